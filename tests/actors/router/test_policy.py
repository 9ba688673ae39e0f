"""Where requests go, and which replicas there are. Every decision is followed by a check of the router's tables."""

from __future__ import annotations

from collections import Counter

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Decision, RouteRequest
from satchel.actors.router.policy import FIRST_PREFILL_S, Policy
from satchel.cluster.config.timing import USUAL
from tests.worlds.routing import BLOCKS, RATE, make_policy, probe, report, route


def test_an_agent_returns_to_its_replica_and_new_agents_spread():
    policy = make_policy("a", "b", "c")
    homes = {}
    for index in range(12):
        homes[index] = route(policy, f"agent{index}", request_id=str(index)).replica
        policy.members.release(homes[index], str(index))
    assert Counter(homes.values()) == {"a": 4, "b": 4, "c": 4}
    for index, home in homes.items():
        again = route(policy, f"agent{index}", 1.0)
        assert (again.replica, again.why) == (home, "agent_home")


def test_a_burst_does_not_herd():
    """Reservations count before any report does: 16 requests at once go evenly to two replicas."""
    policy = make_policy("a", "b")
    assert Counter(route(policy).replica for _ in range(16)) == {"a": 8, "b": 8}


def test_a_prefix_goes_where_its_blocks_are_and_one_that_all_hold_decides_nothing():
    policy = make_policy()
    policy.members.observe(report("a", announced=BLOCKS[:2]), 0.0)
    policy.members.observe(report("b", announced=BLOCKS[:10]), 0.0)
    decision = route(policy, tokens=10 * BLOCK_TOKENS + 5, blocks=10)
    assert (decision.replica, decision.why, decision.cached_tokens) == ("b", "prefix", 10 * BLOCK_TOKENS)
    policy = make_policy()
    for name in ("a", "b", "c"):
        policy.members.observe(report(name, announced=BLOCKS), 0.0)
    shared = [route(policy, tokens=19 * BLOCK_TOKENS + 100, blocks=19) for _ in range(9)]
    assert [decision.replica for decision in shared] == ["a", "b", "c"] * 3
    assert {decision.why for decision in shared[:1]} == {"least_recent"}


@pytest.mark.parametrize("own_tokens", [50, 300, 1000])
def test_a_prefix_that_one_replica_holds_does_not_draw_a_whole_burst(own_tokens: int):
    """64 requests at once with a prefix of 4,096 tokens: its holder gets more than the others, but every replica gets
    some, and nobody is sent to wait where another place would have answered sooner."""
    policy = make_policy(*(f"r{index}" for index in range(1, 8)))
    policy.members.observe(report("r0", announced=BLOCKS[:16]), 0.0)
    decisions = [route(policy, tokens=16 * BLOCK_TOKENS + own_tokens, blocks=16) for _ in range(64)]
    got = Counter(decision.replica for decision in decisions)
    assert len(got) == 8
    assert 8 < got["r0"] <= 24
    assert max(got[name] for name in got if name != "r0") <= 8
    for decision in decisions:
        first_token = [
            sum(terms)
            for terms in zip(*(decision.costs_s[term] for term in ("queue", "prefill", "decode")), strict=True)
        ]
        assert first_token[decision.candidates.index(decision.replica)] <= min(first_token) + 0.02


def test_new_agents_go_round_though_one_replica_holds_their_system_prompt():
    """It decides for a request without an agent; an agent comes back and pays for its prefix once."""
    chosen = []
    for agent in ("", "agent"):
        policy = make_policy("b", "c", "d")
        policy.members.observe(report("a", announced=BLOCKS[:8]), 0.0)
        for index in range(8):
            name = f"{agent}{index}" if agent else ""
            chosen.append(route(policy, name, tokens=8 * BLOCK_TOKENS + 50, blocks=8, request_id="q").replica)
            policy.members.release(chosen[-1], "q")
    assert "".join(chosen) == "aaaaaaaa" + "abcdabcd"
    policy = make_policy("b")
    policy.members.observe(report("z", announced=BLOCKS), 0.0)
    decision = route(policy, "forgotten", tokens=20 * BLOCK_TOKENS, blocks=20)
    assert (decision.replica, decision.why) == ("z", "prefix"), "a long conversation is found without its home"


