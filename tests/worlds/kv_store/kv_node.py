"""The store actor's own class over a real disk, and what replicas and endpoints do with it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.kv_store.disk.segments import write_segment
from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.kv_store.services import ownership
from satchel.actors.protocol.entries import Entry, Failure, SegmentRecord
from satchel.actors.protocol.store_messages import Commit, CommitOutcome, Content
from satchel.cluster.config.config import parse_config

from .kv_files import MODEL, NoSync, payload, same
from .lone_store import LoneStore

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
        self.actor = LoneStore(parse_config(config), folder)
        self.client = self.actor.client

    @property
    def disk(self) -> DiskStore:
        disk = self.actor.services.memory.disk.store
        assert disk is not None
        return disk

    @property
    def owned(self) -> ownership.Ownership:
        owned = self.actor.services.memory.disk.owned
        assert owned is not None
        return owned

    async def speak(self, agent: str, tokens: Sequence[int], since: int | None = None) -> CommitOutcome:
        """A turn that opens a branch."""
        if since is None:
            since = (await self.client.recall(agent, MODEL, {})).since
        content = Content(array("I", tokens).tobytes(), "x", b"[]")
        return await self.client.commit(agent, Commit(MODEL, content, 1, since))

    async def write(self, entries: Sequence[Entry], model: bytes = MODEL) -> SegmentRecord:
        """What a replica has written and not committed yet."""
        told = await self.client.disk_session()
        assert told is not None
        values: dict[str, Any] = {"session": told.session, "epoch": told.epoch, "now_s": 1.0, "io": NoSync()}
        return write_segment(Path(told.root), self.disk.key, model, entries, **values)

    async def put(self, *entries: Entry, model: bytes = MODEL) -> list[bytes] | None:
        return await self.client.disk_commit(await self.write(entries, model))

    async def forget(self, agent: str) -> None:
        await self.client.forget(agent)
        await self.owned.idle()

    def has(self, *entries: Entry, model: bytes = MODEL) -> bool:
        found = [location for location in self.disk.locate(model, [entry.id for entry in entries]) if location]
        whole = {entry.id: entry for entry in entries}
        for stored in read_entries(self.disk.root, self.disk.key, found):
            assert not isinstance(stored, Failure) and same(stored.parts, whole[stored.location.id].parts)
        return len(found) == len(entries)

    def on_disk(self, entry: Entry) -> bool:
        return any(payload(entry) in path.read_bytes() for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        self.actor.close()

    async def restarted(self) -> Node:
        self.close()
        node = Node(self.folder, self.claim_wait_s)
        await node.client.stats()
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
