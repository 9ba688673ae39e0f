"""What a store tells the router: which agents came, changed and went, what is on the disk, and what room is left."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil

from ...protocol.reporter import Reporter
from ...protocol.router_messages import StoreReport
from ..agents.roles import Role, tombstone_epoch
from .node_memory import NodeMemory

ROOM_BYTES_MIN = 64 << 20
"""With less than that free on its disk a node is not asked to fetch KV, which it could not keep."""

_Agents = tuple[list[tuple[str, int, bool]], list[str], list[tuple[str, int]]]


class StoreReports:
    """
    Args:
        links: takes bytes a second by the node that was pulled from.
        introduce: called before everything is announced, on the reporter's thread.

    Attributes:
        reporter: sends the reports; `run` it in a thread.
        draining: whether no agent is to come here any more.
        on_full: told when the disk becomes full, and when it is so no more.
    """

    def __init__(
        self,
        node: str,
        memory: NodeMemory,
        *,
        links: Callable[[], dict[str, float]],
        introduce: Callable[[], None],
    ) -> None:
        self._node, self._links = node, links
        self._work, self._agents, self._roles, self._disk = memory.work, memory.agents, memory.roles, memory.disk
        self._lock = threading.Lock()
        # Changed on the loop, taken on the reporter's thread; with the lock.
        self._changed: set[str] = set()
        # Whether the router has heard what is on the disk.
        self._disk_told = False
        self._full = False
        self.draining = False
        self.on_full: Callable[[bool], object] = lambda full: None
        self.reporter = Reporter(self.report, memory.timing, before_full=introduce)

    def changed(self, agent: str) -> None:
        """What this node has of the agent has changed."""
        with self._lock:
            self._changed.add(agent)
        self.reporter.wake()

    def drain(self) -> None:
        """The node leaves: no agent is to come here any more."""
        self.draining = True
        self.reporter.wake()

    def report(self, sequence: int, full: bool) -> StoreReport:
        """The state for the router. On the reporter's thread."""
        with self._lock:
            agents, self._changed = self._changed, set()
        try:
            claimed, retracted, gone = self._work.from_thread(lambda: self._places(agents, full))
            announced, lost = ([], [])
            stats: dict[str, int] = {}
            if (disk := self._disk.store) is not None:
                announced, lost = disk.changes(full or not self._disk_told)
                stats = disk.stats()
                self._disk_told = True
                self.note_room(stats["device_free_bytes"])
        except BaseException:
            with self._lock:
                self._changed |= agents
            raise
        return StoreReport(
            node=self._node,
            incarnation=self.reporter.incarnation,
            sequence=sequence,
            announced=announced,
            retracted=lost,
            full=full,
            agents=claimed,
            agents_retracted=retracted,
            tombstones=gone,
            links=self._links(),
            blocks=stats.get("blocks", 0),
            used_bytes=stats.get("bytes", 0),
            free_bytes=max(0, stats.get("bytes_max", 0) - stats.get("bytes", 0)),
            disk_full=stats.get("device_free_bytes", 0) < ROOM_BYTES_MIN,
            disk_error=self._disk.error,
            agents_let_go=self._agents.evicted,
            draining=self.draining,
            memory_free_bytes=psutil.virtual_memory().available,
        )

    def _places(self, agents: set[str], full: bool) -> _Agents:
        """Those that live here or have a copy, those of which nothing is known any more, and tombstones."""
        agents.update(self._agents.take_evicted())
        buried = set(self._agents.forgotten()) if full else agents
        known = dict(self._roles.claims({*self._roles.every(), *agents} if full else agents))
        gone = [
            (agent, epoch)
            for agent, place in known.items()
            if agent in buried and (epoch := tombstone_epoch(place)) >= 0
        ]
        alive = [(agent, place) for agent, place in known.items() if place.role is not Role.FORGOTTEN]
        claimed = [(agent, place.epoch, place.role is Role.PRIMARY) for agent, place in alive]
        return claimed, [agent for agent in agents if agent not in known], gone

    def note_room(self, free_bytes: int) -> None:
        """So much is free on the device."""
        full = free_bytes < (2 if self._full else 1) * ROOM_BYTES_MIN
        if full != self._full:
            self.on_full(full)
        self._full = full
