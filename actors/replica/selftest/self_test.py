"""The self-test of a model before it is served: batched sequences, prompts in chunks and cached KV must give what the
model computes alone.

A model of an unknown family may read a batch's padding, share KV between layers, count positions by itself, or overflow
in another number format. Such a model loads without an error, and then gives wrong answers to requests that are not
alone. So a real engine runs three sequences of the model, forced along given tokens, and its logits are compared with
those that the bare model computes with its own caches. If a test fails, the feature that it tests is not used.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ....cluster.config.config import Model, Scheduling
from ....cluster.errors import ModelLoadError
from ...model_files.source import Progress, first_sentence
from ..device.device import as_numpy, on_gpu
from ..execution.decode_way import DEQUANTIZED, DecodeWay
from ..execution.draft_model.model_drafts import DraftModel
from ..execution.loaded_model import LoadedModel
from ..kernels.sealing import FULL_PRECISION, POLICIES
from ..kv.paged_cache import Reads
from ..loading.models import resealed
from ..loading.quirks import positions_leak
from ..proving.agreement import MODEL_ERRORS
from ..proving.findings import Findings
from ..proving.pieces import IN_ONE_PIECE, Pieces
from . import audio, pictures
from .forced_sequences import DRAWN, MORE_TOKENS, Faults, ForcedSequence, ForcedSequences, Logits, not_finite

logger = logging.getLogger(__name__)

PROMPTS = (20, 262, 300)
"""Tokens of the sequences' prompts: one is shorter than a block, the others are longer, if the model's context allows
it."""

WINDOW_MAX, PAST_WINDOW = 1100, 40
"""For windows up to this length there is a sequence that exceeds the window, by this many tokens."""

OWN = "own"
"""Says that KV stays in the model's own caches, not in the pool."""

_WHAT, _VERSION = "trial", 6
"""Increased whenever the self-test, or what it tests, changes."""


@dataclass(frozen=True)
class Verdict:
    """How a model may be served.

    Attributes:
        kv: how KV is kept instead: `fp16` in sealed blocks as computed, `own` in the model's caches; "" as asked for.
        usual_way: whether decode steps may read sealed KV in the way that was found at load.
        together: whether sequences may run at the same time.
        unbatched: whether steps compute sequence by sequence.
        reuses: whether KV may be used again.
        blind: why a vision model gets no pictures; empty if it gets them, and for a text model.
        stills: why a model gets a video's frames as single pictures; empty if it gets videos, or no pictures.
        no_audio: why a model whose processor takes audio gets none; empty if it gets it, and for other models.
        refusal: why it cannot be served at all; empty if it can.
        notes: what differs from the config, and why, a sentence each.
    """

    kv: str = ""
    usual_way: bool = True
    together: bool = True
    reuses: bool = True
    unbatched: bool = False
    blind: str = ""
    stills: str = ""
    no_audio: str = ""
    refusal: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Proven:
    """A model as it may be served. `notes` say what differs from the config, and why, a sentence each. `draft_model`
    drafts for it; None for none."""

    loaded: LoadedModel
    together: bool = True
    notes: Sequence[str] = ()
    draft_model: DraftModel | None = None

    @property
    def kv_beside_bytes(self) -> int:
        """The most that KV takes that is not the model's own."""
        return 0 if self.draft_model is None else self.draft_model.kv_bytes

    def scheduling(self, asked: Scheduling) -> Scheduling:
        """Returns the limits of its scheduler."""
        return asked if self.together else replace(asked, sequences_max=1, prefill_sequences_max=1)


def prove(
    loaded: LoadedModel,
    model: Model,
    progress: Progress,
    known: Path | None = None,
    pieces: Pieces = IN_ONE_PIECE,
) -> Proven:
    """Tests a loaded model, or takes what an earlier self-test on this device found. Models that ship with Satchel need
    none on a CPU: Satchel's own tests cover that.

    Args:
        known: the file that keeps findings; None for no file.
        pieces: the pieces of the self-test.

    Raises:
        ModelLoadError: the model cannot be served correctly; the message says what is wrong.
    """
    source = model.source
    proven = _prove(loaded, model, progress, known, pieces)
    blind = proven.loaded.blind
    if blind and not loaded.blind:
        logger.warning("%s is served for text alone: %s", source, blind)
    notes = [f"it does not support pictures: {blind}"] if blind else []
    if stills := proven.loaded.stills:
        notes = [f"videos are shown to it as single pictures: {stills}"]
    if no_audio := proven.loaded.no_audio:
        notes = [*notes, f"it does not support audio: {no_audio}"]
    return replace(proven, notes=[*proven.notes, *notes]) if notes else proven


