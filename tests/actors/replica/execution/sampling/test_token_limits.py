"""Allowed tokens and bad words: for the sequence that asks, in every step, also after a failover; some token is always
possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.execution.sampling.sampling import BatchSampler
from satchel.actors.rpc.codec import decode, encode

VOCABULARY = 50
END = frozenset({7, 11})


def steps(count: int, *, seed: int = 0) -> list[mx.array]:
    numbers = np.random.default_rng(seed).normal(size=(count, VOCABULARY)).astype(np.float32) * 2
    return [mx.array(sequence) for sequence in numbers]


def answers(
    sequences: Sequence[Sampling], logits: Sequence[mx.array], generated: Sequence[int] = ()
) -> list[list[int]]:
    """The tokens of each sequence, if the model says `logits`, one `(vocabulary,)` a step, to all of them."""
    batch = BatchSampler(VOCABULARY, END)
    for sequence in sequences:
        batch.add(sequence, [1, 2, 3], generated)
    draws = [batch(mx.broadcast_to(step, (len(sequences), VOCABULARY))).tokens for step in logits]
    return np.array(mx.stack(draws)).T.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, allowed_token_ids=[3, 9, 7, 10**6], seed=4, logprobs=2)
    (tokens,) = answers([sampling], steps(60))
    assert {*tokens} <= {3, 9, 7} and len({*tokens}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("word", [[5], [5, 6], [5, 6, 8], [5, 5]])
def test_a_bad_word_does_not_appear_and_its_parts_do(temperature: float, word: list[int]) -> None:
    logits = [
        step + mx.array([9.0 if token in (5, 6, 8) else 0.0 for token in range(VOCABULARY)]) for step in steps(80)
    ]
    (free,) = answers([Sampling(temperature=temperature, seed=1)], logits)
    (tokens,) = answers([Sampling(temperature=temperature, seed=1, bad_words=[word])], logits)
    spelled = [tokens[at : at + len(word)] for at in range(len(tokens))]
    assert word in [free[at : at + len(word)] for at in range(len(free))]
    assert word not in spelled
    assert len(word) == 1 or all(token in tokens for token in word)


def test_other_sequences_draw_what_they_draw_alone() -> None:
    limited = [Sampling(allowed_token_ids=[4, 5], seed=3), Sampling(bad_words=[[4], [5, 6], [6]], seed=4)]
    others = [Sampling(seed=5), Sampling(temperature=0.0), Sampling(seed=6, top_p=0.5, logprobs=1)]
    logits = steps(30)
    alone = [answers([sequence], logits)[0] for sequence in (*limited, *others)]
    assert answers([limited[0], *others, limited[1]], logits) == [alone[0], *alone[2:], alone[1]]


@pytest.mark.parametrize("at", [1, 2, 7, 20])
def test_a_sequence_that_fails_over_has_the_same_answer(at: int) -> None:
    sampling = Sampling(temperature=3.0, allowed_token_ids=[4, 5, 6], bad_words=[[4, 5], [5, 6, 4], [6, 6]], seed=8)
    logits = steps(30)
    (whole,) = answers([sampling], logits)
    sent = decode(Sampling, encode(sampling))
    assert sent == sampling
    assert answers([sent], logits[at:], whole[:at]) == [whole[at:]]


@pytest.mark.parametrize(
    "limits",
    [
        {"allowed_token_ids": [7], "min_tokens": 5},
        {"allowed_token_ids": [9], "bad_words": [[9]]},
        {"allowed_token_ids": [9], "bad_words": [[9, 9]]},
        {"allowed_token_ids": [7, 9], "bad_words": [[9]], "min_tokens": 5},
        {"allowed_token_ids": [7, 9], "bad_words": [[9, 9]], "min_tokens": 5},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_limits_that_leave_nothing_give_way(limits: dict[str, Any], temperature: float) -> None:
    (tokens,) = answers([Sampling(temperature=temperature, **limits)], steps(5))
    assert {*tokens} <= {*limits["allowed_token_ids"]}


def test_sequences_that_leave_take_their_limits_along() -> None:
    batch = BatchSampler(VOCABULARY, END)
    sequences = [
        Sampling(temperature=0.0),
        Sampling(bad_words=[[4, 5]], seed=2),
        Sampling(allowed_token_ids=[6], seed=3),
    ]
    for sequence in sequences:
        batch.add(sequence, [], [])
    batch(mx.broadcast_to(steps(1)[0], (3, VOCABULARY)))
    batch.keep([2, 0])
    tokens = np.array(batch(mx.broadcast_to(steps(1)[0], (2, VOCABULARY))).tokens).tolist()
    assert tokens == [6, int(mx.argmax(steps(1)[0]))]
