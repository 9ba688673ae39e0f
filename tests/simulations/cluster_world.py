"""A whole cluster in virtual time: stores with their KV on disks, replicas, a router and an endpoint.

Stores, router and endpoint run the actors' own code (`store_world`), pulls the real `PullLoop` (`cluster_pulls`). A
replica is the simple one of `router_replicas`; KV that it reads from its node's disk is checked.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from array import array
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from satchel.actors.kv_store.transfer.node_blocks import NodeBlocks
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id, scope_of
from satchel.actors.protocol.entries import EntryRecord, Failure, owner_tag
from satchel.actors.protocol.router_messages import Decision, RouteRequest, SequenceLeft, prefill_sequence
from satchel.actors.protocol.store_messages import PullKV
from satchel.actors.replica.memory.following import follow
from satchel.api.ray_backend.store import RayStore
from satchel.cluster.errors import ReplicaLost, SatchelError, Unavailable

from ..worlds.direct import carried
from ..worlds.kv_store.store_world import CLIENT, MODEL, REPORT_S, Endpoint, Peers, Store, World
from .cluster_disk import ENTRY_BYTES, KVDisk, digest, kv_of
from .cluster_pulls import Puller
from .cluster_time import Process
from .router_replicas import MODEL as SERVED
from .router_replicas import Ask, Consumer, Replica, Seq

TRIES_MAX = 4
PULL_S = 6.0
PREFILLS, DECODES = (4000.0, 0.05), (500.0, 0.01)
"""Prompt tokens a second and seconds of a decode step, where nodes are uneven."""
ANSWER_S = 60.0
"""How long a replica may take for an answer; its node's death is seen sooner."""


class KVStore(Store):
    """A store that keeps KV, too."""

    def __init__(self, world: ClusterWorld, name: str, process: Process) -> None:
        super().__init__(world, name, process)
        self.kv = world.kv_of(name)
        disk: Any = self.kv
        held = self.services.memory.disk
        held.take(disk)
        assert held.owned is not None
        self.owned = held.owned
        self.services.fetching.blocks = blocks = Blocks(world, self)
        self.owned.end_pulls = blocks.end_pulls


class Blocks(NodeBlocks):
    """As the node's own, over simulated links."""

    def __init__(self, world: ClusterWorld, store: KVStore) -> None:  # pyright: ignore[reportMissingSuperCall]
        self._answer_s = world.config.timing.answer_s
        self._peers, self._lock, self._links = Peers(world, store.name), threading.Lock(), {}
        self._server: Any = SimpleNamespace(addresses=[("link", 1), ("network", 1)])
        self._puller: Any = Puller(world, store)
        self._threads: Any = None


