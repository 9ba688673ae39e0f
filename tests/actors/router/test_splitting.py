"""When a prompt is prefilled on one node and decoded on another, and that both nodes' loads say so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from satchel.actors.protocol.router_messages import Decision, RouteRequest
from satchel.actors.router import splitting
from satchel.actors.router.costs import RESTORE_SETUP_S
from satchel.actors.router.policy import Policy
from satchel.actors.router.splitting import (
    ANSWER_TOKENS,
    GAIN_S_MIN,
    HAND_ON_S,
    LAST_TOKENS,
    WAIT_FACTOR,
    WAIT_S_MIN,
    Candidates,
    Rules,
    Split,
    best_split,
)
from satchel.actors.rpc.codec import decode, encode

from ...worlds.routing import make_policy, report, route, store

RULES = Rules(2048, 0.25)
KV_BYTES = 36_864.0
TOKENS = 4000
BLOCKS = [bytes([3, index]) * 16 for index in range(TOKENS // 256)]
LINK = 1e9


def candidates(count: int, **columns: Sequence[float]) -> Candidates:
    """Replicas on nodes of their own that prefill 1000 tokens a second, and decode 50."""
    values: dict[str, np.ndarray] = {each.name: np.zeros(count) for each in fields(Candidates)}
    values |= {name: np.zeros(count, np.int64) for name in ("model", "held", "near", "hot")}
    values |= {"node": np.arange(count), "stores": np.ones(count, bool), "kv_bytes": np.full(count, KV_BYTES)}
    values |= {"prefill_s": np.full(count, TOKENS / 1000), "step_s": np.full(count, 0.02)}
    given = {name: np.array(column, values[name].dtype) for name, column in columns.items()}
    return Candidates(**{**values, "own_s": given.get("prefill_s", values["prefill_s"]), **given})


def split_of(
    them: Candidates, rules: Rules = RULES, *, link: float = LINK, busy_s: list[float] | None = None
) -> Split | None:
    count = len(them.node)
    return best_split(TOKENS, them, np.full((count, count), link), np.array(busy_s or [0.0] * count), rules)


FAST_AND_FLUENT = {"prefill_s": [1.0, 8.0], "step_s": [0.1, 0.01]}
"""One that prefills fast and decodes slowly, and the other way round."""


def test_one_prefills_fast_and_the_other_decodes_fast():
    split = split_of(candidates(2, **FAST_AND_FLUENT))
    assert split is not None and (split.prefill, split.decode) == (0, 1)
    costs = split.costs_s
    assert costs["prefill"] == 1.0 and costs["pace"] == pytest.approx(ANSWER_TOKENS * 0.01)
    assert costs["travel"] == pytest.approx(LAST_TOKENS * KV_BYTES / LINK + HAND_ON_S)
    assert costs["restore"] == RESTORE_SETUP_S and costs["queue"] == costs["away"] == costs["decode"] == 0.0
    terms = [seconds for term, seconds in costs.items() if term not in ("total", "alone")]
    assert costs["total"] == pytest.approx(sum(terms))
    assert costs["alone"] == pytest.approx(8.0 + ANSWER_TOKENS * 0.01)
    assert split.wire_s == pytest.approx((TOKENS - 1) * KV_BYTES / LINK)
    assert split.wait_s == pytest.approx(WAIT_FACTOR * (costs["prefill"] + costs["travel"]) + WAIT_S_MIN)


def test_equal_nodes_never_split_whatever_their_queues():
    rng = random.Random(1)
    for _ in range(200):
        queue_s = [rng.choice([0.0, rng.random() * 5])] * 3
        assert split_of(candidates(3, queue_s=queue_s), Rules(1, 0.0)) is None


def test_the_gain_must_be_clear():
    """More than half a second, and more than the share of what the best one alone takes."""
    pace_s = ANSWER_TOKENS * 0.02
    handing_s = LAST_TOKENS * KV_BYTES / LINK + HAND_ON_S + RESTORE_SETUP_S

    def with_decode(seconds: float, rules: Rules) -> Split | None:
        """The first loses `seconds` by decoding; the second would take for ever to prefill."""
        return split_of(candidates(2, prefill_s=[4.0, 1e6], other_s=[seconds, 0.0]), rules)

    assert with_decode(handing_s + GAIN_S_MIN - 0.01, Rules(1, 0.0)) is None
    assert with_decode(handing_s + GAIN_S_MIN + 0.01, Rules(1, 0.0)) is not None
    alone_s = (4.0 + pace_s + handing_s) / (1.0 - 0.25) - 4.0 - pace_s
    assert with_decode(alone_s - 0.01, RULES) is None
    assert with_decode(alone_s + 0.01, RULES) is not None


def test_short_prompts_and_those_that_are_known_are_not_split():
    assert split_of(candidates(2, **FAST_AND_FLUENT), Rules(TOKENS, 0.25)) is not None
    assert split_of(candidates(2, **FAST_AND_FLUENT), Rules(TOKENS + 1, 0.25)) is None
    known = {**FAST_AND_FLUENT, "held": [0.0, TOKENS - 2047], "prefill_s": [1.0, 0.9]}
    assert split_of(candidates(2, **known)) is None


def test_nodes_that_cannot_keep_or_give_kv_and_those_that_compute_otherwise_are_left_out():
    for other in ({"stores": [1, 0]}, {"stores": [0, 1]}, {"node": [0, -1]}, {"node": [1, 1]}, {"model": [0, 1]}):
        assert split_of(candidates(2, **FAST_AND_FLUENT, **other)) is None


def test_a_slow_or_busy_link_is_counted_and_blocks_travel_while_others_are_computed():
    them = candidates(2, **FAST_AND_FLUENT)

    def travel_s(link: float, busy_s: float = 0.0) -> float:
        split = split_of(them, Rules(1, 0.0), link=link, busy_s=[busy_s, 9.0])
        assert split is not None
        return split.costs_s["travel"] - HAND_ON_S

    nbytes = (TOKENS - 1) * KV_BYTES
    assert travel_s(nbytes) == pytest.approx(LAST_TOKENS / (TOKENS - 1)), "as fast as the prefill of a second"
    assert travel_s(nbytes / 3) == pytest.approx(2.0), "three seconds, of which one is the prefill"
    assert travel_s(nbytes, busy_s=1.5) == pytest.approx(1.5 + LAST_TOKENS / (TOKENS - 1))
    assert split_of(them, link=nbytes / 30) is None, "then each is better alone"


def test_what_the_decoding_node_has_already_does_not_travel():
    held = {"prefill_s": [1.0, 5.0], "step_s": [0.1, 0.01], "near": [0, 1024], "hot": [0, 1000]}
    split = split_of(candidates(2, **held, restore_token_s=[1.0, 1e-4]))
    assert split is not None and split.wire_s == pytest.approx((TOKENS - 1 - 1024) * KV_BYTES / LINK)
    assert split.costs_s["restore"] == pytest.approx((TOKENS - 1 - 768) * 1e-4 + RESTORE_SETUP_S)


def test_what_a_replica_would_pull_for_itself_is_computed_for_another():
    """It counts for that replica alone."""
    pulling = {"prefill_s": [0.5, 8.0], "own_s": [1.0, 9.0], "step_s": [0.1, 0.01]}
    split = split_of(candidates(2, **pulling))
    assert split is not None and split.costs_s["prefill"] == 1.0
    assert split.costs_s["alone"] == pytest.approx(8.0 + ANSWER_TOKENS * 0.01)


def test_the_decoding_nodes_queue_passes_meanwhile():
    waits = split_of(candidates(2, **FAST_AND_FLUENT, queue_s=[0.5, 1.0]))
    assert waits is not None and waits.costs_s["queue"] == 0.0 and waits.costs_s["prefill"] == 1.5
    waits = split_of(candidates(2, **FAST_AND_FLUENT, queue_s=[0.0, 2.0]))
    assert waits is not None
    assert waits.costs_s["prefill"] + waits.costs_s["travel"] + waits.costs_s["queue"] == pytest.approx(2.0)


def test_the_best_pair_is_chosen_among_all():
    """Against every pair, each reckoned alone."""
    rng = random.Random(2)
    found = 0
    for _ in range(600):
        count = rng.randint(2, 6)

        def some(most: float, count: int = count) -> list[float]:
            return [rng.random() * most for _ in range(count)]

        columns = {name: some(3.0) for name in ("queue_s", "prefill_s", "other_s", "decode_s", "away_s")}
        columns |= {"step_s": some(0.05), "restore_token_s": some(1e-4), "node": [rng.randrange(4) for _ in some(1)]}
        them = candidates(count, **columns)
        rates = np.array([[rng.choice([1e8, 1e9, 1e10]) for _ in range(count)] for _ in range(count)])
        rates = np.resize(rates, (4, 4))
        busy_s = np.array([rng.random() for _ in range(4)])
        split = best_split(TOKENS, them, rates, busy_s, Rules(1, 0.0))
        totals = []
        for pair in itertools.permutations(range(count), 2):
            picked = Candidates(**{each.name: getattr(them, each.name)[[*pair]] for each in fields(Candidates)})
            # The second one alone must look dear, and the first one slow to answer: then only this pair is left.
            dear = replace(picked, other_s=np.full(2, 1e6), away_s=picked.away_s + np.array([1e5, 0.0]))
            one = best_split(TOKENS, dear, rates, busy_s, Rules(1, 0.0))
            if one is not None:
                assert (one.prefill, one.decode) == (0, 1)
                totals.append(one.costs_s["total"])
        if split is not None:
            found += 1
            assert split.costs_s["total"] == pytest.approx(min(totals))
            assert split.costs_s["alone"] - split.costs_s["total"] >= GAIN_S_MIN
    assert found > 20


def test_of_very_many_replicas_the_likeliest_are_compared(monkeypatch):
    monkeypatch.setattr(splitting, "COMPARED", 3)
    prefill_s = [9.0 - index / 10 for index in range(20)] + [0.5] + [9.0] * 20
    step_s = [0.1] * 30 + [0.001] + [0.1] * 10
    split = split_of(candidates(41, prefill_s=prefill_s, step_s=step_s))
    assert split is not None and (split.prefill, split.decode) == (20, 30)


# In the policy.


def world(rules: Rules | None = RULES, **fields: object) -> Policy:
    """A studio that prefills fast, and an air that decodes fast."""
    policy = make_policy(split=rules, **fields)
    for node in ("studio", "air"):
        policy.members.observe_store(store(node, links={"air": LINK, "studio": LINK}), 0.0)
    speeds = {"studio": (4000.0, 0.1), "air": (500.0, 0.01)}
    for node, (rate, step_s) in speeds.items():
        each = report(
            f"r-{node}",
            node=node,
            prefill_tokens_per_s=rate,
            decode_token_s=step_s,
            kv_bytes_per_token=KV_BYTES,
            moves_kv=True,
        )
        policy.members.observe(each, 0.0)
    return policy


def ask(policy: Policy, name: str = "q", **fields: object) -> Decision:
    values = {"agent": "t/alice", "block_ids": BLOCKS, "splits": True, **fields}
    request = RouteRequest(name, "m", prompt_tokens=TOKENS, **values)  # type: ignore[arg-type]
    decision = policy.route(request, 0.0)
    policy.members.check()
    assert decision is not None
    return decision


def test_a_decision_names_both_replicas_and_why():
    policy = world()
    decision = ask(policy)
    assert decision.why == "prefill on studio, decode on air"
    assert (decision.replica, decision.node) == ("r-air", "air")
    assert (decision.prefill_on, decision.pull_from, decision.pull_tokens) == ("r-studio", "studio", TOKENS - 1)
    assert decision.wait_s > 1.0 and decision.split_costs_s["total"] < decision.split_costs_s["alone"]
    assert decision.candidates == ["r-air", "r-studio"] and decision.cached_tokens == 0
    assert decode(Decision, encode(decision)) == decision


def test_both_replicas_are_loaded_until_each_is_released():
    policy = world()
    decision = ask(policy)
    members = policy.members
    assert members.requests == {"q": "r-air", "q/prefill": "r-studio"}
    columns = members.columns_of("m")
    queue_s = dict(zip(columns.names, columns.queue_s, strict=True))
    assert queue_s == {"r-air": 0.0, "r-studio": pytest.approx(TOKENS / 4000.0)}
    again = ask(policy, "other", agent="t/bob", block_ids=[])
    assert again.prefill_on and again.split_costs_s["prefill"] == pytest.approx(2 * TOKENS / 4000.0)
    members.release(decision.prefill_on, "q/prefill")
    members.release(decision.replica, "q")
    members.release("r-studio", "other/prefill")
    members.release(again.replica, "other")
    assert members.requests == {}
    members.check()


def test_a_request_that_is_routed_again_loads_neither_of_the_former_two():
    policy = world()
    ask(policy)
    again = ask(policy, splits=False)
    assert not again.prefill_on and policy.members.requests == {"q": again.replica}


def test_the_blocks_are_expected_on_both_nodes():
    policy = world()
    ask(policy)
    later = route(policy, "t/alice", request_id="later", tokens=100)
    assert later.replica == "r-air", "the agent's home is where its answer was decoded"
    policy.members.settle()
    runs = policy.members.directory.runs(BLOCKS)
    assert {runs[policy.members.directory.index(name)] for name in ("r-air", "r-studio")} == {len(BLOCKS)}


@pytest.mark.parametrize(
    "change",
    [
        {"rules": None},
        {"rules": Rules(TOKENS + 1, 0.25)},
        {"rules": Rules(1, 0.95)},
        {"rule": "prefix"},
        {"rule": "least_loaded"},
    ],
)
def test_it_can_be_turned_off_and_has_limits(change):
    assert not ask(world(**change)).prefill_on


def test_it_is_not_for_requests_that_say_so_nor_beside_others():
    assert not ask(world(), splits=False).prefill_on
    assert not ask(world(), beside="r-air").prefill_on
    assert not ask(world(), exclude=["r-studio"]).prefill_on


def test_a_full_disk_a_silent_store_and_a_drained_node_take_no_part():
    for unfit in ({"disk_full": True}, {"draining": True}):
        policy = world()
        policy.members.observe_store(store("studio", sequence=1, **unfit), 0.0)
        assert not ask(policy).prefill_on
    policy = world()
    policy.members.nodes.lose("air", 1.0)
    assert not ask(policy).prefill_on
    policy = world()
    policy.members.observe(
        report("r-air", node="air", sequence=1, prefill_tokens_per_s=500.0, decode_token_s=0.01), 0.0
    )
    assert not ask(policy).prefill_on, "a model whose KV stays where it is"


def test_the_home_of_an_agent_counts_where_the_answer_is_decoded():
    """The home prefills slowly and decodes as fast as another one: its agent is decoded at home."""
    policy = world()
    policy.members.observe_store(store("mini", links={"studio": LINK, "air": LINK}), 0.0)
    mini = report(
        "r-mini",
        node="mini",
        prefill_tokens_per_s=400.0,
        decode_token_s=0.011,
        kv_bytes_per_token=KV_BYTES,
        moves_kv=True,
    )
    policy.members.observe(mini, 0.0)
    policy.members.observe_store(store("mini", sequence=1, agents=[("t/alice", 1, True)], full=False), 0.0)
    decision = ask(policy)
    assert decision.why == "prefill on studio, decode on mini" and decision.split_costs_s["away"] == 0.0


def test_decisions_replay():
    """The same reports and requests give the same decisions, so a log of them is enough to find out why."""

    def decided() -> list[bytes]:
        rng, policy, said = random.Random(5), world(), []
        for number in range(40):
            decision = ask(policy, f"q{number}", splits=rng.random() < 0.7)
            said.append(encode(decision))
            if rng.random() < 0.5:
                for replica, row in ((decision.prefill_on, f"q{number}/prefill"), (decision.replica, f"q{number}")):
                    policy.members.release(replica, row)
        return said

    first = decided()
    assert first == decided() and len(set(first)) > 3
