"""The pace measures what calls cost, in worlds where a call takes `fixed + tokens * per_token`, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from satchel.actors.replica.scheduling.prefill_budget import (
    FIRST_CHUNK_TOKENS,
    IDLE_PAUSE_S,
    STEP_WEIGHT,
    TOKENS_MIN,
    PrefillPace,
    stop_beside,
)

CHUNK_TOKENS = 2048
PAUSE_S = 0.25

Cost = Callable[[int], float]


def linear(fixed_s: float, token_s: float) -> Cost:
    return lambda tokens: fixed_s + token_s * tokens


def busy(pace: PrefillPace, cost: Cost, chunks: int, rng: random.Random, noise: float = 0.0) -> None:
    """Chunks beside decoding sequences, every fourth followed by the short rest of a prompt."""
    for number in range(chunks):
        sizes = [pace.budget(True)] + ([rng.randint(1, TOKENS_MIN - 1)] if number % 4 == 3 else [])
        for tokens in sizes:
            pace.note(tokens, cost(tokens) * rng.uniform(1 - noise, 1 + noise))


def test_before_anything_is_known_a_step_is_short_and_shorter_beside_decoding_sequences():
    pace = PrefillPace(CHUNK_TOKENS, PAUSE_S)
    assert pace.budget(False) == FIRST_CHUNK_TOKENS
    assert pace.budget(True) == TOKENS_MIN


@pytest.mark.parametrize("seed", range(60))
def test_a_step_takes_the_pause_and_no_more(seed: int):
    """A chunk fits the pause, or is the least that is sensible; twice as many tokens would not fit."""
    rng = random.Random(seed)
    fixed_s, token_s = rng.uniform(0.0, PAUSE_S / 3), 10 ** rng.uniform(-5, -2)
    cost, pace = linear(fixed_s, token_s), PrefillPace(CHUNK_TOKENS, PAUSE_S)
    busy(pace, cost, 60, rng)
    tokens = pace.budget(True)
    said = f"seed {seed}: {tokens} tokens in {cost(tokens):.3f} s, fixed {fixed_s:.3f} s, known as {pace.fixed_s:.3f} s"
    assert cost(tokens) <= 1.01 * max(PAUSE_S, cost(TOKENS_MIN)), said
    assert tokens == CHUNK_TOKENS or cost(2 * tokens) > 0.95 * PAUSE_S, said


@pytest.mark.parametrize("seed", range(20))
def test_noise_changes_little(seed: int):
    rng = random.Random(seed)
    fixed_s, token_s = rng.uniform(0.0, PAUSE_S / 4), 10 ** rng.uniform(-4.5, -2.3)
    cost, pace = linear(fixed_s, token_s), PrefillPace(CHUNK_TOKENS, PAUSE_S)
    busy(pace, cost, 60, rng, noise=0.15)
    for _ in range(40):
        busy(pace, cost, 1, rng, noise=0.15)
        tokens = pace.budget(True)
        assert cost(tokens) <= 1.2 * max(PAUSE_S, cost(TOKENS_MIN)), f"seed {seed}"
        assert tokens == CHUNK_TOKENS or cost(4 * tokens) > PAUSE_S, f"seed {seed}"


def test_a_fixed_part_over_half_of_the_pause_does_not_stop_prefill():
    """A chunk's tokens take about as long as its fixed part, where 64 of them would take a tenth of it."""
    fixed_s, token_s = 0.2, 0.0003
    pace = PrefillPace(CHUNK_TOKENS, PAUSE_S)
    for tokens in (1024, 10, 512, 1, 512, 20) * 10:
        pace.note(tokens, fixed_s + token_s * tokens)
    assert pace.fixed_s == pytest.approx(fixed_s, rel=0.1)
    assert pace.budget(True) == 512


def test_a_rate_measured_alone_is_not_taken_for_that_of_small_chunks():
    """A large chunk hides its fixed part. Once that is known, the first chunk beside decoding sequences fits the
    pause."""
    cost, pace = linear(0.1, 0.0002), PrefillPace(CHUNK_TOKENS, PAUSE_S)
    for tokens in (2048, 2048, 10, 2048, 30) * 5:
        pace.note(tokens, cost(tokens))
    assert pace.budget(False) == 1024
    assert pace.budget(True) == 512
    assert cost(512) <= PAUSE_S < cost(1024)


