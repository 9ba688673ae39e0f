"""When drafts pay, on devices that are functions: seconds by the width of a step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from satchel.actors.replica.drafting.drafter import Drafter
from satchel.actors.replica.drafting.pace import WIDTHS, DraftPace, Hope

Device = Callable[[int], float]

DEVICES: dict[str, Device] = {
    "memory decides": lambda width: 1.0 + 0.02 * width,
    "computing decides": lambda width: float(width),
    "a step of several is slow": lambda width: 3.0 + 0.1 * width,
}


def answer(device: Device, prompt: list[int], tokens: list[int], pace: DraftPace, *, ragged: bool) -> tuple[float, int]:
    """Returns how many seconds an answer takes, and in how many steps, as the executor takes them."""
    made, seconds, steps, at = Drafter(prompt), 0.0, 0, 0
    while at < len(tokens):
        most = min(15, len(tokens) - at - 1) if made.drafts else 0
        (count,) = pace.lengths([Hope(made.share, most)], ragged=ragged)
        draft, right, width = made.draft(count), 0, 1 + count
        while right < len(draft) and draft[right] == tokens[at + right]:
            right += 1
        width = next(each for each in (1, *WIDTHS) if each >= width)
        took = device(width) if width > 1 else 1.0
        pace.note(1, width, took)
        for token in tokens[at : at + right + 1]:
            made.add(token)
        at, seconds, steps = at + right + 1, seconds + took, steps + 1
    return seconds, steps


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("ragged", [False, True])
def test_text_that_repeats_nothing_takes_three_percent_longer_at_most(device: Device, ragged: bool):
    rng = random.Random(1)
    prompt, tokens = ([rng.randrange(300) for _ in range(4000)] for _ in range(2))
    # A few of the last three tokens were there before, by chance, and followed by something else.
    tokens = [token if rng.random() < 0.9 else prompt[at % 4000] for at, token in enumerate(tokens)]
    seconds, _ = answer(device, prompt, tokens, DraftPace(), ragged=ragged)
    assert seconds <= 1.03 * len(tokens)


@pytest.mark.parametrize("ragged", [False, True])
def test_where_memory_decides_a_repetition_takes_wide_steps(ragged: bool):
    rng = random.Random(2)
    prompt = [rng.randrange(50_000) for _ in range(3000)]
    seconds, steps = answer(DEVICES["memory decides"], prompt, prompt, DraftPace(), ragged=ragged)
    assert seconds < len(prompt) / 8 and steps < len(prompt) / 10


@pytest.mark.parametrize("ragged", [False, True])
def test_where_computing_decides_a_repetition_takes_no_longer_than_without_drafts(ragged: bool):
    """A draft that is right is as fast as steps of one token, so nothing is gained."""
    rng = random.Random(3)
    prompt = [rng.randrange(50_000) for _ in range(3000)]
    seconds, _ = answer(DEVICES["computing decides"], prompt, prompt, DraftPace(), ragged=ragged)
    assert seconds <= 1.01 * len(prompt)


def timed(sequences: int, seconds: dict[int, float]) -> DraftPace:
    """A pace that knows how long steps take, by their tokens."""
    pace = DraftPace()
    for tokens, took in seconds.items():
        for _ in range(2):
            pace.note(sequences, tokens, took)
    return pace


SURE, NONE = Hope(0.99, 15), Hope(0.0, 0)


def test_a_width_is_chosen_by_what_it_gives_for_all_sequences():
    pace = timed(4, {4: 1.0, 8: 1.2, 16: 1.4, 32: 1.8, 64: 4.0})

    def widths(*hopes: Hope) -> list[int]:
        return [1 + length for length in pace.lengths(hopes, ragged=False)]

    assert widths(*[SURE] * 4) == [8] * 4
    assert widths(SURE, NONE, NONE, NONE) == [8, 1, 1, 1]
    assert widths(Hope(0.99, 3), NONE, NONE, NONE) == [4, 1, 1, 1]
    assert widths(Hope(0.2, 15), NONE, NONE, NONE) == [1] * 4
    assert widths(Hope(0.99, 15, chance=0.1), NONE, NONE, NONE) == [1] * 4
    assert widths(*[NONE] * 4) == [1] * 4 and widths() == []


def test_the_tokens_of_a_step_go_where_they_give_most():
    pace = timed(4, {4: 1.0, 8: 1.1, 16: 1.2, 32: 4.0})

    def lengths(*hopes: Hope) -> list[int]:
        return pace.lengths(hopes, ragged=True)

    assert lengths(SURE, NONE, NONE, NONE) == [12, 0, 0, 0]
    assert lengths(*[SURE] * 4) == [3] * 4
    uneven = lengths(Hope(0.9, 15), Hope(0.5, 15), Hope(0.9, 2), NONE)
    assert sum(uneven) == 12 and uneven[0] > uneven[1] > 0 and uneven[2:] == [2, 0]
    assert lengths(Hope(0.2, 15), NONE, NONE, NONE) == [0] * 4
    assert lengths(*[NONE] * 4) == [0] * 4 and lengths() == []


@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_is_drafted_before_steps_were_timed_and_wider_ones_only_after_narrower_ones(ragged: bool):
    pace = DraftPace()
    assert pace.lengths([SURE], ragged=ragged) == [0]
    pace.note(1, 1, 1.0)
    pace.note(1, 1, 1.0)
    tried = []
    for _ in range(9):
        tried.append(1 + pace.lengths([SURE], ragged=ragged)[0])
        # The first of each width compiles something.
        pace.note(1, tried[-1], 1.1 if tried.count(tried[-1]) > 1 else 100.0)
    assert tried == [2, 2, 4, 4, 8, 8, 16, 16, 16]
    assert pace.lengths([SURE, SURE], ragged=ragged) == [0, 0]
