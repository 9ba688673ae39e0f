"""Which replica answers a request, and why. Pure: `now` is an argument.

The cost of a replica is a sum of terms, all in seconds. The first five are the time to the first token there, the
others what the request does to everybody's time:

    queue     what was routed there before and is still to be prefilled, the places that are taken, and a wait where
              memory has no room for the prompt
    pull      the time until KV that another node's disk has is on this one's
    restore   the time to read from its node's disk what memory lacks
    prefill   the part of the prompt that comes neither way, at its own measured rate. Which of these three is taken
              how far is the best mix for each replica (`costs.py`). For an agent that nobody knows, all three without
              what they are over the least of them, up to `FIRST_PREFILL_S`: it pays once and comes back many times,
              and all agents may begin with one system prompt
    encode    the pictures after what is had that way whose features are neither in memory nor on the node's disk
    decode    the rows that decode beside the request: all answers come slower
    away      for every replica but the agent's home: `sticky_penalty_s_max`, and what the home need not compute but
              this one must, for that is work done twice: up to its queue, since where nobody waits nobody loses by
              it. What can be pulled is not computed twice

Costs are compared, so a prefix that every candidate holds decides nothing, and one that a single replica holds draws
requests only until its queue outweighs the prefill elsewhere. A request counts from the moment it is routed, and so do
the blocks and features that it will leave and the pull that it causes, so a burst spreads and still computes a prefix
once in each place; of replicas whose costs are even, the one that was given work least recently is taken.

An agent's home is the replica of its last turn; where that is gone, or its memory has moved since, the replicas of the
node that its stores call home. An agent that nobody knows and that asks about a picture that somebody knows has none:
it goes where that costs least. Nodes that are drained keep the agents they have and get no other requests.

Replicas of one model may have several ids, where their nodes compute differently. KV is of use to those of its own id
alone. So a request says for every id what its blocks are called there, and only what is held under a replica's own
names counts for it: an agent goes back to where its KV is of use, or is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ...cluster.timing import USUAL, Timing
from ..protocol.block_ids import BLOCK_TOKENS
from ..protocol.messages import Chain, Decision, RouteRequest
from .columns import Columns
from .costs import Floats, Integers, Sources, Ways, best_ways, encoding_s, joined
from .directory import Seat
from .load import ROW_WAIT_S, Load
from .members import Members
from .places import Whereabouts

FIRST_PREFILL_S = 4.0
"""How much more of a first prefill decides nothing about where an agent that nobody knows will live."""

EVEN_S = 0.02
"""Costs this close are even; the replica that was given work least recently gets it."""

SOURCES_MAX = 16
"""Of how many nodes that could be pulled from the links are compared: those that hold most."""

CANDIDATES_SHOWN = 64
"""Of how many replicas a decision tells the costs: the cheapest."""

RULES = {
    "satchel": ("queue", "pull", "restore", "prefill", "encode", "decode", "away"),
    "prefix": ("queue", "restore", "prefill", "encode", "decode"),
    "least_loaded": ("queue", "decode"),
    "round_robin": (),
}
"""The terms that each rule adds up; all but the first are for comparison: they know no agents, and pull nothing."""


@dataclass(slots=True)
class _Group:
    """The candidates of one model id by their positions, and what the prompt's blocks and pictures are called there."""

    positions: Integers | slice
    blocks: Sequence[bytes]
    pictures: Sequence[tuple[bytes, int, int, bool]]


@dataclass(slots=True)
class _Case:
    """A request among its candidates, the replicas at `rows` of `columns`; arrays run along the candidates."""

    request: RouteRequest
    columns: Columns
    rows: Integers
    home: list[int]
    """The positions of those that are the agent's home."""
    seat: Seat | None
    """The agent's last turn, where that is still its home."""
    known: bool
    """Whether anybody knows the agent."""
    groups: list[_Group]
    """Each candidate is in one."""

    def group_of(self, position: int) -> _Group:
        groups = self.groups
        return next(group for group in groups if isinstance(group.positions, slice) or position in group.positions)