def test_a_new_agent_does_not_wait_where_it_need_not():
    """Only its first prefill is no matter: of a replica with half a second of work and an idle one it gets the idle
    one, though the other is next in turn."""
    policy = make_policy("a", "b")
    route(policy, "first", request_id="q")
    policy.members.release("a", "q")
    policy.members.observe(report("b", sequence=1, full=False, active=["other"], pending_tokens=int(0.5 * RATE)), 0.0)
    assert route(policy, "second").replica == "a"


def test_the_last_token_of_a_prompt_is_always_computed():
    """A prompt of whole blocks that are all held still needs its last block, or the tokens before its last one."""
    policy = make_policy()
    policy.members.observe(report("a", announced=BLOCKS), 0.0)
    assert route(policy, tokens=4 * BLOCK_TOKENS, blocks=4).cached_tokens == 3 * BLOCK_TOKENS
    assert route(policy, tokens=4 * BLOCK_TOKENS + 1, blocks=4).cached_tokens == 4 * BLOCK_TOKENS
    policy = make_policy("a")
    route(policy, "agent", tokens=300, blocks=1)
    assert route(policy, "agent", tokens=300, blocks=1).cached_tokens == 299
    assert route(policy, tokens=0).cached_tokens == 0


def test_stickiness_is_bounded():
    """An agent leaves its home once another replica is sooner by more than `sticky_penalty_s_max`."""
    for queued_s, leaves in ((1.9, False), (2.2, True), (60.0, True)):
        policy = make_policy("a")
        route(policy, "agent", request_id="first")
        policy.members.release("a", "first")
        policy.members.observe(report("b"), 0.0)
        # A row beside it costs 0.064 s, and the 100 tokens of the agent 0.1 s elsewhere.
        policy.members.observe(report("a", sequence=1, pending_tokens=int(queued_s * RATE), active=["other"]), 0.0)
        decision = route(policy, "agent")
        assert (decision.replica, decision.why) == (("b", "home_busy") if leaves else ("a", "agent_home"))


def test_leaving_home_costs_what_is_computed_twice():
    """Beyond the penalty, a home that holds 2,560 tokens keeps its agent for as long as these take elsewhere, and once
    more where others wait: as long as they do, up to that."""
    for waits_s, queued_s, leaves in (
        (0.0, 4.4, False),
        (0.0, 4.7, True),
        (1.0, 6.4, False),
        (1.0, 6.7, True),
        (9.0, 15.9, False),
        (9.0, 16.3, True),
    ):
        policy = make_policy()
        policy.members.observe(report("a", announced=BLOCKS[:10]), 0.0)
        route(policy, "agent", request_id="first", tokens=10 * BLOCK_TOKENS + 1, blocks=10)
        policy.members.release("a", "first")
        # Each has one row, so decoding costs the same.
        policy.members.observe(report("b", pending_tokens=int(waits_s * RATE), active=["another"]), 0.0)
        busy = report("a", sequence=1, full=False, pending_tokens=int(queued_s * RATE), active=["other"])
        policy.members.observe(busy, 0.0)
        decision = route(policy, "agent", tokens=10 * BLOCK_TOKENS + 1, blocks=10)
        assert (decision.replica == "b") == leaves, (waits_s, queued_s)


def test_a_home_that_evicted_its_agent_keeps_it_by_the_penalty_only():
    """While the blocks of an agent's last turn are at its home, so is the open tail that no report mentions."""
    policy = make_policy("a")
    tokens = 10 * BLOCK_TOKENS + 50

    def turn(now: float) -> Decision:
        decision = route(policy, "agent", now, tokens=tokens, blocks=10, request_id="turn")
        policy.members.release(decision.replica, "turn")
        return decision

    assert [turn(0.0).cached_tokens, turn(0.0).cached_tokens] == [0, tokens - 1]
    policy.members.observe(report("b"), 0.5)
    policy.members.observe(report("a", sequence=1, full=False, announced=BLOCKS[:10]), 0.5)
    assert turn(0.5).cached_tokens == tokens - 1
    policy.members.observe(report("a", sequence=2, full=False, retracted=BLOCKS[2:10]), 1.0)
    evicted = turn(1.0)
    assert (evicted.replica, evicted.cached_tokens) == ("a", 2 * BLOCK_TOKENS)
    assert evicted.costs_s["away"] == [0.0, 2.0]


