"""What is measured of links, and what nodes say of their memory: simulated, without a clock."""

from __future__ import annotations

import pytest

from satchel.actors.kv_store.transfer.block_client import PullResult
from satchel.actors.kv_store.transfer.node_blocks import LINK_BYTES_MIN, LINK_S_MIN, link_rate
from satchel.actors.kv_store.transfer.pull_loop import Stop
from satchel.actors.kv_store.transfer.rate import TokenBucket
from tests.actors.router.test_router_nodes import cluster
from tests.worlds.routing import store


def pulled(nbytes: int, seconds: float, stop: Stop = Stop.COMPLETE) -> PullResult:
    return PullResult(stop, "", 1, [], 1, nbytes, seconds, 1, [])


def test_a_link_is_measured_by_pulls_that_say_something_of_it():
    """A small and quick one is mostly its connection and its commit; a small one that took long had a slow link."""
    assert link_rate(pulled(LINK_BYTES_MIN, 0.01)) == LINK_BYTES_MIN / 0.01
    assert link_rate(pulled(LINK_BYTES_MIN - 1, LINK_S_MIN / 2)) is None
    assert link_rate(pulled(1000, LINK_S_MIN)) == 1000 / LINK_S_MIN
    assert link_rate(pulled(1000, 2.0, Stop.DEADLINE)) == 500.0
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


def test_a_bucket_keeps_its_rate_and_grants_pieces():
    """Over ten seconds at most the rate and one burst, however it is asked."""
    bucket = TokenBucket(1000.0, 0.0, burst_s=0.1, piece=10)
    now, taken = 0.0, 0
    while now < 10.0:
        grant = bucket.take(10_000, now)
        assert grant.count == 0 or grant.count >= 10
        taken += grant.count
        now += grant.wait_s or 0.0001
    assert 9_900 <= taken <= 10_100
    while bucket.take(50, now).count:
        pass
    assert bucket.take(3, now + 0.005).count == 3, "less than a piece, where no more is wanted"
    with pytest.raises(ValueError):
        TokenBucket(0.0, now)


def test_a_bucket_says_how_long_to_wait_and_keeps_no_more_than_a_burst():
    bucket = TokenBucket(1000.0, 0.0, burst_s=0.1, piece=10)
    assert bucket.take(50, 0.0).wait_s == pytest.approx(0.01)
    assert bucket.take(50, 0.004).wait_s == pytest.approx(0.006)
    assert bucket.take(50, 0.03) == (30, 0.0) and bucket.take(3, 0.03).wait_s == pytest.approx(0.003)
    assert bucket.take(10_000, 50.0).count == 100
    assert bucket.take(1, 49.0).count == 0, "a clock that went back gives nothing"
    assert TokenBucket(1000.0, 0.0, burst_s=0.001, piece=10).take(10_000, 9.0).count == 10, "a piece at least"
