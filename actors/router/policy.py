"""Chooses the replica for a request, and says why. Pure: `now` is an argument.

The cost of a replica is a sum of terms in seconds. The first five are the time to the first token there, the others
the time that the request costs everybody:

    queue     tokens routed there before that are still to be prefilled, sequences beyond its places, and a wait if
              memory has no room for the prompt
    pull      the time until KV from another node's disk is on this one's
    restore   the time to read KV that memory lacks from the node's disk
    prefill   the time to compute the rest of the prompt, at the measured rate. Each replica takes the best mix of these
              three (`costs.py`). For a new agent their excess over the cheapest replica is not counted, up to
              `FIRST_PREFILL_S`: it is paid once, the agent comes back many times, and all agents may begin with one
              system prompt
    encode    the pictures in the computed part whose image embeddings are neither in memory nor on the node's disk
    decode    the sequences that decode beside the request: all answers get slower
    away      for every replica but the agent's home: `sticky_penalty_s_max`, and the prefill that the home need not do,
              because that is work done twice. The latter counts up to the replica's queue: if no request waits, none
              is delayed. KV that can be pulled is not computed twice

Costs are compared, so a prefix that every candidate holds decides nothing, and one that a single replica holds attracts
requests only until its queue costs more than the prefill elsewhere. A request counts as soon as it is routed, and so do
the blocks and image embeddings that it will leave and the pull that it causes. So a burst spreads, and still computes a
prefix once in each place. Among replicas of even cost the one that was given work least recently is taken.

An agent's home is the replica of its last turn. If that is gone, or the agent's memory has moved since, it is the
replicas on its primary node. A new agent that asks about a known picture has no home: it goes to the replica where that
picture costs least. Nodes that are drained keep their agents and get no other requests.

If energy is preferred, and all candidates know their joules a token, the one that takes the fewest is chosen among
those whose cost is not much above the lowest (`energy.py`). If one does not know them, the costs decide.

A long prompt may be prefilled on one node and the answer decoded on another, if that is clearly better
(`splitting.py`). It then counts on both replicas.

Replicas of one model may have several model ids if their nodes compute differently, and can use only KV of their own
id. So a request has the block ids of every model id, and only those under a replica's own id count for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ...cluster.config.timing import USUAL, Timing
from ..model_files.identity.model_identity import adapted_id
from ..protocol.block_ids import BLOCK_TOKENS
from ..protocol.router_messages import Chain, Decision, RouteRequest, prefill_sequence
from .columns import Columns
from .costs import Floats, Integers, Sources, Ways, best_ways, encoding_s, joined
from .directory import Seat
from .energy import least_energy, request_j
from .load import SEQUENCE_WAIT_S, Load
from .members import Members
from .places import Whereabouts
from .splitting import Candidates, Rules, Split, best_split

FIRST_PREFILL_S = 4.0
"""The extra cost of a new agent's first prefill that is not counted."""

EVEN_S = 0.02
"""Costs this close count as even; then the replica that was given work least recently is taken."""

SOURCES_MAX = 16
"""How many source nodes for pulls are compared: those that hold most."""

CANDIDATES_SHOWN = 64
"""How many replicas' costs a decision lists: the cheapest ones."""

RULES = {
    "satchel": ("queue", "pull", "restore", "prefill", "encode", "decode", "away"),
    "prefix": ("queue", "restore", "prefill", "encode", "decode"),
    "least_loaded": ("queue", "decode"),
    "round_robin": (),
}
"""The terms that each rule adds up. All but the first are for comparison: they ignore agents and do not pull."""


@dataclass(slots=True)
class _Group:
    """The candidates of one model id by their positions, and the ids of the prompt's blocks and pictures there."""

    positions: Integers | slice
    blocks: Sequence[bytes]
    pictures: Sequence[tuple[bytes, int, int, bool]]


