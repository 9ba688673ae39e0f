"""What is measured of links, and what nodes say of their memory: simulated, without a clock."""

from __future__ import annotations

import random

import pytest

from satchel.actors.kv_store.transfer.block_client import PullResult
from satchel.actors.kv_store.transfer.node_blocks import (
    LINK_BYTES_MIN,
    LINK_SLOW_BYTES_MIN,
    LINK_SLOW_S_MIN,
    link_rate,
)
from satchel.actors.kv_store.transfer.pull_loop import Stop
from satchel.actors.kv_store.transfer.rate import BURST_S, PIECE_BYTES, Rate
from tests.actors.router.test_router_nodes import cluster
from tests.worlds.routing import store


def pulled(nbytes: int, seconds: float, stop: Stop = Stop.COMPLETE) -> PullResult:
    return PullResult(stop, "", 1, [], 1, nbytes, seconds, 1, [])


def test_a_link_is_measured_by_pulls_that_say_something_of_it():
    """A small one is mostly its connection and its commit, however long these took; one that its deadline cut off had
    a slow link."""
    assert link_rate(pulled(LINK_BYTES_MIN, 0.01)) == LINK_BYTES_MIN / 0.01
    assert link_rate(pulled(LINK_BYTES_MIN - 1, LINK_SLOW_S_MIN / 2)) is None
    assert link_rate(pulled(LINK_SLOW_BYTES_MIN, LINK_SLOW_S_MIN)) == LINK_SLOW_BYTES_MIN / LINK_SLOW_S_MIN
    for seconds in (0.01, 0.2, 1.0, 30.0):
        for few in (1000, 300_000, LINK_SLOW_BYTES_MIN - 1):
            assert link_rate(pulled(few, seconds)) is link_rate(pulled(few, seconds, Stop.MISSING)) is None
    assert link_rate(pulled(1000, 2.0, Stop.DEADLINE)) == 500.0
    assert link_rate(pulled(1000, 0.5, Stop.DEADLINE)) is None
    assert link_rate(pulled(0, 5.0)) is None


@pytest.mark.parametrize("stop", [Stop.UNREACHABLE, Stop.CANCELLED, Stop.DISK])
def test_a_pull_that_broke_off_says_nothing_of_the_link(stop):
    assert link_rate(pulled(10**9, 10.0, stop)) is None


def test_a_link_that_became_slow_is_believed_at_once():
    """Else the router has KV pulled over it for a while that would be computed sooner. A faster one has to prove it."""
    policy = cluster(2)
    for sequence, rate in enumerate((1e9, 1e9, 12e6), 1):
        policy.members.observe_store(store("n0", sequence=sequence, full=False, links={"n1": rate}), 0.0)
    policy.members.check()
    assert policy.members.nodes.rates[0, 1] == 12e6
    policy.members.observe_store(store("n0", sequence=4, full=False, links={"n1": 1e9}), 0.0)
    assert policy.members.nodes.rates[0, 1] == pytest.approx(12e6 + 0.3 * (1e9 - 12e6))
    policy.members.observe_store(store("n0", sequence=5, full=False, links={"n1": 2e8}), 0.0)
    assert policy.members.nodes.rates[0, 1] > 2e8, "a little slower is not slow"


def test_nodes_say_how_much_memory_their_machines_have_left():
    policy = cluster(2)
    policy.members.observe_store(store("n1", sequence=1, full=False, memory_free_bytes=5), 0.0)
    assert [node["memory_free_bytes"] for node in policy.members.node_views(0.0)] == [None, 5]


def test_a_rate_is_kept_over_time_however_it_is_asked():
    """Over ten seconds at most the rate and one burst, by several senders."""
    rate, rng, sent = Rate(1000.0, 0.0), random.Random(1), 0
    ready = [0.0] * 3
    while (now := min(ready)) < 10.0:
        nbytes = rng.choice([1, 30, 200])
        sent += nbytes
        ready[ready.index(now)] = now + rate.wait_s(nbytes, now)
    assert 9_900 <= sent <= 10_000 + 1000 * BURST_S + 3 * 200
    with pytest.raises(ValueError):
        Rate(0.0, now)


def test_a_rate_says_how_long_to_wait_and_keeps_no_more_than_a_burst():
    rate = Rate(1000.0, 0.0)
    assert rate.wait_s(50, 0.0) == pytest.approx(0.05)
    assert rate.wait_s(50, 0.04) == pytest.approx(0.06), "after what others send"
    assert rate.wait_s(0, 0.2) == 0.0
    assert rate.wait_s(20, 50.0) == 0.0 and rate.wait_s(20, 50.0) == pytest.approx(0.02)
    assert rate.wait_s(1, 49.0) == pytest.approx(1.021), "a clock that went back gives nothing"
    assert Rate(1000.0, 0.0).piece_bytes == PIECE_BYTES and Rate(1e9, 0.0).piece_bytes == 1e9 * BURST_S
