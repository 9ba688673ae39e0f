"""What is drafted: what followed the last tokens where they were before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from satchel.actors.replica.drafting import drafter
from satchel.actors.replica.drafting.drafter import LOOKED_UP, Drafter


def found_by_search(tokens: Sequence[int]) -> int | None:
    """Where the last tokens were the last time before, by comparing them with all others."""
    last = list(tokens[-LOOKED_UP:])
    ends = range(len(tokens) - 1, LOOKED_UP - 1, -1)
    return next((end for end in ends if list(tokens[end - LOOKED_UP : end]) == last), None)


@pytest.mark.parametrize("seed", range(20))
def test_what_followed_the_last_tokens_where_they_were_last_is_drafted(seed: int):
    """At once from a prompt, and token by token; with few different tokens, so that most places repeat. A few are not
    found, because others have the same hash."""
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice((2, 4, 30))) for _ in range(rng.randrange(1, 3000))]
    split = rng.randrange(len(tokens) + 1)
    made = Drafter(tokens[:split])
    place = found_by_search(tokens[:split]) if split >= LOOKED_UP else None
    found = missed = 0
    for end in range(split, len(tokens)):
        found, missed = found + made.drafts, missed + (place is not None and not made.drafts)
        place = place if made.drafts else None
        expected = [] if place is None else [tokens[place + at % (end - place)] for at in range(9)]
        assert made.draft(9) == expected and made.drafts == (place is not None)
        made.add(tokens[end])
        # A draft that is right goes on where it is.
        place = place + 1 if place is not None and tokens[place] == tokens[end] else None
        if place is None and end + 1 >= LOOKED_UP:
            place = found_by_search(tokens[: end + 1])
    assert made.count == len(tokens)
    assert 10 * missed <= found + 20


def test_an_edit_is_drafted_again_three_tokens_behind_what_was_changed():
    before = list(range(100, 160))
    made, drafted = Drafter([*before, 1]), []
    for token in [*before[:20], 7, 8, *before[22:]]:
        drafted.append(made.draft(4))
        made.add(token)
    assert drafted[3] == before[3:7] and drafted[20] == before[20:24]
    assert drafted[21] == drafted[24] == []
    assert drafted[25] == before[25:29]


def test_its_share_is_of_what_was_right_lately_and_counts_what_was_not_computed_ahead():
    made = Drafter([*range(50), 0, 1, 2])
    assert made.share == 0.5
    for token in range(3, 50):
        made.add(token)
    assert made.share > 0.9
    for token in range(40):
        # What followed is always something else.
        for each in (token, token + 1, token + 2, 1000 + token):
            made.add(each)
    assert made.share < 0.3


def test_a_long_context_is_looked_up_in_its_last_tokens_within_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drafter, "TOKENS_MAX", 4096)
    rng = random.Random(1)
    prompt = [rng.randrange(2**17) for _ in range(20_000)]
    made = Drafter(prompt)
    assert len(made._tokens) == 4096
    for token in prompt[-1000:-990]:
        made.add(token)
    assert made.draft(5) == prompt[-990:-985]
    for token in prompt[:10]:
        made.add(token)
    assert made.draft(5) == []
    for _ in range(30_000):
        made.add(rng.randrange(2**17))
        assert len(made._tokens) <= 2 * 4096 and len(made._table) <= 32 * 4096
    assert made.count == 50_020
