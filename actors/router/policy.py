"""Which replica answers a request, and why. Pure: `now` is an argument.

The cost of a replica is a sum of four terms, all in seconds. The first two are the time to the first token there, the
others what the request does to everybody's time:

    queue     what was routed there before and is still to be prefilled, and the places that are taken
    prefill   the part of the prompt that it does not hold, at its own measured rate; of an agent that nobody knows
              a quarter, for it pays once and comes back many times, and all agents may begin with one system prompt
    decode    the rows that decode beside the request: all answers come slower
    away      for every replica but the agent's home: `sticky_penalty_s_max`, and what the home need not compute but
              this one must, for that is work done twice while others wait

Costs are compared, so a prefix that every candidate holds decides nothing, and one that a single replica holds draws
requests only until its queue outweighs the prefill elsewhere. A request counts from the moment it is routed, and so do
the blocks that it will leave, so a burst spreads and still computes a prefix once in each place; of replicas whose
costs are even, the one that was given work least recently is taken.

Reports come twice a second and may be late, lost or out of order. What a report says of blocks is the directory's;
what it says of load only corrects the router's own count (`load.py`), where each request is on one replica at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from math import inf
from operator import add

from ..kv_store.blocks import BLOCK_TOKENS
from ..messages import Decision, ReplicaReport, RouteRequest
from .directory import Directory, Home
from .load import DEFAULT_PREFILL_TOKENS_PER_S, RESERVATION_S, Load, ReplicaState

NEW_AGENT_PREFILL = 0.25
"""The part of its first prefill that decides where an agent that nobody knows will live."""

EVEN_S = 0.02
"""Costs this close are even; the replica that was given work least recently gets it."""

NEW_AGENT_EVEN_S = 1.0
"""The same for an agent that nobody knows: it is to live there, so they go round unless load or prefix forbids."""

GONE_S = 600.0
"""A replica that has been silent for this long is forgotten with all it held."""

FORMER_INCARNATIONS = 4
"""How many earlier processes of a replica are remembered, whose late reports say nothing any more."""

RULES = {
    "satchel": ("queue", "prefill", "decode", "away"),
    "prefix": ("queue", "prefill", "decode"),
    "least_loaded": ("queue", "decode"),
    "round_robin": (),
}
"""The terms that each rule adds up; all but the first are for comparison, and know no agents."""


class Policy:
    """The router's state and its rules.

    Args:
        timeout_s: a replica that has not reported for this long is avoided.
        sticky_penalty_s_max: how much sooner another replica must answer to take an agent from its home.
        rule: one of `RULES`.
        agents_max: how many agents' homes are remembered.

    Raises:
        ValueError: no such rule.
    """

    def __init__(
        self, *, timeout_s: float, sticky_penalty_s_max: float, rule: str = "satchel", agents_max: int = 100_000
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"no routing rule {rule!r}; there are {', '.join(RULES)}")
        self.directory = Directory(agents_max)
        self._timeout_s = timeout_s
        self._sticky_s = sticky_penalty_s_max
        self._rule = rule
        self._replicas: dict[str, ReplicaState] = {}
        self._models: dict[str, list[ReplicaState]] = {}
        """The replicas of each model, by name."""
        self._placed: dict[str, ReplicaState] = {}
        """Where each request is counted."""
        self._coming: list[tuple[str, list[bytes], float]] = []
        """Replica, blocks and until when they are expected there; not in the directory yet."""
        self._assignments = 0

    def observe(self, report: ReplicaReport, now: float) -> bool:
        """Take a replica's report. Returns False when one before it was missed: the replica must send a full one."""
        *_, complete = self.observe_in_parts(report, now)
        return complete

    def observe_in_parts(self, report: ReplicaReport, now: float) -> Iterator[bool]:
        """`observe` with pauses, for a report of very many blocks; every pause yields what `observe` returns.

        Routing may go on in the pauses, but the next report must wait for the end.
        """
        self.settle()
        state = self._replicas.get(report.replica)
        if state is not None and self._is_late(report, state, now):
            yield True
            return
        known = state is not None and state.incarnation == report.incarnation
        if state is None or not known:
            state = self._join(report, state)
        complete = report.full or (known and report.sequence == state.sequence + 1)
        state.sequence, state.seen, state.lost = report.sequence, now, False
        state.rows_max, state.pending_tokens = max(1, report.rows_max), report.pending_tokens
        state.token_s = 1.0 / (report.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)
        for request_id in state.correct(set(report.active), now):
            del self._placed[request_id]
        if report.full:
            # A router that has restarted learns what runs. What was routed elsewhere since is about to end here.
            for request_id in set(report.active) - self._placed.keys():
                state.add(request_id, Load(now, report.pending_tokens, seen=True))
                self._placed[request_id] = state
        for other in [other for other in self._replicas.values() if now - other.seen > GONE_S]:
            self._forget(other)
        self.directory.expire(report.replica, now)
        whole = report.full or not known
        for _ in self.directory.update(report.replica, report.announced, report.retracted, whole=whole):
            yield complete

    def lose(self, replica: str) -> None:
        """Somebody saw the replica fail: avoid it until it reports again.

        What it holds is forgotten when it comes back as another process, or is silent for `GONE_S`, not before: a
        broken connection is no death.
        """
        state = self._replicas.get(replica)
        if state is not None:
            state.lost = True

    def release(self, replica: str, request_id: str) -> None:
        """The request is no load on the replica any more: it was refused, or has ended."""
        state = self._placed.get(request_id)
        if state is not None and state.name == replica:
            self._remove(request_id)

    @property
    def requests(self) -> dict[str, str]:
        """The replica on which each request is counted."""
        return {request_id: state.name for request_id, state in self._placed.items()}

    def alive(self, model: str, now: float) -> list[str]:
        """Replicas of `model` that reported lately, by name."""
        return [state.name for state in self._alive(model, now)]

    def route(self, request: RouteRequest, now: float) -> Decision | None:
        """The replica for a request, whose load is reserved there; None when no replica of its model lives.

        Call `settle` when the answer is on its way.
        """
        self.settle()
        candidates = self._alive(request.model, now)
        if request.exclude:
            # A replica that just failed this request is better than none.
            candidates = [state for state in candidates if state.name not in request.exclude] or candidates
        if not candidates:
            return None
        home = self.directory.home(request.agent, request.model) if request.agent else None
        at_home = _position(candidates, home.replica if home else "")
        beside = _position(candidates, "" if request.beside in request.exclude else request.beside)
        held = self._held(request, candidates, home, at_home)
        if beside is not None:
            # The two are computed together, once.
            held[beside] = max(0, request.prompt_tokens - 1)
        new = bool(request.agent) and home is None and self._rule == "satchel"
        costs = self._costs(request.prompt_tokens, candidates, held, at_home, NEW_AGENT_PREFILL if new else 1.0)
        total, even_s = costs["total"], NEW_AGENT_EVEN_S if new else EVEN_S
        chosen = _least_recent(candidates, total, even_s) if beside is None else beside
        if beside is not None:
            why = "beside"
        elif self._rule != "satchel":
            why = self._rule
        else:
            why = _why(chosen, total, held, home, at_home, even_s)
        self._assign(candidates[chosen], request, held[chosen], now)
        names = [state.name for state in candidates]
        return Decision(names[chosen], why, held[chosen], names, costs)

    def settle(self) -> None:
        """Note what the last requests will leave where they went. Left undone, the next call of anything does it."""
        for replica, blocks, until in self._coming:
            self.directory.expect(replica, blocks, until)
        self._coming.clear()

    def check(self) -> None:
        """Raise AssertionError where the tables disagree."""
        self.directory.check()
        assert self.directory.replicas == self._replicas.keys()
        grouped = [state for states in self._models.values() for state in states]
        assert sorted(state.name for state in grouped) == sorted(self._replicas), "each replica has one model"
        for model, states in self._models.items():
            assert states and all(state.model == model for state in states)
            assert states == sorted(states, key=_name)
        counted = 0
        for name, state in self._replicas.items():
            assert state.name == name
            assert all(self._placed[request_id] is state for request_id in state.requests)
            state.check()
            counted += len(state.requests)
        assert counted == len(self._placed), "each request is counted once"

    # Who may answer, and at what cost. Lists run along the candidates, which are in order of their names.

    def _alive(self, model: str, now: float) -> list[ReplicaState]:
        timeout_s = self._timeout_s
        return [state for state in self._models.get(model, ()) if now - state.seen <= timeout_s and not state.lost]

    def _held(
        self, request: RouteRequest, candidates: list[ReplicaState], home: Home | None, at_home: int | None
    ) -> list[int]:
        """How many of the prompt's tokens each candidate need not compute. The last one always is."""
        usable = max(0, request.prompt_tokens - 1)
        blocks = request.block_ids
        if len(blocks) * BLOCK_TOKENS > usable:
            blocks = blocks[: usable // BLOCK_TOKENS]
        held = list(self.directory.held_tokens(blocks, [state.name for state in candidates]).values())
        if home is not None and at_home is not None:
            # The turn's open tail is in no report: it is believed to be there where the turn's blocks are.
            claimed = min(home.tokens, usable)
            if held[at_home] >= claimed - claimed % BLOCK_TOKENS:
                held[at_home] = max(held[at_home], claimed)
        return held

    def _costs(
        self, prompt_tokens: int, candidates: list[ReplicaState], held: list[int], at_home: int | None, weight: float
    ) -> dict[str, list[float]]:
        """Seconds by term; `weight` is the part of the prefill that counts."""
        away = [0.0] * len(candidates)
        prefill = [
            (prompt_tokens - tokens) * state.token_s * weight for state, tokens in zip(candidates, held, strict=True)
        ]
        if at_home is not None:
            least = prefill[at_home]
            away = [self._sticky_s + (seconds - least if seconds > least else 0.0) for seconds in prefill]
            away[at_home] = 0.0
        costs = {
            "queue": [state.queue_s for state in candidates],
            "prefill": prefill,
            "decode": [state.decode_s for state in candidates],
            "away": away,
        }
        total = [0.0] * len(candidates)
        for term in RULES[self._rule]:
            total = list(map(add, total, costs[term]))
        costs["total"] = total
        return costs

    # Loads.

    def _assign(self, state: ReplicaState, request: RouteRequest, held: int, now: float) -> None:
        self._remove(request.request_id)
        state.add(request.request_id, Load(now, max(0, request.prompt_tokens - held)))
        self._placed[request.request_id] = state
        self._assignments += 1
        state.last_assigned = self._assignments
        coming = request.block_ids[held // BLOCK_TOKENS :]
        if coming:
            # Whoever comes next with the same prefix finds it there, after the same queue.
            self._coming.append((state.name, coming, now + RESERVATION_S + 2.0 * state.queue_s))
        if request.agent:
            self.directory.set_home(request.agent, request.model, Home(state.name, request.prompt_tokens))

    def _remove(self, request_id: str) -> None:
        state = self._placed.pop(request_id, None)
        if state is not None:
            state.remove(request_id)

    # Replicas that come and go.

    def _is_late(self, report: ReplicaReport, state: ReplicaState, now: float) -> bool:
        """Whether something newer than the report has been heard."""
        if report.incarnation == state.incarnation:
            return report.sequence <= state.sequence
        # A router that is new itself may have heard of two processes in the wrong order: the silent one is the old one.
        return report.incarnation in state.former and now - state.seen <= self._timeout_s

    def _join(self, report: ReplicaReport, earlier: ReplicaState | None) -> ReplicaState:
        """A state for a replica's new process. The blocks of an earlier one go when the report's come."""
        former: tuple[str, ...] = ()
        if earlier is not None:
            former = (*earlier.former, earlier.incarnation)[-FORMER_INCARNATIONS:]
            self._remove_state(earlier)
            self.directory.restart(earlier.name)
        state = ReplicaState(report.replica, report.model, report.incarnation, former)
        self._replicas[state.name] = state
        insort(self._models.setdefault(state.model, []), state, key=_name)
        return state

    def _forget(self, state: ReplicaState) -> None:
        self._remove_state(state)
        self.directory.forget(state.name)

    def _remove_state(self, state: ReplicaState) -> None:
        for request_id in state.requests:
            del self._placed[request_id]
        del self._replicas[state.name]
        self._models[state.model].remove(state)
        if not self._models[state.model]:
            del self._models[state.model]


def _name(state: ReplicaState) -> str:
    return state.name


def _position(candidates: list[ReplicaState], name: str) -> int | None:
    if name:
        for position, state in enumerate(candidates):
            if state.name == name:
                return position
    return None


def _least_recent(candidates: list[ReplicaState], total: list[float], even_s: float) -> int:
    """Of the cheapest, and those even to it, the one that was given work least recently."""
    most = min(total) + even_s
    turns = [state.last_assigned if seconds <= most else inf for state, seconds in zip(candidates, total, strict=True)]
    return turns.index(min(turns))


def _why(
    chosen: int, total: list[float], held: list[int], home: Home | None, at_home: int | None, even_s: float
) -> str:
    if at_home == chosen:
        return "agent_home"
    if len(total) == 1:
        return "only_replica"
    if home is not None:
        return "home_lost" if at_home is None else "home_busy"
    if max(total) - min(total) <= even_s:
        return "least_recent"
    return "prefix" if held[chosen] > min(held) else "least_loaded"
