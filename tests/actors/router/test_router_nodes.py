"""What nodes, their disks, links and agents do to decisions. Every decision is followed by a check of the tables."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Decision, RouteRequest
from satchel.actors.router.directory import Disk
from satchel.actors.router.nodes import ASSUMED_LINK_BYTES_PER_S, LINK_RETRY_S, NodeTable
from satchel.actors.router.places import Whereabouts
from satchel.actors.router.policy import CANDIDATES_SHOWN, Policy
from satchel.cluster.config.timing import USUAL
from tests.worlds.routing import BLOCKS, RATE, make_policy, probe, report, route, store

GIGABYTE = 1e9
FAST = {"kv_bytes_per_token": 36_864, "restore_bytes_per_s": 3e9}
TOKENS = 16 * BLOCK_TOKENS + 50


def cluster(nodes: int = 2, *, disks: dict[str, int] | None = None, rate: float = 0.0, **fields: object) -> Policy:
    """A replica `r0` on `n0` and so on; `disks` have that many of BLOCKS, `rate` is that of every link."""
    policy = make_policy(**fields)
    for index in range(nodes):
        node = f"n{index}"
        links = {f"n{other}": rate for other in range(nodes) if rate and other != index}
        policy.members.observe(report(f"r{index}", node=node, **FAST), 0.0)
        policy.members.observe_store(store(node, announced=BLOCKS[: (disks or {}).get(node, 0)], links=links), 0.0)
    return policy


def only(
    policy: Policy, replica: str, tokens: int = TOKENS, blocks: int = 16, now: float = 0.0, agent: str = ""
) -> Decision:
    """A decision for which there is no other replica, and which leaves no load."""
    others = [name for name in policy.members.alive("m", now) if name != replica]
    decision = route(policy, agent, now, request_id="only", tokens=tokens, blocks=blocks, exclude=others)
    policy.members.release(replica, "only")
    policy.members.settle()
    policy.members.directory.expire(replica, float("inf"))
    assert decision.replica == replica
    return decision


def test_a_disk_saves_the_prefill_and_costs_the_reading():
    """What the node's disk has is restored, after what is in memory, at the replica's own rates."""
    policy = cluster(disks={"n0": 16})
    policy.members.observe(report("r0", sequence=1, full=False, node="n0", announced=BLOCKS[:4], **FAST), 0.0)
    decision = only(policy, "r0")
    assert (decision.cached_tokens, decision.pull_from, decision.node) == (16 * BLOCK_TOKENS, "", "n0")
    assert decision.costs_s["restore"] == [pytest.approx(12 * BLOCK_TOKENS * 36_864 / 3e9 + 0.005)]
    assert decision.costs_s["prefill"] == [pytest.approx(50 / RATE)]
    slow = {**FAST, "restore_bytes_per_s": 1e6}
    policy.members.observe(report("r0", sequence=2, full=False, node="n0", **slow), 0.0)
    decision = only(policy, "r0")
    assert (decision.cached_tokens, decision.costs_s["restore"]) == (4 * BLOCK_TOKENS, [0.0]), "computing is sooner"


@pytest.mark.parametrize(("bits_per_s", "pulled"), [(10e9, 16), (100e6, 0)])
def test_a_fast_link_is_used_and_a_slow_one_is_not(bits_per_s: float, pulled: int):
    """An agent of 4K tokens at 400 tokens a second: 10 s of prefill, 0.12 s at 10 Gb/s, 12 s at 100 Mb/s."""
    policy = cluster(disks={"n1": 16}, rate=bits_per_s / 8)
    policy.members.observe(report("r0", sequence=1, node="n0", prefill_tokens_per_s=400.0, **FAST), 0.0)
    decision = only(policy, "r0")
    assert (decision.pull_from, decision.pull_tokens) == (("n1", pulled * BLOCK_TOKENS) if pulled else ("", 0))
    assert decision.cached_tokens == pulled * BLOCK_TOKENS
    assert (decision.costs_s["pull"][0] > 0.0) == (decision.costs_s["restore"][0] > 0.0) == bool(pulled)


def test_memory_then_disk_then_the_best_peer():
    """Each for the part that the one before it lacks."""
    policy = cluster(4, disks={"n0": 6, "n1": 9, "n2": 16, "n3": 16}, rate=GIGABYTE)
    policy.members.observe_store(store("n0", sequence=1, full=False, links={"n2": GIGABYTE, "n3": 2.5 * GIGABYTE}), 0.0)
    policy.members.observe(report("r0", sequence=1, node="n0", announced=BLOCKS[:4], **FAST), 0.0)
    decision = only(policy, "r0")
    assert (decision.pull_from, decision.pull_tokens) == ("n3", 10 * BLOCK_TOKENS)
    assert decision.cached_tokens == 16 * BLOCK_TOKENS
    moved, read = 10 * BLOCK_TOKENS * 36_864, 12 * BLOCK_TOKENS * 36_864
    rate = GIGABYTE + 0.3 * 1.5 * GIGABYTE
    assert decision.costs_s["pull"] == [pytest.approx(moved / rate + 0.03)]
    assert decision.costs_s["restore"] == [pytest.approx(read / 3e9 + 0.005)]


def test_pulls_from_one_node_wait_for_each_other():
    """Eight at once from two equal nodes: both are used, and each next pull costs more until computing is sooner."""
    policy = cluster(3, disks={"n1": 16, "n2": 16}, rate=0.1 * GIGABYTE)
    decisions = [only(policy, "r0") for _ in range(8)]
    assert {decision.pull_from for decision in decisions[:4]} == {"n1", "n2"}
    waits = [decision.costs_s["pull"][0] for decision in decisions if decision.pull_from]
    assert len(waits) < 8 and waits == sorted(waits) and waits[-1] > 1.9 * waits[0]
    assert decisions[-1].pull_from == "" and decisions[-1].cached_tokens == 0
    assert only(policy, "r0", now=4.0).pull_from, "later they have left"


def test_what_is_pulled_from_a_node_adds_up():
    """Each pull begins when the one before it has left, or now."""
    nodes, left = NodeTable(), []
    for seconds, now in ((3.0, 1.0), (2.0, 1.5), (0.5, 6.0), (1.0, 20.0)):
        nodes.reserve(1, seconds, now)
        left.append(float(nodes.busy_until[1]))
    assert left == [4.0, 6.0, 6.5, 21.0] and nodes.busy_until[0] < 0.0


def test_what_is_restored_or_pulled_is_expected_in_memory():
    """The next one with the same prefix finds it there, and pulls nothing again."""
    for disks in ({"n0": 16}, {"n1": 16}):
        policy = cluster(disks=disks, rate=GIGABYTE)
        first = route(policy, tokens=TOKENS, blocks=16, exclude=["r1"])
        assert (first.cached_tokens, bool(first.pull_from)) == (16 * BLOCK_TOKENS, "n1" in disks)
        second = route(policy, tokens=TOKENS, blocks=16, exclude=["r1"])
        assert (second.cached_tokens, second.pull_from) == (16 * BLOCK_TOKENS, "")
        assert second.costs_s["restore"] == second.costs_s["pull"] == [0.0]


def test_a_prefix_that_every_disk_has_decides_nothing():
    policy = cluster(3, disks={"n0": 16, "n1": 16, "n2": 16})
    chosen = [route(policy, tokens=TOKENS, blocks=16) for _ in range(6)]
    assert [decision.replica for decision in chosen] == ["r0", "r1", "r2"] * 2
    assert {decision.pull_from for decision in chosen} == {""}


def test_an_agent_whose_home_is_busy_takes_its_memory_along():
    """Away from home what can be pulled is not computed twice: the agent leaves for the sticky penalty alone."""
    for rate, leaves in ((1.25 * GIGABYTE, True), (1e6, False)):
        policy = cluster(disks={"n0": 16}, rate=rate)
        policy.members.observe(report("r0", sequence=1, node="n0", announced=BLOCKS[:16], **FAST), 0.0)
        first = route(policy, "t/agent", request_id="first", tokens=TOKENS, blocks=16)
        policy.members.release("r0", "first")
        assert first.replica == "r0"
        busy = report("r0", sequence=2, full=False, node="n0", pending_tokens=3000, active=["other"], **FAST)
        policy.members.observe(busy, 0.0)
        decision = route(policy, "t/agent", tokens=TOKENS, blocks=16)
        expected = ("r1", "home_busy", "n0") if leaves else ("r0", "agent_home", "")
        assert (decision.replica, decision.why, decision.pull_from) == expected


def test_only_rule_satchel_pulls():
    for rule in ("prefix", "least_loaded", "round_robin"):
        policy = cluster(disks={"n1": 16}, rate=GIGABYTE, rule=rule)
        assert only(policy, "r0").pull_from == ""
        assert only(policy, "r1").cached_tokens == 16 * BLOCK_TOKENS, "a replica restores under every rule"


@pytest.mark.parametrize("reason", ["silent", "lost", "full", "no node", "no blocks"])
def test_who_cannot_pull_or_be_pulled_from_computes(reason: str):
    policy = cluster(disks={"n1": 0 if reason == "no blocks" else 16}, rate=GIGABYTE)
    now = 0.0
    if reason == "silent":
        now = 5.5
        policy.members.observe(report("r0", sequence=1, full=False, node="n0", **FAST), now)
    elif reason == "lost":
        policy.members.lose_node("n1", 0.0)
    elif reason == "full":
        policy.members.observe_store(store("n0", sequence=1, full=False, disk_full=True), now)
    elif reason == "no node":
        policy.members.observe(report("r0", sequence=1, full=False, **FAST), now)
    decision = only(policy, "r0", now=now)
    assert (decision.pull_from, decision.cached_tokens) == ("", 0)


def test_a_disk_whose_store_is_silent_is_not_read():
    policy = cluster(disks={"n0": 16})
    policy.members.observe(report("r0", sequence=1, full=False, node="n0", **FAST), 5.5)
    assert only(policy, "r0", now=5.5).cached_tokens == 0


# Agents.


def test_an_agent_that_only_its_store_knows_goes_home():
    """A router that is new, or whose replica was restarted, finds the node; several replicas there are all home."""
    policy = cluster(3)
    policy.members.observe(report("s1", node="n1", **FAST), 0.0)
    policy.members.observe_store(store("n1", sequence=1, full=False, agents=[["t/agent", 3, True]]), 0.0)
    policy.members.observe_store(store("n2", sequence=1, full=False, agents=[["t/agent", 3, False]]), 0.0)
    decision = route(policy, "t/agent")
    assert (decision.node, decision.why) == ("n1", "agent_home")
    assert dict(zip(decision.candidates, decision.costs_s["away"], strict=True)) == {
        "r0": 2.0, "r1": 0.0, "r2": 2.0, "s1": 0.0,
    }  # fmt: skip
    assert route(policy, "t/agent").replica == decision.replica, "from now on it is one of them"
    other = {"r1": "s1", "s1": "r1"}[decision.replica]
    policy.members.lose(decision.replica)
    again = route(policy, "t/agent")
    assert (again.replica, again.why) == (other, "agent_home"), "the node is home still"


def test_an_agent_follows_its_memory():
    """Moved or adopted elsewhere, its last turn's replica is home no more; a turn that the router sent away is no
    move, and reports of an older epoch are none either."""
    policy = cluster(3)
    policy.members.observe_store(store("n0", sequence=1, full=False, agents=[["t/agent", 1, True]]), 0.0)
    assert route(policy, "t/agent", request_id="a").replica == "r0"
    away = route(policy, "t/agent", request_id="b", exclude=["r0"])
    assert away.why == "home_lost" and away.replica != "r0"
    assert route(policy, "t/agent", request_id="c").replica == away.replica
    policy.members.observe_store(store("n2", sequence=1, full=False, agents=[["t/agent", 2, True]]), 0.0)
    policy.members.observe_store(store("n0", sequence=2, full=False, agents=[["t/agent", 1, True]]), 0.0)
    for name in "abc":
        policy.members.release(policy.members.requests[name], name)
    decision = route(policy, "t/agent")
    assert (decision.replica, decision.why) == ("r2", "agent_home")
    assert policy.members.where("t/agent") == Whereabouts("n2", 2, ("n0",))


def test_a_node_that_is_drained_keeps_its_agents_and_gets_no_others():
    policy = cluster(3)
    policy.members.observe_store(store("n0", sequence=1, full=False, agents=[["t/lives", 1, True]], draining=True), 0.0)
    assert {route(policy, f"t/new{index}").node for index in range(6)} == {"n1", "n2"}
    assert {route(policy).node for _ in range(6)} == {"n1", "n2"}
    assert route(policy, "t/lives", tokens=10).replica == "r0"
    assert policy.members.places.agents_on("n0") == ["t/lives"]
    for node in ("n1", "n2"):
        policy.members.observe_store(store(node, sequence=1, full=False, draining=True), 0.0)
    assert route(policy, "t/another").replica, "all are drained: somebody answers"
    policy.members.observe_store(store("n0", sequence=2, full=False), 0.0)
    assert {route(policy, f"t/newer{index}").node for index in range(3)} == {"n0"}


# Nodes that come and go.


def test_a_lost_node_is_avoided_until_new_processes_speak_or_it_goes_on_speaking():
    """A report that was on its way when the node was seen dead does not bring it back."""
    policy = cluster(disks={"n1": 16}, rate=GIGABYTE)
    policy.members.lose_node("n1", 0.0)
    policy.members.observe(report("r1", sequence=1, full=False, node="n1", **FAST), 1.0)
    policy.members.observe_store(store("n1", sequence=1, full=False), 1.0)
    policy.members.check()
    assert policy.members.alive("m", 1.0) == ["r0"] and policy.members.alive_nodes(1.0) == ["n0"]
    assert only(policy, "r0", now=1.0).pull_from == ""
    policy.members.observe_store(store("n1", incarnation="2", announced=BLOCKS[:16]), 2.0)
    assert policy.members.alive("m", 2.0) == ["r0"] and policy.members.alive_nodes(2.0) == ["n0", "n1"]
    assert policy.members.observe(report("r1", sequence=2, full=False, node="n1", **FAST), 5.1), (
        "it was only out of reach"
    )
    assert policy.members.alive("m", 5.0) == ["r0", "r1"]
    policy.members.lose_node("n9", 5.0)


def test_a_late_report_of_a_store_that_was_replaced_says_nothing():
    policy = cluster()
    assert policy.members.observe_store(store("n0", incarnation="2", announced=BLOCKS[:2]), 1.0)
    assert policy.members.observe_store(store("n0", incarnation="1", sequence=7, announced=BLOCKS[5:]), 2.0)
    policy.members.check()
    assert policy.members.directory.held(Disk("n0")) == set(BLOCKS[:2])
    policy.members.lose_node("n0", 3.0)
    policy.members.observe_store(store("n0", incarnation="1", sequence=8, announced=BLOCKS[5:]), 7.9)
    assert policy.members.directory.held(Disk("n0")) == set(BLOCKS[:2]) and policy.members.alive_nodes(7.9) == []


def test_a_store_that_missed_a_report_is_asked_for_all():
    policy = cluster()
    assert not policy.members.observe_store(store("n0", sequence=2, full=False, announced=BLOCKS[:1]), 0.0)
    assert policy.members.observe_store(store("n0", sequence=3, announced=BLOCKS[1:3], agents=[["t/a", 1, True]]), 0.0)
    assert policy.members.directory.held(Disk("n0")) == set(BLOCKS[1:3])
    assert policy.members.observe_store(store("n0", sequence=4), 0.0) and policy.members.where("t/a") is None
    assert not policy.members.observe_store(store("new", sequence=4, full=False), 0.0)


def test_a_report_without_a_node_is_refused():
    policy = make_policy("a")
    with pytest.raises(ValueError, match="no node"):
        policy.members.observe_store(store("", announced=BLOCKS), 0.0)
    policy.members.check()
    assert policy.members.alive_nodes(0.0) == [] and only(policy, "a").cached_tokens == 0


def test_a_silent_node_is_forgotten_in_the_end():
    policy = cluster(disks={"n1": 16}, rate=GIGABYTE)
    policy.members.observe_store(store("n1", sequence=1, full=False, agents=[["t/a", 1, True]]), 0.0)
    for now in (USUAL.gone_s, USUAL.gone_s + 0.1):
        policy.members.observe_store(store("n0", sequence=int(now * 10), full=False), now)
        policy.members.check()
        gone = now > USUAL.gone_s
        assert policy.members.directory.blocks == (0 if gone else 16)
        assert (policy.members.where("t/a") is None) == gone
        assert [node["name"] for node in policy.members.node_views(now)] == (["n0"] if gone else ["n0", "n1"])
    assert policy.members.node_views(USUAL.gone_s + 0.1)[0]["links"] == {}, "what was measured of it goes with it"


def test_more_nodes_than_there_was_room_for():
    policy = cluster(30, disks={"n29": 16}, rate=GIGABYTE)
    assert only(policy, "r3").pull_from == "n29"


# Links, and what is known of replicas.


def test_links_are_averages_of_what_was_measured_and_count_both_ways():
    policy = cluster(3)
    policy.members.observe_store(store("n0", sequence=1, full=False, links={"n1": 1e9, "n2": -1.0, "n0": 5.0}), 0.0)
    policy.members.observe_store(store("n0", sequence=2, full=False, links={"n1": 2e9, "n2": float("nan")}), 0.0)
    policy.members.check()
    nodes = policy.members.nodes
    assert nodes.rates[0, 1] == nodes.rates[1, 0] == pytest.approx(1.3e9)
    assert nodes.rates[0, 2] == ASSUMED_LINK_BYTES_PER_S
    policy.members.observe_store(store("n1", sequence=1, full=False, links={"n0": 5e8, "late": 7e8}), 0.0)
    assert (nodes.rates[0, 1], nodes.rates[1, 0]) == (pytest.approx(1.3e9), 5e8)
    policy.members.observe_store(store("late"), 0.0)
    assert nodes.rates[nodes.index("late"), 1] == 7e8, "it was measured before it spoke"
    assert policy.members.node_views(0.0)[2]["links"] == {"late": 7e8, "n0": 5e8}


def test_a_link_that_was_slow_once_is_tried_again():
    policy = cluster()
    policy.members.observe_store(store("n0", sequence=1, full=False, links={"n1": 1e6}), 0.0)
    assert policy.members.nodes.rates[0, 1] == 1e6
    policy.members.observe_store(store("n0", sequence=2, full=False), LINK_RETRY_S + 1)
    policy.members.check()
    assert policy.members.nodes.rates[0, 1] == ASSUMED_LINK_BYTES_PER_S


def test_a_measured_decode_step_and_the_room_in_memory_count():
    policy = make_policy("a")
    policy.members.observe(report("b", decode_token_s=0.1, active=["row"]), 0.0)
    assert probe(policy, "decode") == {"a": 0.0, "b": pytest.approx(0.3)}
    policy.members.observe(report("c", kv_bytes_per_token=1000, free_bytes=99_000), 0.0)
    assert only(policy, "c", tokens=99).costs_s["queue"] == [0.0]
    assert only(policy, "c", tokens=100).costs_s["queue"] == [1.0]


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_figures_that_cannot_be_are_not_believed(nonsense: float):
    policy = cluster(disks={"n0": 16, "n1": 16})
    fields = dict.fromkeys(
        ("prefill_tokens_per_s", "decode_token_s", "restore_bytes_per_s", "kv_bytes_per_token"), nonsense
    )
    policy.members.observe(report("r0", sequence=1, node="n0", pending_tokens=-5, active=["x"], **fields), 0.0)
    decision = only(policy, "r0")
    assert all(0.0 <= seconds[0] < 60.0 for seconds in decision.costs_s.values())


def test_of_very_many_candidates_the_cheapest_are_told():
    policy = make_policy(*(f"r{index:03d}" for index in range(200)))
    policy.members.observe(report("r150", sequence=1, announced=BLOCKS), 0.0)
    decision = policy.route(RouteRequest("q", "m", "", BLOCKS[:16], TOKENS), 0.0)
    assert decision is not None and decision.replica == "r150"
    assert len(decision.candidates) == CANDIDATES_SHOWN and decision.candidates == sorted(decision.candidates)
    chosen = decision.candidates.index("r150")
    assert decision.costs_s["total"][chosen] == min(decision.costs_s["total"])
    assert {len(seconds) for seconds in decision.costs_s.values()} == {CANDIDATES_SHOWN}


# Memory that moves to where its agent is answered.


class Living:
    """An agent at home on `n0` of a few nodes, whose memory follows every decision that says so."""

    def __init__(self, nodes: int = 3, **fields: Any) -> None:
        self.policy = cluster(nodes, **fields)
        self.names = [f"n{index}" for index in range(nodes)]
        self.sequences = Counter[str]()
        self.home, self.epoch, self.moves, self.turns = "n0", 1, 0, 0
        self.tell()

    def tell(self, now: float = 0.0, **fields: Any) -> None:
        """All stores report: the home, and a copy elsewhere."""
        copy = self.names[self.names.index(self.home) - 1]
        for name in self.names:
            self.sequences[name] += 1
            held = [("t/x", self.epoch, name == self.home)] if name in (self.home, copy) else []
            said = store(name, sequence=self.sequences[name], agents=held, **fields.get(name, {}))
            self.policy.members.observe_store(said, now)

    def turn(self, *busy: str, model: str = "m", **fields: Any) -> Decision:
        """A turn while these replicas have much to do; the memory follows before the next one."""
        self.turns += 1
        for name in busy:
            others = [other for other in self.policy.members.alive("m", 0.0) if other != name]
            route(self.policy, request_id=f"load of {name}", tokens=100_000, exclude=others)
        decision = route(self.policy, "t/x", request_id=f"turn{self.turns}", model=model, **fields)
        self.policy.members.release(decision.replica, f"turn{self.turns}")
        for name in busy:
            self.policy.members.release(name, f"load of {name}")
        if decision.move_to and decision.move_to != self.home:
            self.home, self.epoch, self.moves = decision.move_to, self.epoch + 1, self.moves + 1
            self.tell()
        return decision


def test_an_agent_moves_to_where_it_is_answered_twice():
    """And stays there. Once is no reason, as long as it comes home again."""
    life = Living()
    assert [life.turn().node for _ in range(3)] == ["n0"] * 3 and life.moves == 0
    away = life.turn("r0")
    assert away.node != "n0" and not away.move_to
    again = life.turn("r0")
    assert again.node == again.move_to == away.node == life.home
    assert {life.turn().node for _ in range(5)} == {life.home} and life.moves == 1


def test_further_choices_and_attempts_are_no_turns():
    life = Living()
    away = life.turn("r0")
    assert not life.turn(beside=away.replica).move_to
    assert not life.turn(exclude=["r0"]).move_to
    assert life.turn("r0").move_to == away.node


@pytest.mark.parametrize("seed", range(20))
def test_an_agent_moves_once_in_two_turns_at_the_most(seed: int):
    """Whatever load there is; and where the load stays, it moves once at the most."""
    rng = random.Random(seed)
    life = Living(4)
    for _ in range(60):
        life.turn(*(name for name in ("r0", "r1", "r2", "r3") if rng.random() < 0.5))
    assert 0 < life.moves <= life.turns / 2
    for _ in range(2):
        life.turn("r0", "r1")
    settled = life.moves
    for _ in range(20):
        assert life.turn("r0", "r1").node in ("n2", "n3")
    assert life.moves - settled <= 1


def test_an_agent_that_asks_two_models_in_turn_does_not_swing():
    """Each has its replica on a node of its own; the memory stays with one of them."""
    life = Living(1)
    life.names.append("n1")
    life.policy.members.observe(report("other", model="other", node="n1", **FAST), 0.0)
    life.tell()
    for _ in range(10):
        assert (life.turn().node, life.turn(model="other").node) == ("n0", "n1")
    assert life.moves == 0
    assert [life.turn(model="other").move_to for _ in range(2)] == ["n1", ""], "it asks only that one now"


def test_a_home_that_is_drained_lets_its_agents_go():
    """To a copy; without one, to where fewest agents are. It answers meanwhile, and a drained node gets nobody."""
    life = Living()
    life.turn()
    life.tell(n0={"draining": True})
    decision = life.turn()
    assert (decision.node, decision.move_to) == ("n0", "n2")
    life.tell(n2={"draining": True})
    assert life.turn().move_to == "n1"
    alone = cluster(3)
    claims = [("t/x", 1, True)]
    alone.members.observe_store(store("n0", sequence=1, agents=claims, draining=True), 0.0)
    alone.members.observe_store(store("n1", sequence=1, agents=[("t/y", 1, True)]), 0.0)
    assert route(alone, "t/x").move_to == "n2"
    for name in ("n1", "n2"):
        alone.members.observe_store(store(name, sequence=2, draining=True), 0.0)
    assert route(alone, "t/x").move_to == ""


@pytest.mark.parametrize("lost", ["home", "there"])
def test_nobody_moves_from_or_to_a_node_that_is_lost(lost: str):
    """A copy adopts the agents of a lost home."""
    life = Living()
    away = life.turn("r0").node
    node = "n0" if lost == "home" else away
    life.policy.members.nodes.lose(node, 10.0)
    assert life.turn("r0").move_to == ""


def test_the_other_rules_move_nobody():
    life = Living(2, rule="round_robin")
    assert not any(life.turn().move_to for _ in range(10))


def test_the_costs_that_are_told_have_those_of_the_chosen_one():
    """Also where it was not chosen for its costs, but to be beside another row."""
    policy = make_policy()
    for index in range(3 * CANDIDATES_SHOWN):
        policy.members.observe(report(f"r{index:03}", active=["stranger"], pending_tokens=1000 * index), 0.0)
    dearest = f"r{3 * CANDIDATES_SHOWN - 1}"
    decision = route(policy, beside=dearest)
    assert (decision.replica, decision.why) == (dearest, "beside")
    assert decision.candidates == [*(f"r{index:03}" for index in range(CANDIDATES_SHOWN - 1)), dearest]
    assert decision.costs_s["total"][-1] == max(decision.costs_s["total"])
