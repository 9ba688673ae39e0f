"""Which replica answers a request, and why. Pure: `now` is an argument.

The cost of a replica is the estimated time to first token there, in seconds: what is queued before it, prefilling the
part of the prompt that it does not hold, and a term for the rows that decode beside it. Costs are compared, so a
prefix that every candidate holds decides nothing. An agent's home is preferred by at most `sticky_penalty_s_max`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..messages import Decision, ReplicaReport, RouteRequest
from .directory import Directory, Home

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
"""Assumed until a replica has measured its own rate."""

DECODE_LOAD_S = 0.25
"""What a full batch adds to the time to first token: prefill chunks take turns with its decode steps."""

ROW_WAIT_S = 1.0
"""What each row beyond the batch's places adds: it waits for another to finish."""

RESERVATION_S = 5.0
"""A routed request that no report has mentioned for this long has not arrived."""

EVEN_S = 0.02
"""Costs this close are even; the replica that was given work least recently gets it."""


@dataclass
class Load:
    """A request on a replica. `tokens` are to be prefilled; once a report has `seen` it, the report counts them."""

    since: float
    tokens: int
    seen: bool = False


@dataclass
class ReplicaState:
    """A replica as its last report describes it, and the requests that it has now.

    Requests are counted from the moment they are routed until their consumer says that they ended: a report is old
    when it arrives. Reports only drop those that never arrived, or whose consumer died.
    """

    report: ReplicaReport
    seen: float
    requests: dict[str, Load] = field(default_factory=dict)
    last_assigned: float = float("-inf")
    lost: bool = False


class Policy:
    """The router's state and its rules.

    Args:
        timeout_s: a replica that has not reported for this long is avoided.
        sticky_penalty_s_max: how much sooner another replica must answer to take an agent from its home.
        rule: `satchel`, or `round_robin` for comparison.
    """

    def __init__(self, *, timeout_s: float, sticky_penalty_s_max: float, rule: str = "satchel") -> None:
        self.directory = Directory()
        self._timeout_s = timeout_s
        self._sticky_s = sticky_penalty_s_max
        self._rule = rule
        self._replicas: dict[str, ReplicaState] = {}
        self._assignments = 0

    def observe(self, report: ReplicaReport, now: float) -> bool:
        """Take a replica's report. Returns False when one before it was missed: the replica must send a full one."""
        state = self._replicas.get(report.replica)
        restarted = state is not None and state.report.incarnation != report.incarnation
        if state is None or restarted:
            self.directory.forget(report.replica)
        complete = report.full or (state is not None and not restarted and report.sequence == state.report.sequence + 1)
        if report.full:
            self.directory.retract(report.replica, self.directory.held(report.replica) - set(report.announced))
        self.directory.announce(report.replica, report.announced)
        self.directory.retract(report.replica, report.retracted)
        if state is None or restarted:
            state = ReplicaState(report, now)
            self._replicas[report.replica] = state
        state.report, state.seen, state.lost = report, now, False
        self._reconcile(state, now)
        return complete

    def lose(self, replica: str) -> None:
        """Somebody saw the replica fail: avoid it until it reports again.

        What it holds is forgotten when it comes back as another process, not before: a broken connection is no death.
        """
        state = self._replicas.get(replica)
        if state is not None:
            state.lost = True

    def release(self, replica: str, request_id: str) -> None:
        """The request is no load on the replica any more: it was refused, or has ended."""
        state = self._replicas.get(replica)
        if state is not None:
            state.requests.pop(request_id, None)

    def alive(self, model: str, now: float) -> list[str]:
        """Replicas of `model` that reported lately, by name."""
        return sorted(
            name
            for name, state in self._replicas.items()
            if state.report.model == model and not state.lost and now - state.seen <= self._timeout_s
        )

    def route(self, request: RouteRequest, now: float) -> Decision | None:
        """The replica for a request, whose load is reserved there; None when no replica of its model lives."""
        candidates = self.alive(request.model, now)
        # A replica that just failed this request is better than none.
        candidates = [name for name in candidates if name not in request.exclude] or candidates
        if not candidates:
            return None
        held = self.directory.held_tokens(request.block_ids, candidates)
        home = self.directory.home(request.agent, request.model) if request.agent else None
        if home is not None and home.replica in held:
            known = min(home.tokens, max(0, request.prompt_tokens - 1))
            held[home.replica] = max(held[home.replica], known)
        costs = {name: self._cost(name, request, held, home) for name in candidates}
        chosen = self._choose(candidates, costs, home)
        why = self._why(chosen, candidates, costs, held, home)
        self._assign(chosen, request, held[chosen], now)
        return Decision(chosen, why, cached_tokens=held[chosen], costs_s=costs)

    def _cost(self, name: str, request: RouteRequest, held: dict[str, int], home: Home | None) -> dict[str, float]:
        state = self._replicas[name]
        report = state.report
        rate = report.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        tokens = report.pending_tokens + sum(load.tokens for load in state.requests.values() if not load.seen)
        rows = len(state.requests)
        away = home is not None and home.replica in held and home.replica != name
        terms = {
            "queue": tokens / rate + max(0, rows + 1 - report.rows_max) * ROW_WAIT_S,
            "prefill": max(0, request.prompt_tokens - held[name]) / rate,
            "decode": min(rows, report.rows_max) / report.rows_max * DECODE_LOAD_S,
            "away": self._sticky_s if away else 0.0,
        }
        terms["total"] = sum(terms.values())
        return terms

    def _choose(self, candidates: list[str], costs: dict[str, dict[str, float]], home: Home | None) -> str:
        if self._rule == "round_robin":
            return min(candidates, key=lambda name: (self._replicas[name].last_assigned, name))
        cheapest = min(cost["total"] for cost in costs.values())
        even = [name for name in candidates if costs[name]["total"] <= cheapest + EVEN_S]
        if home is not None and home.replica in even:
            return home.replica
        return min(even, key=lambda name: (self._replicas[name].last_assigned, name))

    def _why(
        self,
        chosen: str,
        candidates: list[str],
        costs: dict[str, dict[str, float]],
        held: dict[str, int],
        home: Home | None,
    ) -> str:
        if self._rule == "round_robin":
            return "round_robin"
        if home is not None and home.replica == chosen:
            return "agent_home"
        if len(candidates) == 1:
            return "only_replica"
        if home is not None:
            return "home_busy" if home.replica in candidates else "home_lost"
        if held[chosen] > min(held.values()):
            return "prefix"
        totals = sorted(cost["total"] for cost in costs.values())
        return "least_recent" if totals[-1] - totals[0] <= EVEN_S else "least_loaded"

    def _assign(self, name: str, request: RouteRequest, held: int, now: float) -> None:
        state = self._replicas[name]
        state.requests[request.request_id] = Load(now, max(0, request.prompt_tokens - held))
        self._assignments += 1
        state.last_assigned = self._assignments
        if request.agent:
            self.directory.set_home(request.agent, request.model, Home(name, request.prompt_tokens))

    def _reconcile(self, state: ReplicaState, now: float) -> None:
        active = set(state.report.active)
        for request_id, load in list(state.requests.items()):
            if request_id in active:
                load.seen = True
            elif load.seen or now - load.since > RESERVATION_S:
                del state.requests[request_id]
        if state.report.full:
            # A router that has restarted learns what runs.
            for request_id in active - state.requests.keys():
                state.requests[request_id] = Load(now, 0, seen=True)
