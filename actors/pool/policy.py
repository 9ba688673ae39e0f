"""Where a model that comes and goes is loaded, and which others are unloaded to make room for it. Pure.

The least recently used models go first, and only those that are idle. If a model has waited for `PATIENCE_S`, busy ones
go too: they accept no more requests, finish what they have, and are loaded again for those that came meanwhile. So no
model waits for ever because another one is always busy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..replica.memory.budget import MemoryClaim, has_room

PATIENCE_S = 10.0
"""A model waits this long for others to become idle."""

HOLD_S = 5.0
"""A model that has just been loaded stays at least this long: the requests that waited for it are on their way."""


@dataclass(frozen=True)
class Wanted:
    """A model to load.

    Attributes:
        need: bytes of its weights, as far as known.
        count: how many replicas; None for one on each node that has room.
        since: when it was first asked for.
        beside_max: a replica found no room on a node, although the figures said so: fewer unpinned models than this
            must be there. None if none did.
        kv: whether it has KV, as far as known.
    """

    name: str
    need: int
    count: int | None = None
    since: float = 0.0
    beside_max: int | None = None
    kv: bool = True


@dataclass(frozen=True)
class Resident:
    """A model that is loaded, or is being loaded or unloaded.

    Attributes:
        claims: what each of its replicas claims of a node's memory, in bytes, by node.
        used_at: when a request used it last.
        held_until: it stays until then.
        pinned: whether it is never unloaded.
        busy: whether it has requests.
        coming, leaving: whether it is being loaded, or unloaded.
        kv: whether it has KV, as far as known.
    """

    name: str
    claims: Mapping[str, Sequence[int]]
    used_at: float = 0.0
    held_until: float = 0.0
    pinned: bool = False
    busy: bool = False
    coming: bool = False
    leaving: bool = False
    kv: bool = True


@dataclass(frozen=True)
class Place:
    """The model is loaded on these nodes, a replica for each mention."""

    nodes: Sequence[str]


@dataclass(frozen=True)
class Unload:
    """These models are unloaded first."""

    names: Sequence[str]


@dataclass(frozen=True)
class Wait:
    """Nothing can be done now: `names` are in the way."""

    names: Sequence[str]


@dataclass(frozen=True)
class Never:
    """The model does not fit, whatever is unloaded."""

    why: str


@dataclass(frozen=True)
class _Room:
    """What a choice of models that go would leave."""

    wanted: Wanted
    budgets: Mapping[str, int | None]
    residents: Sequence[Resident]
    gone: Collection[str] = ()

    def nodes(self) -> list[str]:
        """Returns where the model's replicas have room, as many as wanted; [] if they have none."""
        placed: list[str] = []
        count = len(self.budgets) if self.wanted.count is None else self.wanted.count
        while len(placed) < count:
            free = [name for name in self.budgets if self._fits(name, placed)]
            if self.wanted.count is None:
                free = [name for name in free if name not in placed]
            if not free:
                break
            placed.append(min(free, key=placed.count))
        return placed if self.wanted.count is None or len(placed) == count else []

    def _fits(self, node: str, placed: Sequence[str]) -> bool:
        budget = self.budgets[node]
        there = [one for one in self.residents if node in one.claims and one.name not in self.gone]
        most = self.wanted.beside_max
        if most is not None and sum(not one.pinned for one in there) >= most:
            return False
        if budget is None:
            return True
        claims = [MemoryClaim(claim, 0, one.kv) for one in there for claim in one.claims[node]]
        need = MemoryClaim(self.wanted.need, 0, self.wanted.kv)
        return has_room(budget, [*claims, *[need] * placed.count(node)], need)


def plan(
    wanted: Wanted, budgets: Mapping[str, int | None], residents: Sequence[Resident], now: float
) -> Place | Unload | Wait | Never:
    """Returns what to do for a model.

    Args:
        budgets: the memory that replicas may use, by node that the model may run on and that is present, the preferred
            first; None where it is not known, and the replica finds out.
        residents: all other models, pinned or not.
    """
    room = _Room(wanted, budgets, residents)
    if nodes := room.nodes():
        return Place(nodes)
    others = [one for one in residents if not one.pinned and any(node in budgets for node in one.claims)]

    def fits_without(gone: Collection[str]) -> bool:
        return bool(_Room(wanted, budgets, residents, gone).nodes())

    if not fits_without({one.name for one in others}):
        return Never(_why_never(wanted, budgets, residents))
    leaving = [one.name for one in others if one.leaving]
    if fits_without(leaving):
        return Wait(leaving)
    stay = [one for one in others if one.coming or one.held_until > now]
    may_go = sorted((one for one in others if one not in stay and not one.leaving), key=_idle_and_least_used)
    if now - wanted.since < PATIENCE_S:
        may_go = [one for one in may_go if not one.busy]
    gone: list[str] = []
    for one in may_go:
        gone.append(one.name)
        if fits_without([*leaving, *gone]):
            break
    else:
        return Wait([one.name for one in others if one.name not in gone])
    # Those that turned out not to be in the way stay, the most recently used first.
    for name in reversed(gone[:-1]):
        fewer = [other for other in gone if other != name]
        if fits_without([*leaving, *fewer]):
            gone = fewer
    return Unload(gone)


def _idle_and_least_used(one: Resident) -> tuple[bool, float]:
    return one.busy, one.used_at


def _why_never(wanted: Wanted, budgets: Mapping[str, int | None], residents: Sequence[Resident]) -> str:
    def of(node: str) -> str:
        pinned = sum(claim for one in residents if one.pinned for claim in one.claims.get(node, ()))
        budget = budgets[node]
        told = "unknown" if budget is None else _mib(budget)
        return f"{node} has {told}" + (f", of which models that stay loaded take {_mib(pinned)}" if pinned else "")

    replicas = f"{wanted.count} replicas of it" if (wanted.count or 1) > 1 else "it"
    where = "; ".join(map(of, budgets)) or "none of its nodes is present"
    return f"no room for {replicas}: its weights take {_mib(wanted.need)} and it needs memory for KV ({where})"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
