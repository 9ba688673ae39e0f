"""Machines that fall asleep, in virtual time: what runs on one stands still, and goes on where it was.

Its wall clock is right when it wakes. Its other clock has stopped meanwhile, as Python's `time.monotonic` on a Mac; or
it has gone on, so that everything that was to happen is late at once, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

from satchel.actors.protocol.clients import RouterClient
from satchel.actors.rpc.codec import encode

from ..worlds.kv_store.store_world import CLIENT
from .cluster_disk import KVDisk
from .cluster_time import Clock, Process, VirtualLoop
from .cluster_world import ClusterWorld

TICK_S = 1e-6

LOST_S = 20.0
"""After so long without a node's answers Ray counts it as lost, and its processes end when they hear of it."""

HEADLESS_S = 60.0
"""After so long without the head a node's processes end."""

JOIN_S = 6.0
"""How long it may take at most until a node has joined again."""


class SleepyLoop(VirtualLoop):
    """Attributes:
    stops: whether clocks stop while a machine sleeps.
    asleep: since when, by host.
    """

    def __init__(self, *, stops: bool) -> None:
        self.stops = stops
        self.asleep: dict[str, float] = {}
        self._slept: dict[str, float] = defaultdict(float)
        self._held: dict[str, list[tuple[asyncio.Handle, Callable[[], object], Context]]] = defaultdict(list)
        super().__init__()

    def slept_s(self, host: str) -> float:
        """For how long a host has slept so far."""
        since = self.asleep.get(host)
        return self._slept[host] + (self.now - since if since is not None else 0.0)

    def monotonic(self, host: str) -> float:
        return self.now - (self.slept_s(host) if self.stops else 0.0)

    def sleep(self, host: str) -> None:
        self.asleep.setdefault(host, self.now)

    def wake(self, host: str) -> None:
        self._slept[host] = self.slept_s(host)
        del self.asleep[host]
        for handle, work, context in self._held.pop(host, []):
            if not handle.cancelled():
                super().call_soon(work, context=context)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self._when_awake(super().call_soon, callback, args, context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        # Differences of two clocks are rounded: who waits for less than time can advance would wait for ever.
        when = max(when, self.now + TICK_S)

        def plan(work: Any, context: Context) -> asyncio.TimerHandle:
            return super(SleepyLoop, self).call_at(when, work, context=context)

        return self._when_awake(plan, callback, args, context, when)

    def _when_awake(
        self, plan: Callable[..., Any], callback: Any, args: Any, context: Context | None, when: float | None = None
    ) -> Any:
        context = context or copy_context()
        host = host_of(context)
        if not host:
            return plan(lambda: callback(*args), context=context)
        before, made = self.slept_s(host), list[asyncio.Handle]()

        def run() -> None:
            if made[0].cancelled():
                return
            if host in self.asleep:
                self._held[host].append((made[0], run, context))
            elif when is not None and self.stops and (due := when + self.slept_s(host) - before) > self.now:
                super(SleepyLoop, self).call_at(due, run, context=context)
            else:
                callback(*args)

        made.append(plan(run, context=context))
        return made[0]


class SleepyClock(Clock):
    """Each host's own."""

    def __init__(self, *, stops: bool) -> None:
        self.loop: SleepyLoop = SleepyLoop(stops=stops)

    def monotonic(self) -> float:
        return self.loop.monotonic(host_of(copy_context()))


def host_of(context: Context) -> str:
    process = context.get(Process.current)
    return process.host if process is not None else ""


class SleepyWorld(ClusterWorld):
    """A cluster whose machines may sleep. The first one is the head: it has the router and the endpoint."""

    @property
    def head(self) -> str:
        return self.names[0]

    def process(self, name: str) -> Process:
        process = super().process(name)
        node = name.removeprefix("r-")
        process.host = node if node in self.names else self.head
        return process

    def kv_of(self, name: str) -> KVDisk:
        if name not in self.kv:
            self.kv[name] = KVDisk(lambda: self.now_of(name), self._entries_max)
        return self.kv[name]

    def now_of(self, name: str) -> float:
        return self.loop.monotonic(name)

    def awake_s(self, name: str) -> float:
        return self.loop.time() - self.loop.slept_s(name)

    def alive(self) -> list[str]:
        return self.policy.members.alive_nodes(self.now_of(self.head))

    def reaches(self, one: str, other: str) -> bool:
        hosts = {self.head if name == CLIENT else name for name in (one, other)}
        return not hosts & self.loop.asleep.keys() and super().reaches(one, other)

    async def tell(self, node: str, method: str, report: Any) -> bool:
        """Sends the router a report, which is computed where the router runs."""
        await asyncio.sleep(self.rng.random() * 0.1)
        if not self.reaches(node, CLIENT):
            return False
        heard = self.process_of_router.start(getattr(self.router, method)(encode([report])))
        with suppress(TimeoutError):
            return RouterClient.report.answered(
                await asyncio.wait_for(asyncio.shield(heard), self.config.timing.brief_answer_s)
            )
        return False

    async def nap(self, name: str, seconds: float) -> None:
        """Lets a machine sleep, and its node join again where Ray has taken it for lost meanwhile."""
        if name in self.loop.asleep:
            return
        began, started = self.loop.time(), self.stores.get(name)
        self.loop.sleep(name)
        others = [each for each in self.names if each != name]
        if name == self.head and seconds > HEADLESS_S:
            await asyncio.sleep(HEADLESS_S)
            for each in others:
                # Who is asleep, too, sees it when it wakes.
                if each in self.stores and each not in self.loop.asleep:
                    self.crash_node(each)
        await asyncio.sleep(began + seconds - self.loop.time())
        self.loop.wake(name)
        if name == self.head:
            for each in others:
                await asyncio.sleep(self.rng.random() * JOIN_S)
                if each not in self.stores and each not in self.loop.asleep:
                    self.start_node(each)
        elif seconds > LOST_S and (self.head not in self.loop.asleep):
            # For a moment it goes on as if nothing had been.
            await asyncio.sleep(self.rng.random() * JOIN_S)
            await self.rejoin(name, started)

    async def rejoin(self, name: str, started: Any) -> None:
        if self.stores.get(name) is started and started is not None and name not in self.loop.asleep:
            self.crash_node(name)
            await asyncio.sleep(self.rng.random() * JOIN_S)
            if name not in self.stores:
                self.start_node(name)
