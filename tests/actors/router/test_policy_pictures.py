"""Pictures in the choice of a replica: a request goes where what encoders made of them is."""

from __future__ import annotations

from satchel.actors.protocol.router_messages import Decision
from satchel.actors.router.costs import ENCODE_SETUP_S, RESTORE_SETUP_S
from satchel.actors.router.policy import Policy
from tests.worlds.routing import BLOCKS, make_policy, report, route, store

ONE, TWO = b"1" * 32, b"2" * 32
ENCODE_TOKEN_S = 0.001


def policy_of(**announced: list[bytes]) -> Policy:
    """Replicas by name, each on a node of its own, with what they have in memory."""
    policy = make_policy()
    for name, entries in announced.items():
        policy.members.observe(report(name, node=f"node-{name}", announced=entries, encode_token_s=ENCODE_TOKEN_S), 0.0)
    return policy


def encode_s(decision: Decision) -> dict[str, float]:
    return dict(zip(decision.candidates, decision.costs_s["encode"], strict=True))


def test_a_request_goes_where_its_pictures_are_known_and_who_must_encode_pays():
    policy = policy_of(a=[], b=[ONE], c=[ONE, TWO])
    decision = route(policy, tokens=400, pictures=[(ONE, 100, 64, True), (TWO, 300, 128, True)])
    both_s, second_s = 192 * ENCODE_TOKEN_S + 2 * ENCODE_SETUP_S, 128 * ENCODE_TOKEN_S + ENCODE_SETUP_S
    assert decision.replica == "c"
    assert {name: round(seconds, 6) for name, seconds in encode_s(decision).items()} == {
        "a": round(both_s, 6),
        "b": round(second_s, 6),
        "c": 0.0,
    }


def test_a_picture_whose_kv_is_had_need_not_be_encoded():
    policy = policy_of(a=BLOCKS[:1], b=[])
    decision = route(policy, tokens=600, blocks=1, pictures=[(ONE, 256, 64, True), (TWO, 257, 1, True)])
    assert round(encode_s(decision)["a"], 6) == round(ENCODE_TOKEN_S + ENCODE_SETUP_S, 6)
    assert encode_s(decision)["b"] > encode_s(decision)["a"]


def test_features_on_the_disk_of_a_node_that_lives_are_read_back():
    policy = policy_of(a=[], b=[])
    policy.members.observe_store(store("node-b", announced=[ONE]), 0.0)
    assert encode_s(route(policy, now=1.0, pictures=[(ONE, 90, 64, True)])) == {
        "a": 64 * ENCODE_TOKEN_S + ENCODE_SETUP_S,
        "b": RESTORE_SETUP_S,
    }
    for name in "ab":
        policy.members.observe(
            report(name, node=f"node-{name}", sequence=1, full=False, encode_token_s=ENCODE_TOKEN_S), 20.0
        )
    assert encode_s(route(policy, now=20.0, pictures=[(TWO, 90, 64, True)]))["b"] > 2 * RESTORE_SETUP_S
    assert encode_s(route(policy, now=20.0, pictures=[(ONE, 90, 64, True)]))["b"] > 2 * RESTORE_SETUP_S


def test_an_agent_that_nobody_knows_goes_to_a_picture_that_is_known_and_stays():
    """And not where its memory would begin for want of anything better."""
    policy = policy_of(a=[], b=[ONE])
    first = route(policy, "new", near="node-a", pictures=[(ONE, 90, 64, True)], request_id="1")
    assert first.replica == "b"
    policy.members.release("b", "1")
    assert route(policy, "new", near="node-a", request_id="2").why == "agent_home"
    assert route(policy, "newer", near="node-a", pictures=[(TWO, 90, 64, True)]).replica == "a"


def test_a_known_agent_stays_at_home_whoever_knows_the_picture():
    policy = policy_of(a=[], b=[ONE])
    policy.members.observe_store(store("node-a", agents=[("old", 1, True)]), 0.0)
    decision = route(policy, "old", near="node-a", pictures=[(ONE, 90, 64, True)])
    assert (decision.replica, decision.why) == ("a", "agent_home")


def test_whoever_comes_next_with_a_picture_waits_for_the_one_that_encodes_it():
    """A burst about one new picture is not spread over all replicas, which would all encode it."""
    policy = policy_of(a=[], b=[], c=[])
    chosen = {route(policy, request_id=str(number), pictures=[(ONE, 90, 1000, True)]).replica for number in range(4)}
    assert len(chosen) == 1


def test_a_picture_without_pixels_is_left_to_whoever_has_it_however_busy():
    """Nobody else can encode it: the agent would hear that its picture is lost, though it is not."""
    policy = policy_of(a=[ONE], b=[])
    policy.members.observe_store(store("node-a", agents=[("old", 1, True)]), 0.0)
    for number in range(12):
        asked = route(policy, "old", near="node-a", pictures=[(ONE, 90, 64, False)], request_id=str(number))
        assert asked.replica == "a"
    assert route(policy, "old", near="node-a", pictures=[(ONE, 90, 64, True)]).replica == "b", "with pixels it moves"


def test_features_are_expected_where_a_picture_is_encoded_and_nowhere_else():
    """Who has the KV behind a picture does not encode it, so the next prompt with it finds nothing there."""
    policy = policy_of(a=BLOCKS[:1], b=[])
    first = route(policy, request_id="1", tokens=600, blocks=1, pictures=[(ONE, 256, 64, True), (TWO, 400, 32, True)])
    assert first.replica == "a"
    one, two = (route(policy, tokens=90, pictures=[(picture, 80, 64, True)]) for picture in (ONE, TWO))
    assert encode_s(one)["a"] > 0.0 and encode_s(two)["a"] == 0.0
