"""What reports do to the router's counts and to the costs that follow from them."""

from __future__ import annotations

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.cluster.config.timing import USUAL
from tests.worlds.routing import BLOCKS, RATE, make_policy, probe, report, route


def test_a_missed_report_asks_for_a_full_one_which_repairs_the_directory():
    policy = make_policy()
    assert policy.members.observe(report("a", announced=BLOCKS[:3]), 0.0)
    assert not policy.members.observe(report("a", sequence=2, full=False, announced=BLOCKS[5:6]), 1.0)
    assert policy.members.observe(report("a", sequence=1, full=False, announced=BLOCKS[9:]), 1.5), (
        "late, so it says nothing"
    )
    assert policy.members.directory.held("a") == {*BLOCKS[:3], BLOCKS[5]}
    assert policy.members.observe(report("a", sequence=3, announced=BLOCKS[2:4]), 2.0)
    assert policy.members.directory.held("a") == set(BLOCKS[2:4])
    fresh = make_policy()
    assert not fresh.members.observe(report("a", sequence=9, full=False), 0.0), "a new router asks everybody"


def test_load_counts_from_routing_until_its_end():
    policy = make_policy("a")
    for name in ("r1", "r2", "r3"):
        route(policy, request_id=name, tokens=1000)
    assert probe(policy, "queue") == {"a": pytest.approx(3.0)}
    policy.members.observe(report("a", sequence=1, active=["r1"], pending_tokens=500), 0.5)
    assert probe(policy, "queue", 0.5) == {"a": pytest.approx(2.5)}, "the report counts what is left of r1"
    policy.members.release("b", "r2")
    assert probe(policy, "queue", 0.5) == {"a": pytest.approx(2.5)}, "it is not there"
    policy.members.release("a", "r2")
    assert probe(policy, "queue", 0.5) == {"a": pytest.approx(1.5)}
    assert probe(policy, "decode", 0.5)["a"] > 0.0
    policy.members.observe(report("a", sequence=2), 1.0)
    assert probe(policy, "queue", 1.0) == {"a": pytest.approx(1.0)}, "r1 has ended, though its consumer never said so"
    policy.members.observe(report("a", sequence=3), USUAL.reservation_s + 0.1)
    assert probe(policy, "queue", USUAL.reservation_s + 0.1) == {"a": 0.0}, "r3 never arrived"
    assert probe(policy, "decode", USUAL.reservation_s + 0.1) == {"a": 0.0}


def test_a_request_is_counted_once():
    """Routed again, it is no load where it was before, though nobody released it there and it is still active."""
    policy = make_policy("a", "b")
    first = route(policy, request_id="r", tokens=1000).replica
    other = route(policy, request_id="r", tokens=1000, exclude=[first]).replica
    assert policy.members.requests == {"r": other}
    assert probe(policy, "queue") == {first: 0.0, other: pytest.approx(1.0)}
    policy.members.observe(report(first, sequence=1, active=["r"]), 0.5)
    policy.members.check()
    assert policy.members.requests == {"r": other}


def test_what_a_waiting_prompt_will_find_there_is_no_queue():
    """A replica reports all of a waiting prompt as pending; the router knows that most of it is held."""
    policy = make_policy()
    policy.members.observe(report("a", announced=BLOCKS), 0.0)
    route(policy, request_id="r", tokens=10 * BLOCK_TOKENS + 200, blocks=10)
    waiting = {"pending_tokens": 10 * BLOCK_TOKENS + 200, "full": False}
    policy.members.observe(report("a", sequence=1, active=["r"], **waiting), 0.5)
    assert probe(policy, "queue", 0.5) == {"a": pytest.approx(200 / RATE)}
    policy.members.observe(report("a", sequence=2, active=["r", "stranger"], **waiting), 1.0)
    assert probe(policy, "queue", 1.0) == {"a": pytest.approx(2760 / RATE)}, "of a stranger it knows nothing"


def test_a_router_that_restarted_learns_what_runs():
    policy = make_policy()
    assert not policy.members.observe(report("a", sequence=8, full=False, active=["r"]), 0.0)
    policy.members.observe(report("a", sequence=9, active=["r", "s"], pending_tokens=3000), 0.5)
    assert policy.members.requests == {"r": "a", "s": "a"}
    assert probe(policy, "queue", 0.5) == {"a": pytest.approx(3.0)}
    policy.members.observe(report("a", sequence=10, full=False, active=["r", "s"], pending_tokens=2000), 1.0)
    assert probe(policy, "queue", 1.0) == {"a": pytest.approx(2.0)}
    policy.members.release("a", "r")
    policy.members.observe(report("a", sequence=11, full=False, active=[]), 1.5)
    policy.members.check()
    assert policy.members.requests == {}


def test_an_old_report_does_not_drive_agents_away():
    """Eight agents come back at once, while the last report still shows their first turns in all eight places."""
    policy = make_policy("a", "b")
    homes = {index: route(policy, f"x{index}", request_id=f"first{index}").replica for index in range(16)}
    for name in ("a", "b"):
        active = [f"first{index}" for index in homes if homes[index] == name]
        policy.members.observe(report(name, sequence=1, running=8, active=active), 0.1)
    for index, home in homes.items():
        policy.members.release(home, f"first{index}")
        assert route(policy, f"x{index}", 0.2, request_id=f"second{index}").replica == home


def test_a_replica_is_judged_by_its_own_rate():
    """Also one that has not measured it yet, and one that says it has no places."""
    policy = make_policy()
    policy.members.observe(report("a", sequences_max=0, prefill_tokens_per_s=0.0), 0.0)
    policy.members.observe(report("b", prefill_tokens_per_s=4 * RATE), 0.0)
    decision = route(policy, tokens=1000)
    assert (decision.replica, decision.costs_s["prefill"]) == ("b", pytest.approx([1.0, 0.25]))
    assert route(policy, tokens=100, exclude=["b"]).replica == "a"
    assert probe(policy, "queue")["a"] == pytest.approx(1.1)


def test_a_request_is_let_go_by_the_replica_where_it_is_and_by_no_other():
    """What left another one late was sent elsewhere since, and is a load there."""
    policy = make_policy("a", "b", "c")
    assert route(policy, request_id="r", exclude=["a", "c"]).replica == "b"
    for name in ("a", "c", "nobody"):
        policy.members.release(name, "r")
        policy.members.check()
        assert policy.members.requests == {"r": "b"}
    policy.members.release("b", "r")
    assert policy.members.requests == {}
