"""A whole cluster's stores in virtual time: the actors' own code over memory, a router, an endpoint, and a bad network.

What a node has written stays when it dies; what it knew otherwise does not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.kv_store.agents.branches import AgentLimits
from satchel.actors.kv_store.agents.roles import Role, RoleTable
from satchel.actors.kv_store.disk.quotas import Quotas
from satchel.actors.kv_store.disk.store import DiskLimits
from satchel.actors.kv_store.services.composition import StoreServices
from satchel.actors.kv_store.services.disk import NodeDisk
from satchel.actors.kv_store.services.node_memory import NodeMemory
from satchel.actors.kv_store.services.work import Work
from satchel.actors.protocol.clients import RouterClient
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import (
    Commit,
    Content,
)
from satchel.actors.router.actor import RouterActor
from satchel.actors.router.places import AgentPlaces
from satchel.actors.router.policy import Policy
from satchel.actors.rpc.codec import encode
from satchel.api.ray_backend.locator import AgentLocator, Question
from satchel.cluster.config.config import Config, parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import SatchelError, Unavailable
from satchel.cluster.keys import OWNER

from ...simulations.cluster_memory import Memory
from ...simulations.cluster_time import Process
from ..direct import Direct, carried

T = TypeVar("T")

MODEL = b"m" * 32
REPORT_S = 2.0
CLIENT = "client"


class Store(KVStoreActor):
    """The actor without its threads, over storage that survives a crash of its node.

    Attributes:
        slow_s: how long its disks may take.
    """

    def __init__(self, world: World, name: str, process: Process) -> None:  # pyright: ignore[reportMissingSuperCall]
        memory: Any = world.disks.setdefault(name, Memory())
        self._world, self._rng = world, world.rng
        self.name, self.process, self.slow_s = name, process, 0.0
        # Of turns that are held: which, and the home epoch in which it was taken.
        self._held: dict[str, tuple[str, int]] = {}
        self._agents = Agents(memory, AgentLimits(branches_max=64), world.root_of, start=int(world.loop.time()) << 20)
        quotas = Quotas(self._agents.nbytes_of, OWNER)
        self.roles = RoleTable(memory, self._agents.end_turn)
        self._memory = memory
        work = SlowWork(self, memory, ready=lambda: disk.ready(), make_room=lambda: None)
        disk = SlowDisk(self, lambda ask: work.in_order(lambda: ask(self._agents)), quotas, world.config.timing)
        held = NodeMemory(memory, self._agents, self.roles, quotas, disk, work, world.config.timing)
        config = replace(world.config, timeouts=replace(world.config.timeouts, turn_wait_s=3.0))
        self.services = StoreServices(config, Node(name=name), held, Peers(world, name), b"")
        self.news = asyncio.Event()
        reporter: Any = SimpleNamespace(incarnation=process.name, wake=self.news.set)
        self.services.reports.reporter = reporter

    def check_turns(self) -> None:
        """Who has a turn has it at the agent's home, and since no other node was that, as far as this one knows."""
        turns, homes = self._agents._turns, self._world.homes
        self._held = {agent: held for agent, held in self._held.items() if agent in turns}
        for agent in self._memory.heard_of("", 100):
            place = self.roles.place(agent)
            if place.role is Role.PRIMARY:
                homes.setdefault(agent, {}).setdefault(place.epoch, set()).add(self.name)
            if agent not in turns:
                continue
            name = turns[agent].name
            if self._held.get(agent, ("", 0))[0] != name:
                self._held[agent] = name, place.epoch
            since = self._held[agent][1]
            was_home = self.name in homes.get(agent, {}).get(since, ())
            assert not (was_home and place.role is Role.SECONDARY), f"{agent}: a turn is held at a former home"
            between = {e: nodes for e, nodes in homes.get(agent, {}).items() if since < e < place.epoch}
            elsewhere = place.role is Role.PRIMARY and any(self.name not in nodes for nodes in between.values())
            assert not elsewhere, f"{agent}: a turn of epoch {since} is held in {place.epoch}, {between}"

    async def disk_takes_its_time(self) -> None:
        if self.slow_s:
            await asyncio.sleep(self._rng.random() * self.slow_s)
        if not self.process.alive:
            raise asyncio.CancelledError


class SlowWork(Work):
    """One at a time, as the thread does it. A process that dies meanwhile has written it down, or not."""

    def __init__(self, store: Store, database: Any, **given: Any) -> None:
        super().__init__(database, **given)
        self._store, self._at_disk = store, asyncio.Lock()

    async def in_order(self, work: Callable[[], T]) -> T:
        async with self._at_disk:
            await self._store.disk_takes_its_time()
            found = work()
            self._store.check_turns()
            await self._store.disk_takes_its_time()
        return found

    def from_thread(self, work: Callable[[], T]) -> T:
        return work()


