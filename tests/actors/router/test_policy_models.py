"""Replicas of one model with several ids, as nodes that compute differently have them: KV is of use to its own id."""

from __future__ import annotations

import random

import pytest

from satchel.actors.model_files.identity.model_identity import adapted_id
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Chain, Decision, RouteRequest
from satchel.actors.router.costs import RESTORE_SETUP_S
from satchel.actors.router.policy import Policy
from tests.worlds.routing import BLOCKS, held_tokens, make_policy, report, route, store

CPU, GPU = b"c" * 32, b"g" * 32
NAMES = {CPU: BLOCKS[:10], GPU: [bytes([100 + index]) * 32 for index in range(10)]}
"""What ten blocks are called under each id."""

TOKENS = 10 * BLOCK_TOKENS + 5


def ask(
    policy: Policy, agent: str = "", *, own: bytes = CPU, also: tuple[bytes, ...] = (CPU, GPU), **fields: object
) -> Decision:
    request = RouteRequest(
        f"r{random.random()}", "m", agent, NAMES[own], TOKENS, model_id=own,
        others=[Chain(other, NAMES[other]) for other in also if other != own], **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    decision = policy.route(request, 0.0)
    policy.members.check()
    policy.members.release(decision.replica if decision else "", request.request_id)
    assert decision is not None
    return decision


def unequal(**held: list[bytes]) -> Policy:
    """Replicas `cpu` and `gpu` on nodes `mac0` and `mac1`, with what each has in memory."""
    policy = make_policy()
    for name, model_id, node in (("cpu", CPU, "mac0"), ("gpu", GPU, "mac1")):
        policy.members.observe(report(name, model_id=model_id, node=node, announced=held.get(name, [])), 0.0)
    return policy


@pytest.mark.parametrize("own", [CPU, GPU])
@pytest.mark.parametrize("holder", ["cpu", "gpu"])
def test_a_request_goes_where_its_prefix_is_under_the_holders_own_id(own: bytes, holder: str):
    """Whichever id the endpoint has for the model: it is no matter of who was asked first."""
    policy = unequal(**{holder: NAMES[CPU if holder == "cpu" else GPU]})
    decision = ask(policy, own=own)
    assert (decision.replica, decision.why, decision.cached_tokens) == (holder, "prefix", 10 * BLOCK_TOKENS)
    assert decision.model_id == (CPU if holder == "cpu" else GPU)
    assert decision.model_ids == [CPU, GPU]


def test_blocks_of_another_id_count_for_nothing():
    """Though the names are those of the request: they are in memory there by mistake, or by another model's hand."""
    policy = unequal(gpu=NAMES[CPU])
    decision = ask(policy)
    assert decision.cached_tokens == 0
    assert decision.costs_s["prefill"][0] == decision.costs_s["prefill"][1] > 0


@pytest.mark.parametrize("holder", ["cpu", "gpu"])
def test_a_known_agent_returns_to_where_its_kv_is_of_use(holder: str):
    """Its words are at home on `mac0`, and may be said anywhere."""
    policy = unequal(**{holder: NAMES[CPU if holder == "cpu" else GPU]})
    policy.members.observe_store(store("mac0", agents=[("t/ann", 1, True)]), 0.0)
    decisions = [ask(policy, "t/ann", own=own) for own in (CPU, GPU, CPU)]
    assert [decision.replica for decision in decisions] == [holder] * 3
    assert all(decision.cached_tokens >= 10 * BLOCK_TOKENS for decision in decisions)


def test_disks_and_pulls_count_for_their_own_id():
    """A node's disk may hold copies of both; each replica restores and pulls what it can use."""
    policy = unequal()
    for node, blocks in (("mac0", NAMES[GPU]), ("mac1", []), ("mac2", NAMES[CPU])):
        policy.members.observe_store(store(node, announced=blocks, links={"mac0": 1e9, "mac1": 1e9, "mac2": 1e9}), 0.0)
    decision = ask(policy)
    terms = {
        name: {term: seconds[place] for term, seconds in decision.costs_s.items()}
        for place, name in enumerate(decision.candidates)
    }
    # The GPU's KV is on the disk beside the CPU, where it is of no use: both have theirs from elsewhere.
    assert {name: each["pull"] > 0 and each["prefill"] < 0.1 for name, each in terms.items()} == {
        "cpu": True,
        "gpu": True,
    }
    assert {"cpu": "mac2", "gpu": "mac0"}[decision.replica] == decision.pull_from
    away = ask(policy, exclude=[decision.replica])
    assert {"cpu": "mac2", "gpu": "mac0"}[away.replica] == away.pull_from != decision.pull_from
    policy = unequal()
    policy.members.observe_store(store("mac1", announced=NAMES[GPU]), 0.0)
    near = ask(policy)
    assert (near.replica, near.pull_from) == ("gpu", "")
    assert near.costs_s["restore"][near.candidates.index("gpu")] > RESTORE_SETUP_S


def test_what_is_coming_is_expected_under_the_chosen_id():
    """So a burst with one prefix is computed once in each place, and nothing is expected where it never comes."""
    policy = unequal()
    first = ask(policy, own=CPU, exclude=["cpu"])
    assert first.replica == "gpu"
    policy.members.settle()
    assert held_tokens(policy.members.directory, NAMES[GPU], ["gpu"]) == {"gpu": 10 * BLOCK_TOKENS}
    assert held_tokens(policy.members.directory, NAMES[CPU], ["gpu", "cpu"]) == {"gpu": 0, "cpu": 0}
    assert ask(policy).replica == "gpu"


def test_pictures_count_under_their_own_ids_too():
    """Features follow from the model as KV does."""
    policy = unequal(gpu=[b"picture of the gpu"])
    shown: list[tuple[bytes, int, int, bool]] = [(b"picture of the cpu", 400, 300, True)]
    others = [Chain(GPU, [], [(b"picture of the gpu", 400, 300, True)])]
    decision = route(policy, "new", tokens=450, pictures=shown, model_id=CPU, others=others)
    encode_s = dict(zip(decision.candidates, decision.costs_s["encode"], strict=True))
    assert decision.replica == "gpu" and encode_s["gpu"] == 0.0 < encode_s["cpu"]


def test_an_id_that_the_endpoint_does_not_know_yet_is_told_and_has_nothing():
    """A node that has just joined gets requests all the same."""
    policy = unequal(gpu=NAMES[GPU])
    decision = ask(policy, also=(), exclude=["cpu"])
    assert (decision.replica, decision.model_id, decision.cached_tokens) == ("gpu", GPU, 0)
    assert decision.model_ids == [CPU, GPU]
    policy.members.settle()
    assert held_tokens(policy.members.directory, NAMES[CPU], ["gpu"]) == {"gpu": 0}


def test_a_replica_that_comes_back_with_another_id_has_nothing_of_the_old_one():
    """As after an update: it is another process."""
    policy = unequal(gpu=NAMES[GPU])
    policy.members.observe(report("gpu", model_id=CPU, node="mac1", incarnation="2"), 0.0)
    decision = ask(policy)
    assert decision.model_ids == [CPU] and decision.cached_tokens == 0


def test_a_replica_whose_self_test_ends_is_asked_with_its_new_id():
    """The process stays the same, but from now on it computes with other parts."""
    policy = unequal(gpu=[])
    assert ask(policy).model_ids == [CPU, GPU]
    policy.members.observe(report("gpu", model_id=b"new", node="mac1", sequence=2, full=True), 0.0)
    decision = ask(policy, exclude=["cpu"])
    assert (decision.replica, decision.model_id) == ("gpu", b"new")
    assert decision.model_ids == sorted([CPU, b"new"])


@pytest.mark.parametrize("holder", ["cpu", "gpu"])
def test_a_request_with_an_adapter_goes_where_the_adapters_kv_is(holder: str):
    """KV of the model without it, which has other names, counts for nothing. Agents are at home with each adapter where
    they had their last turn with it."""
    adapter = b"a" * 32
    ids = {CPU: adapted_id(CPU, adapter), GPU: adapted_id(GPU, adapter)}
    own = {
        CPU: [bytes([50 + index]) * 32 for index in range(10)],
        GPU: [bytes([150 + index]) * 32 for index in range(10)],
    }
    other = "gpu" if holder == "cpu" else "cpu"
    of = {"cpu": CPU, "gpu": GPU}
    policy = unequal(**{holder: own[of[holder]], other: NAMES[of[other]]})

    def adapted(agent: str = "") -> Decision:
        request = RouteRequest(
            f"r{random.random()}",
            "m",
            agent,
            own[CPU],
            TOKENS,
            model_id=ids[CPU],
            others=[Chain(ids[GPU], own[GPU])],
            adapter=adapter,
        )
        decision = policy.route(request, 0.0)
        assert decision is not None
        policy.members.release(decision.replica, request.request_id)
        return decision

    decision = adapted()
    assert (decision.replica, decision.why, decision.cached_tokens) == (holder, "prefix", 10 * BLOCK_TOKENS)
    assert decision.model_id == ids[of[holder]] and decision.model_ids == [ids[CPU], ids[GPU]]
    assert ask(policy).replica == other
    plain = ask(policy, "t/ann").replica
    first = adapted("t/ann")
    assert first.why != "agent_home", "its turn without the adapter was another conversation's KV"
    again = adapted("t/ann")
    assert (again.replica, again.why) == (first.replica, "agent_home")
    assert ask(policy, "t/ann").replica == plain
