"""What is known of a drafting model: its times, how many of its tokens are right, and what may be spent on it."""

from __future__ import annotations

import pytest

from satchel.actors.replica.drafting.model_pace import (
    CREDIT_MOST_S,
    SHARE_FIRST,
    TRIAL_PART,
    TRIED_LEAST,
    ModelPace,
    Share,
)
from satchel.actors.replica.drafting.pace import LASTS_STEPS, DraftPace, Hope


@pytest.fixture
def pace() -> ModelPace:
    return ModelPace({16: 0.02, 64: 0.04}, 0.005)


def test_what_comes_after_a_wrong_token_was_not_tried():
    share = Share()
    share.note(0, 7)
    assert share.tried == 1 and share.right == 0
    share.note(2, 2)
    assert 1.9 < share.right < 2 < share.tried < 3


def test_a_sequence_is_taken_to_be_like_the_others_until_it_has_shown_otherwise(pace: ModelPace):
    assert pace.share() == pace.share(Share()) == SHARE_FIRST
    good, bad = Share(), Share()
    for _ in range(40):
        pace.note_right(good, 4, 4)
        pace.note_right(bad, 0, 4)
    assert pace.share(bad) < 0.35 < pace.share(Share()) < 0.85 < pace.share(good) < 1
    assert pace.share() == pace.share(Share())


def test_it_is_known_after_some_tokens_and_not_for_ever(pace: ModelPace):
    for _ in range(TRIED_LEAST // 3):
        assert not pace.is_known
        pace.note_right(Share(), 2, 4)
    assert pace.is_known
    for _ in range(LASTS_STEPS + 1):
        pace.note_step(0.0)
    assert not pace.is_known
    pace.note_right(Share(), 2, 4)
    assert not pace.is_known


def test_a_part_of_the_steps_time_may_be_spent(pace: ModelPace):
    for _ in range(10):
        pace.note_step(0.5)
    assert pace.credit_s == pytest.approx(TRIAL_PART * 5)
    for _ in range(1000):
        pace.note_step(0.5)
    assert pace.credit_s == CREDIT_MOST_S


def test_times_of_fewer_sequences_stand_for_those_of_more_until_these_are_known(pace: ModelPace):
    """The first time of a shape may compile it, so it is not believed alone."""
    assert pace.drafts_s(4, 3) == pytest.approx(0.015)
    pace.note_drafts(4, 3, 9.0)
    assert pace.drafts_s(4, 3) == pytest.approx(0.015)
    pace.note_drafts(4, 2, 0.02)
    assert pace.drafts_s(3, 1) == pytest.approx(0.005)
    assert pace.drafts_s(4, 1) == pace.drafts_s(9, 1) == pytest.approx(0.01)
    for _ in range(LASTS_STEPS + 1):
        pace.note_step(0.0)
    assert pace.drafts_s(4, 1) == pytest.approx(0.005)


def test_a_prompt_takes_as_long_as_its_pieces(pace: ModelPace):
    assert pace.prompt_s(5) == pace.prompt_s(16) == pytest.approx(0.02)
    assert pace.prompt_s(32) == pytest.approx(0.04)
    assert pace.prompt_s(128) == pytest.approx(0.08)
    for _ in range(2):
        pace.note_piece(64, 0.1)
    assert pace.prompt_s(128) == pytest.approx(0.2)


def test_what_it_takes_to_make_drafts_counts():
    """Two tokens for the price of one, or of two."""
    steps = DraftPace()
    for _ in range(3):
        steps.note(1, 1, 0.01)
        steps.note(1, 2, 0.01)
    hopes = [Hope(0.9, 1)]
    assert steps.best(hopes, ragged=True) == (pytest.approx(1.9), [1])
    assert steps.best(hopes, ragged=True, before_s=0.005) == (pytest.approx(1.9 / 1.5), [1])
    assert steps.best(hopes, ragged=True, before_s=0.01) == (1.0, [0])
