"""The pool of models that come and go: what state each has, who waits for it, and what is done next. Knows no Ray;
`Work` does what it decides.

    unloaded -> waiting (for room) -> loading -> loaded -> unloading -> unloaded

The registry says what is loaded, so a pool that was killed begins again from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...cluster.config.config import Model
from ...cluster.errors import ModelBusy, ModelLoadError, ModelNotFound, NoRoom, SatchelError
from ..protocol.clients import GIVE_ROOM_S
from ..protocol.pool_messages import LOADED, LOADING, UNLOADED, UNLOADING, WAITING, PooledModel
from ..protocol.registry import ServedEntry
from ..protocol.replica_messages import ReplicaStats
from .policy import HOLD_S, Never, Place, Resident, Unload, Wait, Wanted, plan

logger = logging.getLogger(__name__)

POLL_S, WAITED_POLL_S = 1.0, 0.25
"""How often the pool looks at the replicas; the second while a model waits for room."""

LOADS_MAX = 3
"""A load is given up if this many successive processes ended while they loaded the model."""

ERROR_S = 5.0
"""So long after a failed load requests for the model fail at once."""

FORGOTTEN_S = 5.0
"""A model that waits for room is forgotten if nobody has waited for it for this long. Requests ask every second."""

LOST_S = 5.0
"""A loaded model is unloaded if all of its nodes have been absent for this long: it can be loaded elsewhere."""


class LoadLost(Exception):
    """A load ended for a reason that is not the model's: a replica's process was killed, or its node was lost."""


@dataclass(frozen=True)
class View:
    """What the pool sees.

    Attributes:
        nodes: the memory that replicas may use, by node that is present, the head first; None where no config says it.
        stats: of the placed replicas that answer, by their id.
        starting: what the other placed replicas do, by their id: an activity with the fraction done, or why their model
            cannot be loaded.
    """

    entries: Sequence[ServedEntry]
    nodes: Mapping[str, int | None]
    stats: Mapping[str, ReplicaStats] = field(default_factory=dict)
    starting: Mapping[str, tuple[str, float | None] | SatchelError] = field(default_factory=dict)


class Work(Protocol):
    """What the pool does to replicas."""

    async def look(self) -> View: ...

    async def need(self, model: Model) -> int:
        """Returns what the model's weights take at least, in bytes; 0 if unknown."""
        ...

    async def load(self, model: Model, placed: Mapping[str, str], report: Callable[[str, float | None], None]) -> None:
        """Starts replicas on nodes, waits until they are ready, and enters them into the registry. If it fails or is
        cancelled, none is left.

        Raises:
            NoRoom: a node has no room for one.
            LoadLost: one died, or its node was lost.
            SatchelError: the model cannot be loaded.
        """
        ...

    async def unload(self, replicas: Sequence[str]) -> None:
        """Takes replicas out of the registry, lets them finish what they have, and ends them."""
        ...

    async def leftovers(self, model: Model) -> list[str]:
        """Returns the replicas of a model that run and are not in the registry."""
        ...


@dataclass
class _Member:
    """One model.

    Attributes:
        placed: its replicas and their nodes, in the registry or not yet.
        need: what a replica claims, or a lower bound of it before it was ever loaded.
        requests: how many its replicas have had; -1 if not known yet.
        away_since: since when none of the replicas answers, None if one does.
        wanted_since: when the first of those who wait for it came, None if nobody waits.
        waiting, asked_at: how many wait now, and when the last of them left.
        settled: set once they are told.
        has_changed: whether a view that is being made may already be wrong.
    """

    entry: ServedEntry
    state: str = UNLOADED
    what: str = ""
    fraction: float | None = None
    placed: dict[str, str] = field(default_factory=dict)
    need: int = 0
    beside_max: int | None = None
    used_at: float = -math.inf
    held_until: float = -math.inf
    busy: bool = False
    requests: int = -1
    away_since: float | None = None
    wanted_since: float | None = None
    waiting: int = 0
    asked_at: float = -math.inf
    error: SatchelError | None = None
    failed_at: float = -math.inf
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    has_changed: bool = False

    @property
    def model(self) -> Model:
        return self.entry.model

    @property
    def is_ready(self) -> bool:
        return self.state == LOADED and self.away_since is None


