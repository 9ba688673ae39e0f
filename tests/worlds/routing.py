"""A router policy under test: reports made up here, requests, and what a decision said. Time is a number."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Decision, ReplicaReport, RouteRequest, StoreReport
from satchel.actors.router.directory import Directory, Holder
from satchel.actors.router.policy import Policy

BLOCKS = [bytes([index]) * 32 for index in range(20)]
RATE = 1000.0


def held_tokens(directory: Directory, blocks: Sequence[bytes], holders: Iterable[Holder]) -> dict[Holder, int]:
    """For each holder, how many tokens of the prefix `blocks` it has, counted from the beginning."""
    runs = directory.runs(blocks)
    return {holder: int(runs[directory.index(holder)]) * BLOCK_TOKENS for holder in holders}


def make_policy(*replicas: str, **fields: object) -> Policy:
    policy = Policy(**{"timeout_s": 5.0, "sticky_penalty_s_max": 2.0, **fields})  # type: ignore[arg-type]
    for name in replicas:
        policy.members.observe(report(name), 0.0)
    return policy


def report(replica: str, **fields: object) -> ReplicaReport:
    values = {
        "replica": replica,
        "model": "m",
        "incarnation": "1",
        "sequence": 0,
        "running": 0,
        "waiting": 0,
        "pending_tokens": 0,
        "sequences_max": 8,
        "prefill_tokens_per_s": RATE,
        "active": [],
        "announced": [],
        "retracted": [],
        "full": True,
    }
    return ReplicaReport(**{**values, **fields})  # type: ignore[arg-type]


def store(node: str, **fields: object) -> StoreReport:
    """A full report, unless `fields` say otherwise."""
    values = {"node": node, "incarnation": "1", "sequence": 0, "announced": [], "retracted": [], "full": True}
    return StoreReport(**{**values, **fields})  # type: ignore[arg-type]


def route(
    policy: Policy, agent: str = "", now: float = 0.0, *, request_id: str = "", tokens: int = 100, blocks: int = 0,
    model: str = "m", **fields: object,
) -> Decision:  # fmt: skip
    """Route a request with the first `blocks` of BLOCKS; somebody must be found."""
    request = RouteRequest(request_id or f"r{random.random()}", model, agent, BLOCKS[:blocks], tokens, **fields)  # type: ignore[arg-type]
    decision = policy.route(request, now)
    policy.members.check()
    assert decision is not None
    return decision


def probe(policy: Policy, term: str, now: float = 0.0) -> dict[str, float]:
    """A term of every candidate's cost, for a request that leaves no load."""
    decision = route(policy, now=now, request_id="probe", tokens=0)
    policy.members.release(decision.replica, "probe")
    return dict(zip(decision.candidates, decision.costs_s[term], strict=True))