class SlowDisk(NodeDisk):
    """The disk tier of a store, which has none before it is given one."""

    def __init__(self, store: Store, ask: Any, quotas: Quotas, timing: Timing) -> None:
        super().__init__(None, DiskLimits(0), ask, quotas, timing)
        self._of, self.session = store, store.process.name

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        await self._of.disk_takes_its_time()
        found = work(*arguments)
        await self._of.disk_takes_its_time()
        return found


class Peers:
    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node

    async def others(self) -> list[str]:
        return [name for name in self._world.alive() if name != self._node]

    def client(self, node: str) -> StoreClient:
        return self._world.way_to(self._node, node)


class Endpoint(AgentLocator):
    """The endpoint's own, over the simulated network."""

    def __init__(self, world: World) -> None:
        super().__init__(world.config)
        self._world = world
        self._router = RouterClient(world.config.timing, Direct(lambda: world.router))

    async def ask(self, node: str, question: Question[T], timeout_s: float | None = None) -> T:
        return await question(self._world.way_to(CLIENT, node)).within(timeout_s or 8.0)


class World:
    """Attributes: `cut` are pairs that do not reach each other, `loss` and `twice` the chances of a call or report."""

    def __init__(
        self, seed: object, names: Sequence[str], *, replication: int = 1, loss: float = 0.0, twice: float = 0.0
    ) -> None:
        self.rng = random.Random(seed) if isinstance(seed, int) else random.Random(str(seed))
        self.names = list(names)
        self.loop: Any = asyncio.get_running_loop()
        config = parse_config(
            {"models": [{"name": "x", "source": "x"}], "nodes": [{"name": name} for name in names[:1]]}
            | {"replication": replication}
        )
        self.config: Config = replace(config, timing=Timing(turn_lease_s=20.0, fetch_s=6.0, block_lease_s=10.0))
        self.disks: dict[str, Memory] = {}
        self.stores: dict[str, Store] = {}
        self.cut: set[frozenset[str]] = set()
        self.loss, self.twice = loss, twice
        self.accepted: list[tuple[str, int, str]] = []
        self.homes: dict[str, dict[int, set[str]]] = {}
        self._processes = self.routers_lost = 0
        self.restart_router()
        for name in names:
            self.start(name)

    @property
    def policy(self) -> Policy:
        return self.router._policy

    @property
    def places(self) -> AgentPlaces:
        return self.policy.members.places

    def alive(self) -> list[str]:
        return self.policy.members.alive_nodes(self.loop.time())

    def reaches(self, one: str, other: str) -> bool:
        return not self.cut or frozenset((one, other)) not in self.cut

    def process(self, name: str) -> Process:
        self._processes += 1
        return Process(f"{name}-{self._processes}")

    def root_of(self, agent: str, model: bytes) -> bytes:
        """Where an agent's KV begins: here nobody keeps any."""
        return b""

    def store(self, name: str, process: Process) -> Store:
        return Store(self, name, process)

    def start(self, name: str) -> None:
        process = self.process(name)
        store = self.stores[name] = process.run(lambda: self.store(name, process))
        process.start(self._report(store))
        process.start(self._tend(store))

    def crash(self, name: str) -> None:
        store = self.stores.pop(name, None)
        if store is not None:
            store.process.end()
            self.disks[name].syncs = lambda: None

    def way_to(self, caller: str, node: str) -> StoreClient:
        """The store of a node, over the network from `caller`."""
        return carried(node, partial(self.carry, caller, node), timing=self.config.timing)

    async def carry(self, caller: str, node: str, method: str, asked: bytes, timeout_s: float) -> bytes:
        """A call that may be lost, doubled, slow, or lose its answer. What began goes on where the caller gives up."""
        rng = self.rng
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(rng.random() * 0.05 if rng.random() < 0.95 else rng.random() * 2 * timeout_s)
                if rng.random() < self.loss or not self.reaches(caller, node) or node not in self.stores:
                    if rng.random() < self.twice * 3:
                        # It comes when nobody waits for it any more.
                        late = partial(self._late, node, method, asked)
                        self.loop.call_later(rng.random() * 3 * timeout_s, late)
                    await asyncio.sleep(timeout_s)
                if rng.random() < self.twice:
                    self._begin(node, method, asked)
                    await asyncio.sleep(rng.random() * 0.2)
                answer = await asyncio.shield(self._begin(node, method, asked))
                await asyncio.sleep(rng.random() * 0.05)
                if rng.random() < self.loss or not self.reaches(caller, node) or node not in self.stores:
                    await asyncio.sleep(timeout_s)
        except (TimeoutError, KeyError):
            raise Unavailable(f"{node} does not answer") from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise Unavailable(f"{node} died") from None
        return answer

    def _late(self, node: str, method: str, asked: bytes) -> None:
        if node in self.stores:
            self._begin(node, method, asked)

    def _begin(self, node: str, method: str, asked: bytes) -> asyncio.Task[bytes]:
        store = self.stores[node]
        if method == "commit":
            return store.process.start(self._commit(store, asked))
        if method in ("promote", "promote_here"):
            return store.process.start(self._become_home(getattr(store, method), asked))
        if method == "take_secondary":
            return store.process.start(self._take_copy(store, asked))
        return store.process.start(getattr(store, method)(asked))

    async def _become_home(self, call: Callable[[bytes], Awaitable[bytes]], asked: bytes) -> bytes:
        answer = await call(asked)
        with suppress(SatchelError):
            _, above = StoreClient.promote.asked(asked)
            assert StoreClient.promote.answered(answer) > above, "a later home has a later epoch"
        return answer

    async def _take_copy(self, store: Store, asked: bytes) -> bytes:
        (copy,), answer = StoreClient.take_secondary.asked(asked), await store.take_secondary(asked)
        with suppress(SatchelError):
            if not StoreClient.take_secondary.answered(answer):
                known = store.roles.place(copy.agent).epoch
                assert known >= copy.epoch, "who has a copy of a later home knows of that home"
        return answer

    async def _commit(self, store: Store, asked: bytes) -> bytes:
        agent, *_ = StoreClient.commit.asked(asked)
        epoch = max(store.roles.place(agent).epoch, 1)
        answer = await store.commit(asked)
        with suppress(SatchelError):
            if StoreClient.commit.answered(answer).kept:
                self.accepted.append((agent, epoch, store.name))
        return answer

    async def _tend(self, store: Store) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(store.services.succession.awake.wait(), 5.0)
            store.services.succession.awake.clear()
            await store.services.tending.tend()
            await asyncio.sleep(0.1)

    # Reports, as `Reporter` sends them.

    async def _report(self, store: Store) -> None:
        full = True
        for sequence in itertools.count():
            store.news.clear()
            if full:
                await store.services.tending.learn()
            full = not await self.tell(store.name, "store_report", store.services.reports.report(sequence, full))
            with suppress(TimeoutError):
                await asyncio.wait_for(store.news.wait(), REPORT_S)

    async def tell(self, node: str, method: str, report: Any) -> bool:
        """Send the router a report, which may be lost, late, or come twice. False where the next one must be full."""
        rng, message = self.rng, encode([report])
        await asyncio.sleep(rng.random() * 0.1)
        fate = rng.random()
        if not self.reaches(node, CLIENT) or fate < self.loss / 2:
            return False
        if fate < self.loss or fate > 1 - self.twice:
            self.loop.call_later(rng.random() * 4.0, self._hear, method, message)
        return fate >= self.loss and RouterClient.report.answered(await getattr(self.router, method)(message))

    def _hear(self, method: str, message: bytes) -> None:
        self.process_of_router.start(getattr(self.router, method)(message))

    def restart_router(self) -> None:
        """It knows nothing any more."""
        if hasattr(self, "process_of_router"):
            self.process_of_router.end()
            self.routers_lost += 1
        self.process_of_router = self.process("router")
        self.router = RouterActor(self.config, self.names)

    def router_now(self) -> RouterClient:
        """The one that runs now; one that is started later is another."""
        actor = self.router
        return RouterClient(self.config.timing, Direct(lambda: actor))

    def texts(self, name: str, agent: str) -> list[str]:
        return [content.text for _, content in self.disks[name].branches.get(agent, {}).values()]


