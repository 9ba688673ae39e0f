"""Sampling: right distributions, and a sequence's draws depend on its own request and its own tokens only."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.replica_messages import Sampling, TokenLogprobs
from satchel.actors.replica.execution.sampling import sampling
from satchel.actors.replica.execution.sampling.grammar import SequenceMasks
from satchel.actors.replica.execution.sampling.sampling import (
    BatchSampler,
    Draw,
    _largest,
    _one_by_one,
    _stretches,
    likeliest,
    noise_key,
)
from tests.worlds.replica import metal_on_cpu

LOGITS = mx.array(np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32) * 2)
VOCABULARY = 1500
"""Beyond all of `WIDTHS`, so that every way of filtering is taken."""
END = frozenset({7, 11})


def draws(sampling: Sampling, count: int) -> np.ndarray:
    """`count` draws from LOGITS, at positions 0, 1, …"""
    batch = BatchSampler(50, frozenset())
    for position in range(count):
        batch.add(sampling, [], [0] * position)
    return np.array(batch(mx.broadcast_to(LOGITS, (count, 50))).tokens)


def random_sampling(rng: random.Random) -> Sampling:
    """Every field on or off by itself."""
    plain = rng.random() < 0.1
    tokens = rng.sample(range(VOCABULARY), 6)
    return Sampling(
        temperature=0.0 if plain else rng.choice([0.0, 0.3, 1.0, 1.0, 4.0]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5]),
        top_k=rng.choice([0, 0, 1, 20, 32, 100, 1024, 1200, 10**12]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        repetition_penalty=1.0 if plain else rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=0.0 if plain else rng.choice([0.0, 0.0, 1.5, -0.5]),
        frequency_penalty=0.0 if plain else rng.choice([0.0, 0.0, 0.7]),
        logit_bias=[] if plain or rng.random() < 0.5 else [(token, rng.uniform(-9, 9)) for token in tokens],
        seed=rng.getrandbits(64) - 2**63,
        choice=rng.choice([0, 0, 1, 5]),
        min_tokens=0 if plain else rng.choice([0, 0, 3]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.sample(range(VOCABULARY), rng.choice([0, 3])),
        logprobs=rng.choice([None, None, 0, 5, 40]),
        allowed_token_ids=[] if plain or rng.random() < 0.7 else rng.sample(range(VOCABULARY), rng.choice([2, 40])),
        bad_words=[]
        if plain or rng.random() < 0.7
        else [[tokens[0]], tokens[1:3], tokens[2:5], [tokens[3], tokens[0]]],
    )


def expected(sampling: Sampling, prompt: list[int], generated: list[int], logits: np.ndarray) -> int:
    """The token by the definitions, in numpy, one sequence and one token at a time."""
    values = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in {*prompt, *generated}:
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(generated):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(token)
    if sampling.allowed_token_ids:
        values[[token for token in range(len(values)) if token not in sampling.allowed_token_ids]] = -np.inf
    values[[word[-1] for word in sampling.bad_words if [*generated, word[-1]][-len(word) :] == word]] = -np.inf
    if len(generated) < sampling.min_tokens:
        values[[*sampling.stop_token_ids, *(() if sampling.ignore_eos else END)]] = -np.inf
    if sampling.temperature == 0:
        return int(values.argmax())
    values /= sampling.temperature
    order = np.argsort(-values)
    probabilities = np.exp(values - values.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    allowed = np.zeros(len(values), dtype=bool)
    allowed[order[before < sampling.top_p]] = True
    allowed[order[sampling.top_k or len(values) :]] = False
    allowed &= probabilities >= sampling.min_p * probabilities.max()
    seed = noise_key(sampling.seed, sampling.choice) if sampling.choice else sampling.seed
    key = noise_key(seed, len(generated))
    noise = mx.random.gumbel((len(values),), key=mx.array([key >> 32, key & 0xFFFFFFFF], dtype=mx.uint32))
    return int(np.where(allowed, values + np.array(noise), -np.inf).argmax())


def random_logits(name: int, position: int) -> np.ndarray:
    """What a model might say to one sequence at one position; 30 tokens are likely, so that tokens come again."""
    rng = np.random.default_rng([name, position])
    logits = rng.normal(size=VOCABULARY).astype(np.float32)
    logits[:30] += 4
    return logits


@dataclasses.dataclass
class Sequence:
    """A sequence with a prompt, what it has drawn, and what was said about it."""

    name: int
    sampling: Sampling
    prompt: list[int]
    generated: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)

    @classmethod
    def random(cls, name: int, rng: random.Random) -> Sequence:
        return cls(name, random_sampling(rng), [rng.randrange(60) for _ in range(rng.randrange(40))])

    def again(self) -> Sequence:
        return Sequence(self.name, self.sampling, self.prompt)


class Batch:
    """A sampler and the sequences in it, driven as a replica does: a draw is launched before the last one is read."""

    def __init__(self) -> None:
        self.sampler = BatchSampler(VOCABULARY, END)
        self.sequences: list[Sequence] = []
        self._flying: tuple[list[Sequence | None], Draw] | None = None

    def add(self, sequence: Sequence) -> None:
        self.sampler.add(sequence.sampling, sequence.prompt, sequence.generated)
        self.sequences.append(sequence)

    def keep(self, indices: list[int]) -> None:
        """If a sequence leaves, its draws that were not read are lost."""
        self.sampler.keep(indices)
        self.sequences = [self.sequences[index] for index in indices]
        assert len(self.sampler) == len(self.sequences)
        if self._flying is not None:
            sequences, draw = self._flying
            stay = {id(sequence) for sequence in self.sequences}
            self._flying = [sequence if id(sequence) in stay else None for sequence in sequences], draw

    def step(self) -> None:
        flying = {id(sequence) for sequence in self._flying[0]} if self._flying else set()
        positions = [len(sequence.generated) + (id(sequence) in flying) for sequence in self.sequences]
        logits = [
            random_logits(sequence.name, position) for sequence, position in zip(self.sequences, positions, strict=True)
        ]
        draw = self.sampler(mx.array(np.stack(logits)))
        self.land()
        self._flying = [*self.sequences], draw

    def land(self) -> None:
        """Read the last draw."""
        if self._flying is not None:
            sequences, draw = self._flying
            mx.async_eval(draw.arrays())
            for sequence, token, said in zip(sequences, np.array(draw.tokens).tolist(), draw.logprobs(), strict=True):
                if sequence is not None:
                    sequence.generated.append(token)
                    sequence.logprobs.append(said)
        self._flying = None


def run_alone(sequence: Sequence, tokens: int) -> Sequence:
    batch, copy = Batch(), sequence.again()
    batch.add(copy)
    for _ in range(tokens):
        batch.step()
    batch.land()
    return copy


@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_draws_the_same_in_any_batch(seed: int):
    """Tokens and logprobs, to the last bit, while other sequences of every kind come, go and come back."""
    rng = random.Random(seed)
    batch, left = Batch(), []
    for step in range(25):
        if not batch.sequences or rng.random() < 0.5:
            returning = left.pop() if left and rng.random() < 0.5 else Sequence.random(100 * seed + step, rng)
            batch.add(returning)
        elif rng.random() < 0.3:
            stay = [index for index in range(len(batch.sequences)) if rng.random() < 0.7]
            left += [sequence for index, sequence in enumerate(batch.sequences) if index not in stay]
            batch.keep(stay)
            if not stay:
                continue
        batch.step()
    batch.land()
    for sequence in [*batch.sequences, *left]:
        alone = run_alone(sequence, len(sequence.generated))
        assert sequence.generated == alone.generated, f"seed {seed}: {sequence.sampling}"
        assert sequence.logprobs == alone.logprobs, f"seed {seed}: {sequence.sampling}"


@pytest.mark.parametrize("seed", range(6))
def test_every_draw_is_what_the_definitions_say(seed: int):
    """All fields at once, against plain numpy with the history spelled out."""
    rng = random.Random(1000 + seed)
    batch = Batch()
    for name in range(8):
        batch.add(Sequence.random(100 * seed + name, rng))
    for _ in range(8):
        batch.step()
    batch.land()
    for sequence in batch.sequences:
        for position, token in enumerate(sequence.generated):
            logits = random_logits(sequence.name, position)
            wanted = expected(sequence.sampling, sequence.prompt, sequence.generated[:position], logits)
            assert token == wanted, f"seed {seed}, position {position}: {sequence.sampling}"


def test_greedy_is_argmax_in_any_batch():
    best = int(np.argmax(LOGITS))
    for others in ([], [Sampling(temperature=5, seed=1), Sampling(temperature=1, top_k=2, logprobs=3)]):
        batch = BatchSampler(50, frozenset({best}))
        for sequence in [*others, Sampling(temperature=0), Sampling(temperature=1e-30)]:
            batch.add(sequence, [1], [])
        tokens = np.array(batch(mx.broadcast_to(LOGITS, (len(batch), 50))).tokens)
        assert tokens[-2:].tolist() == [best, best]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature: float):
    expected = np.array(mx.softmax(LOGITS[0] / temperature))
    check_frequencies(draws(Sampling(temperature=temperature, seed=3), 20_000), expected)


@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_min_p_draws_from_what_is_likely_enough(min_p: float):
    probabilities = np.array(mx.softmax(LOGITS[0] / 1.5))
    kept = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0)
    assert 1 < (kept > 0).sum() < 50
    check_frequencies(draws(Sampling(temperature=1.5, min_p=min_p, seed=4), 20_000), kept / kept.sum())


@pytest.mark.parametrize("top_k", [0, 10])
def test_top_p_draws_from_the_nucleus(top_k: int):
    probabilities = np.array(mx.softmax(LOGITS[0]))
    order = np.argsort(-probabilities)
    nucleus = int(np.searchsorted(np.cumsum(probabilities[order]), 0.9)) + 1
    kept = np.zeros(50)
    members = order[: min(nucleus, top_k or nucleus)]
    kept[members] = probabilities[members]
    check_frequencies(draws(Sampling(top_p=0.9, top_k=top_k, seed=5), 20_000), kept / kept.sum())


def check_frequencies(drawn: np.ndarray, expected: np.ndarray) -> None:
    """Within four standard deviations of a binomial, for each of 50 tokens; none that cannot be."""
    frequencies = np.bincount(drawn, minlength=50) / len(drawn)
    assert (frequencies[expected == 0] == 0).all()
    assert (np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / len(drawn)) + 1e-4).all()


def test_filters_always_leave_the_best_token():
    best = {mx.argmax(LOGITS).item()}
    assert set(draws(Sampling(temperature=5, top_k=1, seed=1), 50)) == best
    assert set(draws(Sampling(temperature=1, top_p=1e-9, seed=1), 50)) == best
    assert set(draws(Sampling(temperature=5, min_p=1, seed=1), 50)) == best


def test_nothing_ends_before_min_tokens():
    """Neither an end token nor a stop token comes before, whatever its bias; right after, it does."""
    for ignore_eos, blocked in ((False, {3, 4}), (True, {4})):
        for target in (3, 4):
            batch = BatchSampler(50, frozenset({3}))
            asked = {"min_tokens": 3, "ignore_eos": ignore_eos, "stop_token_ids": [4], "temperature": 0.0}
            batch.add(Sampling(logit_bias=[(target, 1000.0)], **asked), [], [9])
            tokens = [np.array(batch(LOGITS).tokens).item() for _ in range(3)]
            first = int(np.argmax(LOGITS)) if target in blocked else target
            assert tokens == [first, first, target]


@pytest.fixture(params=["by sorts", "as on CUDA"])
def ways_to_look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of looking for the likeliest tokens."""
    if request.param == "as on CUDA":
        monkeypatch.setattr(sampling, "on_cuda", lambda: True)


