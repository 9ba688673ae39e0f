"""Two nodes in one process: replicas' shells over engines, stores over real disks and loopback, the endpoint's backend.

Stand-ins replace Ray, and the test makes the decisions. A task of the event loop steps the engines, so a test can stop
one of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from ray.exceptions import RayActorError

from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from satchel.actors.protocol.router_messages import Decision, RouteRequest, SequenceLeft
from satchel.actors.replica.actor import ReplicaActor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loop.engine import Engine
from satchel.actors.replica.memory import disk_tier
from satchel.actors.replica.memory.disk_tier import DiskTier, WriteJob
from satchel.actors.rpc import client as calls
from satchel.api.ray_backend import connection, dispatch, routing
from satchel.api.ray_backend.sequences import RayGeneration
from satchel.cluster.config.config import Scheduling, parse_config
from satchel.cluster.config.nodes import Node
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import Unavailable

from .direct import carried
from .kv_store import store_nodes

T = TypeVar("T")

MODEL = "m"
CHUNK_TOKENS = 256
TIMING = Timing(retry_s=0.02)


class Process:
    """A replica's process. Calls to it break off when it dies."""

    def __init__(self, actor: ReplicaActor) -> None:
        self.actor, self.alive = actor, True
        self._calls: set[asyncio.Task[Any]] = set()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda asked: self._call(method, asked))

    async def _call(self, method: str, asked: bytes) -> bytes:
        if not self.alive:
            raise RayActorError
        call = asyncio.ensure_future(getattr(self.actor, method)(asked))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if self.alive:
                raise
            raise RayActorError from None

    def kill(self) -> None:
        self.alive = False
        for call in [*self._calls]:
            call.cancel()


