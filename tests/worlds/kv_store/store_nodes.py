"""Several nodes' stores in one process, over real disks and loopback: what `Ray` does between them is played here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from satchel.actors.kv_store.actor import KVStoreActor, Surroundings
from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.kv_store.agents.roles import Place
from satchel.actors.kv_store.disk.segment_reader import read_entries
from satchel.actors.kv_store.disk.segments import write_segment
from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.kv_store.replication.peers import secondary_nodes
from satchel.actors.kv_store.services.ownership import Ownership
from satchel.actors.protocol.entries import Entry, Failure
from satchel.actors.protocol.router_messages import StoreReport
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import Commit, CommitOutcome, Content, TakeSecondary
from satchel.actors.router.places import AgentPlaces
from satchel.actors.rpc.codec import decode, encode
from satchel.cluster.config.config import parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.errors import Unavailable

from ..direct import Direct, carried
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

    def client(self, node: str) -> StoreClient:
        return carried(node, partial(self._carry, node))

    async def _carry(self, node: str, method: str, asked: bytes, timeout_s: float) -> bytes:
        cluster = self._cluster
        cluster.calls.append((self._node, node, method, asked))
        store = cluster.stores.get(node)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(cluster.delay_s)
                cluster.fault(self._node, node, method)
                if store is None or cluster.is_cut(self._node, node):
                    raise Unavailable(f"{node} does not answer")
                answer = await getattr(store, method)(asked)
        except TimeoutError:
            raise Unavailable(f"{node} takes too long") from None
        if (self._node, node, method) in cluster.unanswered:
            raise Unavailable("the answer is lost")
        return answer


class Cluster:
    """Stores by node. `cut` are pairs that do not reach each other; `listed` is what the router says is there."""

    def __init__(self, folder: Path, names: Sequence[str], **config: Any) -> None:
        self.folder = folder
        # KV waits for its branch only for a moment.
        timing = {"claim_wait_s": 0.1}
        self.config = parse_config({"models": [{"name": "x", "source": "x"}], "timing": timing, **config})
        self.stores: dict[str, KVStoreActor] = {}
        self.listed: list[str] = []
        self.cut: set[frozenset[str]] = set()
        self.unanswered: set[tuple[str, str, str]] = set()
        self.calls: list[tuple[str, str, str, bytes]] = []
        self.delay_s = 0.0
        self.fault: Fault = lambda caller, node, method: None
        self.sequences: dict[str, int] = {}
        self.places = AgentPlaces()
        for name in names:
            self.start(name)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cut

    def copied(self, agent: str, home: str) -> list[str]:
        """Where an agent's copies belong."""
        return secondary_nodes(agent, [name for name in self.listed if name != home], self.config.replication)

    def sent_copies(self) -> list[TakeSecondary]:
        return [
            StoreClient.take_secondary.asked(asked)[0]
            for _, _, method, asked in self.calls
            if method == "take_secondary"
        ]

    def start(self, name: str) -> KVStoreActor:
        given = Surroundings(self.folder / name, CLUSTER_KEY, Peers(self, name))
        store = self.stores[name] = KVStoreActor(self.config, Node(name=name), given)
        store.services.tending.introduced.set()
        if name not in self.listed:
            self.listed.append(name)
        return store

    async def stop(self, name: str) -> None:
        """As kill -9 does, but for what Python has to give back."""
        store = self.stores.pop(name)
        self.listed.remove(name)
        services, memory = store.services, store.services.memory
        if services.fetching.blocks is not None:
            await asyncio.to_thread(services.fetching.blocks.close)
        memory.work.thread.shutdown(wait=True)
        with contextlib.suppress(Exception):
            memory.database.close()
        if memory.disk.store is not None:
            memory.disk.store.close()

    async def close(self) -> None:
        for store in self.stores.values():
            for task in list(store.services.copies._behind.values()):
                task.cancel()
            await asyncio.sleep(0)
            if (owned := store.services.memory.disk.owned) is not None:
                await owned.idle()
        for name in list(self.stores):
            await self.stop(name)

    def at(self, node: str) -> StoreClient:
        """The store of the node, for whom no network lies between."""
        return StoreClient(node, self.config.timing, Direct(lambda: self.stores[node]))

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
    ) -> CommitOutcome:
        """A turn that opens a branch, or goes on with the last one (`more`)."""
        recalled = await self.at(node).recall(agent, MODEL, {}, limits)
        base: dict[str, Any] = {}
        if more:
            last = max(recalled.branches, key=lambda branch: branch.head.epoch)
            base = {"branch": last.head.branch, "epoch": last.head.epoch, "turns": last.head.turns + 1}
            assert last.content is not None
            tokens = [*array("I", last.content.tokens), *(tokens or spell(text))]
        transcript = json.dumps([{"content": text}]).encode()
        content = Content(array("I", tokens or spell(text)).tobytes(), text, transcript)
        commit = Commit(MODEL, content, 1, recalled.since, turn=turn, **base)
        return await self.at(node).commit(agent, commit, limits)

    def said(self, node: str, agent: str) -> set[str]:
        """The texts of the agent's branches there, whoever's they are."""
        agents = self.agents(node)
        return {content.text for head in agents.heads(agent) if (content := agents.content(head))}

    def place(self, node: str, agent: str) -> Place:
        return self.stores[node].services.memory.roles.place(agent)

    def homes(self, agent: str) -> list[str]:
        return [name for name in self.stores if self.place(name, agent).role == 1 and self.said(name, agent)]

    async def report(self, node: str, *, full: bool = True) -> StoreReport:
        """What the router is told; `places` takes it."""
        store = self.stores[node]
        number = self.sequences[node] = self.sequences.get(node, -1) + 1
        message = decode(StoreReport, encode(await asyncio.to_thread(store.services.reports.report, number, full)))
        for _ in self.places.update(node, message.agents, message.agents_retracted, message.tombstones, whole=full):
            self.places.check()
        return message

    async def tend(self) -> None:
        """What all nodes do now and then."""
        for store in list(self.stores.values()):
            await store.services.tending.learn()
            await store.services.tending.tend()

    async def put(self, node: str, entries: Sequence[Entry], model: bytes = MODEL) -> None:
        """KV that a replica of the node has computed."""
        for same_kind in ([each for each in entries if not each.tail], [each for each in entries if each.tail]):
            if same_kind:
                await self._put(node, same_kind, model)

    async def _put(self, node: str, entries: Sequence[Entry], model: bytes) -> None:
        told = await self.at(node).disk_session()
        assert told is not None
        values = {"session": told.session, "epoch": told.epoch, "now_s": 1.0, "io": NoSync()}
        record = write_segment(Path(told.root), self.disk(node).key, model, entries, **values)
        await self.at(node).disk_commit(record)

    def agents(self, node: str) -> Agents:
        return self.stores[node].services.memory.agents

    def disk(self, node: str) -> DiskStore:
        disk = self.stores[node].services.memory.disk.store
        assert disk is not None
        return disk

    def owned(self, node: str) -> Ownership:
        """Who may have what on the node's disk."""
        owned = self.stores[node].services.memory.disk.owned
        assert owned is not None
        return owned

    def has(self, node: str, *entries: Entry, model: bytes = MODEL) -> bool:
        disk = self.disk(node)
        found = [location for location in disk.locate(model, [entry.id for entry in entries]) if location]
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
