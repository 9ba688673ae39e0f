"""An engine over a tiny model; agents' KV is written to disk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.kv_store.disk.store import DiskLimits, DiskStore
from satchel.actors.kv_store.services.disk import NodeDisk
from satchel.actors.kv_store.transfer.block_client import BlockPuller
from satchel.actors.kv_store.transfer.block_server import BlockServer
from satchel.actors.kv_store.transfer.pull_loop import Wanted
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.store_messages import Fetched, PullKV
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.actors.replica.memory.other_parts import OtherParts, Remote
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import Unavailable
from tests.worlds.direct import carried
from tests.worlds.replica.bench import Bench

CLUSTER_KEY = bytes(range(32))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One that runs in a thread as long as this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="stores", daemon=True).start()
    return loop


class _DiskActor(KVStoreActor):
    """The store's actor where nobody was ever forgotten, of which only the disk tier is asked."""

    def __init__(self, store: DiskStore, session: str, sources: Mapping[str, Node]) -> None:  # pyright: ignore[reportMissingSuperCall]
        async def ask(work: Any) -> Any:
            return work(SimpleNamespace(forgotten=list, list=lambda *_: []))

        # A replica keeps limits by itself.
        quotas: Any = SimpleNamespace(note=lambda limits: None, knows=lambda tenant: False)
        disk = NodeDisk(None, DiskLimits(0), ask, quotas, USUAL)
        disk.session = session
        # Nobody tidies up behind a test.
        disk.tend = lambda: None
        disk.take(store)

        async def pull(wanted: PullKV) -> Fetched:
            return await asyncio.to_thread(_pulled, store, sources[wanted.source].store, wanted)

        fetching = SimpleNamespace(pull=pull)
        self.services: Any = SimpleNamespace(memory=SimpleNamespace(disk=disk), fetching=fetching)


def _pulled(store: DiskStore, source: DiskStore, asked: PullKV) -> Fetched:
    """Pulls over loopback from the disk of a node that is named as is asked for."""
    server = BlockServer(source, CLUSTER_KEY, asked.source, [("127.0.0.1", 0)])
    puller = BlockPuller(store, CLUSTER_KEY, store)
    try:
        wanted = Wanted(asked.model, asked.root, tuple(asked.block_ids), None, asked.rest)
        addresses = server.addresses
        found = puller.pull(wanted, asked.source, addresses, deadline_s=asked.deadline_s, owner=asked.owner)
        return Fetched(found.blocks * BLOCK_TOKENS, found.installed, found.nbytes, found.seconds)
    finally:
        puller.close()
        server.close()


class Node:
    """A node's store in this process, called by `client` from any thread. `restart` is what the next process finds.

    Attributes:
        sources: other nodes, from which it can pull.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.silent = False
        self.sources: dict[str, Node] = {}
        self._loop = _loop()
        self.client = carried("local", self._carry, self._loop)
        self._number = 0
        self.restart()

    def restart(self) -> None:
        self._number += 1
        if self._number > 1:
            self.store.close()
        session = f"s{self._number}"
        self.store = DiskStore(self.root, session=session, limits=DiskLimits(bytes_max=2**30))
        self._actor = _DiskActor(self.store, session, self.sources)

    def call(self, method: str, asked: bytes) -> bytes:
        if self.silent:
            raise Unavailable("the store does not answer")
        return asyncio.run_coroutine_threadsafe(getattr(self._actor, method)(asked), self._loop).result(30)

    async def _carry(self, method: str, asked: bytes, timeout_s: float) -> bytes:
        return await asyncio.to_thread(lambda: self.call(method, asked))


def disk_of(
    loaded: LoadedModel, node: Node, remotes: Sequence[Remote] = (), kind: type[DiskTier] = DiskTier
) -> DiskTier:
    """The disk side of a process that uses KV of other parts of its model too."""
    disk = kind(loaded.spec, loaded.model_id, node.client)
    if loaded.part is not None:
        disk.others = OtherParts(loaded.identity, *loaded.part, loaded.spec, node.client, remotes)
    return disk


def wait_written(disk: DiskTier) -> None:
    ends = time.monotonic() + 20
    while disk.waiting_bytes or not disk._queue.empty():
        assert time.monotonic() < ends
        time.sleep(0.01)


def process(loaded: LoadedModel, node: Node, *, drafts: bool = False, **scheduling: Any) -> tuple[Bench, DiskTier]:
    """An engine that remembers nothing, with its disk side."""
    disk = DiskTier(loaded.spec, loaded.model_id, node.client)
    return Bench(loaded, disk=disk, drafts=drafts, **scheduling), disk


def write_down(bench: Bench, disk: DiskTier) -> None:
    bench.turn()
    ends = time.monotonic() + 20
    while bench.engine.keeping.unwritten_bytes or disk.waiting_bytes or not disk._queue.empty():
        assert time.monotonic() < ends
        time.sleep(0.01)
        bench.turn()
    time.sleep(0.05)
    bench.turn()
    # A turn of which nothing is new has no bytes to wait for.
    while bench.engine.memory._writers and time.monotonic() < ends:
        time.sleep(0.01)
        bench.turn()
