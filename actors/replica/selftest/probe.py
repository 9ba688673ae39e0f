"""Measures how KV quantization changes a model's answers: every policy against full precision, on the same tokens.

All policies read the same text (teacher-forced), so their next-token distributions can be compared position by
position. Two things are measured at each length. *Divergence*: KL(fp16 || policy) in nats, and how often the likeliest
token is the same, over the last 256 positions before the length, so that the open block has every fill once. In half of
the texts these positions have the model's own greedy continuation. *Recall*: codes are told at several depths of a
conversation, and asked for at its end. An answer is right if greedy decoding predicts each of the code's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ....cluster.errors import GenerationFailed, InvalidRequest
from ...model_files.source import Progress, first_sentence
from ...protocol.block_ids import BLOCK_TOKENS
from ..execution.loaded_model import LoadedModel
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..kv.caches import ModelCacheSpec, new_caches, new_pool
from ..kv.paged_cache import Reads
from ..loading.models import resealed
from ..proving.divergence import CHUNK_TOKENS, NewCaches, Scores, Span, compare, logits_of, read
from .probe_texts import Quiz, Texts

LENGTH_MIN = 2 * BLOCK_TOKENS
"""With at least this length, every scored position has a sealed block before it."""

QUESTIONS_MAX = 24
TOKENS_PER_QUESTION = 96
TOP1_MIN = 0.99
RECALL_LOSS_MAX = 0.005
RECALL_FP16_MIN = 0.5
"""If a model recalls a smaller share than this in full precision, its recall says nothing about a policy."""


@dataclass(frozen=True)
class ProbeResult:
    """A policy at a length. `kl` and `top1` are over `places` positions; `right` of `questions` codes were recalled,
    None if none were asked for."""

    policy: str
    tokens: int
    kl_mean: float
    kl_p99: float
    top1: float
    places: int
    right: int | None = None
    questions: int | None = None


@dataclass(frozen=True)
class KVSize:
    """The size of a policy's KV: per further token, and of a whole conversation of `tokens` tokens."""

    policy: str
    token_bytes: int
    tokens: int
    total_bytes: int


@dataclass(frozen=True)
class Report:
    """The result of a probe.

    Attributes:
        dtype: the dtype of computation, and of KV that is not sealed.
        memory, rows: KV sizes and results of the probed policies, `fp16` among them.
        recommended: the name of a policy; `why` gives the reason.
        notes: what was left out, in sentences.
    """

    model: str
    layers: str
    dtype: str
    text: str
    memory: list[KVSize]
    rows: list[ProbeResult]
    recommended: str
    why: str
    rule: str
    notes: list[str] = field(default_factory=list)


def probe(
    source: str,
    loaded: LoadedModel,
    texts: Texts,
    *,
    lengths: Sequence[int],
    policies: Sequence[str],
    samples: int,
    seed: int,
    progress: Progress,
) -> Report:
    """Measures policies on a loaded model.

    Args:
        source: the model's name for the report.
        lengths: in tokens, at least `LENGTH_MIN`; those beyond the model's context are left out.
        policies: names; `fp16` is always measured.
        samples: number of texts of each length.

    Raises:
        InvalidRequest: an argument is out of range, or no length fits the model's context.
        GenerationFailed: the model failed.
    """
    if samples < 1 or not lengths or min(lengths) < LENGTH_MIN:
        raise InvalidRequest(f"a probe needs at least one sample, and lengths of {LENGTH_MIN} tokens or more")
    if unknown := [name for name in policies if name not in POLICIES]:
        raise InvalidRequest(f"{unknown[0]!r} is not a policy; the policies are {', '.join(sorted(POLICIES))}")
    fitting = sorted({length for length in lengths if length <= loaded.context_tokens})
    notes = [
        f"{length} tokens are left out: the model's context is {loaded.context_tokens}"
        for length in sorted(set(lengths) - set(fitting))
    ]
    if not fitting:
        raise InvalidRequest(f"every length is beyond the model's context of {loaded.context_tokens} tokens")
    try:
        specs = {FULL_PRECISION: spec_of(loaded, FULL_PRECISION)}
        for name in dict.fromkeys(policies):
            spec = spec_of(loaded, name)
            if name != FULL_PRECISION and spec.policy is None:
                notes.append(f"{name} is left out: the model's layers ({spec.describe()}) cannot be sealed")
            else:
                specs[name] = spec
        run = _Probe(loaded, texts, specs, fitting, random.Random(seed), samples, progress)
        rows = run.rows()
    except RuntimeError as error:
        raise GenerationFailed(f"{source} failed while it was probed: {first_sentence(error)}") from error
    memory = [memory_of(name, spec, fitting[-1]) for name, spec in specs.items()]
    recommended, why = recommend(memory, rows)
    return Report(
        model=source,
        layers=specs[FULL_PRECISION].describe().partition(";")[0],
        dtype=loaded.dtype,
        text=texts.source,
        memory=memory,
        rows=rows,
        recommended=recommended,
        why=why,
        rule=RULE,
        notes=notes + run.notes,
    )