def test_chunks_become_smaller_as_the_text_before_them_grows():
    """Every token costs more the deeper it lies; the pause is kept to a quarter, and chunks grow again."""
    pace, depth, largest = PrefillPace(CHUNK_TOKENS, PAUSE_S), 0, 0
    cost = linear(0.005, 0.0003)
    for _ in range(10):
        pace.note(pace.budget(True), cost(pace.budget(True)))
    while depth < 16_000:
        tokens = pace.budget(True)
        seconds = cost(tokens) + 1e-7 * tokens * (depth + tokens / 2)
        assert seconds <= 1.25 * PAUSE_S, f"{tokens} tokens after {depth}"
        pace.note(tokens, seconds)
        depth, largest = depth + tokens, max(largest, tokens)
    assert pace.budget(True) < largest == 512
    for _ in range(6):
        pace.note(pace.budget(True), cost(pace.budget(True)))
    assert pace.budget(True) == 512


def test_a_call_that_compiles_kernels_is_soon_forgotten():
    """Whether it is the first one, a later one or a short one."""
    cost = linear(0.008, 0.0001)
    for position in (0, 7, 8):
        pace = PrefillPace(CHUNK_TOKENS, PAUSE_S)
        for number in range(12):
            tokens = 10 if number == 8 else pace.budget(True)
            pace.note(tokens, 60.0 if number == position else cost(tokens))
        busy(pace, cost, 8, random.Random(1))
        assert pace.budget(True) == 2048, f"call {position} took a minute"


def test_one_call_that_compiles_kernels_costs_the_rate_a_quarter_at_most():
    """Where it is a short one, the next long one shows that its time was no fixed part."""
    cost, pace = linear(0.005, 0.0003), PrefillPace(CHUNK_TOKENS, PAUSE_S)
    busy(pace, cost, 20, random.Random(2))
    assert pace.budget(True) == 512
    rate = pace.tokens_per_s
    pace.note(512, 60.0)
    assert pace.tokens_per_s >= 0.75 * rate
    assert pace.budget(True) == 512
    pace.note(10, 60.0)
    pace.note(512, cost(512))
    assert pace.fixed_s <= cost(512)


@pytest.mark.parametrize("seed", range(30))
def test_budgets_are_powers_of_two_within_the_limits(seed: int):
    """Whatever is noted: no time, hours, no tokens; alone a step gets no less than beside others."""
    rng = random.Random(seed)
    chunk_tokens = rng.choice([256, 512, 2048])
    pace = PrefillPace(chunk_tokens, rng.choice([1e-6, 0.02, PAUSE_S, 2 * IDLE_PAUSE_S]))
    for _ in range(300):
        pace.note(rng.choice([0, 1, 63, 64, 65, 200, 2048]), rng.choice([0.0, 1e-9, 0.01, 1.0, 1e5]))
        beside, alone = pace.budget(True), pace.budget(False)
        assert TOKENS_MIN <= beside <= alone <= chunk_tokens, f"seed {seed}"
        assert beside.bit_count() == alone.bit_count() == 1


def test_a_short_call_that_took_no_time_makes_nothing_less_than_free():
    pace = PrefillPace(CHUNK_TOKENS, PAUSE_S)
    for tokens, seconds in ((512, 0.5), (10, 1e-6), (10, 1e-6), (63, 1e-6)):
        pace.note(tokens, seconds)
        assert 0.0 <= pace.fixed_s <= seconds or tokens < TOKENS_MIN
    assert pace.fixed_s >= 0.0 and pace.budget(True) >= TOKENS_MIN


def test_the_time_of_a_decode_step_is_the_first_one_and_then_follows():
    pace = PrefillPace(CHUNK_TOKENS, PAUSE_S)
    pace.note_step(0.2)
    assert pace.step_s == 0.2
    pace.note_step(0.1)
    assert pace.step_s == pytest.approx(0.2 - 0.1 * STEP_WEIGHT)
    for _ in range(200):
        pace.note_step(0.1)
    assert pace.step_s == pytest.approx(0.1, rel=0.01)


def test_no_chunk_ends_inside_tokens_that_belong_together() -> None:
    runs = [(10, 20), (30, 90)]
    assert [stop_beside(0, stop, runs) for stop in (5, 10, 15, 20, 25, 60, 95)] == [5, 10, 10, 20, 25, 30, 95]
    assert stop_beside(10, 15, runs) == 20 and stop_beside(30, 40, runs) == stop_beside(40, 50, runs) == 90