class Policy:
    """The choice, by one of the rules, among the members that are known.

    Args:
        timeout_s: a replica or store that has not reported for this long is avoided.
        sticky_penalty_s_max: how much sooner another replica must answer to take an agent from its home.
        rule: one of `RULES`.
        agents_max: how many agents' last turns are remembered.
        timing: as for `Members`.

    Raises:
        ValueError: no such rule.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        sticky_penalty_s_max: float,
        rule: str = "satchel",
        agents_max: int = 100_000,
        timing: Timing = USUAL,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"no routing rule {rule!r}; there are {', '.join(RULES)}")
        self.members = Members(timeout_s=timeout_s, agents_max=agents_max, timing=timing)
        self._sticky_s = sticky_penalty_s_max
        self._rule = rule

    def route(self, request: RouteRequest, now: float) -> Decision | None:
        """The replica for a request, whose load is reserved there; None when no replica of its model lives.

        Call `members.settle` when the answer is on its way.
        """
        self.members.settle()
        case = self._case(request, now)
        if case is None:
            return None
        beside = self._beside(case)
        ways, hot = self._ways(case, beside, now)
        new = bool(request.agent) and not case.known and self._rule == "satchel"
        costs = self._costs(case, ways, new, now)
        total = costs["total"]
        chosen = _least_recent(case, total) if beside is None else beside
        if beside is not None:
            why = "beside"
        elif self._rule != "satchel":
            why = self._rule
        else:
            why = _why(chosen, total, ways.held, case)
        state = case.columns.states[case.rows[chosen]]
        held, pulled, source = int(ways.held[chosen]), int(ways.pulled[chosen]), int(ways.source[chosen])
        load = Load(now, max(0, request.prompt_tokens - held))
        group = case.group_of(chosen)
        encoded = (entry for entry, end, _, _ in group.pictures if end > held)
        coming = [*group.blocks[int(hot[chosen]) // BLOCK_TOKENS :], *encoded]
        move_to = self.members.assign(state, request, load, coming)
        pull_from = ""
        if pulled:
            pull_from = self.members.nodes.named(source)
            self.members.nodes.reserve(source, float(ways.pull_s[chosen]), now)
        rows = case.rows
        if len(total) > CANDIDATES_SHOWN:
            shown = _shown(total, chosen)
            rows, costs = rows[shown], {term: seconds[shown] for term, seconds in costs.items()}
        names = [case.columns.names[row] for row in rows.tolist()]
        terms = {term: seconds.tolist() for term, seconds in costs.items()}
        # The other rules know no agents.
        move_to = move_to if self._rule == "satchel" else ""
        ids = state.model_id, list(case.columns.model_ids)
        return Decision(state.name, why, held, names, terms, state.node, pull_from, pulled, move_to, *ids)

    # Who may answer.

    def _case(self, request: RouteRequest, now: float) -> _Case | None:
        columns = self.members.columns_of(request.model)
        seen = now - columns.seen <= self.members.timeout_s
        rows = np.flatnonzero(seen)
        if request.exclude:
            excluded = [columns.rows[name] for name in request.exclude if name in columns.rows]
            seen[excluded] = False
            # A replica that just failed this request is better than none.
            rows = rows[seen[rows]] if seen.any() else rows
        if not len(rows):
            return None
        seat = place = None
        if request.agent:
            seat, place = (
                self.members.directory.seat(request.agent, request.model),
                self.members.places.where(request.agent),
            )
            seat = self._still(seat, place)
        near = request.near
        if seat is None and place is None and self._has_any(columns, rows, request, now):
            near = ""
        at_home = self._at_home(columns, rows, seat, place, near)
        if self.members.nodes.draining.any():
            rows = self._staying(columns, rows, at_home)
        home = [position for row in at_home if (position := _position(rows, row)) is not None]
        known = seat is not None or place is not None
        return _Case(request, columns, rows, home, seat, known, _grouped(request, columns, rows))

    def _staying(self, columns: Columns, rows: Integers, at_home: list[int]) -> Integers:
        """Those of `rows` that are not on a node that is drained, but for the agent's home; all where none is left."""
        nodes = columns.node[rows]
        staying = ~self.members.nodes.draining[nodes] | (nodes < 0)
        staying[np.isin(rows, at_home)] = True
        return rows[staying] if staying.any() else rows

    def _still(self, seat: Seat | None, place: Whereabouts | None) -> Seat | None:
        """The agent's last turn, unless its memory has moved to another node since."""
        if seat is None or place is None or seat.epoch >= place.epoch:
            return seat
        return seat if self.members.node_of(seat.replica) == place.node else None

    def _at_home(
        self, columns: Columns, rows: Integers, seat: Seat | None, place: Whereabouts | None, near: str
    ) -> list[int]:
        """Those of `rows` that are the agent's home: where its last turn was, or else on its home node, or on the node
        that is to be its home, unless that is where all of them are."""
        if seat is not None and _position(rows, columns.rows.get(seat.replica, -1)) is not None:
            return [columns.rows[seat.replica]]
        index = self.members.nodes.index(near if place is None else place.node)
        found = rows[columns.node[rows] == index].tolist() if index >= 0 else []
        return [] if place is None and len(found) == len(rows) else found

    def _beside(self, case: _Case) -> int | None:
        name = case.request.beside
        row = case.columns.rows.get(name, -1)
        if row < 0 or name in case.request.exclude:
            return None
        return _position(case.rows, row)

    # At what cost.

    def _ways(self, case: _Case, beside: int | None, now: float) -> tuple[Ways, Integers]:
        """How each candidate comes by the prompt, and what is in each one's memory."""
        request, columns, rows = case.request, case.columns, case.rows
        usable = max(0, request.prompt_tokens - 1)
        # The last token of a prompt is always computed.
        blocks_max = usable // BLOCK_TOKENS
        runs = [
            self.members.directory.runs(group.blocks[:blocks_max]) * np.int64(BLOCK_TOKENS) for group in case.groups
        ]
        hot = np.zeros(len(rows), np.int64)
        for group, found in zip(case.groups, runs, strict=True):
            hot[group.positions] = found[columns.memory[rows[group.positions]]]
        seat = case.seat
        if seat is not None and case.home and columns.names[rows[case.home[0]]] == seat.replica:
            # The turn's open tail is in no report: it is believed to be there where the turn's blocks are.
            claimed = min(seat.tokens, usable)
            if hot[case.home[0]] >= claimed - claimed % BLOCK_TOKENS:
                hot[case.home[0]] = max(hot[case.home[0]], claimed)
        if beside is not None:
            # The two are computed together, once.
            hot[beside] = usable
        parts = [
            (group.positions, self._ways_of(case, rows[group.positions], hot[group.positions], found, now))
            for group, found in zip(case.groups, runs, strict=True)
        ]
        return joined(parts, len(rows)), hot

    def _ways_of(self, case: _Case, rows: Integers, hot: Integers, runs: Integers, now: float) -> Ways:
        """How each of `rows`, which have one model id, comes by the prompt, of which holders have `runs`; sources are
        indices of nodes."""
        columns = case.columns
        disk, sources, indices = None, None, rows[:0]
        if self.members.nodes.states and runs.any():
            disks = self._on_disks(runs, now)
            nodes = columns.node[rows]
            disk = disks[nodes]
            if "pull" in RULES[self._rule]:
                indices, sources = self._sources(disks, np.maximum(hot, disk), nodes, now)
        ways = best_ways(
            case.request.prompt_tokens,
            hot,
            disk,
            columns.token_s[rows],
            columns.restore_token_s[rows],
            columns.kv_bytes[rows],
            sources,
        )
        return ways if sources is None else replace(ways, source=np.append(indices, -1)[ways.source])

    def _sources(self, disks: Integers, near: Integers, nodes: Integers, now: float) -> tuple[Integers, Sources | None]:
        """The nodes from which somebody could pull more than is near, those that hold most first."""
        indices = np.flatnonzero(disks > near.min())
        if not len(indices):
            return indices, None
        wait_s = np.maximum(0.0, self.members.nodes.busy_until[indices] - now)
        if len(indices) > SOURCES_MAX:
            best = np.lexsort((wait_s, -disks[indices]))[:SOURCES_MAX]
            indices, wait_s = indices[best], wait_s[best]
        rates = self.members.nodes.rates[nodes[:, None], indices]
        rates[(nodes < 0) | ~self.members.nodes.writes[nodes]] = 0.0
        return indices, Sources(disks[indices], wait_s, rates)

    def _encode_s(self, case: _Case, held: Integers, now: float) -> Floats:
        """Seconds to come by the features of the request's pictures, where `held` tokens need not be computed."""
        columns = case.columns
        encode_s = np.zeros(len(case.rows))
        for group in case.groups:
            rows, had = case.rows[group.positions], held[group.positions]
            for entry, end, tokens, pixels in group.pictures:
                memory, disk = self._having(columns, rows, entry, now)
                token_s = columns.encode_token_s[rows]
                encode_s[group.positions] += encoding_s(tokens, end, pixels, had, memory, disk, token_s)
        return encode_s

    def _having(self, columns: Columns, rows: Integers, entry: bytes, now: float) -> tuple[Integers, Integers]:
        """Not 0 for each of `rows` that has these features in its memory, and whose node has them on its disk."""
        found = self.members.directory.runs([entry])
        return found[columns.memory[rows]], self._on_disks(found, now)[columns.node[rows]]

    def _has_any(self, columns: Columns, rows: Integers, request: RouteRequest, now: float) -> bool:
        """Whether one of `rows` has features of one of the request's pictures."""
        called = [request.pictures, *(chain.pictures for chain in request.others)]
        having = (self._having(columns, rows, entry, now) for pictures in called for entry, _, _, _ in pictures)
        return any(memory.any() or disk.any() for memory, disk in having)

    def _on_disks(self, runs: Integers, now: float) -> Integers:
        """What nodes whose stores report have of `runs` on their disks, and a zero at the end, where -1 points."""
        living = now - self.members.nodes.seen <= self.members.timeout_s
        return np.append(np.where(living, runs[self.members.nodes.disks], 0), 0)

    def _costs(self, case: _Case, ways: Ways, new: bool, now: float) -> dict[str, Floats]:
        """Seconds by term; `new` is an agent that nobody knows."""
        columns, rows = case.columns, case.rows
        full = case.request.prompt_tokens * columns.kv_bytes[rows] > columns.free_bytes[rows]
        weight = _first_weight(ways) if new else 1.0
        prefill_s = ways.prefill_s * weight
        away_s = np.zeros(len(rows))
        if case.home:
            least = min(float(prefill_s[position]) for position in case.home)
            away_s = self._sticky_s + np.minimum(np.maximum(0.0, prefill_s - least), columns.queue_s[rows])
            away_s[case.home] = 0.0
        costs = {
            "queue": columns.queue_s[rows] + full * ROW_WAIT_S,
            "pull": ways.pull_s * weight,
            "restore": ways.restore_s * weight,
            "prefill": prefill_s,
            "encode": self._encode_s(case, ways.held, now),
            "decode": columns.decode_s[rows],
            "away": away_s,
        }
        total = np.zeros(len(rows))
        for term in RULES[self._rule]:
            np.add(total, costs[term], out=total)
        costs["total"] = total
        return costs