@dataclass(slots=True)
class _Case:
    """A request and its candidates: the replicas at `rows` of `columns`. A *row* is a replica's index there, a
    *position* a candidate's index among these rows; arrays are `(candidates,)`."""

    request: RouteRequest
    columns: Columns
    rows: Integers
    home: list[int]
    """Positions of the candidates that are the agent's home."""
    seat: Seat | None
    """The agent's last turn, if its replica is still its home."""
    known: bool
    """Whether the agent has had a turn or any node claims it."""
    groups: list[_Group]
    """The candidates by model id; each is in one."""

    @property
    def model_ids(self) -> list[bytes]:
        """The model ids of all replicas of the model, with the request's adapter."""
        return [adapted_id(model_id, self.request.adapter) for model_id in self.columns.model_ids]

    def group_of(self, position: int) -> _Group:
        """Returns the group of a candidate."""
        groups = self.groups
        return next(group for group in groups if isinstance(group.positions, slice) or position in group.positions)


class Policy:
    """Chooses replicas among the known members by one of the rules. Used by the router actor.

    Args:
        timeout_s: a replica or store that has not reported for this long is avoided.
        sticky_penalty_s_max: how much sooner another replica must answer to take an agent from its home.
        rule: one of `RULES`.
        agents_max: how many agents' last turns are remembered.
        timing: as for `Members`.
        split: when requests are split; None for never.
        energy_delay_s_max: by how much the cost of the replica that takes the least energy may be above the lowest one;
            None if energy is not preferred.

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
        split: Rules | None = None,
        energy_delay_s_max: float | None = None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"no routing rule {rule!r}; there are {', '.join(RULES)}")
        self.members = Members(timeout_s=timeout_s, agents_max=agents_max, timing=timing)
        self._sticky_s = sticky_penalty_s_max
        self._rule = rule
        self._split = split
        self._energy_delay_s = energy_delay_s_max

    def route(self, request: RouteRequest, now: float) -> Decision | None:
        """Chooses the replica for a request and reserves its load there; None if no replica of its model is alive.

        Call `members.settle` after the answer is sent.
        """
        self.members.settle()
        case = self._case(request, now)
        if case is None:
            return None
        beside = self._beside(case)
        ways, hot = self._ways(case, beside, now)
        new = bool(request.agent) and not case.known and self._rule == "satchel"
        costs = self._costs(case, ways, new, now)
        total, joules = costs["total"], self._joules(case, ways)
        frugal = joules is not None and beside is None
        if joules is not None and frugal:
            last = case.columns.last_assigned[case.rows]
            chosen = least_energy(joules, total, last, self._energy_delay_s or 0.0)
        else:
            chosen = _least_recent(case, total) if beside is None else beside
        split = self._splits(case, ways, hot, costs, now) if beside is None and not frugal else None
        if split is not None:
            return self._decided_split(case, ways, hot, costs, split, now)
        if beside is not None:
            why = "beside"
        elif frugal:
            why = "least_energy"
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
        names, terms = _listed(case, costs, chosen)
        # The other rules ignore agents.
        move_to = move_to if self._rule == "satchel" else ""
        ids = adapted_id(state.model_id, request.adapter), case.model_ids
        energy_j = [] if joules is None else _listed(case, {**costs, "energy": joules}, chosen)[1]["energy"]
        return Decision(
            state.name, why, held, names, terms, state.node, pull_from, pulled, move_to, *ids, energy_j=energy_j
        )

    def _joules(self, case: _Case, ways: Ways) -> Floats | None:
        """Returns the joules of the request on each candidate, `(candidates,) float64`; None if energy is not
        preferred, or one of them does not know its own."""
        if self._energy_delay_s is None or self._rule != "satchel":
            return None
        columns, rows = case.columns, case.rows
        computed = (case.request.prompt_tokens - ways.held).astype(np.float64)
        return request_j(computed, columns.prefill_token_j[rows], columns.decode_token_j[rows])

    # Prefill on one node, decode on another.

    def _splits(self, case: _Case, ways: Ways, hot: Integers, costs: dict[str, Floats], now: float) -> Split | None:
        """Returns the pair of replicas that answers the request together, None if one answers it alone."""
        request, columns, rows = case.request, case.columns, case.rows
        rules, tokens = self._split, request.prompt_tokens
        if rules is None or self._rule != "satchel" or not request.splits or len(rows) < 2:
            return None
        if tokens - int(ways.held.max()) < rules.tokens_min:
            return None
        nodes, away_s = self.members.nodes, np.full(len(rows), self._sticky_s if case.home else 0.0)
        away_s[case.home] = 0.0
        node = columns.node[rows]
        stores = (now - nodes.seen <= self.members.timeout_s) & nodes.writes & ~nodes.draining
        candidates = Candidates(
            node=node,
            model=columns.model[rows],
            stores=stores[node] & columns.moves_kv[rows],
            held=ways.held,
            near=ways.held - ways.pulled,
            hot=hot,
            queue_s=costs["queue"],
            prefill_s=ways.pull_s + ways.restore_s + ways.prefill_s,
            own_s=ways.restore_s + ways.prefill_s + ways.pulled * (columns.token_s - columns.restore_token_s)[rows],
            other_s=costs["encode"] + costs["decode"] + costs["away"],
            decode_s=costs["decode"],
            step_s=columns.step_s[rows],
            away_s=away_s,
            restore_token_s=columns.restore_token_s[rows],
            kv_bytes=columns.kv_bytes[rows],
        )
        return best_split(tokens, candidates, nodes.rates, np.maximum(0.0, nodes.busy_until - now), rules)

    def _decided_split(
        self, case: _Case, ways: Ways, hot: Integers, costs: dict[str, Floats], split: Split, now: float
    ) -> Decision:
        """Reserves the load of a pair on both replicas, and returns the decision."""
        request, states, nodes = case.request, case.columns.states, self.members.nodes
        first, second = (states[case.rows[position]] for position in (split.prefill, split.decode))
        held = int(ways.held[split.prefill] - ways.pulled[split.prefill])
        blocks = case.group_of(split.decode).blocks
        coming = [blocks[int(hot[position]) // BLOCK_TOKENS :] for position in (split.prefill, split.decode)]
        move_to = self.members.assign(second, request, Load(now, 0), coming[1])
        rest = Load(now, max(0, request.prompt_tokens - held))
        self.members.assign_prefill(first, prefill_sequence(request.request_id), rest, coming[0])
        nodes.reserve(nodes.index(first.node), split.wire_s, now)
        names, terms = _listed(case, costs, split.decode)
        return Decision(
            second.name,
            f"prefill on {first.node}, decode on {second.node}",
            held,
            names,
            terms,
            second.node,
            pull_from=first.node,
            pull_tokens=max(0, request.prompt_tokens - 1),
            move_to=move_to,
            model_id=adapted_id(second.model_id, request.adapter),
            model_ids=case.model_ids,
            prefill_on=first.name,
            wait_s=split.wait_s,
            split_costs_s=split.costs_s,
        )

    # Candidates.

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
                self.members.directory.seat(request.agent, request.sits_by),
                self.members.places.where(request.agent),
            )
            seat = self._still(seat, place)
        near = request.near
        if seat is None and place is None and self._has_any(columns, rows, request, now):
            near = ""
        at_primary = self._at_primary(columns, rows, seat, place, near)
        if self.members.nodes.draining.any():
            rows = self._staying(columns, rows, at_primary)
        home = [position for row in at_primary if (position := _position(rows, row)) is not None]
        known = seat is not None or place is not None
        return _Case(request, columns, rows, home, seat, known, _grouped(request, columns, rows))

    def _staying(self, columns: Columns, rows: Integers, at_primary: list[int]) -> Integers:
        """Returns `rows` without replicas on drained nodes, except the agent's home; all if none would be left."""
        nodes = columns.node[rows]
        staying = ~self.members.nodes.draining[nodes] | (nodes < 0)
        staying[np.isin(rows, at_primary)] = True
        return rows[staying] if staying.any() else rows

    def _still(self, seat: Seat | None, place: Whereabouts | None) -> Seat | None:
        """Returns the agent's last turn, unless its memory has moved to another node since."""
        if seat is None or place is None or seat.epoch >= place.epoch:
            return seat
        return seat if self.members.node_of(seat.replica) == place.node else None

    def _at_primary(
        self, columns: Columns, rows: Integers, seat: Seat | None, place: Whereabouts | None, near: str
    ) -> list[int]:
        """Returns those of `rows` that are the agent's home: the replica of its last turn, or else those on its primary
        node. For a new agent those on `near`, its future primary node, unless these are all."""
        if seat is not None and _position(rows, columns.rows.get(seat.replica, -1)) is not None:
            return [columns.rows[seat.replica]]
        index = self.members.nodes.index(near if place is None else place.node)
        at_primary = rows[columns.node[rows] == index].tolist() if index >= 0 else []
        return [] if place is None and len(at_primary) == len(rows) else at_primary

    def _beside(self, case: _Case) -> int | None:
        name = case.request.beside
        row = case.columns.rows.get(name, -1)
        if row < 0 or name in case.request.exclude:
            return None
        return _position(case.rows, row)

    # Costs.

    def _ways(self, case: _Case, beside: int | None, now: float) -> tuple[Ways, Integers]:
        """Returns how each candidate gets the prompt's KV, and how many of its tokens each has in memory,
        `(candidates,) int64`."""
        request, columns, rows = case.request, case.columns, case.rows
        usable = max(0, request.prompt_tokens - 1)
        # The last token of a prompt is always computed.
        blocks_max = usable // BLOCK_TOKENS
        runs = [
            self.members.directory.runs(group.blocks[:blocks_max]) * np.int64(BLOCK_TOKENS) for group in case.groups
        ]
        hot = np.zeros(len(rows), np.int64)
        for group, group_runs in zip(case.groups, runs, strict=True):
            hot[group.positions] = group_runs[columns.memory[rows[group.positions]]]
        seat = case.seat
        if seat is not None and case.home and columns.names[rows[case.home[0]]] == seat.replica:
            # Reports do not list open tails: the turn's is assumed to be where the turn's blocks are.
            claimed = min(seat.tokens, usable)
            if hot[case.home[0]] >= claimed - claimed % BLOCK_TOKENS:
                hot[case.home[0]] = max(hot[case.home[0]], claimed)
        if beside is not None:
            # Choices of one request share their prefill.
            hot[beside] = usable
        parts = [
            (group.positions, self._ways_of(case, rows[group.positions], hot[group.positions], group_runs, now))
            for group, group_runs in zip(case.groups, runs, strict=True)
        ]
        return joined(parts, len(rows)), hot

    def _ways_of(self, case: _Case, rows: Integers, hot: Integers, runs: Integers, now: float) -> Ways:
        """Returns how each of `rows`, which have one model id, gets the prompt's KV. The result's sources are node
        indices.

        Args:
            hot: tokens in memory, `(rows,) int64`.
            runs: leading tokens that each holder has, `(holders + 1,) int64`, as `Directory.runs` in tokens.
        """
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
        """Returns the indices of the nodes from which a replica could pull, those that hold most, and these as
        `Sources`.

        Args:
            disks: tokens on each node's disk, `(nodes + 1,) int64`.
            near: tokens in memory or on the own node's disk, `(rows,) int64`.
            nodes: the rows' nodes, `(rows,) int64`, -1 for unknown ones.
        """
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
        """Returns the seconds to get the image embeddings that are needed, `(candidates,) float64`; `held` has the
        tokens that need not be computed, `(candidates,) int64`."""
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
        """Returns two `(rows,) int64`, not 0 if a replica has the image embeddings in memory, or on its node's disk."""
        holding = self.members.directory.runs([entry])
        return holding[columns.memory[rows]], self._on_disks(holding, now)[columns.node[rows]]

    def _has_any(self, columns: Columns, rows: Integers, request: RouteRequest, now: float) -> bool:
        """Whether one of `rows` has image embeddings of one of the request's pictures."""
        called = [request.pictures, *(chain.pictures for chain in request.others)]
        having = (self._having(columns, rows, entry, now) for pictures in called for entry, _, _, _ in pictures)
        return any(memory.any() or disk.any() for memory, disk in having)

    def _on_disks(self, runs: Integers, now: float) -> Integers:
        """Returns what each node has of `runs` on its disk, `(nodes + 1,) int64`: 0 if its store does not report, and 0
        at the end, for index -1."""
        living = now - self.members.nodes.seen <= self.members.timeout_s
        return np.append(np.where(living, runs[self.members.nodes.disks], 0), 0)

    def _costs(self, case: _Case, ways: Ways, new: bool, now: float) -> dict[str, Floats]:
        """Returns the seconds of every term and their total, each `(candidates,) float64`; `new` for a new agent."""
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
            "queue": columns.queue_s[rows] + full * SEQUENCE_WAIT_S,
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
    """Returns the index of `row` in the ascending `rows`, `(candidates,) int64`, or None."""
    position = int(rows.searchsorted(row))
    return position if position < len(rows) and rows[position] == row else None