class Engine:
    """A replica's process: it reports, answers, and writes KV to disk."""

    def __init__(self, world: ClusterWorld, replica: Replica) -> None:
        self.world, self.replica, self.process = world, replica, world.process(replica.name)
        self._store = carried(replica.node, self._carry, timing=world.config.timing)
        self.following: set[str] = set()
        replica.restart()
        self.process.start(self._report())

    async def _report(self) -> None:
        replica = self.replica
        while True:
            message = replica.report()
            replica.full = not await self.world.tell(replica.node, "report", message)
            await asyncio.sleep(REPORT_S)

    async def answer(self, ask: Ask, tokens: array[int], decision: Decision) -> None:
        """One sequence, from being accepted to its last token."""
        replica, rng = self.replica, self.world.rng
        replica.sequences[ask.request_id] = sequence = Seq(ask, Consumer(), ask.prompt_tokens, ask.answer_tokens)
        try:
            if decision.prefill_on:
                await self._follow(ask, decision)
            held = await self._restore(ask, tokens, decision)
            sequence.prefill_left = max(1, ask.prompt_tokens - held * BLOCK_TOKENS)
            await asyncio.sleep(sequence.prefill_left / replica.prefill_tokens_per_s)
            sequence.prefill_left = 0
            replica.keep(ask.blocks)
            await asyncio.sleep(ask.answer_tokens * replica.decode_token_s)
        finally:
            replica.abort(sequence)
        if ask.agent and rng.random() < 0.9:
            self.process.start(self._write_down(ask, tokens))

    async def prefill(self, ask: Ask, tokens: array[int]) -> None:
        """Prefills a prompt that another replica decodes. Blocks are written to disk as they are sealed."""
        replica = self.replica
        mine = replace(ask, request_id=prefill_sequence(ask.request_id))
        replica.sequences[mine.request_id] = sequence = Seq(mine, Consumer(), ask.prompt_tokens, 0)
        try:
            for number in range(len(ask.blocks)):
                if ask.blocks[number] not in replica.cache:
                    await asyncio.sleep(BLOCK_TOKENS / replica.prefill_tokens_per_s)
                sequence.prefill_left -= BLOCK_TOKENS
                replica.keep(ask.blocks[: number + 1])
                with suppress(SatchelError):
                    await self._write_block(ask, tokens, number)
        finally:
            replica.abort(sequence)

    async def _follow(self, ask: Ask, decision: Decision) -> None:
        blocks = ask.blocks[: decision.pull_tokens // BLOCK_TOKENS]
        wanted = PullKV(decision.pull_from, MODEL, self.world.root_of(ask.agent, MODEL), blocks, [], ask.agent, PULL_S)
        self.following.add(ask.request_id)
        came = await follow(self._store.pull, wanted, decision.wait_s, lambda: ask.request_id in self.following)
        self.following.discard(ask.request_id)
        self.world.handed_on += came

    async def _restore(self, ask: Ask, tokens: array[int], decision: Decision) -> int:
        """Returns how many blocks need not be computed: in memory, pulled, or on the disk, where each is checked."""
        hot = 0
        while hot < len(ask.blocks) and ask.blocks[hot] in self.replica.cache:
            hot += 1
        chain = ask.blocks[hot:]
        try:
            if decision.pull_from and not decision.prefill_on:
                root = self.world.root_of(ask.agent, MODEL)
                wanted = PullKV(decision.pull_from, MODEL, root, ask.blocks, [], ask.agent, PULL_S)
                await self._store.pull(wanted)
            return hot + (await self._read(chain, ask.agent) if chain else 0)
        except SatchelError:
            return hot

    async def _read(self, chain: list[bytes], owner: str) -> int:
        found = await self._store.disk_find(MODEL, chain, chain[0], b"", 0)
        assert found is not None
        disk = self.world.kv[self.replica.node]
        good, failures = 0, list[Failure]()
        for where in found.blocks:
            await asyncio.sleep(0.001)
            content = disk.read(where.id)
            if content is None or digest(content) != where.digest:
                failures.append(Failure(where, "damaged", content is None))
                break
            assert content == kv_of(where.id), "what is used is right"
            good += 1
        await self._store.disk_read(found.lease, chain[:good], owner, failures)
        return good

    async def _write_down(self, ask: Ask, tokens: array[int]) -> None:
        """Writes the turn's KV to disk after the turn."""
        with suppress(SatchelError):
            for number in range(len(ask.blocks)):
                await self._write_block(ask, tokens, number)
            await self._store.disk_touch(MODEL, ask.blocks, ask.agent)

    async def _write_block(self, ask: Ask, tokens: array[int], number: int) -> None:
        disk, block = self.world.kv[self.replica.node], ask.blocks[number]
        if block in disk:
            return
        parent = ask.blocks[number - 1] if number else self.world.root_of(ask.agent, MODEL)
        packed = tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS].tobytes()
        content = kv_of(block)
        facts = (block, parent, False, packed, digest(content), 0, False, ENTRY_BYTES)
        record = disk.write(MODEL, EntryRecord(*facts, owners=(owner_tag(disk.key, ask.agent),)), content)
        await asyncio.sleep(0.005)
        await self._store.disk_commit(record)

    async def _carry(self, method: str, asked: bytes, timeout_s: float) -> bytes:
        """To the store of the same node."""
        store = self.world.stores.get(self.replica.node)
        if store is None:
            raise Unavailable("the node's store is not there")
        try:
            return await asyncio.shield(store.process.start(getattr(store, method)(asked)))
        except asyncio.CancelledError:
            if not self.process.alive:
                raise
            raise Unavailable("the store died") from None


