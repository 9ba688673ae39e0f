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


def answer(device: Device, prompt: list[int], tokens: list[int], pace: DraftPace) -> tuple[float, int]:
    """Returns how many seconds an answer takes, and in how many steps, as the executor takes them."""
    made, seconds, steps, at = Drafter(prompt), 0.0, 0, 0
    while at < len(tokens):
        most = min(15, len(tokens) - at - 1) if made.drafts else 0
        width = pace.width([Hope(made.share, most)])
        draft, right = made.draft(min(width - 1, most)), 0
        while right < len(draft) and draft[right] == tokens[at + right]:
            right += 1
        took = device(width) if width > 1 else 1.0
        if width > 1:
            pace.note_wide(1, width, took)
        else:
            pace.note_step(1, took)
        for token in tokens[at : at + right + 1]:
            made.add(token)
        at, seconds, steps = at + right + 1, seconds + took, steps + 1
    return seconds, steps


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_text_that_repeats_nothing_takes_three_percent_longer_at_most(device: Device):
    rng = random.Random(1)
    prompt, tokens = ([rng.randrange(300) for _ in range(4000)] for _ in range(2))
    # A few of the last three tokens were there before, by chance, and followed by something else.
    tokens = [token if rng.random() < 0.9 else prompt[at % 4000] for at, token in enumerate(tokens)]
    seconds, _ = answer(device, prompt, tokens, DraftPace())
    assert seconds <= 1.03 * len(tokens)


def test_where_memory_decides_a_repetition_takes_wide_steps():
    rng = random.Random(2)
    prompt = [rng.randrange(50_000) for _ in range(3000)]
    seconds, steps = answer(DEVICES["memory decides"], prompt, prompt, DraftPace())
    assert seconds < len(prompt) / 8 and steps < len(prompt) / 10


def test_where_computing_decides_a_repetition_takes_no_longer_than_without_drafts():
    """A draft that is right is as fast as steps of one token, so nothing is gained."""
    rng = random.Random(3)
    prompt = [rng.randrange(50_000) for _ in range(3000)]
    seconds, _ = answer(DEVICES["computing decides"], prompt, prompt, DraftPace())
    assert seconds <= 1.01 * len(prompt)


def test_a_width_is_chosen_by_what_it_gives_for_all_sequences():
    pace = DraftPace()
    for _ in range(2):
        pace.note_step(4, 1.0)
        for width, seconds in zip(WIDTHS, (1.2, 1.4, 1.8, 4.0), strict=True):
            pace.note_wide(4, width, seconds)
    sure, none = Hope(0.99, 15), Hope(0.0, 0)
    assert pace.width([sure] * 4) == 8
    assert pace.width([sure, none, none, none]) == 8
    assert pace.width([Hope(0.99, 3), none, none, none]) == 4
    assert pace.width([Hope(0.2, 15), none, none, none]) == 1
    assert pace.width([Hope(0.99, 15, chance=0.1), none, none, none]) == 1
    assert pace.width([none] * 4) == pace.width([]) == 1


def test_nothing_is_drafted_before_steps_were_timed_and_wider_ones_only_after_narrower_ones():
    pace, sure = DraftPace(), Hope(0.99, 15)
    assert pace.width([sure]) == 1
    pace.note_step(1, 1.0)
    pace.note_step(1, 1.0)
    tried = []
    for _ in range(9):
        tried.append(pace.width([sure]))
        # The first of each width compiles something.
        pace.note_wide(1, tried[-1], 1.1 if tried.count(tried[-1]) > 1 else 100.0)
    assert tried == [2, 2, 4, 4, 8, 8, 16, 16, 16]
    assert pace.width([sure, sure]) == 1