def test_what_was_routed_somewhere_is_expected_there():
    """The blocks of a request count as held at once; not for ever, nor after a restart, nor against a report."""

    def held(policy: Policy, now: float) -> int:
        request = RouteRequest("probe", "m", "", BLOCKS[:10], 3000)
        decision = policy.route(request, now)
        assert decision is not None
        policy.members.release(decision.replica, "probe")
        return decision.cached_tokens

    def routed() -> Policy:
        policy = make_policy("a")
        assert route(policy, tokens=10 * BLOCK_TOKENS + 50, blocks=10, request_id="r").cached_tokens == 0
        return policy

    policy = routed()
    policy.members.observe(report("a", sequence=1, full=True, active=["r"]), 0.5)
    assert held(policy, 0.5) == 10 * BLOCK_TOKENS
    assert policy.members.directory.held("a") == set(), "that is what was reported"
    policy.members.observe(report("a", sequence=2, full=False, retracted=BLOCKS[4:5]), 1.0)
    policy.members.check()
    assert held(policy, 1.0) == 4 * BLOCK_TOKENS
    policy = routed()
    policy.members.observe(report("a", incarnation="2"), 1.0)
    policy.members.check()
    assert held(policy, 1.0) == 0
    policy = routed()
    policy.members.observe(report("a", sequence=1, full=False, announced=BLOCKS[:3]), 1.0)
    policy.members.observe(report("a", sequence=2, full=False), 100.0)
    policy.members.check()
    assert held(policy, 100.0) == 3 * BLOCK_TOKENS


def test_beside_goes_where_the_same_prompt_is_being_computed():
    """It is taken however busy it is, and costs no second prefill; unless it is dead, excluded or of another model."""
    policy = make_policy("a", "b", "c")
    policy.members.observe(report("x", model="n"), 0.0)
    for index in range(9):
        decision = route(policy, tokens=5000, request_id=f"r{index}", beside="b")
        assert (decision.replica, decision.why, decision.cached_tokens) == ("b", "beside", 4999)
    assert probe(policy, "queue")["b"] == pytest.approx(9 / RATE + 2.0), "nine tokens, and two rows too many"
    assert route(policy, beside="b", exclude=["b"]).replica != "b"
    assert route(policy, beside="b", exclude=["a", "b", "c"]).why != "beside"
    assert route(policy, beside="x").replica != "x"
    assert route(policy, beside="nobody").why != "beside"
    policy.members.lose("b")
    assert route(policy, beside="b").replica != "b"


def test_excluded_replicas_are_a_last_resort():
    policy = make_policy("a", "b")
    for _ in range(4):
        assert route(policy, exclude=["a"]).replica == "b"
    assert route(policy, exclude=["a", "b"]).replica == "a"


def test_an_agent_has_a_home_for_each_model():
    policy = make_policy("a", "b")
    policy.members.observe(report("x", model="n"), 0.0)
    first = route(policy, "agent")
    assert route(policy, "agent", model="n").replica == "x"
    again = route(policy, "agent")
    assert (again.replica, again.why) == (first.replica, "agent_home")


@pytest.mark.parametrize(
    ("rule", "chosen", "why"),
    [
        ("satchel", "b", "agent_home"),
        ("prefix", "a", "prefix"),
        ("least_loaded", "b", "least_loaded"),
        ("round_robin", "c", "round_robin"),
    ],
)
def test_each_rule_adds_its_own_terms(rule: str, chosen: str, why: str):
    """`a` holds most and has a row, `b` is the agent's home and idle, `c` has a row and was never chosen."""
    policy = make_policy(rule=rule)
    busy = {"active": ["row"], "pending_tokens": 100}
    policy.members.observe(report("a", announced=BLOCKS[:10], **busy), 0.0)
    policy.members.observe(report("b", announced=BLOCKS[:4]), 0.0)
    policy.members.observe(report("c", active=["other"], pending_tokens=100), 0.0)
    for agent, name, others in (("", "a", ["b", "c"]), ("one", "b", ["a", "c"])):
        assert route(policy, agent, request_id="q", exclude=others).replica == name
        policy.members.release(name, "q")
    decision = route(policy, "one", tokens=2600, blocks=10)
    assert (decision.replica, decision.why) == (chosen, why)