class CountedDisk(DiskTier):
    """Knows what its thread has not done. A job without bytes is one too: it asks the store once more."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.jobs: set[int] = set()
        super().__init__(*args, **more)

    def write(self, job: WriteJob) -> None:
        done = job.done
        self.jobs.add(id(job))

        def counted() -> None:
            done()
            self.jobs.discard(id(job))

        job.done = counted
        super().write(job)


class SplitNodes:
    """`studio` prefills and `air` decodes, if a decision says so.

    Attributes:
        engines: by node. Those in `held` stand still, and those in `pause_s` do after each step, for so long.
        wait_s: of decisions.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        stores: store_nodes.Cluster,
        stores_loop: asyncio.AbstractEventLoop,
        timing: Timing = TIMING,
    ) -> None:
        self.loaded, self.stores, self._timing = loaded, stores, timing
        self.held: set[str] = set()
        self.pause_s: dict[str, float] = {}
        self._again = {"studio": 0.0, "air": 0.0}
        self.wait_s = 60.0
        self.released: list[tuple[str, str]] = []
        self.processes: dict[str, Process] = {}
        self.engines: dict[str, Engine] = {}
        self.disks: dict[str, CountedDisk] = {}
        self._loop = stores_loop
        for name in ("studio", "air"):
            self._start(name)
        config = parse_config({"models": [{"name": MODEL, "source": "s"}]})
        self.backend = dispatch.RayBackend(replace(config, timing=timing))
        routing: Any = self.backend.routing
        routing._locator = SimpleNamespace(known=lambda agent: "", check=_is_there)
        routing.decide, routing.release, routing.lose = self._decide, self._release, lambda replica: None
        self.decision: Callable[[RouteRequest], Decision] = self.split
        self._stepping = asyncio.ensure_future(self._step())

    def _start(self, name: str) -> None:
        async def carry(method: str, asked: bytes, timeout_s: float) -> bytes:
            store = self.stores.stores.get(name)
            if store is None:
                raise Unavailable("the store is not there")
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(getattr(store, method)(asked), self._loop)
            )

        actor = ReplicaActor(name, SimpleNamespace(name=MODEL), Scheduling(), Node(name=name), self._timing)  # type: ignore[arg-type]
        # From the engine's threads as from the shell's event loop.
        client = carried(name, carry, asyncio.get_running_loop(), self._timing)
        disk = CountedDisk(self.loaded.spec, self.loaded.model_id, client, timing=self._timing)
        self.disks[name] = actor._disk = disk
        settings = Scheduling(sequences_max=4, prefill_chunk_tokens=CHUNK_TOKENS)
        actor._engine = self.engines[name] = Engine(self.loaded, settings, 2**32, actor._send, disk)
        self.processes[name] = Process(actor)

    async def _step(self) -> None:
        while True:
            for name, engine in self.engines.items():
                if name in self.held or not self.processes[name].alive or self._again[name] > time.monotonic():
                    continue
                engine.step()
                self._again[name] = time.monotonic() + self.pause_s.get(name, 0.0)
            await asyncio.sleep(0.001)

    # Decisions.

    def split(self, request: RouteRequest) -> Decision:
        ids = self.loaded.model_id, [self.loaded.model_id]
        return Decision(
            "air", "prefill on studio, decode on air", node="air", pull_from="studio",
            pull_tokens=request.prompt_tokens - 1, model_id=ids[0], model_ids=ids[1],
            prefill_on="studio", wait_s=self.wait_s,
        )  # fmt: skip

    def alone(self, node: str) -> Callable[[RouteRequest], Decision]:
        return lambda request: Decision(node, "alone", node=node, model_id=self.loaded.model_id)

    async def _decide(self, message: RouteRequest) -> Decision:
        assert message.splits or self.decision != self.split
        return self.decision(message)

    def _release(self, left: SequenceLeft) -> None:
        self.released.append((left.replica, left.request_id))

    # Requests.

    async def begin(self, name: str, prompt: list[int], tokens: int = 12, logprobs: int | None = 2) -> RayGeneration:
        """A sequence of an agent; its KV is only found by the agent itself."""
        root = root_id(self.loaded.model_id, f"agent:{name}")
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
        request = GenerateRequest(
            name, "", MODEL, f"t/{name}", prompt, block_ids(root, prompt), root, sampling,
            model_id=self.loaded.model_id, tenant="t",
        )  # fmt: skip
        sequence = RayGeneration(self.backend.routing, request, scope=f"agent:{name}")
        await sequence.start()
        return sequence

    async def answer(
        self, name: str, prompt: list[int], tokens: int = 12, logprobs: int | None = 2
    ) -> list[SequenceUpdate]:
        return [update async for update in await self.begin(name, prompt, tokens, logprobs)]

    async def written(self, node: str) -> None:
        """Waits until the KV of the node's sequences is on its disk."""
        await self.until(lambda: not self.engines[node].memory._writers and not self.disks[node].waiting_bytes)

    def entries_on(self, node: str) -> int:
        return self.stores.disk(node).stats()["entries"]

    async def until(self, true: Callable[[], bool]) -> None:
        ends = time.monotonic() + 60
        while not true():
            assert time.monotonic() < ends
            await asyncio.sleep(0.002)

    async def kill_store(self, node: str) -> None:
        await self.on_stores(self.stores.stop(node))

    async def on_stores(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def rest(self) -> None:
        """Waits until no node has a sequence any more."""
        living = [name for name, process in self.processes.items() if process.alive]
        self.held.clear()
        self.pause_s.clear()

        def is_over() -> bool:
            sequences = any(self.engines[name].active or self.processes[name].actor._following for name in living)
            # Of dead replicas too: their threads live on here, and must not ask stores that have ended.
            return not sequences and not any(disk.jobs for disk in self.disks.values())

        await self.until(is_over)
        assert all(not link.sequences for link in self.backend.routing._links.values())
        await self.until(lambda: all(self.stores.disk(name).stats()["leases"] == 0 for name in self.stores.stores))
        for name in living:
            self.engines[name].scheduler.check()
            self.engines[name].prefixes.check()
            self.engines[name].executor.check()

    async def close(self) -> None:
        self._stepping.cancel()
        with suppress(Exception):
            await self.backend.close()
        for process in self.processes.values():
            process.kill()
            if process.actor._consumers is not None:
                process.actor._consumers._reaper.cancel()


async def _closed(stores: store_nodes.Cluster) -> None:
    await stores.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _is_there(node: str) -> bool:
    return True


@asynccontextmanager
async def split_nodes(
    folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, timing: Timing = TIMING
) -> AsyncIterator[SplitNodes]:
    """Two nodes, at rest again at the end."""
    monkeypatch.setattr(ReplicaActor, "_run_engine", lambda self: None)
    monkeypatch.setattr(ReplicaActor, "_end_when_unwanted", lambda self: None)
    # A writer whose store is dead ends with the test.
    monkeypatch.setattr(disk_tier, "TRIES_S", (0.01,))
    stores_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=stores_loop.run_forever, name="stores", daemon=True)
    thread.start()

    async def made() -> store_nodes.Cluster:
        return store_nodes.Cluster(folder, ("studio", "air"))

    stores = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(), stores_loop))
    nodes = SplitNodes(loaded, stores, stores_loop, timing)

    def client(name: str, timing: Timing, handle: Any = None, *, kind: Any = None) -> ReplicaClient:
        return ReplicaClient(name, timing, nodes.processes[name])

    for module in (connection, routing):
        monkeypatch.setattr(module, "ReplicaClient", client)
    monkeypatch.setattr(calls, "actor_handle", lambda name: nodes.processes[name.removeprefix("replica:")])
    try:
        yield nodes
        await nodes.rest()
    finally:
        await nodes.close()
        await nodes.on_stores(_closed(stores))
        stores_loop.call_soon_threadsafe(stores_loop.stop)
        thread.join(10)
        stores_loop.close()