def spec_of(loaded: LoadedModel, policy: str) -> ModelCacheSpec:
    """Returns a loaded model's cache spec under a policy; its `policy` is None if the layers' KV cannot be sealed."""
    return resealed(loaded, POLICIES[policy]).spec


def caches_of(loaded: LoadedModel, spec: ModelCacheSpec) -> NewCaches:
    """Returns a function that makes empty caches for one sequence under the spec. They compute the same way in prefill
    and decode."""
    return lambda: new_caches(spec, make_prompt_cache(loaded.model), new_pool(spec), Reads.DEQUANTIZED)


def memory_of(name: str, spec: ModelCacheSpec, tokens: int) -> KVSize:
    return KVSize(name, spec.bytes_per_token, tokens, spec.bytes_per_token * tokens + spec.bytes_per_sequence)


def right_answers(model: Any, quiz: Quiz, caches: list[Any]) -> int:
    """Returns how many of the quiz's codes greedy decoding predicts."""
    first, last = min(start for start, _ in quiz.codes) - 1, max(stop for _, stop in quiz.codes) - 1
    likeliest = [mx.argmax(logits, -1) for logits in logits_of(model, quiz.tokens, caches, [(first, last)])]
    predicted = np.concatenate([np.array(part) for part in likeliest])
    wanted = np.array(quiz.tokens)
    return sum(
        bool((predicted[start - 1 - first : stop - 1 - first] == wanted[start:stop]).all())
        for start, stop in quiz.codes
    )


def continue_greedily(model: Any, caches: list[Any], last: int, count: int, banned: Sequence[int]) -> list[int]:
    """Returns `count` tokens of greedy decoding after `last`, none of them `banned`."""
    token, generated, ban = mx.array([last]), [], None
    for _ in range(count):
        logits = model(token[:, None], cache=caches)[:, -1, :]
        if ban is None:
            values = np.zeros(logits.shape[-1], dtype=np.float32)
            values[list(banned)] = -np.inf
            ban = mx.array(values)
        token = mx.argmax(logits.astype(mx.float32) + ban, axis=-1)
        mx.async_eval(token)
        generated.append(token)
    return [int(token.item()) for token in generated]


