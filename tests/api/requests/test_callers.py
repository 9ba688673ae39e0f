"""The limits of one key, with a clock that the tests move."""

from __future__ import annotations

import pytest

from satchel.api.requests.callers import OWNING, Caller, Meter
from satchel.cluster.errors import InvalidRequest, RateLimited
from satchel.cluster.keys import KeyLimits


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def caller(clock: Clock, *, admin: bool = False, **limits: object) -> Caller:
    return Caller("ann", admin=admin, meter=Meter(KeyLimits(**limits), clock))  # type: ignore[arg-type]


def test_requests_are_let_in_as_fast_as_the_bucket_fills(clock: Clock):
    meter = Meter(KeyLimits(requests_per_minute=6), clock)
    for _ in range(6):
        meter.take_request()
    with pytest.raises(RateLimited, match="6 requests a minute") as refused:
        meter.take_request()
    assert refused.value.retry_after_s == pytest.approx(10)
    assert meter.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    clock.now += 9.9
    with pytest.raises(RateLimited):
        meter.take_request()
    clock.now += 0.2
    meter.take_request()
    clock.now += 3600
    assert meter.headers()["x-ratelimit-remaining-requests"] == "6", "an hour of rest is no hour's worth"
    assert meter.headers()["x-ratelimit-reset-requests"] == "0.000s"


def test_tokens_may_be_overdrawn_once_and_are_paid_back_first(clock: Clock):
    ann = caller(clock, tokens_per_minute=600)
    sequences = ann.admit(1, 1000)
    sequences.end_sequence(100)
    with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
        ann.admit(1, 1)
    assert refused.value.retry_after_s == pytest.approx(50.1)
    clock.now += 50
    with pytest.raises(RateLimited):
        ann.admit(1, 1)
    clock.now += 0.2
    ann.admit(1, 1)
    assert ann.meter is not None and ann.meter.headers()["x-ratelimit-remaining-tokens"] == "1"


def test_sequences_count_until_they_end_however_they_do(clock: Clock):
    ann = caller(clock, rows_max=3)
    two, one = ann.admit(2, 10), ann.admit(1, 10)
    with pytest.raises(RateLimited, match="3 concurrent answers"):
        ann.admit(1, 10)
    two.end_sequence(5)
    another = ann.admit(1, 10)
    one.close()
    one.close()
    one.end_sequence(3)
    more = ann.admit(1, 10)
    for sequences in (two, another, more):
        sequences.end_sequence(1)
    assert ann.meter is not None and ann.meter.sequences == 0
    with pytest.raises(InvalidRequest, match="asks for 4"):
        ann.admit(4, 10)


def test_what_is_refused_for_its_sequences_costs_no_tokens(clock: Clock):
    ann = caller(clock, rows_max=1, tokens_per_minute=100)
    ann.admit(1, 10)
    with pytest.raises(RateLimited):
        ann.admit(1, 10)
    assert ann.meter is not None and ann.meter.headers()["x-ratelimit-remaining-tokens"] == "90"


@pytest.mark.parametrize(
    ("limit", "admin", "asked", "given"),
    [
        (None, False, 0, 0),
        (None, False, -3, -3),
        (None, False, 1, None),
        (None, True, 7, 7),
        (5, False, 5, 5),
        (5, False, 6, None),
        (5, True, 6, None),
        (-2, False, 0, -2),
        (-2, False, -5, -5),
    ],
)
def test_priority_is_bounded(clock: Clock, limit: int | None, admin: bool, asked: int, given: int | None):
    ann = caller(clock, admin=admin, priority_max=limit)
    if given is None:
        with pytest.raises(InvalidRequest) as refused:
            ann.priority(asked)
        assert refused.value.param == "priority"
    else:
        assert ann.priority(asked) == given


def test_models_and_the_owner(clock: Clock):
    assert caller(clock).may_use("a")
    assert caller(clock, models=("a",)).may_use("a") and not caller(clock, models=("a",)).may_use("b")
    assert OWNING.admin and OWNING.tenant == "default" and OWNING.priority(2**60) == 2**60
    sequences = OWNING.admit(10**6, 10**9)
    sequences.end_sequence(1)
    sequences.close()