class ClusterWorld(World):
    """
    Attributes:
        kv: what nodes have on their disks, also those that are down.
        engines: replicas that run, by name; one a node.
        bytes_per_s: of every link.
        answered, pulled: requests that got an answer, and those that were sent to a node that was to pull.
        split, handed_on: requests that one node should prefill for another, and those for which it did.
    """

    def __init__(
        self, seed: object, names: list[str], *, entries_max: int = 40, uneven: bool = False, **given: Any
    ) -> None:
        self.kv: dict[str, KVDisk] = {}
        self.replicas = {name: Replica(f"r-{name}", name, ENTRY_BYTES // BLOCK_TOKENS) for name in names}
        self.engines: dict[str, Engine] = {}
        self.bytes_per_s = 50_000.0
        self.answered = self.pulled = self._requests = self.split = self.handed_on = 0
        for replica, speeds in zip(self.replicas.values(), itertools.cycle((PREFILLS, DECODES)), strict=False):
            if uneven:
                replica.prefill_tokens_per_s, replica.decode_token_s = speeds
        self._entries_max = entries_max
        super().__init__(seed, names, **given)
        for name in names:
            self.start_engine(name)
        self.new_endpoint()

    def kv_of(self, name: str) -> KVDisk:
        """The disk of a node, for a process that begins."""
        disk = self.kv.get(name)
        if disk is None:
            disk = self.kv[name] = KVDisk(self.loop.time, self._entries_max)
        return disk

    def now_of(self, name: str) -> float:
        """The clock of a node."""
        return self.loop.time()

    def awake_s(self, name: str) -> float:
        """The time in which a node did not sleep."""
        return self.loop.time()

    def restart_router(self) -> None:
        # Prompts are short here.
        self.config = replace(self.config, routing=replace(self.config.routing, split_tokens_min=500))
        super().restart_router()

    def root_of(self, agent: str, model: bytes) -> bytes:
        tenant, _, name = agent.partition("/")
        return root_id(model, scope_of(self.config.share, tenant, name, ""))

    def store(self, name: str, process: Process) -> Store:
        return KVStore(self, name, process)

    def kv_store(self, name: str) -> KVStore | None:
        """The node's, where it runs."""
        found = self.stores.get(name)
        return found if isinstance(found, KVStore) else None

    def start_engine(self, name: str) -> None:
        self.engines[name] = Engine(self, self.replicas[name])

    def kill_engine(self, name: str) -> None:
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.process.end()

    def start_node(self, name: str) -> None:
        self.start(name)
        self.start_engine(name)

    def crash_node(self, name: str, lost: int = 0) -> None:
        """All of it dies; what its disk of KV was told last may be lost."""
        self.kill_engine(name)
        self.crash(name)
        self.kv_of(name).reopen(lost)

    def crash(self, name: str) -> None:
        super().crash(name)
        if name in self.kv:
            self.kv[name].reopen(0)

    def destroy(self, name: str) -> None:
        """The machine is gone with its disks."""
        self.crash_node(name)
        del self.kv[name], self.disks[name]

    def new_endpoint(self) -> None:
        """A process that knows nothing yet; the requests of an earlier one end with it."""
        if hasattr(self, "client"):
            self.client.end()
        self.client = self.process(CLIENT)
        self.api = self.client.run(lambda: RayStore(Endpoint(self), self.config.timing))

    # Requests.

    async def answer(self, agent: str, tokens: array[int]) -> None:
        """Has a prompt answered where the router says; a lost sequence fails over.

        Raises:
            SatchelError: nobody answers.
        """
        blocks = block_ids(self.root_of(agent, MODEL), tokens)
        self._requests += 1
        ask = Ask(f"q{self._requests}", agent, blocks, len(tokens), self.rng.randrange(2, 40))
        for _ in range(TRIES_MAX):
            router = self.router_now()
            decision = await self._route(ask)
            self.pulled += bool(decision.pull_from)
            self.split += bool(decision.prefill_on)
            prefilling = self.client.start(self._prefill(ask, tokens, decision)) if decision.prefill_on else None
            try:
                await self._submit(ask, tokens, decision)
                self.answered += 1
                return
            except ReplicaLost:
                ask.tried.append(decision.replica)
                await router.lose(decision.replica)
            finally:
                sequences = [(decision.replica, ask.request_id)]
                if prefilling is not None:
                    prefilling.cancel()
                    sequences.append((decision.prefill_on, prefill_sequence(ask.request_id)))
                for each in (router, self.router_now()):
                    for sequence in sequences:
                        await each.release(SequenceLeft(*sequence))
        raise Unavailable("nobody answers")

    async def _route(self, ask: Ask) -> Decision:
        values = (ask.request_id, SERVED, ask.agent, ask.blocks, ask.prompt_tokens, list(ask.tried))
        request = RouteRequest(*values, splits=not ask.tried)
        decision = await self.router_now().route(request)
        assert decision.pull_from != decision.node and decision.pull_from in ("", *self.names)
        return decision

    async def _prefill(self, ask: Ask, tokens: array[int], decision: Decision) -> None:
        """What `api.ray_backend.split.Prefill` does."""
        engine, sequence = self.engines.get(decision.pull_from), None
        try:
            await asyncio.sleep(self.rng.random() * 0.02)
            if engine is not None and self.reaches(CLIENT, decision.pull_from):
                sequence = engine.process.start(engine.prefill(ask, tokens))
                while not sequence.done() and self.reaches(CLIENT, decision.pull_from):
                    await asyncio.wait({sequence}, timeout=2.0)
            if sequence is not None and sequence.done() and not sequence.cancelled():
                await asyncio.sleep(PULL_S)
            while True:
                decoding = self.engines.get(decision.node)
                if decoding is not None and self.reaches(CLIENT, decision.node):
                    decoding.following.discard(ask.request_id)
                await asyncio.sleep(0.25)
        finally:
            if sequence is not None:
                sequence.cancel()

    async def _submit(self, ask: Ask, tokens: array[int], decision: Decision) -> None:
        await asyncio.sleep(self.rng.random() * 0.02)
        engine = self.engines.get(decision.node)
        if engine is None or not self.reaches(CLIENT, decision.node):
            raise ReplicaLost("it is not there")
        sequence = engine.process.start(engine.answer(ask, tokens, decision))
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._stream(sequence, decision.node)
        except (TimeoutError, asyncio.CancelledError):
            sequence.cancel()
            if not self.client.alive:
                raise
            raise ReplicaLost("it died, or is silent") from None

    async def _stream(self, sequence: asyncio.Task[None], node: str) -> None:
        """Gives a stream up if nothing arrives for a while."""
        while not sequence.done():
            if not self.reaches(CLIENT, node):
                raise TimeoutError
            await asyncio.wait({sequence}, timeout=2.0)
        await sequence
