"""Next-token distributions and recall of one model under every cache, beside full precision."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters

from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels.sealing import FULL_PRECISION, POLICIES
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.kv_choice import encoded
from satchel.actors.replica.proving.agreement import MODEL_ERRORS
from satchel.actors.replica.proving.divergence import NewCaches, Scores, compare
from satchel.actors.replica.selftest.probe import caches_of, right_answers, spec_of
from satchel.actors.replica.selftest.probe_texts import Texts, load_tokenizer

from ..parts import Budget, ResultTable, Say
from .texts import TEXTS

SCORED_FROM = 512
"""The first place that is scored."""

MLX_BITS = (4, 8)
PIECE_TOKENS = 256 if on_gpu() else 64
WHOLE_PIECES, ANSWERING = (PIECE_TOKENS, PIECE_TOKENS), (3, 1)
"""Sizes of calls: the products of quantized matrices have fewer shapes on some devices than on others."""

PRODUCTS_OFF_MAX = 0.05
"""Of the largest; 16 bits round much less."""

CHARACTERS_PER_TOKEN = 8
QUESTIONS_MAX, TOKENS_PER_QUESTION = 24, 96
SEED = 5

GOAL = "q4"
KL_MAX_LARGE, KL_MAX_SMALL, LARGE_PARAMETERS = 0.003, 0.005, 1e9
PERPLEXITY_CHANGE_MAX = 0.005
PUBLISHED = 'The paper "Agent Memory Below the Prompt" states -0.7 to +3.0% of perplexity for its 4-bit cache.'


@dataclass(frozen=True)
class Subject:
    """A loaded model, and what makes its caches by name.

    Attributes:
        decoding: of `others`, those that also take any number of tokens, and one after the other.
        refused: which of MLX's own cannot be measured here, or not for recall, and why.
    """

    name: str
    loaded: LoadedModel
    reference: NewCaches
    others: dict[str, NewCaches]
    decoding: dict[str, NewCaches]
    bytes_per_token: dict[str, int]
    refused: tuple[str, ...]

    @cached_property
    def kl_max(self) -> float:
        return KL_MAX_LARGE if get_total_parameters(self.loaded.model) >= LARGE_PARAMETERS else KL_MAX_SMALL


def load(source: str, name: str) -> Subject:
    """Loads a model with all policies that its layers bear, and with MLX's own caches where they compute."""
    loaded = models.load(
        source, context_tokens_max=None, progress=lambda what, fraction: None, kv=FULL_PRECISION, warm=False
    )
    refused: list[str] = []
    specs = {policy: spec_of(loaded, policy) for policy in POLICIES}
    others = {}
    for policy, spec in sorted(specs.items(), key=lambda item: item[1].bytes_per_token):
        if spec.policy is None:
            refused.append(f"{policy} is left out: the model's layers ({spec.describe()}) cannot be sealed.")
        elif policy != FULL_PRECISION:
            others[policy] = caches_of(loaded, spec)
    decoding = dict(others)
    for bits in MLX_BITS:
        make, own = _mlx_caches(loaded.model, bits), f"MLX's own, {bits} bits"
        if why := _why_not(loaded.model, make, WHOLE_PIECES):
            refused.append(f"MLX's own cache of {bits} bits cannot be measured here: {why}")
            continue
        others[own] = make
        if why := _why_not(loaded.model, make, ANSWERING):
            refused.append(
                f"MLX's own cache of {bits} bits takes whole pieces alone here, so recall is left out: {why}"
            )
        else:
            decoding[own] = make
    sizes = {policy: spec.bytes_per_token for policy, spec in specs.items()}
    reference = caches_of(loaded, specs[FULL_PRECISION])
    return Subject(name, loaded, reference, others, decoding, sizes, tuple(refused))


def _mlx_caches(model: Any, bits: int) -> NewCaches:
    return lambda: [cache.to_quantized(group_size=64, bits=bits) for cache in make_prompt_cache(model)]


def _why_not(model: Any, make: NewCaches, sizes: Sequence[int]) -> str:
    """Why these caches do not compute prompts of so many tokens, one after the other, on this device; empty if they
    do."""
    try:
        caches = make()
        for size in sizes:
            mx.eval(model(mx.array([[1 + at for at in range(size)]]), cache=caches))
        if not _multiplies(caches[0].keys, caches[0].group_size, caches[0].bits, sizes[-1]):
            return "the products of such shapes are wrong on this device"
    except (NotImplementedError, *MODEL_ERRORS) as error:
        return str(error).splitlines()[0]
    return ""


def _multiplies(keys: tuple[mx.array, ...], group_size: int, bits: int, queries: int) -> bool:
    """Whether MLX multiplies `keys`, quantized `(1, kv_heads, tokens, dim)`, as it would those that they stand for, in
    the shapes of its attention."""
    plain = mx.dequantize(*keys, group_size=group_size, bits=bits)[:, :, None]
    asked = mx.random.normal((1, plain.shape[1], 2, queries, plain.shape[-1])).astype(plain.dtype)
    codes, scales, biases = (array[:, :, None] for array in keys)
    got = mx.quantized_matmul(asked, codes, scales, biases, transpose=True, group_size=group_size, bits=bits)
    expected = asked @ plain.swapaxes(-1, -2)
    return bool(mx.abs(got - expected).max() <= PRODUCTS_OFF_MAX * mx.abs(expected).max())