@pytest.mark.usefixtures("ways_to_look")
def test_logprobs_are_the_models_own():
    """Natural logarithms of the softmax, best first, for who asks, whatever is done to the logits afterwards."""
    batch = BatchSampler(50, frozenset())
    asks = [3, None, 0, 60]
    for asked in asks:
        batch.add(Sampling(temperature=0.5, top_k=1, logit_bias=[(17, 100.0)], logprobs=asked), [17], [])
    logits = mx.random.normal((4, 50), key=mx.random.key(1)) * 3
    draw = batch(logits)
    assert np.array(draw.tokens).tolist() == [17] * 4
    exact = np.array(logits, dtype=np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    for sequence, (said, asked) in enumerate(zip(draw.logprobs(), asks, strict=True)):
        if asked is None:
            assert said is None
            continue
        assert said is not None
        order = np.argsort(-exact[sequence])[:asked]
        assert [token for token, _ in said[1]] == order.tolist()
        np.testing.assert_allclose(
            [said[0], *(value for _, value in said[1])], exact[sequence, [17, *order]], atol=1e-5
        )
        assert type(said[0]) is float
        assert all(type(token) is int and type(value) is float for token, value in said[1])


@pytest.mark.usefixtures("ways_to_look")
@pytest.mark.parametrize("vocabulary", [151_936, 262_145])
def test_logprobs_of_a_large_vocabulary_are_exact(vocabulary: int):
    """A CPU's sum of so many float32 numbers, one after the other, is not."""
    logits = 3 * np.random.default_rng(0).normal(size=(2, vocabulary)).astype(np.float32)
    logits[1, 9::2] = -np.inf
    batch = BatchSampler(vocabulary, frozenset())
    for _ in logits:
        batch.add(Sampling(temperature=0.0, logprobs=1), [], [])
    for sequence, said in enumerate(batch(mx.array(logits)).logprobs()):
        exact = logits[sequence].astype(np.float64)
        assert said is not None
        assert abs(said[0] - (exact.max() - np.logaddexp.reduce(exact))) < 1e-5


@pytest.mark.usefixtures("ways_to_look")
def test_equally_likely_tokens_are_told_by_their_ids():
    batch = BatchSampler(50, frozenset())
    batch.add(Sampling(logprobs=4), [], [])
    logits = mx.zeros((1, 50)).at[0, mx.array([40, 30, 20])].add(1)
    (said,) = batch(logits).logprobs()
    assert said is not None
    assert [token for token, _ in said[1]][:3] == [20, 30, 40]


@pytest.mark.parametrize("vocabulary", [8192, 8193, 20_000, 151_936])
@pytest.mark.parametrize("masked", [0.0, 0.9999])
def test_the_largest_logits_of_a_large_vocabulary_are_those_of_the_whole(vocabulary: int, masked: float):
    """They are looked for in a few stretches of it: also where many are in one, where many are equal, and where few
    are more than -inf."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=(4, vocabulary)).astype(np.float32)
    logits[1, 700:760] += 9
    logits[2] = np.round(logits[2])
    logits[3, -3:] += 20
    logits[rng.random(logits.shape) < masked] = -np.inf
    wanted = -np.sort(-logits, axis=-1)[:, :32]
    assert _stretches(mx.array(logits), 32) is not None
    assert np.array_equal(-np.sort(-np.array(_largest(mx.array(logits), 32)), axis=-1), wanted)
    for tokens in (np.array(likeliest(mx.array(logits), 32)), np.array(_one_by_one(mx.array(logits), 32))):
        assert np.array_equal(-np.sort(-np.take_along_axis(logits, tokens, axis=-1), axis=-1), wanted)
        assert (tokens < vocabulary).all()
    assert all(len({*sequence}) == 32 for sequence in tokens.tolist()), "none is told twice"


def test_a_large_vocabulary_is_drawn_from_as_if_it_were_sorted_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    """The same tokens and the same logprobs of them and of the likeliest, which CUDA looks for without a sort."""
    sequences = [
        {"top_k": 20},
        {"top_k": 32, "top_p": 0.8},
        {"top_k": 5, "logprobs": 5},
        {"temperature": 0.0, "logprobs": 20},
    ]
    said = []
    for stretch, cuda in ((sampling.STRETCH, False), (10**6, False), (10**6, True)):
        monkeypatch.setattr(sampling, "STRETCH", stretch)
        monkeypatch.setattr(sampling, "on_cuda", lambda on=cuda: on)
        batch = BatchSampler(20_000, frozenset())
        for seed, asked in enumerate(sequences):
            batch.add(Sampling(seed=seed, **asked), [], [])
        rng = np.random.default_rng(1)
        draws = [batch(mx.array(rng.normal(size=(4, 20_000)).astype(np.float32) * 3)) for _ in range(20)]
        said.append([(draw.tokens.tolist(), draw.logprobs()) for draw in draws])
    assert said[0] == said[1] == said[2]


def test_no_sequence_asks_no_logprobs():
    batch = BatchSampler(50, frozenset())
    batch.add(Sampling(temperature=0), [], [])
    draw = batch(LOGITS)
    assert (draw.chosen, draw.top_tokens, draw.top_logprobs) == (None, None, None)
    assert draw.logprobs() == [None]
    assert len(draw.arrays()) == 2


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_that_says_nonsense_is_found_out(broken: float):
    for temperature in (0.0, 1.0):
        batch = BatchSampler(50, frozenset())
        for _ in range(3):
            batch.add(Sampling(temperature=temperature), [], [])
        logits = mx.concatenate([LOGITS, mx.full((1, 50), broken), LOGITS])
        assert np.array(batch(logits).sound).tolist() == [True, False, True]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 20, 49])
@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0.0, "allowed_token_ids": [3, 4]},
    ],
)
@pytest.mark.parametrize("bound", [False, True])
def test_one_broken_logit_is_found_out_though_argmax_passes_over_it(
    asked: dict[str, Any], broken: float, place: int, bound: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also where the token that is drawn is another one, or may not be drawn at all. The sequences beside it are
    sound."""
    metal_on_cpu.passes_over_nan(monkeypatch)
    batch = BatchSampler(50, frozenset())
    for _ in range(3):
        batch.add(Sampling(**asked), [], [])
    logits = mx.repeat(LOGITS, 3, axis=0)
    logits[1, place] = broken
    masks = SequenceMasks([1], np.array([[1 << 3, 0]], dtype=np.uint32)) if bound else None
    assert np.array(batch(logits, masks).sound).tolist() == [True, False, True]


def test_masked_logits_are_sound_and_a_sequence_without_any_other_is_not():
    for temperature in (0.0, 1.0):
        batch = BatchSampler(50, frozenset())
        for _ in range(2):
            batch.add(Sampling(temperature=temperature), [], [])
        logits = mx.concatenate([mx.where(mx.arange(50) == 7, LOGITS, -mx.inf), mx.full((1, 50), -mx.inf)])
        draw = batch(logits)
        assert draw.tokens.tolist()[0] == 7 and draw.sound.tolist() == [True, False]  # type: ignore[index]


def test_tokens_outside_the_vocabulary_change_nothing():
    plain = Sampling(seed=8, repetition_penalty=1.5, min_tokens=5)
    odd = dataclasses.replace(plain, logit_bias=[(50, 5.0), (-1, 5.0), (2**40, 5.0)], stop_token_ids=[-3, 50, 2**40])
    tokens = []
    for asked, prompt in ((plain, [3]), (odd, [3, 50, -1, 10**6])):
        batch = BatchSampler(50, frozenset())
        batch.add(asked, prompt, [])
        tokens.append([np.array(batch(LOGITS).tokens).item() for _ in range(10)])
    assert tokens[0] == tokens[1]


def test_logits_of_another_batch_are_refused():
    batch = BatchSampler(50, frozenset())
    batch.add(Sampling(), [], [])
    with pytest.raises(ValueError, match="1 sequences of 50 logits"):
        batch(mx.zeros((2, 50)))


def test_choices_of_one_seed_differ_and_the_first_is_the_seeds_own():
    sequences = [draws(Sampling(temperature=3, seed=6, choice=choice), 40).tolist() for choice in range(4)]
    assert len({tuple(sequence) for sequence in sequences}) == 4
    key = noise_key(6, 0)
    noise = mx.random.gumbel((50,), key=mx.array([key >> 32, key & 0xFFFFFFFF], dtype=mx.uint32))
    assert sequences[0][0] == mx.argmax(LOGITS[0] / 3 + noise).item()


def test_noise_keys_do_not_collide_for_neighbours():
    keys = {noise_key(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 10_000
    assert all(0 <= key < 2**64 for key in keys)


def test_a_seed_says_the_same_in_every_version():
    """The same seed gives the same answer again, also for a sequence that fails over to a replica of another
    version."""
    known = {
        (0, 0): 0xA706DD2F4D197E6F,
        (0, 1): 0x46B73E79F0C37C00,
        (1, 0): 0x5E41AB087439611E,
        (-1, 0): 0x5DC20AA7B2A27137,
        (2**63, 5): 0xEE1979B8B7B6AD38,
    }
    assert {pair: noise_key(*pair) for pair in known} == known


def test_all_biases_of_one_token_add_up():
    """Each alone is too little to make it the likeliest."""
    alone = float(mx.max(LOGITS) - LOGITS[0, 17]) * 0.7
    for biases, drawn in (([(17, alone)], int(np.argmax(LOGITS))), ([(17, alone), (3, -1.0), (17, alone)], 17)):
        batch = BatchSampler(50, frozenset())
        batch.add(Sampling(temperature=0.0, logit_bias=biases), [], [])
        assert np.array(batch(LOGITS).tokens).tolist() == [drawn]


def mask_of(tokens: list[int]) -> np.ndarray:
    """A bit for every token of the vocabulary and of some that only the tokenizer has."""
    bits = np.zeros((VOCABULARY + 63) // 32 * 32, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_a_mask_constrains_its_sequence_and_no_other(seed: int, dtype: mx.Dtype):
    """Each sequence draws what it draws alone, with its mask or without; also in batches that are all greedy."""
    rng = random.Random(seed)
    plain = {"temperature": 0.0} if seed == 0 else {}
    unbound = {"min_tokens": 0, "allowed_token_ids": [], "bad_words": []}
    sequences = [dataclasses.replace(random_sampling(rng), **unbound, **plain) for _ in range(8)]
    masks = {index: rng.sample(range(VOCABULARY), rng.choice([1, 3, 200])) for index in rng.sample(range(8), 4)}
    logits = mx.array(np.stack([random_logits(index, 0) for index in range(8)])).astype(dtype)

    def draw(members: list[int], bound: bool = True) -> list[int]:
        sampler = BatchSampler(VOCABULARY, END)
        for index in members:
            sampler.add(sequences[index], [1, 2, 3], [4, 4, 5])
        places = [place for place, index in enumerate(members) if bound and index in masks]
        words = np.stack([mask_of(masks[members[place]]) for place in places]) if places else None
        given = None if words is None else SequenceMasks(places, words)
        return np.array(sampler(logits[mx.array(members)], given).tokens).tolist()

    together, free = draw(list(range(8))), draw(list(range(8)), bound=False)
    for index in range(8):
        assert draw([index]) == [together[index]]
        assert together[index] in masks[index] if index in masks else together[index] == free[index]


def test_a_mask_gives_way_to_min_tokens_only_where_something_is_left():
    sampler = BatchSampler(VOCABULARY, END)
    for allowed_end in (min(END), 20):
        sampler.add(Sampling(temperature=0.0, min_tokens=5, logit_bias=[(allowed_end, 90.0)]), [], [])
    words = np.stack([mask_of([min(END)]), mask_of([min(END), 20])])
    logits = mx.array(np.stack([random_logits(index, 0) for index in range(2)]))
    assert np.array(sampler(logits, SequenceMasks([0, 1], words)).tokens).tolist() == [min(END), 20]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_with_ignore_eos_a_constrained_sequence_ends_only_where_it_must(ignore_eos: bool):
    sampler = BatchSampler(VOCABULARY, END)
    end = min(END)
    for _ in range(2):
        sampler.add(Sampling(temperature=0.0, ignore_eos=ignore_eos, logit_bias=[(end, 90.0)]), [], [])
    words = np.stack([mask_of([end, 30]), mask_of([end])])
    logits = mx.array(np.stack([random_logits(index, 0) for index in range(2)]))
    drawn = np.array(sampler(logits, SequenceMasks([0, 1], words)).tokens).tolist()
    assert drawn == [30 if ignore_eos else end, end]
