"""Several nodes' stores in one process, over real disks and loopback: what `Ray` does between them is played here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from satchel.actors.kv_store.agents.homes import Place
from satchel.actors.kv_store.disk.segment_reader import Failure, read_entries
from satchel.actors.kv_store.disk.segments import write_segment
from satchel.actors.kv_store.node_actor import NodeStoreActor, Surroundings
from satchel.actors.protocol.entries import Entry
from satchel.actors.protocol.messages import StoreReport, decode, encode
from satchel.actors.router.places import AgentPlaces
from satchel.cluster.config import parse_config
from satchel.cluster.errors import Unavailable, from_wire
from satchel.cluster.nodes import Node

from .kv_files import MODEL, NoSync, payload, same

CLUSTER_KEY = bytes(range(32))

Fault = Callable[[str, str, str], None]
"""Gets caller, node and method of a call that is about to be made; raises instead."""


class Peers:
    """How one node reaches the others."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster, self._node = cluster, node

    async def others(self) -> list[str]:
        return [node for node in self._cluster.listed if node != self._node]

    async def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        cluster = self._cluster
        cluster.calls.append((self._node, node, method, arguments))
        store = cluster.stores.get(node)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(cluster.delay_s)
                cluster.fault(self._node, node, method)
                if store is None or cluster.is_cut(self._node, node):
                    raise Unavailable(f"{node} does not answer")
                answer = await getattr(store, method)(*arguments)
        except TimeoutError:
            raise Unavailable(f"{node} takes too long") from None
        if (self._node, node, method) in cluster.unanswered:
            raise Unavailable("the answer is lost")
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]


class Cluster:
    """Stores by node. `cut` are pairs that do not reach each other; `listed` is what the router says is there."""

    def __init__(self, folder: Path, names: Sequence[str], **config: Any) -> None:
        self.folder = folder
        # KV waits for its branch only for a moment.
        timing = {"claim_wait_s": 0.1}
        self.config = parse_config({"models": [{"name": "x", "source": "x"}], "timing": timing, **config})
        self.stores: dict[str, NodeStoreActor] = {}
        self.listed: list[str] = []
        self.cut: set[frozenset[str]] = set()
        self.unanswered: set[tuple[str, str, str]] = set()
        self.calls: list[tuple[str, str, str, tuple[Any, ...]]] = []
        self.delay_s = 0.0
        self.fault: Fault = lambda caller, node, method: None
        self.sequences: dict[str, int] = {}
        self.places = AgentPlaces()
        for name in names:
            self.start(name)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cut

    def start(self, name: str) -> NodeStoreActor:
        given = Surroundings(self.folder / name, CLUSTER_KEY, Peers(self, name))
        store = self.stores[name] = NodeStoreActor(self.config, Node(name=name), given)
        store._introduced.set()
        if name not in self.listed:
            self.listed.append(name)
        return store

    async def stop(self, name: str) -> None:
        """As kill -9 does, but for what Python has to give back."""
        store = self.stores.pop(name)
        self.listed.remove(name)
        if store._blocks is not None:
            await asyncio.to_thread(store._blocks.close)
        store._worker.shutdown(wait=True)
        with contextlib.suppress(Exception):
            store._database.close()
        if store._disk is not None:
            store._disk.close()

    async def close(self) -> None:
        for store in self.stores.values():
            for task in list(store._copies._behind.values()):
                task.cancel()
            await asyncio.sleep(0)
            if store._owned is not None:
                await store._owned.idle()
        for name in list(self.stores):
            await self.stop(name)

    async def call(self, node: str, method: str, *arguments: Any, **named: Any) -> Any:
        answer = await getattr(self.stores[node], method)(*arguments, **named)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]

    async def speak(
        self,
        node: str,
        agent: str,
        text: str,
        tokens: Sequence[int] = (),
        *,
        more: bool = False,
        turn: str = "",
        limits: dict[str, int | None] | None = None,
    ) -> dict[str, Any]:
        """A turn that opens a branch, or goes on with the last one (`more`)."""
        recalled = await self.call(node, "recall", agent, MODEL, {}, limits)
        base: dict[str, Any] = {}
        if more:
            last = max(recalled["branches"], key=lambda branch: branch["epoch"])
            base = {"branch": last["branch"], "epoch": last["epoch"], "turns": last["turns"] + 1}
            tokens = [*array("I", last["token_ids"]), *(tokens or spell(text))]
        fields = {"messages": 1, "model": MODEL, "since": recalled["since"], "turn": turn, "limits": limits, **base}
        transcript = json.dumps([{"content": text}]).encode()
        token_ids = array("I", tokens or spell(text)).tobytes()
        return await self.call(node, "commit", agent, token_ids=token_ids, text=text, transcript=transcript, **fields)

    def said(self, node: str, agent: str) -> set[str]:
        """The texts of the agent's branches there, whoever's they are."""
        agents = self.stores[node]._agents
        return {content.text for head in agents.heads(agent) if (content := agents.content(head))}

    def place(self, node: str, agent: str) -> Place:
        return self.stores[node]._homes.place(agent)

    def homes(self, agent: str) -> list[str]:
        return [name for name in self.stores if self.place(name, agent).role == 1 and self.said(name, agent)]

    async def report(self, node: str, *, full: bool = True) -> StoreReport:
        """What the router is told; `places` takes it."""
        store = self.stores[node]
        number = self.sequences[node] = self.sequences.get(node, -1) + 1
        message = decode(StoreReport, encode(await asyncio.to_thread(store._report, number, full)))
        for _ in self.places.update(node, message.agents, message.agents_retracted, message.tombstones, whole=full):
            self.places.check()
        return message

    async def tend(self) -> None:
        """What all nodes do now and then."""
        for store in list(self.stores.values()):
            await store.learn()
            await store.tend()

    async def put(self, node: str, entries: Sequence[Entry]) -> None:
        """KV that a replica of the node has computed."""
        for same_kind in ([each for each in entries if not each.tail], [each for each in entries if each.tail]):
            if same_kind:
                await self._put(node, same_kind)

    async def _put(self, node: str, entries: Sequence[Entry]) -> None:
        store = self.stores[node]
        assert store._disk is not None
        told = await self.call(node, "disk_session")
        values = {"session": told["session"], "epoch": told["epoch"], "now_s": 1.0, "io": NoSync()}
        record = write_segment(Path(told["root"]), store._disk.key, MODEL, entries, **values).to_wire()
        await self.call(node, "disk_commit", record)

    def has(self, node: str, *entries: Entry) -> bool:
        disk = self.stores[node]._disk
        assert disk is not None
        found = [location for location in disk.locate(MODEL, [entry.id for entry in entries]) if location]
        whole = {entry.id: entry for entry in entries}
        for stored in read_entries(disk.root, disk.key, found):
            assert not isinstance(stored, Failure) and same(stored.parts, whole[stored.location.id].parts)
        return len(found) == len(entries)

    def on_disk(self, node: str, entry: Entry) -> bool:
        return any(payload(entry) in path.read_bytes() for path in (self.folder / node).rglob("*") if path.is_file())

    def methods(self) -> list[str]:
        """What was called since the last time."""
        found = [method for _, _, method, _ in self.calls]
        self.calls.clear()
        return found


def spell(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@asynccontextmanager
async def cluster(folder: Path, names: Sequence[str] = ("a", "b"), **config: Any) -> AsyncIterator[Cluster]:
    made = Cluster(folder, names, **config)
    try:
        yield made
    finally:
        await made.close()
