"""The router's actor, without Ray: messages in, messages out."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from satchel.actors.messages import Decision, ReplicaReport, RouteRequest, decode, encode
from satchel.actors.router.actor import RouterActor
from satchel.actors.router.directory import PART_BLOCKS
from satchel.cluster.config import default_config
from satchel.cluster.errors import NoReplica, from_wire

from .routing import BLOCKS, report


async def ask(router: RouterActor, request_id: str) -> Decision:
    answer = await router.route(encode(RouteRequest(request_id, "m", "t/agent", BLOCKS[:4], 1100)))
    assert isinstance(answer, bytes)
    return decode(Decision, answer)


async def test_a_decision_travels_and_can_be_explained():
    """By the response's id, though a row's is longer: the reason, and each candidate's terms, which add up."""
    router = RouterActor(default_config())
    assert await router.report(encode(report("a", announced=BLOCKS)))
    assert await router.report(encode(report("b")))
    decision = await ask(router, "request/1")
    explained = await router.explain("request")
    assert explained is not None and await router.explain("other") is None
    assert (explained["replica"], explained["why"]) == (decision.replica, decision.why)
    assert explained["cached_tokens"] == decision.cached_tokens == 1024
    assert sorted(explained["costs_s"]) == decision.candidates == ["a", "b"]
    for terms in explained["costs_s"].values():
        assert abs(terms["total"] - sum(terms.values()) / 2) < 1e-9
    assert explained["costs_s"]["a"]["prefill"] < explained["costs_s"]["b"]["prefill"]


async def test_what_a_request_will_leave_is_noted_once_it_is_answered():
    router = RouterActor(default_config())
    await router.report(encode(report("a")))
    await ask(router, "r")
    assert router._policy.directory.blocks == 0
    await asyncio.sleep(0)
    assert router._policy.directory.blocks == 4


async def test_without_a_replica_the_answer_is_an_error():
    answer = await RouterActor(default_config()).route(encode(RouteRequest("r", "m", "", [], 5)))
    assert isinstance(answer, dict) and isinstance(from_wire(answer), NoReplica)


async def test_requests_are_routed_while_a_large_report_is_taken():
    """And the next report waits for its end, so that what it says is not undone."""
    router = RouterActor(default_config())
    await router.report(encode(report("a")))
    many = [index.to_bytes(32, "big") for index in range(PART_BLOCKS * 8)]
    order: list[str] = []

    async def take(name: str, message: ReplicaReport) -> None:
        assert await router.report(encode(message))
        order.append(name)

    async def route_often() -> None:
        for index in range(6):
            await ask(router, f"r{index}")
            order.append("routed")
            await asyncio.sleep(0)

    await asyncio.gather(
        take("large", report("a", sequence=1, announced=many)),
        take("small", report("a", sequence=2, full=False, retracted=many[-10:])),
        route_often(),
    )
    assert order.index("large") > 3 and order.index("small") > order.index("large")
    assert ("routed", "routed") in pairwise(order)
    assert router._policy.directory.held("a") == set(many[:-10])
    router._policy.check()