def divergence(subject: Subject, text: str, lengths: Sequence[int], budget: Budget, say: Say) -> ResultTable:
    """Scores every place from `SCORED_FROM` up to each length, in one reading of the longest."""
    part = ResultTable(f"{subject.name}, {text}: next-token distributions beside full precision")
    part.notes += subject.refused
    loaded = subject.loaded
    lengths = sorted(length for length in lengths if SCORED_FROM < length <= loaded.context_tokens)
    if not lengths:
        part.notes.append(f"Its context of {loaded.context_tokens:,} tokens is too short.")
        return part
    written = TEXTS[text]()[: lengths[-1] * CHARACTERS_PER_TOKEN]
    # One more, which the last place foretells.
    tokens = encoded(subject.name, loaded.folder, written)[: lengths[-1] + 1]
    if len(tokens) <= lengths[-1]:
        part.notes.append(f"The text has {len(tokens):,} tokens only.")
    lengths = [length for length in lengths if length < len(tokens)]
    if not lengths:
        return part

    def enough(places: int) -> bool:
        at = SCORED_FROM + places
        if any(at - PIECE_TOKENS < length <= at for length in lengths):
            say(f"  {at:,} tokens")
        return budget.left_s <= 0

    span = (SCORED_FROM, lengths[-1])
    scored = compare(
        loaded.model, tokens, [span], subject.reference, subject.others, scored_tokens=PIECE_TOKENS, enough=enough
    )
    found = {name: scores for name, (scores,) in scored.items()}
    for length in lengths:
        places = length - SCORED_FROM
        if any(len(scores.kl) < places for scores in found.values()):
            part.notes.append(f"There was no time for {length:,} tokens.")
            continue
        for name, scores in found.items():
            row = _row(name, length, scores, places, subject.bytes_per_token.get(name))
            part.rows.append(row)
            if name == GOAL:
                _goals(part, subject, row, length)
    part.notes.append(f"Teacher-forced, over all places from {SCORED_FROM} on. {PUBLISHED}")
    return part


def _row(name: str, length: int, scores: Scores, places: int, size: int | None) -> dict[str, Any]:
    kl, same = scores.kl[:places], scores.same[:places]
    own, other = (
        float(np.exp(losses[:places].mean(dtype=np.float64))) for losses in (scores.reference_loss, scores.loss)
    )
    return {
        "cache": name,
        "tokens": length,
        "KL mean, nats": float(kl.mean(dtype=np.float64)),
        "KL p99": float(np.quantile(kl, 0.99)),
        "same likeliest": float(same.mean()),
        "perplexity": other,
        "in full precision": own,
        "change, %": 100 * (other / own - 1),
        "KV bytes a token": size,
    }


def _goals(part: ResultTable, subject: Subject, row: dict[str, Any], length: int) -> None:
    part.at_most(f"{length:,} tokens: KL of {GOAL}", row["KL mean, nats"], subject.kl_max)
    part.at_most(f"{length:,} tokens: change of perplexity, %", abs(row["change, %"]), 100 * PERPLEXITY_CHANGE_MAX)


def recall(subject: Subject, lengths: Sequence[int], samples: int, budget: Budget, say: Say) -> ResultTable:
    """Codes told at several depths of real prose and asked for at its end, under every cache."""
    part = ResultTable(f"{subject.name}: codes recalled")
    loaded, texts = subject.loaded, Texts(load_tokenizer(subject.loaded.folder))
    if not texts.quizzes:
        part.notes.append("Its tokenizer does not say where a text's tokens are.")
        return part
    makers = {FULL_PRECISION: subject.reference, **subject.decoding}
    for length in sorted(length for length in lengths if length <= loaded.context_tokens):
        rng, asked, right = random.Random(f"{SEED}/{length}"), 0, dict.fromkeys(makers, 0)
        for _ in budget.rounds(samples):
            quiz = texts.quiz(rng, length, min(QUESTIONS_MAX, length // TOKENS_PER_QUESTION))
            asked += len(quiz.codes)
            for name, make in makers.items():
                right[name] += right_answers(loaded.model, quiz, make())
        if not asked:
            part.notes.append(f"There was no time for {length:,} tokens.")
            continue
        say(f"  {length:,} tokens")
        part.rows += _recalled(length, asked, right)
    part.notes.append(
        "Told and asked for in conversations."
        if texts.chats
        else "Told and asked for in plain text, without a template."
    )
    return part


def _recalled(length: int, asked: int, right: dict[str, int]) -> Iterator[dict[str, Any]]:
    for name, count in right.items():
        yield {"cache": name, "tokens": length, "right": count, "asked": asked, "share": count / asked}
