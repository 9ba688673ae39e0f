"""Routing rules, on reports made up here; time is a number."""

from __future__ import annotations

import random

import pytest

from satchel.actors.kv_store.blocks import BLOCK_TOKENS
from satchel.actors.messages import ReplicaReport, RouteRequest
from satchel.actors.router.directory import Directory
from satchel.actors.router.policy import RESERVATION_S, Policy

BLOCKS = [bytes([index]) * 32 for index in range(20)]


def make_policy(**fields: object) -> Policy:
    return Policy(**{"timeout_s": 5.0, "sticky_penalty_s_max": 2.0, **fields})  # type: ignore[arg-type]


def report(replica: str, **fields: object) -> ReplicaReport:
    values = {
        "replica": replica,
        "model": "m",
        "incarnation": "1",
        "sequence": 0,
        "running": 0,
        "waiting": 0,
        "pending_tokens": 0,
        "rows_max": 8,
        "prefill_tokens_per_s": 1000.0,
        "active": [],
        "announced": [],
        "retracted": [],
        "full": True,
    }
    return ReplicaReport(**{**values, **fields})  # type: ignore[arg-type]


def request(agent: str = "", *, request_id: str = "", tokens: int = 100, blocks: int = 0, **fields: object):
    name = request_id or f"q{random.random()}"
    return RouteRequest(name, "m", agent, BLOCKS[:blocks], tokens, **fields)  # type: ignore[arg-type]


def test_an_agent_returns_to_its_replica_and_new_agents_spread():
    policy = make_policy()
    for name in ("a", "b", "c"):
        policy.observe(report(name), 0.0)
    homes = {}
    for index in range(12):
        asked = request(f"agent{index}", request_id=str(index))
        decision = policy.route(asked, 0.0)
        assert decision is not None
        homes[index] = decision.replica
        policy.release(decision.replica, str(index))
    assert sorted(homes.values()) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    for index, home in homes.items():
        again = policy.route(request(f"agent{index}"), 1.0)
        assert again is not None
        assert (again.replica, again.why) == (home, "agent_home")


def test_a_burst_does_not_herd():
    """Reservations count before any report does: 16 requests at once go evenly to two replicas."""
    policy = make_policy()
    policy.observe(report("a"), 0.0)
    policy.observe(report("b"), 0.0)
    chosen = [policy.route(request(f"x{index}"), 0.0) for index in range(16)]
    assert [decision.replica for decision in chosen if decision].count("a") == 8


def test_a_prefix_goes_where_its_blocks_are_and_one_that_all_hold_decides_nothing():
    policy = make_policy()
    policy.observe(report("a", announced=BLOCKS[:2]), 0.0)
    policy.observe(report("b", announced=BLOCKS[:10]), 0.0)
    decision = policy.route(request(tokens=10 * BLOCK_TOKENS + 5, blocks=10), 0.0)
    assert decision is not None
    assert (decision.replica, decision.why, decision.cached_tokens) == ("b", "prefix", 10 * BLOCK_TOKENS)
    shared = [policy.route(request(f"n{index}", tokens=520, blocks=2), 0.0) for index in range(6)]
    assert {decision.replica for decision in shared if decision} == {"a", "b"}


def test_stickiness_is_bounded():
    """An agent stays while its home is at most `sticky_penalty_s_max` slower, and leaves beyond that."""
    policy = make_policy()
    policy.observe(report("a"), 0.0)
    first = policy.route(request("agent"), 0.0)
    assert first is not None
    policy.observe(report("b"), 0.0)
    policy.observe(report("a", sequence=1, pending_tokens=1500), 0.0)
    stays = policy.route(request("agent"), 0.0)
    policy.observe(report("a", sequence=2, pending_tokens=60_000), 0.0)
    leaves = policy.route(request("agent"), 0.0)
    assert stays is not None and leaves is not None
    assert (stays.replica, leaves.replica, leaves.why) == ("a", "b", "home_busy")


def test_a_dead_replica_is_avoided_however_it_is_noticed():
    policy = make_policy()
    policy.observe(report("a"), 0.0)
    policy.observe(report("b"), 0.0)
    policy.lose("a")
    assert policy.alive("m", 0.1) == ["b"]
    policy.observe(report("a", sequence=1), 1.0)
    assert policy.alive("m", 1.0) == ["a", "b"]
    assert policy.alive("m", 5.5) == ["a"], "b has not reported for 5.5 s"
    assert policy.alive("m", 7.0) == []
    assert policy.route(request(), 7.0) is None
    assert policy.alive("other", 1.0) == []


def test_a_replica_that_was_only_out_of_reach_keeps_what_it_has():
    policy = make_policy()
    policy.observe(report("a", announced=BLOCKS[:4]), 0.0)
    policy.route(request("agent", request_id="r"), 0.0)
    policy.lose("a")
    assert policy.route(request("agent"), 0.1) is None
    assert policy.observe(report("a", sequence=1, full=False, active=["r"]), 0.5)
    decision = policy.route(request("agent", tokens=2000, blocks=4), 0.6)
    assert decision is not None
    assert (decision.why, decision.cached_tokens) == ("agent_home", 4 * BLOCK_TOKENS)


