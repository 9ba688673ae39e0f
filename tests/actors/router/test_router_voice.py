"""Which report is news, and which came late: of one process, of one that was restarted, of one that was lost."""

from __future__ import annotations

from satchel.actors.router.voice import Voice

TIMEOUT_S = 5.0


def test_the_first_report_of_a_process_is_never_late():
    for sequence in (0, 1, 2):
        assert not Voice("p").is_late("p", sequence, 0.0, TIMEOUT_S)
    assert not Voice("p").lives(0.0, TIMEOUT_S), "who was never heard does not live"


def test_reports_of_a_process_count_up_and_what_is_missed_stays_missed():
    voice = Voice("p")
    assert voice.hear(3, 1.0, full=True, known=False) and voice.is_late("p", 3, 1.0, TIMEOUT_S)
    assert voice.hear(4, 2.0, full=False, known=True)
    assert not voice.hear(6, 3.0, full=False, known=True) and not voice.hear(7, 3.0, full=False, known=True)
    assert voice.hear(8, 4.0, full=True, known=True)
    assert not Voice("p").hear(0, 0.0, full=False, known=False)


def test_an_earlier_process_is_late_while_its_successor_is_heard_or_was_lost_lately():
    """Else the two were heard in the wrong order, and the silent one is the old one."""
    voice = Voice("old").succeed("new")
    voice.hear(0, 10.0, full=True, known=False)
    assert voice.is_late("old", 9, 10.0 + TIMEOUT_S, TIMEOUT_S) and not voice.is_late("old", 9, 15.1, TIMEOUT_S)
    assert not voice.is_late("newer", 0, 10.0, TIMEOUT_S)
    voice.lose(20.0)
    assert voice.is_late("old", 9, 19.9, TIMEOUT_S)
    assert not voice.is_late("old", 9, 20.0, TIMEOUT_S) and not voice.is_late("old", 9, 25.0, TIMEOUT_S)


def test_who_was_lost_lives_again_with_a_report_that_left_later():
    voice = Voice("p")
    voice.hear(0, 1.0, full=True, known=False)
    assert voice.lives(6.0, TIMEOUT_S) and not voice.lives(6.1, TIMEOUT_S)
    voice.lose(5.0)
    voice.lose(3.0)
    voice.hear(1, 4.9, full=False, known=True)
    assert not voice.lives(4.9, TIMEOUT_S)
    voice.hear(2, 5.0, full=False, known=True)
    assert voice.lives(5.0, TIMEOUT_S)
