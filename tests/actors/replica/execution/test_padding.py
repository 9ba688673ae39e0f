"""Prompts form batches in which padding costs less than the calls that it saves."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from satchel.actors.replica.execution.padding import CALL_TOKENS, PADDING_MAX, batches_of, padded_tokens

Sequences = list[tuple[int, int]]


def cost(batches: list[list[int]], sequences: Sequences, call_tokens: int) -> int:
    return sum(call_tokens + len(batch) * max(padded_tokens(sequences[at][1]) for at in batch) for batch in batches)


def partitions(numbers: list[int]) -> Iterator[list[list[int]]]:
    if not numbers:
        yield []
        return
    first, *rest = numbers
    for others in partitions(rest):
        yield [[first], *others]
        for at, batch in enumerate(others):
            yield [*others[:at], [first, *batch], *others[at + 1 :]]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_batches_cost_less(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [(0, rng.choice([1, 64, 200, 700, rng.randrange(1, 2000)])) for _ in range(rng.randint(1, 6))]
    call_tokens = rng.choice([CALL_TOKENS, 64, 1])
    batches, numbers = batches_of(sequences, call_tokens), list(range(len(sequences)))
    assert sorted(number for batch in batches for number in batch) == numbers
    least = min(cost(others, sequences, call_tokens) for others in partitions(numbers))
    # All are without history, so only their lengths decide.
    assert cost(batches, sequences, call_tokens) == least


def test_short_turns_go_together_and_long_ones_only_with_others_of_their_length() -> None:
    assert batches_of([(9000, 60), (8000, 10), (7000, 100), *[(9000, 20)] * 5], CALL_TOKENS) == [list(range(8))]
    assert batches_of([(5000, 1199), (5000, 300), (6000, 1150)], CALL_TOKENS) == [[0, 2], [1]]
    assert batches_of([(5000, 600), (5000, 600), (5000, 600)], CALL_TOKENS) == [[0, 1, 2]]


def test_short_histories_are_not_padded_to_a_far_longer_one() -> None:
    sequences = [(30_000, 64), (300, 64), (200, 64), (400, 64)]
    assert batches_of(sequences, CALL_TOKENS) != [[0, 1, 2, 3]]
    for batch in batches_of(sequences, CALL_TOKENS):
        held = [sequences[number][0] for number in batch]
        assert len(held) == 1 or len(held) * max(held) <= PADDING_MAX * sum(h + 64 for h in held)


def test_prompts_are_padded_to_the_next_64_tokens() -> None:
    assert [padded_tokens(count) for count in (1, 64, 65, 703, 1199)] == [64, 64, 128, 704, 1216]
