"""A store's reports to the router: agents that were added, changed and removed, what is on the disk, and the room
left."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....cluster.devices.available_memory import node_available_bytes
from ....cluster.devices.energy import node_meter
from ...protocol.reporter import Reporter
from ...protocol.router_messages import StoreReport
from ..agents.roles import Role, tombstone_epoch
from .node_memory import NodeMemory

ROOM_BYTES_MIN = 64 << 20
"""A node with fewer bytes free on its disk is not asked to pull KV, because it could not keep it."""

_Agents = tuple[list[tuple[str, int, bool]], list[str], list[tuple[str, int]]]


class StoreReports:
    """
    Args:
        links: returns bytes per second by the node that was pulled from.
        introduce: called before a full report, on the reporter's thread.

    Attributes:
        reporter: sends the reports; `run` it in a thread.
        draining: whether no agent may move here any more.
        on_full: called when the disk becomes full, and when it has room again.
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
        # Changed on the event loop and taken on the reporter's thread, under the lock.
        self._changed: set[str] = set()
        # Whether the router knows what is on the disk.
        self._disk_told = False
        self._full = False
        self.draining = False
        self.on_full: Callable[[bool], object] = lambda full: None
        self.reporter = Reporter(self.report, memory.timing, before_full=introduce)

    def changed(self, agent: str) -> None:
        """Reports the agent again: its state on this node has changed."""
        with self._lock:
            self._changed.add(agent)
        self.reporter.wake()

    def drain(self) -> None:
        """Reports that the node leaves: no agent may move here any more."""
        self.draining = True
        self.reporter.wake()

    def report(self, sequence: int, full: bool) -> StoreReport:
        """Returns the next report. Called on the reporter's thread."""
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
            memory_free_bytes=node_available_bytes(),
            joules=node_meter().read(),
        )

    def _places(self, agents: set[str], full: bool) -> _Agents:
        """Returns the agents that have a primary or a copy here, those that this node no longer knows, and
        tombstones."""
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
        """Notes the device's free bytes."""
        full = free_bytes < (2 if self._full else 1) * ROOM_BYTES_MIN
        if full != self._full:
            self.on_full(full)
        self._full = full
