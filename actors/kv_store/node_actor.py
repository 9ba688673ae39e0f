"""The store of one node among others: its agents have copies elsewhere, move, and are taken over when a node is lost.

The one way for KV is the pull (`block_client`): who needs blocks fetches them, straight from the other node's
`BlockServer`. Agents' words travel by Ray calls between stores; they are small.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from cachetools import FIFOCache

from ...cluster.config import Config
from ...cluster.environment import cluster_key, default_home
from ...cluster.errors import SatchelError, Unavailable
from ...cluster.incidents import note_incident
from ...cluster.nodes import Node
from ..protocol.handles import store_actor_name
from ..protocol.messages import StoreReport
from ..protocol.reporter import Reporter
from ..supervision.watchdog import Watchdog
from .actor import Answer
from .agents.homes import Memory, Role, buried_up_to
from .disk.probe import DiskProbe
from .disk.quotas import Limits
from .disk.store import DiskStore
from .ownership import OwnedKeeper, Ownership
from .peer_calls import VERSIONS_MAX, PeerCalls
from .replication.copies import Copies
from .replication.peers import Peers, RayPeers
from .replication.succession import Succession
from .transfer.node_blocks import NodeBlocks

logger = logging.getLogger(__name__)

TEND_S = 5.0
"""How often what failed is tried again."""

LEARN_S = 60.0
"""How often other nodes are asked what happened there."""

UNBURIED_MAX = 10_000

ROOM_BYTES_MIN = 64 << 20
"""With less than that free on its disk a node is not asked to fetch KV, which it could not keep."""

STUCK_S = 600.0
"""So long may the store's threads take for one thing, as long as the disk answers; else until it does."""

NUMBERS = 2**14
"""Among how many numbers each node has one of its own for what it does; by hash, so for 16 nodes in 99% of clusters."""


@dataclass(frozen=True)
class Surroundings:
    """What a test gives a store instead of the cluster."""

    folder: Path
    cluster_key: bytes
    peers: Peers