def test_an_agent_has_a_home_for_each_model():
    policy = make_policy()
    for name, model in (("a", "m"), ("b", "m"), ("x", "n")):
        policy.observe(report(name, model=model), 0.0)
    first = policy.route(request("agent"), 0.0)
    other = policy.route(RouteRequest("q", "n", "agent", [], 10), 0.0)
    again = policy.route(request("agent"), 0.0)
    assert first is not None and other is not None and again is not None
    assert (other.replica, again.replica, again.why) == ("x", first.replica, "agent_home")


def test_a_restarted_replica_holds_nothing():
    policy = make_policy()
    policy.observe(report("a", announced=BLOCKS), 0.0)
    policy.observe(report("a", incarnation="2", full=True), 1.0)
    decision = policy.route(request(tokens=3000, blocks=10), 1.0)
    assert decision is not None
    assert decision.cached_tokens == 0


def test_a_missed_report_asks_for_a_full_one_which_repairs_the_directory():
    policy = make_policy()
    assert policy.observe(report("a", announced=BLOCKS[:3]), 0.0)
    assert not policy.observe(report("a", sequence=2, full=False, announced=BLOCKS[5:6]), 1.0)
    assert policy.observe(report("a", sequence=3, announced=BLOCKS[2:4]), 2.0)
    assert policy.directory.held("a") == set(BLOCKS[2:4])
    fresh = make_policy()
    assert not fresh.observe(report("a", sequence=9, full=False), 0.0), "a new router asks everybody"


def test_load_counts_from_routing_until_its_end():
    policy = make_policy()
    policy.observe(report("a"), 0.0)

    def queue(now: float) -> float:
        decision = policy.route(request(request_id="probe", tokens=0), now)
        policy.release("a", "probe")
        assert decision is not None
        return decision.costs_s["a"]["queue"]

    for name in ("r1", "r2", "r3"):
        policy.route(request(request_id=name, tokens=1000), 0.0)
    assert queue(0.0) == pytest.approx(3.0)
    policy.observe(report("a", sequence=1, active=["r1"], pending_tokens=500), 0.5)
    assert queue(0.5) == pytest.approx(2.5), "the report counts what is left of r1"
    policy.release("a", "r2")
    assert queue(0.5) == pytest.approx(1.5)
    policy.observe(report("a", sequence=2), 1.0)
    assert queue(1.0) == pytest.approx(1.0), "r1 has ended, though its consumer never said so"
    policy.observe(report("a", sequence=3), RESERVATION_S + 0.1)
    assert queue(RESERVATION_S + 0.1) == 0.0, "r3 never arrived"


def test_an_old_report_does_not_drive_agents_away():
    """Eight agents come back at once, while the last report still shows their first turns in all eight places."""
    policy = make_policy()
    for name in ("a", "b"):
        policy.observe(report(name), 0.0)
    homes = {}
    for index in range(16):
        decision = policy.route(request(f"x{index}", request_id=f"first{index}"), 0.0)
        assert decision is not None
        homes[index] = decision.replica
    for name in ("a", "b"):
        active = [f"first{index}" for index in homes if homes[index] == name]
        policy.observe(report(name, sequence=1, running=8, active=active), 0.1)
    for index, home in homes.items():
        policy.release(home, f"first{index}")
        again = policy.route(request(f"x{index}", request_id=f"second{index}"), 0.2)
        assert again is not None and again.replica == home


def test_excluded_replicas_are_a_last_resort():
    policy = make_policy()
    policy.observe(report("a"), 0.0)
    policy.observe(report("b"), 0.0)
    for _ in range(4):
        decision = policy.route(request(exclude=["a"]), 0.0)
        assert decision is not None and decision.replica == "b"
    last = policy.route(request(exclude=["a", "b"]), 0.0)
    assert last is not None


def test_round_robin_ignores_everything_but_turns():
    policy = make_policy(rule="round_robin")
    policy.observe(report("a", announced=BLOCKS), 0.0)
    policy.observe(report("b"), 0.0)
    chosen = [policy.route(request("one", tokens=3000, blocks=10), 0.0) for _ in range(4)]
    assert [decision.replica for decision in chosen if decision] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("seed", range(10))
def test_directory_against_a_plain_model(seed: int):
    rng = random.Random(seed)
    directory, model = Directory(agents_max=5), {name: set() for name in "abc"}
    for _ in range(200):
        name, blocks = rng.choice("abc"), rng.sample(BLOCKS, 4)
        action = rng.random()
        if action < 0.5:
            directory.announce(name, blocks)
            model[name] |= set(blocks)
        elif action < 0.9:
            directory.retract(name, blocks)
            model[name] -= set(blocks)
        else:
            directory.forget(name)
            model[name] = set()
        directory.check()
        held = directory.held_tokens(BLOCKS, list("abc"))
        for replica, blocks_held in model.items():
            prefix = next((i for i, block in enumerate(BLOCKS) if block not in blocks_held), len(BLOCKS))
            assert held[replica] == prefix * BLOCK_TOKENS