class _Probe:
    """One run of a probe: makes the texts and measures on them."""

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Texts,
        specs: Mapping[str, ModelCacheSpec],
        lengths: Sequence[int],
        rng: random.Random,
        samples: int,
        progress: Progress,
    ) -> None:
        self._loaded, self._texts, self._rng, self._progress = loaded, texts, rng, progress
        self._caches = {name: caches_of(loaded, spec) for name, spec in specs.items()}
        self._lengths = list(lengths)
        self._samples = samples
        self.notes: list[str] = []

    def rows(self) -> list[ProbeResult]:
        divergences = self._divergences()
        recalls = self._recalls()
        return [
            replace(row, right=recalls[row.tokens][row.policy], questions=recalls[row.tokens][""])
            if row.tokens in recalls
            else row
            for row in divergences
        ]

    def _divergences(self) -> list[ProbeResult]:
        spans = scored_spans(self._lengths)
        others = {name: make for name, make in self._caches.items() if name != FULL_PRECISION}
        found: dict[str, list[list[Scores]]] = {name: [] for name in others}
        for sample in range(self._samples):
            self._progress("comparing distributions", sample / self._samples)
            tokens = self._texts.talk(self._rng, self._lengths[-1])
            if sample % 2:
                tokens = self._with_own_words(tokens, spans)
            for name, scores in compare(
                self._loaded.model, tokens, spans, self._caches[FULL_PRECISION], others
            ).items():
                found[name].append(scores)
        places = [(stop - start) * self._samples for start, stop in spans]
        rows = [
            ProbeResult(FULL_PRECISION, length, 0.0, 0.0, 1.0, count)
            for length, count in zip(self._lengths, places, strict=True)
        ]
        for name, per_sample in found.items():
            for length, scores in zip(self._lengths, zip(*per_sample, strict=True), strict=True):
                rows.append(row_of(name, length, scores))
        return rows

    def _with_own_words(self, tokens: list[int], spans: Sequence[Span]) -> list[int]:
        """Returns the text with the model's own greedy continuation in the spans."""
        caches, at = self._caches[FULL_PRECISION](), 0
        written = list(tokens)
        for start, stop in spans:
            for begin in range(at, start - 1, CHUNK_TOKENS):
                read(self._loaded.model, written[begin : min(begin + CHUNK_TOKENS, start - 1)], caches)
            at = stop - 1
            written[start:stop] = continue_greedily(
                self._loaded.model, caches, written[start - 1], stop - start, sorted(self._loaded.eos_token_ids)
            )
        return written

    def _recalls(self) -> dict[int, dict[str, int]]:
        """Returns, by length, the number of right answers of every policy, and of questions under ""."""
        if not self._texts.quizzes:
            self.notes.append("Recall is left out: its tokenizer does not say where a text's tokens are.")
            return {}
        found: dict[int, dict[str, int]] = {}
        for number, length in enumerate(self._lengths):
            questions = min(QUESTIONS_MAX, length // TOKENS_PER_QUESTION)
            right = dict.fromkeys(("", *self._caches), 0)
            for sample in range(self._samples):
                done = (number + sample / self._samples) / len(self._lengths)
                self._progress("asking for codes", done)
                quiz = self._texts.quiz(self._rng, length, questions)
                right[""] += len(quiz.codes)
                for name, make in self._caches.items():
                    right[name] += right_answers(self._loaded.model, quiz, make())
            if right[FULL_PRECISION] < RECALL_FP16_MIN * right[""]:
                self.notes.append(
                    f"Recall at {length} tokens is left out: in full precision the model knows only "
                    f"{right[FULL_PRECISION]} of {right['']} codes."
                )
            else:
                found[length] = right
        return found


def scored_spans(lengths: Sequence[int]) -> list[Span]:
    """Returns the span of the last `BLOCK_TOKENS` positions before each length, cut at the previous length."""
    before = [0, *lengths]
    return [(max(last, length - BLOCK_TOKENS), length) for last, length in zip(before, lengths, strict=False)]


def row_of(name: str, tokens: int, scores: Sequence[Scores]) -> ProbeResult:
    kl = np.concatenate([part.kl for part in scores])
    same = np.concatenate([part.same for part in scores])
    return ProbeResult(name, tokens, float(kl.mean()), float(np.quantile(kl, 0.99)), float(same.mean()), len(kl))


RULE = (
    f"the smallest memory with the same likeliest token in at least {TOP1_MIN:.0%} of the places at every length, and "
    f"at most {RECALL_LOSS_MAX:.1%} fewer codes recalled than in full precision"
)


def recommend(memory: Sequence[KVSize], rows: Sequence[ProbeResult]) -> tuple[str, str]:
    """Returns the policy chosen by `RULE`, and the reason in one sentence. `fp16` always satisfies the rule."""
    refused: list[str] = []
    full = _recall([row for row in rows if row.policy == FULL_PRECISION])
    for kept in sorted(memory, key=lambda kept: kept.total_bytes):
        own = [row for row in rows if row.policy == kept.policy]
        worst = min(own, key=lambda row: row.top1)
        share = _recall(own)
        if worst.top1 < TOP1_MIN:
            refused.append(f"{kept.policy} agrees in {worst.top1:.2%} of the places at {worst.tokens} tokens")
        elif share is not None and full is not None and round(full - share, 9) > RECALL_LOSS_MAX:
            refused.append(f"{kept.policy} recalls {share:.1%} of the codes instead of {full:.1%}")
        else:
            recalled = "" if share is None else f" and recalls {share:.1%} of the codes ({full:.1%} in full precision)"
            why = f"it agrees in {worst.top1:.2%} of the places or more{recalled}"
            return kept.policy, "; ".join([why, *refused])
    raise AssertionError("full precision agrees with itself")


def _recall(rows: Sequence[ProbeResult]) -> float | None:
    questions = sum(row.questions or 0 for row in rows)
    return sum(row.right or 0 for row in rows) / questions if questions else None
