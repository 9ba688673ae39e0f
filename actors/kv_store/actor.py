"""The store actor of a node: agents' memory and KV, for the endpoint, the node's replicas and the other nodes' stores.

A thin shell: each method of `StoreClient` is done by a service.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from ...cluster.config.config import Config
from ...cluster.config.nodes import Node
from ...cluster.environment import cluster_key, default_home
from ...cluster.incidents import note_incident
from ...cluster.telemetry.process import begin_telemetry
from ..protocol.names import store_actor_name
from ..protocol.store_client import StoreClient
from ..rpc.local import LocalAddress, LocalServer
from ..rpc.shell import Shell, answers, shell
from ..rpc.spec import Method
from ..supervision.watchdog import Watchdog
from .disk.disk_check import DiskProbe
from .replication.peers import Peers, RayPeers
from .services.composition import StoreServices
from .services.node_memory import open_memory

P = ParamSpec("P")
R = TypeVar("R")

STUCK_S = 600.0
"""How long one call in the store's threads may take while the disk answers. If the disk does not, it may take
longer."""


NEAR = ("recall", "begin", "renew", "commit", "abandon")
"""Methods that processes of its machine call without Ray, for each turn of an agent ..."""

NEAR_DISK = ("disk_session", "disk_commit", "disk_touch", "disk_find", "disk_read")
"""... and of each sequence."""


@dataclass(frozen=True)
class Surroundings:
    """Replacements for the cluster that a test gives a store."""

    folder: Path
    cluster_key: bytes
    peers: Peers


def _by(declared: Method[P, R], find: Callable[[StoreServices], Callable[P, Awaitable[R] | R]]) -> Shell:
    """Returns the actor's method for `declared`, done by the service's method that `find` returns."""
    return shell(declared, lambda store: find(store.services), module=__name__, actor="KVStoreActor")


class KVStoreActor:
    """Named `kv_store:<node>` in the cluster's namespace. Made on the event loop that it lives on.

    It is called through `StoreClient`, which says what its methods do.

    Args:
        given: used instead of the cluster. Then there are no reports, and no periodic work except the disk's.

    Raises:
        ClusterError: the folder cannot be used, or belongs to a newer version.
    """

    def __init__(self, config: Config, node: Node, given: Surroundings | None = None) -> None:
        if given is None:
            begin_telemetry(store_actor_name(node.name), config.logs, config.traces)
        memory = open_memory(config, given.folder if given else default_home().kv)
        peers = given.peers if given else RayPeers(node.name, config.timing)
        self.services = StoreServices(config, node, memory, peers, given.cluster_key if given else cluster_key())
        # A turn that its endpoint has sent is kept, though the endpoint ends.
        self._near = LocalServer(self, *NEAR, *NEAR_DISK, ends_calls=False)
        self.services.share_blocks()
        if given is None:
            self._watch(node.name, default_home().kv, config.timing.heartbeat_s)
            services = self.services
            services.reports.on_full = _note_room
            threading.Thread(target=services.reports.reporter.run, name="reporter", daemon=True).start()
            self._tending = asyncio.create_task(services.tending.run())
            memory.disk.tend()

    def _watch(self, node: str, folder: Path, poll_s: float) -> None:
        self._watchdog = Watchdog(store_actor_name(node), poll_s=poll_s)
        probe = DiskProbe(folder)

        def watch(name: str, pool: ThreadPoolExecutor) -> None:
            self._watchdog.watch(f"thread {name}", pool.submit, lambda: STUCK_S, may_end=probe.answers)

        self._watchdog.watch("event loop", asyncio.get_running_loop().call_soon_threadsafe)
        watch("agents", self.services.memory.work.thread)
        watch("disk", self.services.memory.disk.threads)
        self._watchdog.start()

    @answers(StoreClient.local_address)
    async def local_address(self) -> LocalAddress:
        return await self._near.address()

    # Turns.

    recall = _by(StoreClient.recall, lambda services: services.introduced(services.conversations.recall))
    begin = _by(StoreClient.begin, lambda services: services.introduced(services.turns.begin))
    renew = _by(StoreClient.renew, lambda services: services.turns.renew)
    commit = _by(StoreClient.commit, lambda services: services.turns.commit)
    abandon = _by(StoreClient.abandon, lambda services: services.turns.abandon)

    # Agents.

    transcript = _by(StoreClient.transcript, lambda services: services.conversations.transcript)
    info = _by(StoreClient.info, lambda services: services.conversations.describe)
    agents = _by(StoreClient.agents, lambda services: services.conversations.page)
    blocks = _by(StoreClient.blocks, lambda services: services.conversations.blocks)
    disk_kept = _by(StoreClient.disk_kept, lambda services: services.conversations.disk_kept)
    fork = _by(StoreClient.fork, lambda services: services.conversations.fork)
    forget = _by(StoreClient.forget, lambda services: services.conversations.forget)
    room = _by(StoreClient.room, lambda services: services.satchels.room)
    pack = _by(StoreClient.pack, lambda services: services.satchels.pack)
    borrow = _by(StoreClient.borrow, lambda services: services.satchels.borrow)
    give_back = _by(StoreClient.give_back, lambda services: services.satchels.give_back)
    unpack = _by(StoreClient.unpack, lambda services: services.introduced(services.satchels.unpack))
    stats = _by(StoreClient.stats, lambda services: services.stats)

    # KV on the disk.

    disk_session = _by(StoreClient.disk_session, lambda services: services.memory.disk.describe)
    disk_commit = _by(StoreClient.disk_commit, lambda services: services.memory.disk.commit)
    disk_touch = _by(StoreClient.disk_touch, lambda services: services.memory.disk.touch)
    disk_find = _by(StoreClient.disk_find, lambda services: services.memory.disk.find)
    disk_read = _by(StoreClient.disk_read, lambda services: services.memory.disk.read)
    kv_models = _by(StoreClient.kv_models, lambda services: services.memory.disk.models)
    claimed = _by(StoreClient.claimed, lambda services: services.claiming.claimed)
    pull = _by(StoreClient.pull, lambda services: services.fetching.pull)

    # Where agents live.

    move = _by(StoreClient.move, lambda services: services.moving.move)
    promote = _by(StoreClient.promote, lambda services: services.copying.promote)
    drain = _by(StoreClient.drain, lambda services: services.reports.drain)

    # For the stores of other nodes.

    promote_here = _by(StoreClient.promote_here, lambda services: services.copying.promote_here)
    take_secondary = _by(StoreClient.take_secondary, lambda services: services.copying.take_secondary)
    send_secondary = _by(StoreClient.send_secondary, lambda services: services.copying.send_secondary)
    take_in = _by(StoreClient.take_in, lambda services: services.copying.take_in)
    standing = _by(StoreClient.standing, lambda services: services.copying.standing)
    doubt = _by(StoreClient.doubt, lambda services: services.succession.doubt)
    buried = _by(StoreClient.buried, lambda services: services.tombstones.told)
    bury = _by(StoreClient.bury, lambda services: services.tombstones.bury)
    fetch = _by(StoreClient.fetch, lambda services: services.fetching.fetch)
    block_addresses = _by(StoreClient.block_addresses, lambda services: services.fetching.addresses)


def _note_room(full: bool) -> None:
    has = "is full: KV is not written to it now" if full else "has room again"
    home = default_home()
    note_incident(home, "disk", f"the disk of {home.kv} {has}")
