"""The router's actor, without Ray: messages in, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest

from satchel.actors.protocol.clients import RouterClient
from satchel.actors.protocol.router_messages import (
    AgentPlace,
    Decision,
    NodeReport,
    Places,
    ReplicaReport,
    RouteRequest,
    SequenceLeft,
)
from satchel.actors.router.actor import LOST_LOOKS, RouterActor
from satchel.actors.router.directory import PART_BLOCKS
from satchel.cluster.config.config import default_config
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import NoReplica
from tests.worlds.direct import Direct
from tests.worlds.routing import BLOCKS, report, store


class Router(RouterClient):
    """A client of an `actor` in this process."""

    def __init__(self, joined: Iterable[str] = ()) -> None:
        self.own = RouterActor(default_config(), joined=joined)
        super().__init__(USUAL, Direct(lambda: self.own))


async def ask(router: RouterClient, request_id: str) -> Decision:
    return await router.route(RouteRequest(request_id, "m", "t/agent", BLOCKS[:4], 1100))


async def test_a_decision_travels_and_can_be_explained():
    """By the response's id, though a row's is longer: the reason, and each candidate's terms, which add up."""
    router = Router()
    assert await router.report(report("a", announced=BLOCKS))
    assert await router.report(report("b"))
    decision = await ask(router, "request/1")
    explained = await router.explain("request")
    assert explained is not None and await router.explain("other") is None
    assert (explained.replica, explained.why) == (decision.replica, decision.why)
    assert explained.cached_tokens == decision.cached_tokens == 1024
    assert sorted(explained.costs_s) == decision.candidates == ["a", "b"]
    for terms in explained.costs_s.values():
        assert abs(terms["total"] - sum(terms.values()) / 2) < 1e-9
    assert explained.costs_s["a"]["prefill"] < explained.costs_s["b"]["prefill"]


async def test_the_latest_decisions_are_told_to_those_who_have_not_seen_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("satchel.actors.router.actor.LISTED_MAX", 3)
    router = Router()
    await router.report(report("a", announced=BLOCKS))
    await router.report(report("b"))
    for number in range(1, 6):
        await ask(router, f"r{number}/1")
    found = await router.decisions(0, 10)
    assert [(each.number, each.sequence) for each in found.decisions] == [(3, "r3/1"), (4, "r4/1"), (5, "r5/1")]
    first = found.decisions[0]
    assert (first.agent, first.model, first.prompt_tokens) == ("t/agent", "m", 1100)
    assert first.why == await router.explain("r3")
    assert [each.number for each in (await router.decisions(3, 1)).decisions] == [5]
    assert (await router.decisions(5, 10)).decisions == [] and found.last == 5
    assert found.router == (await router.decisions(0, 0)).router != (await Router().decisions(0, 0)).router


async def test_a_decision_is_told_again_with_what_it_took():
    router = Router()
    await router.report(report("a"))
    for name in ("r1/1", "r2/1"):
        await ask(router, name)
    await router.release(SequenceLeft("elsewhere", "r1/1", 3, 0.5))
    assert (await router.decisions(2, 10)).decisions == []
    await router.release(SequenceLeft("a", "r1/1", 3, 0.5, 2))
    (again,) = (await router.decisions(2, 10)).decisions
    assert (again.number, again.sequence) == (3, "r1/1")
    assert (again.why.actual_cached_tokens, again.why.actual_first_token_s) == (3, 0.5)
    assert again.why.actual_disk_tokens == 2
    assert [each.sequence for each in (await router.decisions(0, 10)).decisions] == ["r2/1", "r1/1"]


async def test_what_a_request_took_is_told_beside_what_was_estimated():
    """Once it has ended where it was sent last."""
    router = Router()
    await router.report(report("a", announced=BLOCKS))

    async def actual() -> tuple[int | None, float | None]:
        explained = await router.explain("r")
        assert explained is not None
        return explained.actual_cached_tokens, explained.actual_first_token_s

    await ask(router, "r/1")
    assert await actual() == (None, None)
    await router.release(SequenceLeft("elsewhere", "r/1", 1, 1.0))
    assert await actual() == (None, None)
    await router.release(SequenceLeft("a", "r/1", 768, 0.25))
    assert await actual() == (768, 0.25)
    await ask(router, "r/1")
    assert await actual() == (None, None), "it goes on elsewhere"


async def test_what_a_request_will_leave_is_noted_once_it_is_answered():
    router = Router()
    await router.report(report("a"))
    await ask(router, "r")
    assert router.own._policy.members.directory.blocks == 0
    await asyncio.sleep(0)
    assert router.own._policy.members.directory.blocks == 4


async def test_a_turn_right_after_a_move_goes_where_the_agent_went():
    """Before either node has reported it, and though the last turn was at the former home."""
    router = Router()
    for name, node in (("a", "n0"), ("b", "n1")):
        await router.report(report(name, node=node, kv_bytes_per_token=1000))
    await router.store_report(store("n0", agents=[["t/agent", 2, True]]))
    await router.store_report(store("n1", announced=BLOCKS[:4], agents=[["t/agent", 2, False]]))
    assert (await ask(router, "before")).replica == "a"
    await router.moved("t/agent", "n1", 3)
    (place,) = (await router.places(["t/agent"])).places
    assert (place.home, place.epoch, place.copies) == ("n1", 3, ["n0"])
    assert (await ask(router, "after")).replica == "b"
    # What the former home still says is older.
    await router.store_report(store("n0", sequence=2, agents=[["t/agent", 2, True]]))
    assert (await ask(router, "later")).replica == "b"


