"""Distributions are compared exactly at the wanted positions, and NaN never counts as a small divergence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.proving.divergence import compare, logits_of
from tests.worlds.models.table_model import VOCABULARY, Table, Tape


def distribution(table: Table, place: int, token: int, sharpness: float) -> np.ndarray:
    sequence = np.exp(table.logits_at(place, token, sharpness).astype(np.float64))
    return sequence / sequence.sum()


def test_divergence_is_kl_from_the_reference_at_the_very_places_of_the_spans() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(VOCABULARY) for _ in range(1000)]
    spans, table = [(3, 200), (200, 207), (900, 1000)], Table()
    found = compare(table, tokens, spans, lambda: [Tape()], {"sharp": lambda: [Tape(1.7)], "equal": lambda: [Tape()]})
    for (start, stop), sharp, equal in zip(spans, found["sharp"], found["equal"], strict=True):
        assert len(sharp.kl) == len(sharp.same) == stop - start
        assert not equal.kl.any() and equal.same.all()
        for place in range(start, stop):
            p, q = (
                np.exp(sequence) / np.exp(sequence).sum()
                for sequence in (table.logits_at(place, tokens[place], s).astype(np.float64) for s in (1.0, 1.7))
            )
            assert sharp.kl[place - start] == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-3)


def test_the_likeliest_tokens_are_compared_with_those_of_the_same_place() -> None:
    tokens = list(range(40))
    (flipped,) = compare(Table(), tokens, [(0, 40)], lambda: [Tape()], {"x": lambda: [Tape(-1.0)]})["x"]
    assert not flipped.same.any() and flipped.kl.min() > 0


@pytest.mark.parametrize("broken", ["reference", "other"])
def test_a_place_without_numbers_is_never_the_same(broken: str) -> None:
    """Whichever of the two has a NaN there, and though Metal's `argmax` passes over it."""

    class Broken(Tape):
        pass

    class Model(Table):
        def __call__(self, tokens: mx.array, cache: Sequence[Tape]) -> mx.array:
            logits = super().__call__(tokens, cache)
            if isinstance(cache[0], Broken):
                logits[0, 3, 5] = mx.nan
            return logits

    kinds = (Broken, Tape) if broken == "reference" else (Tape, Broken)
    (scores,) = compare(Model(), list(range(40)), [(0, 40)], lambda: [kinds[0]()], {"x": lambda: [kinds[1]()]})["x"]
    assert scores.same.tolist() == [place != 3 for place in range(40)] and np.isnan(scores.kl[3])


def test_pieces_do_not_depend_on_where_spans_begin() -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, VOCABULARY, 1500)]
    table = Table()
    pieces = list(logits_of(table, tokens, [Tape()], [(0, 10), (523, 1400)]))
    sequences = np.concatenate([np.array(piece) for piece in pieces])
    places = [*range(10), *range(523, 1400)]
    assert all(
        (sequences[i] == table.logits_at(place, int(tokens[place]), 1.0)).all() for i, place in enumerate(places)
    )


def test_losses_are_of_the_token_that_stands_next_and_of_none_at_the_end() -> None:
    tokens, table = [int(token) for token in np.random.default_rng(2).integers(0, VOCABULARY, 300)], Table()
    found = compare(table, tokens, [(5, 30), (200, 300)], lambda: [Tape()], {"sharp": lambda: [Tape(1.7)]})["sharp"]
    for (start, stop), scores in zip([(5, 30), (200, 300)], found, strict=True):
        for place in range(start, min(stop, 299)):
            for losses, sharpness in ((scores.loss, 1.7), (scores.reference_loss, 1.0)):
                wanted = -np.log(distribution(table, place, tokens[place], sharpness)[tokens[place + 1]])
                assert losses[place - start] == pytest.approx(wanted, rel=1e-4)
    assert np.isnan(found[1].loss[-1]) and np.isnan(found[1].reference_loss[-1])


def test_a_comparison_with_enough_places_stops() -> None:
    """And nothing more is read: the tape stops where the last scored piece ends."""
    tokens, tape = list(range(40)) * 10, Tape()
    found = compare(
        Table(), tokens, [(10, 400)], Tape.alone, {"x": lambda: [tape]}, scored_tokens=16, enough=lambda at: at >= 32
    )["x"]
    assert len(found[0].kl) == 32 and tape.seen == 42


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_distribution_has_no_divergence(wrong: float, whole: bool) -> None:
    """Neither where one logit is no number, nor where none is: both would else be 0, as of the very best."""

    class Broken(Table):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            logits = super().__call__(tokens, cache)
            if cache[0].sharpness == 1.0:
                return logits
            return mx.full(logits.shape, wrong) if whole else logits + mx.where(mx.arange(VOCABULARY) == 7, wrong, 0.0)

    (scores,) = compare(Broken(), list(range(40)), [(0, 40)], Tape.alone, {"x": lambda: [Tape(2.0)]})["x"]
    assert np.isnan(scores.kl).all()
    (scores,) = compare(Broken(), list(range(40)), [(0, 40)], lambda: [Tape(2.0)], {"x": Tape.alone})["x"]
    assert np.isnan(scores.kl).all()


def test_a_token_that_neither_may_say_adds_nothing() -> None:
    class Masked(Table):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            return super().__call__(tokens, cache) + mx.where(mx.arange(VOCABULARY) == 7, -float("inf"), 0.0)

    (scores,) = compare(Masked(), list(range(40)), [(0, 40)], Tape.alone, {"x": lambda: [Tape(1.7)]})["x"]
    assert np.isfinite(scores.kl).all() and scores.kl.min() > 0