def _grouped(request: RouteRequest, columns: Columns, rows: Integers) -> list[_Group]:
    """Returns the candidates by their model id."""
    own = [adapted_id(model_id, request.adapter) for model_id in columns.model_ids]
    if own == [request.model_id]:
        return [_Group(slice(None), request.block_ids, request.pictures)]
    chains = {chain.model_id: chain for chain in request.others}
    chains[request.model_id] = Chain(request.model_id, request.block_ids, request.pictures)
    groups = []
    for index, model_id in enumerate(own):
        positions = np.flatnonzero(columns.model[rows] == index)
        # Without a chain for this model id no blocks are known; pictures have the same sizes.
        chain = chains.get(model_id) or Chain(model_id, [], request.pictures)
        if len(positions):
            groups.append(_Group(positions, chain.block_ids, chain.pictures))
    return groups


def _first_weight(ways: Ways) -> Floats:
    """Returns the share of a new agent's first prompt cost that counts, `(candidates,) float64`."""
    kv_s = ways.pull_s + ways.restore_s + ways.prefill_s
    return 1.0 - np.minimum(FIRST_PREFILL_S, kv_s - kv_s.min()) / np.maximum(kv_s, EVEN_S)


def _least_recent(case: _Case, total: Floats) -> int:
    """Returns the position of the cheapest candidate by `total` `(candidates,) float64`, or of those even to it the one
    that was given work least recently."""
    turns = np.where(total <= total.min() + EVEN_S, case.columns.last_assigned[case.rows], inf)
    return int(turns.argmin())


def _listed(case: _Case, costs: dict[str, Floats], chosen: int) -> tuple[list[str], dict[str, list[float]]]:
    """Returns the candidates that a decision lists, and their costs by term."""
    rows = case.rows
    if len(rows) > CANDIDATES_SHOWN:
        shown = _shown(costs["total"], chosen)
        rows, costs = rows[shown], {term: seconds[shown] for term, seconds in costs.items()}
    names = [case.columns.names[row] for row in rows.tolist()]
    return names, {term: seconds.tolist() for term, seconds in costs.items()}


def _shown(total: Floats, chosen: int) -> Integers:
    """Returns the ascending positions whose costs a decision lists, `(CANDIDATES_SHOWN,) int64`."""
    cheapest = np.argpartition(total, CANDIDATES_SHOWN - 1)[:CANDIDATES_SHOWN]
    if chosen not in cheapest:
        # Partition leaves the most expensive of them last.
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