def _position(rows: Integers, row: int) -> int | None:
    """Where `row` is in the ascending `rows`."""
    position = int(rows.searchsorted(row))
    return position if position < len(rows) and rows[position] == row else None


def _grouped(request: RouteRequest, columns: Columns, rows: Integers) -> list[_Group]:
    """The candidates by their model id."""
    if columns.model_ids == [request.model_id]:
        return [_Group(slice(None), request.block_ids, request.pictures)]
    chains = {chain.model_id: chain for chain in request.others}
    chains[request.model_id] = Chain(request.model_id, request.block_ids, request.pictures)
    groups = []
    for index, model_id in enumerate(columns.model_ids):
        positions = np.flatnonzero(columns.model[rows] == index)
        # Where nobody said what they are called, no blocks are known, and pictures are as large.
        chain = chains.get(model_id) or Chain(model_id, [], request.pictures)
        if len(positions):
            groups.append(_Group(positions, chain.block_ids, chain.pictures))
    return groups


def _first_weight(ways: Ways) -> Floats:
    """The part of coming by a new agent's first prompt that counts, for each candidate."""
    kv_s = ways.pull_s + ways.restore_s + ways.prefill_s
    return 1.0 - np.minimum(FIRST_PREFILL_S, kv_s - kv_s.min()) / np.maximum(kv_s, EVEN_S)


def _least_recent(case: _Case, total: Floats) -> int:
    """Of the cheapest, and those even to it, the one that was given work least recently."""
    turns = np.where(total <= total.min() + EVEN_S, case.columns.last_assigned[case.rows], inf)
    return int(turns.argmin())


def _shown(total: Floats, chosen: int) -> Integers:
    """The positions whose costs are told, in their order."""
    cheapest = np.argpartition(total, CANDIDATES_SHOWN - 1)[:CANDIDATES_SHOWN]
    if chosen not in cheapest:
        # The last is the dearest of them.
        cheapest[-1] = chosen
    return np.sort(cheapest)


def _why(chosen: int, total: Floats, held: Integers, case: _Case) -> str:
    if chosen in case.home:
        return "agent_home"
    if len(total) == 1:
        return "only_replica"
    if case.known:
        return "home_busy" if case.home else "home_lost"
    if total.max() - total.min() <= EVEN_S:
        return "least_recent"
    return "prefix" if held[chosen] > held.min() else "least_loaded"