def test_what_a_first_prefill_costs_more_than_elsewhere_decides_nothing_up_to_a_limit():
    """All of it under the other rules, and for a request without an agent."""
    policy = make_policy("b")
    policy.members.observe(report("a", announced=BLOCKS), 0.0)
    least_s, most_s = 0.1, 20 * BLOCK_TOKENS / RATE + 0.1
    for agent, there_s in (("new", most_s - FIRST_PREFILL_S), ("", most_s)):
        costs = route(policy, agent, tokens=20 * BLOCK_TOKENS + 100, blocks=20, exclude=["b"]).costs_s
        assert costs["prefill"] == pytest.approx([least_s]), "alone it is the least"
        decision = route(policy, agent and "newer", tokens=20 * BLOCK_TOKENS + 100, blocks=20)
        assert (decision.replica, decision.costs_s["prefill"]) == ("a", pytest.approx([least_s, there_s]))


def test_a_rule_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="least_loaded"):
        make_policy(rule="wishful")


# Who is there.


def test_a_dead_replica_is_avoided_however_it_is_noticed():
    policy = make_policy("a", "b")
    policy.members.lose("a")
    assert policy.members.alive("m", 0.1) == ["b"]
    policy.members.observe(report("a", sequence=1), 1.0)
    assert policy.members.alive("m", 1.0) == ["a", "b"]
    assert policy.members.alive("m", 5.5) == ["a"], "b has not reported for 5.5 s"
    assert policy.members.alive("m", 7.0) == []
    assert policy.route(RouteRequest("q", "m", "", [], 10), 7.0) is None
    assert policy.members.alive("other", 1.0) == []


def test_a_replica_that_was_only_out_of_reach_keeps_what_it_has():
    policy = make_policy()
    policy.members.observe(report("a", announced=BLOCKS[:4]), 0.0)
    route(policy, "agent", request_id="r")
    policy.members.lose("a")
    assert policy.route(RouteRequest("q", "m", "agent", [], 10), 0.1) is None
    assert policy.members.observe(report("a", sequence=1, full=False, active=["r"]), 0.5)
    decision = route(policy, "agent", 0.6, tokens=2000, blocks=4)
    assert (decision.why, decision.cached_tokens) == ("agent_home", 4 * BLOCK_TOKENS)


def test_a_restarted_replica_holds_nothing():
    """Neither blocks nor requests nor homes, whether or not its first report is a full one."""
    for full in (True, False):
        policy = make_policy()
        policy.members.observe(report("a", announced=BLOCKS), 0.0)
        route(policy, "agent", tokens=3000, blocks=10)
        assert policy.members.observe(report("a", incarnation="2", full=full, announced=BLOCKS[5:6]), 1.0) == full
        policy.members.check()
        assert policy.members.requests == {}
        assert policy.members.directory.held("a") == set(BLOCKS[5:6])
        decision = route(policy, "agent", 1.0, tokens=3000, blocks=10)
        assert (decision.cached_tokens, decision.why) == (0, "only_replica")


def test_a_late_report_of_a_process_that_was_replaced_says_nothing():
    """Unless its successor is silent: a router that is new itself may have heard the two in the wrong order."""
    policy = make_policy()
    policy.members.observe(report("a", incarnation="1", announced=BLOCKS[:2]), 0.0)
    policy.members.observe(report("a", incarnation="2", announced=BLOCKS[2:4]), 1.0)
    assert policy.members.observe(report("a", incarnation="1", sequence=1, announced=BLOCKS[5:7]), 2.0)
    assert policy.members.directory.held("a") == set(BLOCKS[2:4])
    policy.members.observe(report("a", incarnation="1", sequence=9, announced=BLOCKS[5:7]), 6.5)
    assert policy.members.directory.held("a") == set(BLOCKS[5:7])


def test_a_silent_replica_is_forgotten_in_the_end():
    policy = make_policy("b")
    policy.members.observe(report("a", announced=BLOCKS), 0.0)
    route(policy, "agent", request_id="r", tokens=3000, blocks=10)
    policy.members.observe(report("b", sequence=1), USUAL.gone_s)
    assert policy.members.requests == {"r": "a"} and policy.members.directory.blocks == 20
    policy.members.observe(report("b", sequence=2), USUAL.gone_s + 0.1)
    policy.members.check()
    assert policy.members.requests == {} and policy.members.directory.blocks == 0
    assert policy.members.directory.seat("agent", "m") is None
    assert not policy.members.observe(report("a", sequence=1, full=False), USUAL.gone_s + 1), "it is new again"


def test_a_replica_may_change_its_model():
    policy = make_policy("a", "b")
    policy.members.observe(report("a", incarnation="2", model="n"), 1.0)
    policy.members.check()
    assert (policy.members.alive("m", 1.0), policy.members.alive("n", 1.0)) == (["b"], ["a"])