async def test_nodes_report_and_are_asked_for():
    """A pull is decided and explained; where an agent is, who has copies, and which nodes there are."""
    router = Router()
    await router.report(report("a", node="n0", kv_bytes_per_token=1000, prefill_tokens_per_s=100.0))
    assert await router.store_report(store("n0", agents=[["t/agent", 2, True]], links={"n1": 1e9}))
    holds = store("n1", announced=BLOCKS[:4], agents=[["t/agent", 2, False]])
    assert await router.store_report(holds)
    assert not await router.store_report(store("n1", sequence=2, full=False, blocks=4, used_bytes=7, free_bytes=9))
    decision = await ask(router, "r")
    assert (decision.node, decision.pull_from, decision.pull_tokens) == ("n0", "n1", 4 * 256)
    explained = await router.explain("r")
    assert explained is not None
    assert (explained.node, explained.pull_from, explained.pull_tokens) == ("n0", "n1", 4 * 256)
    assert explained.costs_s["a"]["pull"] > 0.0 and explained.costs_s["a"]["restore"] > 0.0
    assert await router.places(["t/agent"]) == Places([AgentPlace("t/agent", "n0", True, 2, ["n1"])])
    assert await router.places(["t/nobody"]) == Places([])
    assert await router.agents_on("n0") == ["t/agent"] and await router.agents_on("n1") == []
    first, second = await router.nodes()
    assert (first.name, first.links, first.replicas) == ("n0", {"n1": 1e9}, ["a"])
    assert (second.used_bytes, second.free_bytes, second.blocks, second.agents) == (7, 9, 4, 1)
    assert second.seen_s is not None and 0.0 <= second.seen_s < 5.0 and second.alive
    await router.lose_node("n1")
    assert await router.places(["t/agent"]) == Places([AgentPlace("t/agent", "n0", True, 2, [])])
    assert [node.alive for node in await router.nodes()] == [True, False]
    assert (await ask(router, "s")).pull_from == ""
    await router.lose_node("n0")
    with pytest.raises(NoReplica):
        await router.route(RouteRequest("t", "m", "", [], 5))


async def test_a_router_that_began_anew_says_what_it_knows_and_no_more():
    """Until all nodes have said everything: no agent is new or lost, and no node is gone."""
    router = Router(["n0", "n1"])
    unsure = Places([], unheard=["n0", "n1"])
    assert await router.places(["t/agent"]) == unsure
    assert await router.nodes() == [NodeReport("n0", True), NodeReport("n1", True)]
    assert not await router.store_report(store("n1", sequence=7, full=False))
    assert await router.places(["t/agent"]) == unsure, "a part of what it has says little"
    await router.store_report(store("n1", sequence=8, agents=[["t/agent", 2, False]]))
    assert await router.places(["t/agent"]) == Places([], unheard=["n0"]), "its home is not lost"
    assert [(node.name, node.alive) for node in await router.nodes()] == [("n1", True), ("n0", True)]
    await router.store_report(store("n0", agents=[["t/agent", 2, True]]))
    known = AgentPlace("t/agent", "n0", True, 2, ["n1"])
    assert await router.places(["t/agent", "t/nobody"]) == Places([known])


@pytest.mark.parametrize("how", ["silent", "lost"])
async def test_a_router_that_began_anew_waits_for_no_node_for_ever(how: str, monkeypatch: pytest.MonkeyPatch):
    router = Router(["n0", "n1"])
    await router.store_report(store("n1", agents=[["t/agent", 2, False]]))
    if how == "lost":
        await router.lose_node("n0")
    else:
        monkeypatch.setattr(router.own, "_listens_until", 0.0)
    places = await router.places(["t/agent", "t/nobody"])
    assert places == Places([AgentPlace("t/agent", "", False, 2, ["n1"])])
    assert [node.name for node in await router.nodes()] == ["n1"]


async def test_without_a_replica_the_answer_is_an_error():
    with pytest.raises(NoReplica):
        await Router().route(RouteRequest("r", "m", "", [], 5))


async def test_requests_are_routed_while_a_large_report_is_taken():
    """And the next report waits for its end, so that what it says is not undone."""
    router = Router()
    await router.report(report("a"))
    many = [index.to_bytes(32, "big") for index in range(PART_BLOCKS * 8)]
    order: list[str] = []

    async def take(name: str, message: ReplicaReport) -> None:
        assert await router.report(message)
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
    assert router.own._policy.members.directory.held("a") == set(many[:-10])
    router.own._policy.members.check()


async def test_nodes_that_fall_silent_are_written_down_once_and_so_is_their_return():
    router = Router()

    def look(alive: bool, **more: object) -> list[str]:
        return router.own._look_at_nodes([{"name": "n0", "alive": alive, "draining": False, "seen_s": 7.0, **more}])

    assert [look(False) for _ in range(LOST_LOOKS - 1)] + [look(True)] == [[]] * LOST_LOOKS, "everything stood still"
    said = [text for _ in range(9) for text in look(False)]
    assert said == ["the store of node n0 has not reported for 7 s"]
    assert look(True) == ["the store of node n0 reports again"] and look(True) == []
    assert not any(look(False, draining=True) for _ in range(9)), "it was asked to leave"
