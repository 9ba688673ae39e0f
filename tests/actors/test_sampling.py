"""Sampling: right distributions, and a row's draws depend on its own seed and position only."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.messages import Sampling
from satchel.actors.replica.sampling import BatchSampler, noise_key

LOGITS = mx.array(np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32) * 2)


def draws(sampling: Sampling, count: int) -> np.ndarray:
    """`count` draws from LOGITS, at positions 0, 1, …"""
    batch = BatchSampler([sampling] * count)
    return np.array(batch(mx.broadcast_to(LOGITS, (count, 50)), range(count)))


def test_greedy_is_argmax_whatever_stands_beside_it():
    alone = BatchSampler([Sampling(temperature=0)])(LOGITS, [3])
    rows = [Sampling(temperature=5, seed=1), Sampling(temperature=0), Sampling(temperature=1, top_k=2, seed=9)]
    together = BatchSampler(rows)(mx.broadcast_to(LOGITS, (3, 50)), [3, 3, 3])
    assert alone.item() == together[1].item() == mx.argmax(LOGITS).item()


def test_a_row_draws_the_same_in_any_company():
    mine = Sampling(temperature=1.3, top_p=0.9, top_k=30, seed=77)
    alone = [BatchSampler([mine])(LOGITS, [position]).item() for position in range(20)]
    others = [Sampling(temperature=0), Sampling(temperature=9, seed=5), mine, Sampling(top_k=1, seed=77)]
    beside = [BatchSampler(others)(mx.broadcast_to(LOGITS, (4, 50)), [9, 9, p, 9])[2].item() for p in range(20)]
    assert alone == beside
    assert len(set(alone)) > 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature: float):
    count = 20_000
    expected = np.array(mx.softmax(LOGITS[0] / temperature))
    frequencies = np.bincount(draws(Sampling(temperature=temperature, seed=3), count), minlength=50) / count
    # Four standard deviations of a binomial, for each of 50 tokens.
    assert (np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / count) + 1e-4).all()


def test_top_k_and_top_p_leave_out_what_they_say():
    order = np.argsort(-np.array(LOGITS[0]))
    assert set(draws(Sampling(temperature=5, top_k=3, seed=1), 500)) == set(order[:3])
    probabilities = np.array(mx.softmax(LOGITS[0]))[order]
    nucleus = int(np.searchsorted(np.cumsum(probabilities), 0.7)) + 1
    assert set(draws(Sampling(temperature=1, top_p=0.7, seed=1), 3000)) == set(order[:nucleus])
    assert set(draws(Sampling(temperature=1, top_p=1e-9, seed=1), 50)) == {order[0]}


def test_noise_keys_do_not_collide_for_neighbours():
    keys = {noise_key(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 10_000
    assert all(0 <= key < 2**64 for key in keys)