def _prove(loaded: LoadedModel, model: Model, progress: Progress, known: Path | None, pieces: Pieces) -> Proven:
    source = model.source
    if not model.self_test:
        note = "its self-test was skipped (self_test: false), so it may be wrong when batched or from cached KV"
        logger.warning("%s: %s", source, note)
        return Proven(loaded, notes=[note])
    if source.startswith("embedded:") and not on_gpu():
        return Proven(loaded)
    findings = Findings(known, loaded.model_id)
    # What a load lacks, such as a processor of audio, was not tested.
    what = f"{_WHAT}{_media_of(loaded)}"
    verdict = _verdict(findings.read(what, _VERSION))
    if verdict is None:
        progress(f"testing {source}", None)
        began = pieces.now_s()
        verdict = _try(loaded, findings, pieces)
        logger.info("the self-test of %s took %.1f s", source, pieces.now_s() - began)
        findings.note(what, _VERSION, asdict(verdict))
    if verdict.refusal:
        raise ModelLoadError(f"{source} cannot be served: {verdict.refusal}")
    for note in verdict.notes:
        logger.warning("%s: %s", source, note)
    if not verdict.usual_way:
        loaded = replace(loaded, way=DEQUANTIZED)
    if verdict.kv:
        loaded = replace(resealed(loaded, POLICIES.get(verdict.kv)), kv_why="every other format failed its self-test")
    if verdict.unbatched:
        loaded = replace(loaded, unbatched=True)
    if not verdict.reuses:
        loaded = replace(loaded, spec=replace(loaded.spec, kept=False))
    if verdict.blind:
        loaded = replace(loaded, vision=None, blind=verdict.blind)
    if verdict.stills:
        loaded = replace(loaded, stills=verdict.stills)
    if verdict.no_audio and loaded.vision is not None:
        loaded = replace(loaded, vision=loaded.vision.without_audio(verdict.no_audio))
    return Proven(loaded, verdict.together, verdict.notes)


def _media_of(loaded: LoadedModel) -> str:
    return "".join(f", {medium}" for medium in ("pictures", "audio") if loaded.media[medium])


def _try(loaded: LoadedModel, findings: Findings, pieces: Pieces) -> Verdict:
    if loaded.context_tokens <= MORE_TOKENS + 1:
        return Verdict(notes=["it had no self-test: its context is too short"])
    test = _SelfTest(loaded, findings, pieces)
    if refusal := test.refusal(loaded):
        return Verdict(refusal=refusal)
    tried: list[tuple[_Variant, Faults]] = []
    for variant in _variants(loaded):
        if variant.unbatched and not loaded.unbatched and not any(faults.together for _, faults in tried):
            continue
        tried.append((variant, test.faults(variant, loaded)))
        if not tried[-1][1]:
            break
    # The first of the variants with the smallest faults.
    place = min(range(len(tried)), key=lambda index: tried[index][1].weight)
    variant, faults = tried[place]
    if faults.alone:
        return Verdict(refusal=f"if a prompt is computed in chunks, {faults.alone}")
    notes = [f"{variant.means}: otherwise {tried[place - 1][1].first}"] if place else []
    if loaded.unbatched:
        notes = ["decode is unbatched: its caches cannot be batched", *notes]
    blind = stills = no_audio = ""
    if loaded.vision is not None:
        variant, seen = _seen(variant, loaded, notes, pieces)
        blind = seen.alone
        if not blind:
            stills = pictures.fault_of_videos(variant.of(loaded), pieces)
            no_audio = audio.fault_of_audio(variant.of(loaded), pieces) if loaded.vision.audio is not None else ""
            faults.together, faults.again = faults.together or seen.together, faults.again or seen.again
    if faults.together:
        notes = [*notes, f"sequences run one after the other: when batched, {faults.together}"]
    if not loaded.spec.reusable:
        notes = [
            *notes,
            "no KV is reused, every turn is prefilled from its beginning: its kinds of caches are not supported",
        ]
    if faults.again:
        notes = [*notes, f"no KV is reused, every turn is prefilled from its beginning: {faults.again}"]
    return Verdict(
        kv=variant.kv,
        usual_way=variant.way == loaded.way,
        together=not faults.together,
        reuses=not faults.again,
        unbatched=variant.unbatched,
        blind=blind,
        stills=stills,
        no_audio=no_audio,
        notes=notes,
    )


