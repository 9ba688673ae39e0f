"""A token's joules come from times in which sequences ran; without readings nothing is known."""

from __future__ import annotations

import pytest

from satchel.actors.replica.energy_pace import EnergyPace, EnergyReading


def noted(*readings: tuple[float | None, int, int, int]) -> EnergyPace:
    """A pace that has taken readings of joules, computed and generated tokens, and running sequences."""
    pace = EnergyPace()
    for joules, *counts in readings:
        pace.note(EnergyReading({} if joules is None else {"nvml": joules}, *counts))
    return pace


def test_all_energy_is_the_decoded_tokens_while_nothing_is_prefilled():
    pace = noted((0.0, 0, 0, 1), (30.0, 0, 10, 1))
    assert (pace.decode_token_j, pace.prefill_token_j) == (3.0, 0.0)


def test_what_decoding_usually_takes_is_not_the_prompts():
    pace = noted((0.0, 0, 0, 1), (30.0, 0, 10, 1), (160.0, 500, 20, 2))
    assert pace.prefill_token_j == pytest.approx((130.0 - 30.0) / 500)


def test_a_prompt_alone_needs_no_known_decoding():
    assert noted((0.0, 0, 0, 1), (64.0, 256, 0, 1)).prefill_token_j == 0.25


@pytest.mark.parametrize(
    "readings",
    [
        ((None, 0, 0, 1), (None, 0, 100, 1)),
        ((0.0, 0, 0, 0), (30.0, 0, 100, 1)),
        ((0.0, 0, 0, 1), (30.0, 0, 100, 0)),
        ((0.0, 0, 0, 1), (0.0, 0, 100, 1)),
        ((0.0, 0, 0, 1), (30.0, 0, 7, 1)),
        ((0.0, 0, 0, 1), (30.0, 500, 50, 1)),
        ((0.0, 900, 900, 1), (30.0, 0, 10, 1)),
        ((0.0, 0, 0, 1), (None, 0, 100, 1)),
    ],
    ids=["no counter", "idle before", "idle after", "a counter that stands still", "few tokens",
         "a prompt beside decoding that is not known", "another engine", "a counter that went away"],
)  # fmt: skip
def test_other_readings_say_nothing(readings: tuple[tuple[float | None, int, int, int], ...]):
    pace = noted(*readings)
    assert (pace.prefill_token_j, pace.decode_token_j) == (0.0, 0.0)


def test_later_measurements_are_averaged():
    pace = noted((0.0, 0, 0, 1), (30.0, 0, 10, 1), (40.0, 0, 20, 1))
    assert 1.0 < pace.decode_token_j < 3.0
