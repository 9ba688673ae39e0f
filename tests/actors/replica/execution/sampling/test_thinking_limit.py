"""A sequence's reasoning ends within its budget, wherever the sequence is continued."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satchel.actors.protocol.replica_messages import Sampling, ThinkingBudget
from satchel.actors.replica.execution.sampling.sampling import BatchSampler
from satchel.actors.replica.execution.sampling.thinking_limit import START_TOKENS_MAX, ThinkingLimit, thinking_limit_of

VOCABULARY = 12
START, END, BREAK = [7], [8, 9], 10
TEXT = 3


def budget(tokens: int, **fields: object) -> ThinkingBudget:
    given = {"start": START, "end": END, "closing": END, "breaks": [BREAK], **fields}
    return ThinkingBudget(tokens, **given)  # type: ignore[arg-type]


def answer(of: ThinkingBudget, wanted: list[int], *, cut: int | None = None) -> list[int]:
    """What a sequence draws whose model wants these tokens; moved to another replica after `cut` tokens."""
    limit, drawn = ThinkingLimit(of, [], VOCABULARY), list[int]()
    for place, token in enumerate(wanted):
        if place == cut:
            limit = ThinkingLimit(of, drawn, VOCABULARY)
        logits = mx.array(np.eye(VOCABULARY, dtype=np.float32)[token])
        drawn.append(int(mx.argmax(limit(logits))))
        limit.drawn(mx.array([drawn[-1]], dtype=mx.uint32))
    return drawn


def test_a_block_that_the_prompt_has_opened_is_closed_after_its_budget():
    assert answer(budget(5, inside=True), [TEXT] * 10) == [TEXT] * 5 + END + [TEXT] * 3
    assert answer(budget(0, inside=True), [TEXT] * 4) == [*END, TEXT, TEXT]


def test_a_block_that_the_answer_opens_is_closed_after_its_budget():
    assert answer(budget(3), [BREAK, *START, *[TEXT] * 8]) == [BREAK, *START, *[TEXT] * 3, *END, *[TEXT] * 3]


def test_a_block_that_ends_in_time_is_left_alone():
    wanted = [*START, TEXT, TEXT, *END, *[TEXT] * 12]
    assert answer(budget(6), wanted) == wanted


def test_only_the_beginning_of_an_answer_opens_a_block():
    wanted = [*[TEXT] * (START_TOKENS_MAX + 1), *START, *[TEXT] * 12]
    assert answer(budget(2), wanted) == wanted


def test_near_its_end_a_block_ends_with_its_line():
    """An eighth of 16 tokens are 2."""
    early, late = [*[TEXT] * 5, BREAK, *[TEXT] * 13], [*[TEXT] * 14, BREAK, *[TEXT] * 8]
    assert answer(budget(16, inside=True), early)[14:] == [TEXT, TEXT, *END, TEXT]
    assert answer(budget(16, inside=True), late) == [*[TEXT] * 14, BREAK, *END, *[TEXT] * 6]


def test_more_may_be_drawn_to_close_a_block_than_ends_it_and_further_blocks_count():
    """As in the Harmony format."""
    harmony = budget(3, start=[7], end=[8], closing=[8, 5, 6], again=True)
    assert answer(harmony, [7, *[TEXT] * 8]) == [7, TEXT, TEXT, TEXT, 8, 5, 6, TEXT, TEXT]
    assert answer(harmony, [7, TEXT, TEXT, 8, 7, *[TEXT] * 6]) == [7, TEXT, TEXT, 8, 7, 8, 5, 6, TEXT, TEXT, TEXT]


def test_what_a_grammar_excludes_is_not_forced():
    """The marker is begun again where it can be. Behind the end of the block nothing is forced any more."""
    limit = ThinkingLimit(budget(1, inside=True), [], VOCABULARY)
    for excluded, expected in (((), TEXT), ((8,), TEXT), ((), 8), ((9,), TEXT), ((), 8), ((), 9), ((), TEXT)):
        logits = np.eye(VOCABULARY, dtype=np.float32)[TEXT]
        logits[list(excluded)] = -np.inf
        drawn = mx.argmax(limit(mx.array(logits)))[None]
        assert int(drawn) == expected
        limit.drawn(drawn)
    harmony = ThinkingLimit(budget(0, end=[8], closing=[8, 5, 6], inside=True), [], VOCABULARY)
    for excluded, expected in (((), 8), ((5,), TEXT), ((), TEXT), ((), TEXT)):
        logits = np.eye(VOCABULARY, dtype=np.float32)[TEXT]
        logits[list(excluded)] = -np.inf
        drawn = mx.argmax(harmony(mx.array(logits)))[None]
        assert int(drawn) == expected
        harmony.drawn(drawn)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=30),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.integers(0, 30),
)
def test_it_goes_on_elsewhere_as_it_would_have_here(
    wanted: list[int], tokens: int, inside: bool, again: bool, cut: int
):
    of = budget(tokens, inside=inside, again=again)
    drawn = answer(of, wanted)
    assert answer(of, wanted, cut=cut) == drawn
    if inside:
        ends = [at for at in range(len(drawn) - 1) if drawn[at : at + 2] == END]
        # A marker that is half drawn when the budget is used is drawn whole.
        assert (ends and ends[0] <= tokens) or len(drawn) <= tokens + len(END)


@pytest.mark.parametrize("closing", [[], [VOCABULARY]])
def test_a_model_that_cannot_close_a_block_has_no_limit(closing: list[int]):
    assert thinking_limit_of(budget(1, closing=closing), [], VOCABULARY) is None
    assert thinking_limit_of(None, [], VOCABULARY) is None


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_in_a_batch_each_sequence_has_its_own(temperature: float):
    """Forced tokens come before noise and penalties, and other sequences draw what they would draw alone."""
    asked = [
        Sampling(temperature=temperature, seed=1, thinking=budget(2, inside=True), presence_penalty=2.0),
        Sampling(temperature=temperature, seed=2),
        Sampling(temperature=temperature, seed=3, thinking=budget(4, inside=True), logit_bias=[(8, -100.0)]),
    ]
    logits = mx.random.normal((6, VOCABULARY), key=mx.random.key(5))
    logits = mx.where(mx.arange(VOCABULARY) < 7, logits, -20.0)

    def run(sampling: list[Sampling]) -> list[list[int]]:
        sampler = BatchSampler(VOCABULARY, frozenset())
        for each in sampling:
            sampler.add(each, [], [])
        draws = [sampler(mx.broadcast_to(step[None], (len(sampling), VOCABULARY))) for step in logits]
        assert all(bool(mx.all(draw.sound)) for draw in draws)
        return np.array([np.array(draw.tokens) for draw in draws]).T.tolist()

    together = run(asked)
    assert together == [*run(asked[:1]), *run(asked[1:2]), *run(asked[2:])]
    assert together[0][2:4] == END and together[2][4:6] == END
    assert not {8, 9} & {*together[1]}