def _seen(variant: _Variant, loaded: LoadedModel, notes: list[str], pieces: Pieces) -> tuple[_Variant, Faults]:
    """Tests a variant with pictures. Returns the variant and its faults; or if unbatched decode has fewer faults, that
    variant and its faults, with a note added to `notes`."""
    seen = pictures.faults(variant.of(loaded), pieces)
    if not seen.together or variant.unbatched:
        return variant, seen
    unbatched = replace(variant, unbatched=True)
    alone = pictures.faults(unbatched.of(loaded), pieces)
    if alone.weight >= seen.weight:
        return variant, seen
    notes.append(f"decode is unbatched: when batched, {seen.together}")
    return unbatched, alone


@dataclass(frozen=True)
class _Variant:
    """One way to serve a model: how its KV is kept, as in `Verdict`, how decode steps read it, whether they compute
    sequence by sequence, and what that `means` for the user."""

    kv: str
    way: DecodeWay
    means: str = ""
    unbatched: bool = False

    @property
    def name(self) -> str:
        """Its name among the findings."""
        return f"{_WHAT}, {self.kv or 'as asked'}, {self.way.describe()}{', unbatched' if self.unbatched else ''}"

    def of(self, loaded: LoadedModel) -> LoadedModel:
        loaded = replace(loaded, unbatched=self.unbatched)
        return resealed(loaded, POLICIES.get(self.kv)) if self.kv else replace(loaded, way=self.way)


def _variants(loaded: LoadedModel) -> Iterator[_Variant]:
    """Yields the variants of a model, the best first."""
    usual = _Variant("", loaded.way, unbatched=loaded.unbatched)
    yield usual
    policy = loaded.spec.policy
    ways = [usual]
    if policy is not None and loaded.way.reads is not Reads.DEQUANTIZED:
        ways.append(replace(usual, way=DEQUANTIZED, means="decode steps gather blocks"))
    yield from ways[1:]
    if policy is not None and policy.quantizes:
        yield _Variant(FULL_PRECISION, DEQUANTIZED, "KV is kept as computed")
    if policy is not None:
        yield _Variant(OWN, DEQUANTIZED, "KV is kept as computed, in the model's own way")
    for one in ways:
        if not loaded.unbatched:
            yield replace(one, means="decode is unbatched", unbatched=True)


