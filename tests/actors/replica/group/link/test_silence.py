"""A machine that cannot be reached is lost soon, a process that stands still late, nobody by a pause of one's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from satchel.actors.replica.group.link.silence import Silence

EVERY_S, SILENT_S, STALLED_S = 0.2, 2.0, 20.0


def lost_after(
    unacknowledged: Callable[[float], int | None], heard: Callable[[float], bool] = lambda now: False
) -> tuple[float, str]:
    """Looks at a peer ten times as often as heartbeats are sent. Returns when it is lost, and why."""
    silence = Silence(EVERY_S, SILENT_S, STALLED_S, 0.0)
    for look in range(1, 2000):
        now = look * EVERY_S / 10
        if not look % 10:
            silence.sent(unacknowledged(now))
        if heard(now):
            silence.heard()
        if why := silence.lost(now, unacknowledged(now)):
            return now, why
    return 0.0, ""


def test_a_machine_that_acknowledges_nothing_is_lost_within_the_short_limit():
    when, why = lost_after(lambda now: 50 + int(now / EVERY_S))
    assert SILENT_S < when <= SILENT_S + EVERY_S and why == "cannot be reached for 2 s"


def test_a_process_whose_machine_acknowledges_is_lost_within_the_long_limit():
    """Also if acknowledgements always come after the next heartbeat was sent."""
    for unacknowledged in (lambda now: 0, lambda now: 50 if now / EVERY_S % 1 > 0.5 else 100):
        when, why = lost_after(unacknowledged)
        assert STALLED_S < when <= STALLED_S + EVERY_S and why == "says nothing for 20 s"


def test_a_process_that_is_heard_is_not_lost():
    """Whatever its machine acknowledges, and however seldom it is heard within the limit."""
    assert lost_after(lambda now: None, lambda now: round(now / EVERY_S * 10) % 90 == 0) == (0.0, "")
    assert lost_after(lambda now: 100, lambda now: round(now / EVERY_S * 10) % 90 == 0) == (0.0, "")


def test_without_acknowledgements_the_short_limit_counts():
    when, why = lost_after(lambda now: None)
    assert SILENT_S < when <= SILENT_S + EVERY_S and "cannot be reached" in why


@pytest.mark.parametrize("unacknowledged", [None, 0, 100])
def test_a_pause_of_its_own_is_no_silence_of_the_peer(unacknowledged: int | None):
    """What came meanwhile is heard at the next look, or at one of those after it."""
    silence = Silence(EVERY_S, SILENT_S, STALLED_S, 0.0)
    assert not silence.lost(0.1, unacknowledged)
    assert not silence.lost(500.0, unacknowledged)
    silence.heard()
    assert not silence.lost(500.1, unacknowledged)
    # But a peer that stays away afterwards is lost as any other.
    looks = [500.1 + 0.1 * look for look in range(1, 220)]
    assert any(silence.lost(now, 200) for now in looks)
