"""With `prefer: energy` the replica that takes the fewest joules is chosen if it is soon enough and all know theirs."""

from __future__ import annotations

import pytest

from satchel.actors.router.policy import Policy
from satchel.actors.router.splitting import ANSWER_TOKENS
from tests.worlds.routing import BLOCKS, make_policy, report, route


def policy_of(frugal: dict[str, float], thirsty: dict[str, float], delay_s: float | None = 5.0) -> Policy:
    """Two replicas: one that is slow and takes little energy, and one that is fast."""
    policy = make_policy(energy_delay_s_max=delay_s)
    policy.members.observe(report("frugal", prefill_tokens_per_s=500.0, **frugal), 0.0)
    policy.members.observe(report("thirsty", prefill_tokens_per_s=4000.0, **thirsty), 0.0)
    return policy


LITTLE, MUCH = {"prefill_token_j": 0.1, "decode_token_j": 1.0}, {"prefill_token_j": 0.4, "decode_token_j": 3.0}


def test_the_fewest_joules_decide():
    decision = route(policy_of(LITTLE, MUCH), tokens=1000)
    assert (decision.replica, decision.why) == ("frugal", "least_energy")
    energy = dict(zip(decision.candidates, decision.energy_j, strict=True))
    assert energy == pytest.approx({"frugal": 100.0 + ANSWER_TOKENS * 1.0, "thirsty": 400.0 + ANSWER_TOKENS * 3.0})


@pytest.mark.parametrize(
    "unknown", [{}, {"prefill_token_j": 0.1}, {"decode_token_j": 1.0}, {**LITTLE, "decode_token_j": -1.0}]
)
def test_speed_decides_if_one_does_not_know_its_joules(unknown: dict[str, float]):
    decision = route(policy_of(unknown, MUCH), tokens=1000)
    assert (decision.replica, decision.energy_j) == ("thirsty", [])


def test_speed_decides_where_it_is_preferred():
    decision = route(policy_of(LITTLE, MUCH, delay_s=None), tokens=1000)
    assert (decision.replica, decision.energy_j) == ("thirsty", [])


def test_a_replica_that_is_much_later_is_not_chosen():
    assert route(policy_of(LITTLE, MUCH, delay_s=1.0), tokens=1000).replica == "thirsty"


def test_a_queue_of_frugal_work_overflows():
    policy = policy_of(LITTLE, MUCH, delay_s=5.0)
    taken = [route(policy, tokens=1000).replica for _ in range(10)]
    assert taken[0] == "frugal" and "thirsty" in taken


def test_kv_in_memory_is_energy_that_is_not_spent():
    policy = make_policy(energy_delay_s_max=5.0)
    for name, announced in (("with", BLOCKS[:3]), ("without", [])):
        policy.members.observe(report(name, announced=announced, **MUCH), 0.0)
    decision = route(policy, tokens=1000, blocks=3)
    energy = dict(zip(decision.candidates, decision.energy_j, strict=True))
    assert decision.replica == "with" and energy["without"] - energy["with"] == pytest.approx(768 * 0.4)


def test_even_ones_take_turns():
    policy = make_policy(energy_delay_s_max=5.0)
    for name in ("a", "b"):
        policy.members.observe(report(name, **MUCH), 0.0)
    assert {route(policy, tokens=100).replica for _ in range(2)} == {"a", "b"}