def sequences_of(loaded: LoadedModel) -> list[ForcedSequence]:
    """Returns the sequences of a self-test, without any if the model's context is too short. Their tokens are drawn
    from the vocabulary with a fixed seed."""
    if loaded.context_tokens <= MORE_TOKENS + 1:
        return []
    draw, vocabulary = random.Random(1).randrange, loaded.vocabulary_size
    # The first ids of a vocabulary are often special tokens.
    first = min(256, vocabulary // 2)
    window = max((layer.window for layer in loaded.spec.layers if layer.window <= WINDOW_MAX), default=0)
    wanted = [*PROMPTS, *([window + PAST_WINDOW] if window + PAST_WINDOW > PROMPTS[-1] else [])]
    prompts = [min(prompt, loaded.context_tokens - MORE_TOKENS) for prompt in wanted]
    return [
        ForcedSequence([draw(first, vocabulary) for _ in range(prompt + MORE_TOKENS)], prompt) for prompt in prompts
    ]


def reused(sequences: Sequence[ForcedSequence]) -> list[int]:
    """Returns the numbers of the sequences whose KV is reused: the second, and the one that exceeds a window if there
    is one."""
    return [1, *range(len(PROMPTS), len(sequences))]


class _SelfTest:
    """The sequences of a self-test, and what the bare model computes for them.

    The findings of each variant are stored at once. So if the process ends, the next start continues with the next
    variant.
    """

    def __init__(self, loaded: LoadedModel, findings: Findings, pieces: Pieces) -> None:
        self._sequences = ForcedSequences(loaded, sequences_of(loaded), pieces)
        self._findings, self._pieces = findings, pieces
        self._own: Logits = {}

    def refusal(self, loaded: LoadedModel) -> str:
        """Returns why the bare model itself is wrong, as a sentence; empty if it is not."""
        try:
            self._own = self._alone_with_own_caches(loaded)
        except MODEL_ERRORS as error:
            return f"it cannot continue from its own caches ({first_sentence(error)})"
        if not_finite(self._own):
            return f"in {loaded.dtype} it computes numbers that are not finite; try another `dtype`"
        return ""

    def _alone_with_own_caches(self, loaded: LoadedModel) -> Logits:
        """Returns what the bare model computes as mlx-lm runs it: a prompt in one call, then steps."""
        logits: Logits = {}
        for number, sequence in enumerate(self._sequences.sequences):
            script, prompt, caches = sequence.tokens, sequence.prompt, make_prompt_cache(loaded.model)
            loaded.model(mx.array([script[: prompt - 1]], mx.uint32), cache=caches)
            self._pieces.evaluate(caches)
            for drawn in range(DRAWN):
                step = loaded.model(mx.array([[script[prompt - 1 + drawn]]], mx.uint32), cache=caches)[0, -1]
                logits[(number, drawn)] = as_numpy(step.astype(mx.float32))
                self._pieces.pause()
        return logits

    def _in_one_piece(self, loaded: LoadedModel) -> Logits:
        """Returns what the bare model computes in a single call. Some models' windows are one token longer in prompts
        than in steps; then both results are right."""
        logits: Logits = {}
        for number, sequence in enumerate(self._sequences.sequences):
            given, caches = (
                mx.array([sequence.tokens[: sequence.prompt + DRAWN - 1]], mx.uint32),
                make_prompt_cache(loaded.model),
            )
            whole = loaded.model(given, cache=caches)[0, sequence.prompt - 1 :]
            self._pieces.evaluate(caches)
            logits |= {(number, drawn): as_numpy(one) for drawn, one in enumerate(whole.astype(mx.float32))}
            self._pieces.pause()
        return logits

    def faults(self, variant: _Variant, loaded: LoadedModel) -> Faults:
        """Returns the faults of a variant of a model in an engine."""
        match self._findings.read(variant.name, _VERSION):
            case {"alone": str(alone), "together": str(together), "again": str(again)}:
                return Faults(alone, together, again)
        found = self._faults(variant.of(loaded))
        self._findings.note(variant.name, _VERSION, asdict(found))
        return found

    def _faults(self, loaded: LoadedModel) -> Faults:
        found = Faults()
        alone, plain, wrong = self._sequences.alone(loaded)
        found.alone = wrong or self._sequences.difference(self._own, plain)
        if found.alone and not wrong and not self._sequences.difference(self._in_one_piece(loaded), plain):
            found.alone = ""
        if found.alone:
            return found
        found.together = self._sequences.batched(loaded, alone)
        if (
            not found.together
            and not loaded.unbatched
            and positions_leak(loaded.model, loaded.context_tokens - MORE_TOKENS, self._pieces)
        ):
            found.together = "one sequence's position changes what another one computes"
        if loaded.spec.reusable:
            found.again = self._sequences.again(loaded, reused(self._sequences.sequences))
        return found


def _verdict(found: Any) -> Verdict | None:
    """Returns a stored verdict of an earlier self-test; None if it cannot be read."""
    with suppress(TypeError, AttributeError):
        return Verdict(**{"unbatched" if name == "apart" else name: value for name, value in found.items()})
    return None