class NodeStoreActor(PeerCalls):
    """As `KVStoreActor`, named `kv_store:<node>`. Made on the event loop that it lives on.

    Args:
        given: instead of the cluster's own; then nothing is reported, and `tend` and `learn` are called from outside.
    """

    def __init__(self, config: Config, node: Node, given: Surroundings | None = None) -> None:
        super().__init__(config, given.folder if given else default_home().kv)
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._node = node.name
        self._peers: Peers = given.peers if given else RayPeers(node.name, config.timing)
        self._agents.count_apart(_residue(node.name), NUMBERS)
        self._lock = threading.Lock()
        # Changed on the loop, taken on the reporter's thread; with the lock.
        self._changed: set[str] = set()
        self._counts = dict.fromkeys(("moves", "moved_bytes", "adopted"), 0)
        self._unburied: dict[tuple[str, str], int] = {}
        self._introduced = asyncio.Event()
        self._succession = Succession(
            node.name,
            self._homes,
            self._agents.heads,
            self._in_order,
            self._peers,
            bury=self._bury,
            changed=self._note,
            timing=config.timing,
        )
        self._copies = Copies(
            node.name,
            self._homes,
            self._in_order,
            self._peers,
            version=lambda: self._agents.sequence,
            count=config.replication,
            machines=len(config.machines),
            wait_s=config.copy_wait_s,
            strict=config.replication_wait == "strict",
            doubt=self._succession.doubt,
            limits=self._quotas.of,
            timing=config.timing,
        )
        # Of copies that came lately: whose, of which home epoch, and the home's count.
        self._versions = FIFOCache(VERSIONS_MAX)
        self._blocks: NodeBlocks | None = None
        self._serve_blocks = partial(self._begin_blocks, given.cluster_key if given else cluster_key(), node)
        # Whether the router has heard what is on the disk.
        self._disk_told = False
        if self._disk is not None and self._owned is not None:
            self._serve_blocks(self._disk, self._owned)
        self._full = False
        self._watchdog: Watchdog | None = None
        self._reporter = Reporter(self._report, config.timing, before_full=self._introduce)
        if given is None:
            self._begin_watch()
            threading.Thread(target=self._reporter.run, name="reporter", daemon=True).start()
            self._tending = asyncio.create_task(self._tend_for_ever())
            self._tend_disk_too()

    def _begin_blocks(self, key: bytes, node: Node, disk: DiskStore, owned: Ownership) -> None:
        keeper = OwnedKeeper(disk, owned, self._loop)
        self._blocks = NodeBlocks(disk, key, node, self._session, self._peers, keeper, self._timing)
        owned.end_pulls = self._blocks.end_pulls

    def _begin_watch(self) -> None:
        self._watchdog = Watchdog(store_actor_name(self._node), poll_s=self._timing.heartbeat_s)
        self._disk_probe = DiskProbe(self._folder)
        self._watchdog.watch("event loop", self._loop.call_soon_threadsafe)
        self._watch_thread("agents", self._worker)
        if self._disk_threads is not None:
            self._watch_thread("disk", self._disk_threads)
        self._watchdog.start()

    def _watch_thread(self, name: str, pool: ThreadPoolExecutor) -> None:
        if self._watchdog is not None:
            self._watchdog.watch(f"thread {name}", pool.submit, lambda: STUCK_S, may_end=self._disk_probe.answers)

    def _disk_came(self, disk: DiskStore, owned: Ownership) -> None:
        if self._disk_threads is not None:
            self._watch_thread("disk", self._disk_threads)
        self._serve_blocks(disk, owned)
        self._reporter.wake()

    # Asked by the endpoint.

    async def move(self, agent: str, to: str) -> Answer:
        """Hand the agent over to another node, between two of its turns.

        Returns:
            `{"node", "epoch", "tokens", "blocks", "bytes", "seconds"}`; or an error (`AgentNotFound`, `AgentBusy`,
            `AgentElsewhere`, `Unavailable` where no such node is there now).
        """
        return await self._guarded(self._move(agent, to))

    async def _move(self, agent: str, to: str) -> dict[str, Any]:
        started = time.monotonic()

        def memory() -> Memory:
            self._homes.check(agent)
            return self._homes.memory(agent)

        nothing = {"tokens": 0, "blocks": 0, "bytes": 0}
        epoch = (await self._in_order(memory)).epoch
        if to == self._node:
            return {**nothing, "node": to, "epoch": epoch, "seconds": 0.0}
        if to not in await self._peers.others():
            raise Unavailable(f"node {to!r} does not answer yet, or is not there", retry_after_s=self._timing.peers_s)
        # What can go while it talks goes first, so that the turn is held for a moment only.
        await self._copies.send(agent, to, self._timing.answer_s)
        before = await self._fetched(agent, to, self._timing.fetch_s)
        turn = f"move-{uuid.uuid4().hex}"
        begun = await self.begin(agent, turn, b"", {})
        if "error" in begun:
            return begun
        try:
            sent = await self._copies.send(agent, to, self._timing.answer_s)
            moved = await self._fetched(agent, to, self._timing.hold_s) if before is not None else None
            # From here on it may be the home, whatever is heard of it: if it does not give way, this node asks.
            self._succession.doubt(agent)
            above = await self._peers.call(to, "become_home", agent, sent.epoch, timeout_s=self._timing.answer_s)
            # Turns that nobody takes may have ended meanwhile.
            await self._succession.give_way(agent, to, above, sent)
        finally:
            await self.abandon(agent, turn)
            self._note(agent)
        self._counts["moves"] += 1
        before = before or nothing
        moved = moved or {**nothing, "tokens": before["tokens"]}
        moved = {**moved, "blocks": before["blocks"] + moved["blocks"], "bytes": before["bytes"] + moved["bytes"]}
        self._counts["moved_bytes"] += moved["bytes"]
        return {**moved, "node": to, "epoch": above, "seconds": time.monotonic() - started}

    async def _fetched(self, agent: str, to: str, within_s: float) -> dict[str, Any] | None:
        """Have another node fetch the agent's KV. None where it cannot: then that is computed again there."""
        try:
            timeout_s = within_s + self._timing.answer_s
            return await self._peers.call(to, "fetch", agent, self._node, within_s, timeout_s=timeout_s)
        except SatchelError as error:
            logger.warning("node %s does not get the KV of agent %s: %s", to, agent, error.message)
            return None

    async def drain(self) -> None:
        """The node leaves: tell the router that no agent is to come here any more."""
        self._draining = True
        self._reporter.wake()

    async def adopt(self, agent: str, above: int) -> Answer:
        """Become the agent's home after its own was lost, with the latest copy that any node has that answers.

        Args:
            above: the highest home epoch that the caller has heard of.

        Returns:
            The new epoch; or an error (`AgentNotFound`).
        """
        answer = await self._guarded(self._succession.adopt(agent, above))
        self._counts["adopted"] += "result" in answer
        self._copies.be_late(agent)
        return answer

    # What the single store does, and the others are told of.

    async def recall(self, agent: str, words: bytes, known: dict[int, int], limits: Limits | None = None) -> Answer:
        await self._ready()
        return await super().recall(agent, words, known, limits)

    async def begin(
        self, agent: str, turn: str, words: bytes, known: dict[int, int], limits: Limits | None = None
    ) -> Answer:
        await self._ready()
        return await super().begin(agent, turn, words, known, limits)

    async def _ready(self) -> None:
        """No turn begins at a home that may be none any more, as long as that can be asked."""
        if not self._introduced.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._introduced.wait(), self._timing.learn_s)
            self._introduced.set()

    async def _kept(self, agent: str) -> bool:
        """A turn has been committed: its words go to the nodes of the copies before its last event leaves."""
        self._note(agent)
        copied = await self._copies.after_turn(agent)
        if not copied.at_home:
            await self._succession.settle_with(agent)
        return copied.all_made

    async def fork(self, source: str, target: str, limits: Limits | None = None) -> Answer:
        answer = await super().fork(source, target, limits)
        if "result" in answer:
            await self._kept(target)
            self._copies.blocks_later(target)
        return answer

    async def forget(self, agent: str) -> Answer:
        answer = await super().forget(agent)
        self._note(agent)
        place = await self._in_order(lambda: self._homes.place(agent))
        if (epoch := buried_up_to(place)) >= 0 and place.role is Role.GONE:
            others = await self._peers.others()
            await asyncio.gather(*(self._bury_at(node, agent, epoch) for node in others))
        return answer

    async def _bury_at(self, node: str, agent: str, epoch: int) -> None:
        try:
            number = await self._in_order(lambda: self._agents.buried(agent))
            await self._peers.call(node, "bury", agent, epoch, number, timeout_s=self._timing.answer_s)
        except SatchelError as error:
            # A node that was away asks before it announces anything; one that is there is told again.
            logger.warning("node %s has not forgotten agent %s yet: %s", node, agent, error.message)
            if len(self._unburied) < UNBURIED_MAX:
                self._unburied[node, agent] = epoch
        else:
            self._unburied.pop((node, agent), None)

    async def disk_touch(self, model: bytes, chain: list[bytes], owner: str) -> Answer:
        answer = await super().disk_touch(model, chain, owner)
        if owner and "result" in answer:
            heirs = self._owned.heirs_of(owner) if self._owned is not None else []
            for agent in (owner, *heirs):
                self._copies.blocks_later(agent)
        return answer

    async def stats(self) -> Answer:
        answer = await super().stats()
        if "result" in answer:
            answer["result"] |= {f"{name}_total": count for name, count in self._counts.items()}
            answer["result"] |= {"copies_failed_total": self._copies.failed_total, "copies_late": self._copies.late()}
        return answer

    async def learn(self) -> None:
        """Hear from the other nodes what was forgotten there and who lives elsewhere now; then turns may begin here."""
        try:
            async with asyncio.timeout(self._timing.learn_s):
                await self._succession.learn()
        except TimeoutError:
            logger.warning("the other nodes take too long to say what happened there")
        finally:
            self._introduced.set()

    async def tend(self) -> None:
        """Try again what failed: copies, burials, handing over."""
        await self._succession.resolve()
        await self._copies.catch_up()
        others = await self._peers.others()
        for (node, agent), epoch in list(self._unburied.items()):
            if node in others:
                await self._bury_at(node, agent, epoch)
            else:
                del self._unburied[node, agent]

    async def _tend_for_ever(self) -> None:
        learned_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._succession.awake.wait(), TEND_S)
            self._succession.awake.clear()
            try:
                await self.tend()
                if time.monotonic() - learned_at > LEARN_S:
                    learned_at = time.monotonic()
                    await self.learn()
            except Exception as error:
                # The next round tries again; what it is about would not be tended at all otherwise.
                logger.exception("what failed before fails again: %s", type(error).__name__)
            # Not more often, whatever wakes it.
            await asyncio.sleep(0.1)

    # Reports to the router.

    def _note(self, agent: str) -> None:
        with self._lock:
            self._changed.add(agent)
        self._reporter.wake()

    def _introduce(self) -> None:
        """On the reporter's thread: what was forgotten elsewhere is known before anything is announced."""
        ends = time.monotonic() + self._timing.introduce_s
        while True:
            asyncio.run_coroutine_threadsafe(self.learn(), self._loop).result(2 * self._timing.learn_s)
            if self._succession.heard or time.monotonic() > ends:
                return
            time.sleep(self._timing.report_s)

    def _report(self, sequence: int, full: bool) -> StoreReport:
        """The state for the router. On the reporter's thread."""
        with self._lock:
            agents, self._changed = self._changed, set()

        def places() -> tuple[list[Any], list[str], list[Any]]:
            agents.update(self._agents.take_evicted())
            buried = set(self._agents.forgotten()) if full else agents
            known = dict(self._homes.claims({*self._homes.every(), *agents} if full else agents))
            gone = [
                (agent, epoch)
                for agent, place in known.items()
                if agent in buried and (epoch := buried_up_to(place)) >= 0
            ]
            alive = [(agent, place) for agent, place in known.items() if place.role is not Role.GONE]
            claimed = [(agent, place.epoch, place.role is Role.HOME) for agent, place in alive]
            return claimed, [agent for agent in agents if agent not in known], gone

        try:
            claimed, retracted, gone = self._worker.submit(places).result()
            announced, lost = ([], [])
            stats: dict[str, int] = {}
            if self._disk is not None:
                announced, lost = self._disk.changes(full or not self._disk_told)
                stats = self._disk.stats()
                self._disk_told = True
                self._note_room(stats["device_free_bytes"])
        except BaseException:
            with self._lock:
                self._changed |= agents
            raise
        return StoreReport(
            node=self._node,
            incarnation=self._reporter.incarnation,
            sequence=sequence,
            announced=announced,
            retracted=lost,
            full=full,
            agents=claimed,
            agents_retracted=retracted,
            tombstones=gone,
            links=self._blocks.take_links() if self._blocks is not None else {},
            blocks=stats.get("blocks", 0),
            used_bytes=stats.get("bytes", 0),
            free_bytes=max(0, stats.get("bytes_max", 0) - stats.get("bytes", 0)),
            disk_full=stats.get("device_free_bytes", 0) < ROOM_BYTES_MIN,
            disk_error=self._disk_error,
            agents_let_go=self._agents.evicted,
            draining=self._draining,
            memory_free_bytes=psutil.virtual_memory().available,
        )

    def _note_room(self, free_bytes: int) -> None:
        """Write down when the disk becomes full, and when it is so no more."""
        full = free_bytes < (2 if self._full else 1) * ROOM_BYTES_MIN
        if full != self._full and self._watchdog is not None:
            has = "is full: no KV is kept there now" if full else "has room again"
            note_incident(default_home(), "disk", f"the disk of {self._folder} {has}")
        self._full = full


def _residue(node: str) -> int:
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "big") % NUMBERS