class Pool:
    """Run `run` once, on the event loop on which `ensure` is called.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._clock = work, clock
        self._members: dict[str, _Member] = {}
        self._claimable: dict[str, int] = {}
        self._claimed: dict[str, int] = {}
        self._without_kv: set[str] = set()
        """The models of which it is known that they have no KV."""
        """What replicas claimed when they were heard last."""
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()

    async def ensure(self, name: str, wait_s: float) -> PooledModel:
        """As `PoolClient.ensure`."""
        if not self._looked.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._looked.wait()
            except TimeoutError:
                return PooledModel(name, UNLOADED, "the pool is starting")
        member, now = self._member(name), self._clock()
        if member.is_ready:
            member.used_at = now
            return self._shown(member)
        if member.error is not None and now - member.failed_at < ERROR_S:
            raise member.error
        if member.wanted_since is None:
            member.wanted_since, member.error = now, None
            member.settled = asyncio.Event()
            self._wake.set()
        settled = member.settled
        member.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await settled.wait()
        except TimeoutError:
            return self._shown(member)
        finally:
            member.waiting -= 1
            member.asked_at = self._clock()
        if member.error is not None:
            raise member.error
        return self._shown(member)

    def _member(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            raise ModelNotFound(f"the model {name!r} does not come and go", param="model", model=name)
        return member

    def unload(self, name: str) -> None:
        """As `PoolClient.unload`."""
        member = self._member(name)
        if member.wanted_since is not None or member.state == LOADING:
            raise ModelBusy(f"requests wait for the model {name!r}, so it is not unloaded now", param="model")
        if member.state == LOADED:
            self._begin_unload(member, list(member.placed))

    async def give_room(self, nodes: Sequence[str], wait_s: float) -> bool:
        """As `PoolClient.give_room`."""
        on_nodes = set(nodes)
        for _ in range(int(GIVE_ROOM_S / POLL_S)):
            there = [one for one in self._members.values() if not on_nodes.isdisjoint(one.placed.values())]
            idle = [one for one in there if one.is_ready and not one.busy and one.held_until <= self._clock()]
            if idle:
                member = min(idle, key=lambda one: one.used_at)
                self._begin_unload(member, list(member.placed))
                assert member.task is not None
                done, _ = await asyncio.wait({member.task}, timeout=wait_s)
                return bool(done)
            if not there:
                break
            await asyncio.sleep(POLL_S)
        return False

    def models(self) -> list[PooledModel]:
        """Returns every model of the pool, in the order of the registry."""
        return [self._shown(member) for member in sorted(self._members.values(), key=lambda one: one.entry.order)]

    def _shown(self, member: _Member) -> PooledModel:
        restarts = member.state == LOADED and member.away_since is not None
        state = LOADING if restarts else member.state
        if state == UNLOADED and member.wanted_since is not None:
            state = WAITING
        used = None if member.used_at == -math.inf else max(0.0, self._clock() - member.used_at)
        error = "" if member.error is None else member.error.message
        return PooledModel(member.model.name, state, member.what, member.fraction, used, error, restarts)

    async def run(self) -> None:
        """Follows the replicas for ever."""
        while True:
            self._wake.clear()
            try:
                await self.tick()
            except Exception:
                # The control store may be restarting.
                logger.warning("the pool cannot look at the cluster now", exc_info=True)
            waits = any(member.wanted_since is not None for member in self._members.values())
            try:
                async with asyncio.timeout(WAITED_POLL_S if waits else POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def tick(self) -> None:
        """Looks at the replicas once, and begins what is to be done."""
        for member in self._members.values():
            member.has_changed = member.task is not None
        view = await self._work.look()
        await self._meet(view)
        self._looked.set()
        for member in self._members.values():
            if member.state == LOADED and not member.has_changed:
                self._check(member, view)
        await self._plan(view)

    async def _meet(self, view: View) -> None:
        """Learns which models there are, what their replicas do, and what they claim."""
        now = self._clock()
        for stats in view.stats.values():
            self._claimed[stats.replica] = stats.claimed_bytes
            if stats.answers:
                self._without_kv -= {stats.model}
                self._without_kv |= set() if stats.has_kv else {stats.model}
            if stats.claimable_bytes and stats.node:
                self._claimable[stats.node] = stats.claimable_bytes
        found = {entry.model.name: entry for entry in view.entries if entry.comes_and_goes}
        for name in self._members.keys() - found.keys():
            self._drop(self._members.pop(name))
        for name, entry in found.items():
            member = self._members.get(name)
            if member is not None and member.entry != entry:
                # Another model under the same name.
                self._drop(member)
                member = None
            if member is None:
                member = self._members[name] = _Member(entry)
                if not entry.replicas and (left := await self._work.leftovers(entry.model)):
                    self._begin_unload(member, left)
            member.entry = entry
            if member.task is not None or member.has_changed:
                # The registry was read before it changed.
                continue
            if entry.replicas and member.state != LOADED:
                # A pool before this one has loaded it.
                self._settle(member, LOADED)
                member.used_at = max(member.used_at, now)
            elif not entry.replicas and member.state == LOADED:
                member.state, member.away_since = UNLOADED, None
            member.placed = dict(entry.replicas)

    def _drop(self, member: _Member) -> None:
        """Forgets a model that is not served any more. Whoever removed it ends its replicas."""
        if member.task is not None and member.state == LOADING:
            member.task.cancel()
        member.error = ModelNotFound(f"the model {member.model.name!r} has just been unloaded", param="model")
        member.settled.set()

    def _check(self, member: _Member, view: View) -> None:
        """Notes whether a loaded model is used, and unloads it if it has been idle for long, or is lost."""
        now, idle_s = self._clock(), member.model.idle_s
        stats = [view.stats[replica] for replica in member.placed if replica in view.stats]
        if not stats:
            self._check_away(member, view)
            return
        if member.away_since is not None:
            member.away_since, member.what, member.fraction = None, "", None
            self._settle(member, LOADED)
        # Besides its weights it needs temporary memory, which its files do not say.
        member.need = max(one.claimed_bytes for one in stats) or member.need
        requests = sum(one.requests_total for one in stats)
        member.busy = any(one.running or one.waiting for one in stats)
        if member.busy or (requests != member.requests and member.requests >= 0):
            member.used_at = now
        member.requests = requests
        idle = not member.busy and now >= member.held_until and idle_s is not None and now - member.used_at >= idle_s
        if idle and member.wanted_since is None:
            self._begin_unload(member, list(member.placed))

    def _check_away(self, member: _Member, view: View) -> None:
        """Ray restarts replicas whose process ended. Those that cannot load, or whose nodes are lost, are given up."""
        now = self._clock()
        if member.away_since is None:
            member.away_since = now
        doing = [view.starting[replica] for replica in member.placed if replica in view.starting]
        errors = [one for one in doing if isinstance(one, SatchelError)]
        steps = [one for one in doing if not isinstance(one, SatchelError)]
        member.what, member.fraction = steps[0] if steps else ("its replica is away", None)
        present = any(node in view.nodes for node in member.placed.values())
        if errors and len(errors) == len(member.placed):
            if isinstance(errors[0], NoRoom):
                # It is loaded again, with room.
                member.beside_max = self._beside(member, member.placed.values()) or None
            else:
                self._fail(member, errors[0])
            self._begin_unload(member, list(member.placed))
        elif not present and now - member.away_since >= LOST_S:
            self._begin_unload(member, list(member.placed))

    async def _plan(self, view: View) -> None:
        """Begins to load what is wanted and has room, in the order in which it was first asked for; and to unload what
        is in the way of the first that has none."""
        wanted = [one for one in self._members.values() if one.wanted_since is not None and one.task is None]
        for member in sorted(wanted, key=lambda one: one.wanted_since or 0.0):
            if member.state == LOADED:
                continue
            if not member.waiting and self._clock() - member.asked_at >= FORGOTTEN_S:
                self._settle(member, UNLOADED)
                continue
            if not member.need:
                member.need = await self._work.need(member.model)
            if not self._place(member, view):
                break

    def _place(self, member: _Member, view: View) -> bool:
        """Begins what a wanted model needs next. Returns whether others may be loaded meanwhile."""
        budgets = self._budgets(member, view)
        if not budgets:
            where = ", ".join(member.model.nodes) or "any node"
            self._fail(member, ModelLoadError(f"{member.model.name!r} may run on {where}, and none is present"))
            return True
        residents = self._residents(member, view)
        name = member.model.name
        since, has_kv = member.wanted_since or 0.0, name not in self._without_kv
        asked = Wanted(name, member.need, member.model.replicas, since, member.beside_max, has_kv)
        step = plan(asked, budgets, residents, self._clock())
        member.state = WAITING
        if isinstance(step, Place):
            self._begin_load(member, step.nodes)
            return True
        if isinstance(step, Never):
            self._fail(member, NoRoom(f"{member.model.name!r}: {step.why}"))
            return True
        if isinstance(step, Unload):
            for name in step.names:
                self._begin_unload(self._members[name], list(self._members[name].placed))
            member.what = f"unloading {', '.join(step.names)}"
        else:
            assert isinstance(step, Wait)
            member.what = f"room is taken by {', '.join(step.names)}"
        return False

    def _budgets(self, member: _Member, view: View) -> dict[str, int | None]:
        """Returns the memory of the nodes on which a model may run, those with most of it left first."""
        allowed = [name for name in view.nodes if not member.model.nodes or name in member.model.nodes]
        found = {name: self._budget(name, view.nodes[name]) for name in allowed}
        taken = {name: sum(sum(one.claims.get(name, ())) for one in self._residents(member, view)) for name in allowed}
        return dict(sorted(found.items(), key=lambda item: taken[item[0]] - (item[1] or 0)))

    def _budget(self, node: str, configured: int | None) -> int | None:
        return configured if configured is not None else self._claimable.get(node)

    def _residents(self, but: _Member, view: View) -> list[Resident]:
        """Returns the other models that are loaded, or on their way."""
        residents = []
        for entry in view.entries:
            if not entry.comes_and_goes and entry.replicas:
                name = entry.model.name
                claims, has_kv = self._claims(entry.replicas, 0), name not in self._without_kv
                residents.append(Resident(name, claims, pinned=True, kv=has_kv))
        for member in self._members.values():
            if member is but or not member.placed:
                continue
            residents.append(
                Resident(
                    member.model.name,
                    self._claims(member.placed, member.need),
                    used_at=member.used_at,
                    held_until=member.held_until,
                    busy=member.busy,
                    coming=member.state == LOADING,
                    leaving=member.state == UNLOADING,
                    kv=member.model.name not in self._without_kv,
                )
            )
        return residents

    def _claims(self, placed: Mapping[str, str], need: int) -> dict[str, list[int]]:
        claims: dict[str, list[int]] = {}
        for replica, node in placed.items():
            claims.setdefault(node, []).append(self._claimed.get(replica) or need)
        return claims

    def _beside(self, member: _Member, nodes: Iterable[str]) -> int:
        """Returns how many models could be unloaded on the node that has most of them."""
        others = [one for one in self._members.values() if one is not member]
        return max((sum(node in one.placed.values() for one in others) for node in nodes), default=0)

    def _begin_load(self, member: _Member, nodes: Sequence[str]) -> None:
        member.state, member.what, member.fraction = LOADING, "starting", None
        member.placed = {f"{member.model.slug}-{number}": node for number, node in enumerate(nodes)}
        member.task = asyncio.create_task(self._load(member))

    async def _load(self, member: _Member) -> None:
        def report(what: str, fraction: float | None) -> None:
            member.what, member.fraction = what, fraction

        nodes = set(member.placed.values())
        try:
            await self._try_load(member, report)
        except LoadLost:
            # It is placed anew, on the nodes that are left.
            member.state, member.placed = WAITING, {}
        except NoRoom as error:
            member.placed = {}
            member.beside_max = self._beside(member, nodes) or None
            if member.beside_max:
                member.state = WAITING
            else:
                self._fail(member, error)
        except SatchelError as error:
            member.placed = {}
            self._fail(member, error)
        except Exception as error:
            logger.exception("loading %s failed", member.model.name)
            member.placed = {}
            self._fail(member, ModelLoadError(f"{member.model.name} cannot be loaded: {error}"))
        else:
            now = self._clock()
            member.used_at, member.held_until = now, now + HOLD_S
            member.beside_max, member.requests, member.busy = None, -1, False
            self._settle(member, LOADED)
        finally:
            member.task, member.has_changed = None, True
            self._wake.set()

    async def _try_load(self, member: _Member, report: Callable[[str, float | None], None]) -> None:
        """Raises as `Work.load`; `LoadLost` only if a node was lost."""
        for attempt in range(LOADS_MAX):
            try:
                await self._work.load(member.model, member.placed, report)
                return
            except LoadLost as error:
                logger.warning("the load of %s was lost: %s", member.model.name, error)
                view = await self._work.look()
                if not set(member.placed.values()) <= view.nodes.keys():
                    raise
                if attempt == LOADS_MAX - 1:
                    raise ModelLoadError(str(error)) from error

    def _begin_unload(self, member: _Member, replicas: Sequence[str]) -> None:
        if member.task is None:
            member.state, member.what, member.fraction = UNLOADING, "finishing what runs", None
            member.away_since = None
            member.task = asyncio.create_task(self._unload(member, replicas))

    async def _unload(self, member: _Member, replicas: Sequence[str]) -> None:
        try:
            await self._work.unload(replicas)
        except Exception:
            # What is left of it is found again.
            logger.warning("unloading %s failed", member.model.name, exc_info=True)
        finally:
            for replica in replicas:
                self._claimed.pop(replica, None)
            member.state, member.what, member.placed, member.busy = UNLOADED, "", {}, False
            member.task, member.has_changed = None, True
            self._wake.set()

    def _settle(self, member: _Member, state: str) -> None:
        """Tells those who wait for the model that they need not."""
        member.state, member.what, member.fraction = state, "", None
        member.error, member.wanted_since, member.away_since = None, None, None
        member.settled.set()

    def _fail(self, member: _Member, error: SatchelError) -> None:
        """Tells those who wait for the model why it is not loaded."""
        member.state, member.what, member.fraction = UNLOADED, "", None
        member.error, member.failed_at, member.wanted_since = error, self._clock(), None
        member.settled.set()