async def speak(
    store: Any,
    agent: str,
    number: int,
    rng: random.Random,
    *,
    tokens: int = 3,
    opening: Sequence[int] = (),
    turn: str = "",
    answer: Callable[[str, array[int]], Awaitable[object]] | None = None,
) -> int | None:
    """A turn that continues any branch or opens one, and adds a number. Returns the turn's number if it was committed.

    Args:
        store: a `RayStore`.
        tokens: how many it has.
        opening: what a new branch begins with.
        turn: of one that is taken before it begins, and goes on with the main branch; "" for a stateless one.
        answer: gets the agent and all tokens up to the turn's end, before that is committed.
    """
    try:
        if turn:
            recalled = await store.begin(agent, turn, MODEL, {})
            base = recalled.branch
            if rng.random() < 0.1:
                # Its client dies, and nobody gives the turn back.
                return None
        else:
            recalled = await store.recall(agent, MODEL, {})
            base = rng.choice([None, *recalled.branches])
        text = (base.content.text if base else "") + f"<{number}>"
        head = base.head if base else None
        fields = {"branch": head.branch, "epoch": head.epoch, "turns": head.turns + 1} if head else {}
        spoken = (array("I", base.content.tokens) if base else array("I", opening)) + array("I", [number + 1]) * tokens
        await (answer(agent, spoken) if answer else asyncio.sleep(rng.random()))
        content = Content(spoken.tobytes(), text, json.dumps([text]).encode())
        commit = Commit(MODEL, content, 1, recalled.since, turn=turn, **fields)
        outcome = await store.commit(agent, commit)
    except SatchelError:
        return None
    return number if outcome.kept else None
