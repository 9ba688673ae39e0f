"""The store actor's own class over a real disk, and what replicas and endpoints do with it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store import ownership
from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.kv_store.disk.segment_reader import Failure, read_entries
from satchel.actors.kv_store.disk.segments import write_segment
from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.protocol.entries import Entry
from satchel.cluster.config import parse_config

from .kv_files import MODEL, NoSync, payload, same

ALICE, BOB, CAROL, DAVE = "default/alice", "default/bob", "default/carol", "default/dave"
WAIT_S = 0.2


def spoken(*entries: Entry) -> list[int]:
    """The token ids of a branch that consists of these entries."""
    return [token for entry in entries for token in entry.tokens]


class Node:
    """The store actor's class in this process, and what replicas and endpoints do with it. Its KV waits for its branch
    only for a moment."""

    def __init__(self, folder: Path, claim_wait_s: float = WAIT_S) -> None:
        self.folder = folder
        config = {"models": [{"name": "x", "source": "x"}], "timing": {"claim_wait_s": claim_wait_s}}
        self.claim_wait_s = claim_wait_s
        self.actor = KVStoreActor(parse_config(config), folder)

    @property
    def disk(self) -> DiskStore:
        assert self.actor._disk is not None
        return self.actor._disk

    @property
    def owned(self) -> ownership.Ownership:
        assert self.actor._owned is not None
        return self.actor._owned

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        answer = await getattr(self.actor, method)(*arguments, **named)
        assert "error" not in answer, answer
        return answer["result"]

    async def speak(self, agent: str, tokens: Sequence[int], since: int | None = None) -> Any:
        """A turn that opens a branch."""
        if since is None:
            since = (await self.call("recall", agent, MODEL, {}))["since"]
        content = {"token_ids": array("I", tokens).tobytes(), "text": "x", "transcript": b"[]"}
        return await self.call("commit", agent, **content, messages=1, model=MODEL, since=since)

    async def write(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """What a replica has written and not committed yet."""
        told = await self.call("disk_session")
        values = {"session": told["session"], "epoch": told["epoch"], "now_s": 1.0, "io": NoSync()}
        return write_segment(Path(told["root"]), self.disk.key, MODEL, entries, **values).to_wire()

    async def put(self, *entries: Entry) -> list[bytes]:
        return await self.call("disk_commit", await self.write(entries))

    async def forget(self, agent: str) -> None:
        await self.call("forget", agent)
        await self.owned.idle()

    def has(self, *entries: Entry) -> bool:
        found = [location for location in self.disk.locate(MODEL, [entry.id for entry in entries]) if location]
        whole = {entry.id: entry for entry in entries}
        for stored in read_entries(self.disk.root, self.disk.key, found):
            assert not isinstance(stored, Failure) and same(stored.parts, whole[stored.location.id].parts)
        return len(found) == len(entries)

    def on_disk(self, entry: Entry) -> bool:
        return any(payload(entry) in path.read_bytes() for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        self.actor._database.close()
        self.disk.close()

    async def restarted(self, *, lose_index: bool = False) -> Node:
        self.close()
        if lose_index:
            (self.folder / "index").write_bytes(b"garbage" * 1000)
        node = Node(self.folder, self.claim_wait_s)
        await node.call("stats")
        await node.owned.idle()
        return node


@pytest.fixture(name="node")
async def nodes(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "kv")
    yield made
    await made.owned.idle()
    if not made.disk._closed:
        made.disk.check(payload=True)
        made.close()
