"""Finds the fastest way in which decode steps of a model read sealed blocks on this device and agree with the
reference.

A model may compute attention itself, or with more inputs than a mask, and a kernel may be wrong on a device where it
never ran. So every way computes some steps when a model is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .....cluster.environment import kernels_wanted
from ....model_files.source import first_sentence
from ....protocol.block_ids import BLOCK_TOKENS
from ...device.device import on_cuda, on_gpu
from ...execution.decode_way import TENSOR, DecodeWay, Trial, Tried, nobody
from ...execution.recorded.compiled_step import CompiledStep
from ...execution.recorded.deferral import Deferral
from ...execution.recorded.fused_products import FusedProducts
from ...execution.recorded.residual_sums import ResidualSums
from ...kernels import decode_kernel, few_rows, gpu_kernels
from ...kv.caches import ModelCacheSpec, merge, new_caches, new_pool
from ...kv.paged_cache import PagedKVCache, Reads
from ...kv.sequence_view import SequenceView
from ...proving.agreement import MODEL_ERRORS, TOLERANCE_16, Logits, Verdict, agree, farthest, try_change
from ...proving.findings import NOWHERE, Findings
from ...proving.pieces import IN_ONE_PIECE, Pieces
from .alike import tokens_alike
from .trial_sequences import far, prefill, sequences_of

logger = logging.getLogger(__name__)

FAR_TOKENS_MAX = 131_072
"""The length that a test sequence claims to have, to show whether recorded steps compute the same at a far position."""

TIMED_STEPS, TIMED_ROUNDS = 8, 5
LONG_SEQUENCES, LONG_BLOCKS = 8, 32
"""With these histories a step takes a device longer than its host, so that a faster kernel shows."""

NO_FASTER = "a recorded step takes no less time"

SLOWER_MOST = 1.5
"""A kernel is not used if it takes more than this many times as long as dequantizing. It is made for longer sequences
than those of the test, so a little slower says nothing."""

TRIES_MAX = 2
"""After so many processes that ended while kernels were tried, they are not tried again. One may have been stopped."""

_FAILS, _TRYING = "fails:", "trying_kernels"
_WHAT, _VERSION = "decode_way", 9
"""Increased whenever the ways, or their tests, change."""


def fastest(
    model: Any,
    spec: ModelCacheSpec,
    context_tokens: int,
    findings: Findings = NOWHERE,
    pieces: Pieces = IN_ONE_PIECE,
    tried: Tried = nobody,
    *,
    whole: bool = True,
    shared: bool = False,
) -> DecodeWay:
    """Tests the ways of this device, or takes what an earlier load found. Failed tests are logged.

    Args:
        context_tokens: the most tokens that a sequence has.
        findings: of this model with KV of this spec.
        pieces: a piece ends after each step of a test, and after each layer of a prompt.
        tried: is told each way that is tested now.
        whole: False for a part of a divided model, which fuses no sums: a stage passes the sums themselves on.
        shared: whether others have equal shares of its layers. They must record the same steps, so gates and tensor
            cores are not used: a test of the time decides about them, which may end differently in each process.
    """
    if on_gpu() and kernels_wanted() is False:
        # Not stored: the variable may be gone at the next load.
        return DecodeWay(Reads.DEQUANTIZED, reason="SATCHEL_KERNELS is 0")
    if (known := _known(findings.read(_WHAT, _VERSION))) is not None:
        if known.reason:
            logger.warning("decode steps read blocks %s, as an earlier load found", known.describe())
        decode_kernel.use_tensor_cores(known.tensor)
        return known
    tries = _tries(findings)
    if tries >= TRIES_MAX and kernels_wanted() is None:
        reason = f"the last {tries} processes ended while kernels were tried; SATCHEL_KERNELS=1 tries again"
        logger.warning("decode steps copy blocks together: %s", reason)
        return DecodeWay(Reads.DEQUANTIZED, reason=reason)
    kernels = gpu_kernels.is_available()
    if kernels:
        # A kernel can end the process. What it leaves is read at the next load.
        findings.note(_TRYING, _VERSION, tries + 1)
    raised: list[str] = []

    def told(trial: Trial) -> None:
        raised.extend([trial.way] if _FAILS in trial.reason else [])
        tried(trial)

    found = _found(model, spec, context_tokens, pieces, told, whole=whole, shared=shared)
    decode_kernel.use_tensor_cores(found.tensor)
    if kernels:
        findings.note(_TRYING, _VERSION, 0)
    if _FAILS not in found.reason and not any(TENSOR in way for way in raised):
        # Not stored if a test raised: the way need not be the cause, memory may have been short.
        findings.note(_WHAT, _VERSION, asdict(found) | {"reads": found.reads.value})
    return found


def _tries(findings: Findings) -> int:
    """Returns how many processes in a row ended while they tried kernels."""
    tries = findings.read(_TRYING, _VERSION)
    return tries if isinstance(tries, int) else 0


def _known(found: Any) -> DecodeWay | None:
    """Returns what an earlier load found; None if it does not apply here."""
    match found:
        case {
            "reads": str(reads),
            "compiled": bool(compiled),
            "fused": bool(fused),
            "reason": str(reason),
            "drafts": bool(drafts),
            "summed": bool(summed),
            "tensor": bool(tensor),
            "gated": bool(gated),
            "alike": int(alike),
        }:
            with suppress(ValueError):
                return DecodeWay(Reads(reads), compiled, fused, reason, drafts, summed, tensor, gated, alike)
    return None


def _found(
    model: Any,
    spec: ModelCacheSpec,
    context_tokens: int,
    pieces: Pieces,
    tried: Tried,
    *,
    whole: bool,
    shared: bool,
) -> DecodeWay:
    # What an earlier model of this process uses is no reference.
    decode_kernel.use_tensor_cores(False)
    wanted = Reads.KERNEL if gpu_kernels.is_available() else Reads.IN_PLACE
    if on_gpu() and wanted is not Reads.KERNEL:
        return DecodeWay(Reads.DEQUANTIZED, reason="this device has no kernels")
    reason = _why_not(model, spec, wanted, pieces, tried)
    if reason:
        logger.warning("decode steps gather blocks: %s", reason)
        return DecodeWay(Reads.DEQUANTIZED, reason=reason)
    if wanted is not Reads.KERNEL:
        return DecodeWay(wanted)
    how = _Recording(Deferral(model))

    def why_not(how: _Recording, than: _Recording | None = None) -> tuple[str, bool]:
        return _why_not_compiled(model, spec, context_tokens, pieces, tried, how, than)

    assert how.deferral is not None
    reason, drafts = ("it has none of the kinds that are known", True) if how.deferral.is_empty else why_not(how)
    if reason:
        logger.info("norms and rotations are not left to the kernel: %s", reason)
        how = _Recording()
        reason, drafts = why_not(how)
    if reason:
        logger.warning("decode steps are not compiled: %s", reason)
        return DecodeWay(wanted, reason=reason, drafts=drafts)
    reason = "others have shares of its layers" if shared else "it has none of the kinds that are known"
    for fusions in () if shared else _fusions(model, sums=whole):
        reason, fused_drafts = why_not(fused := replace(how, fusions=fusions), how)
        if not reason:
            how, drafts = fused, fused_drafts
        if reason in ("", NO_FASTER):
            break
    if reason:
        logger.info("residual sums and gates are not computed with what is beside them: %s", reason)
    if not shared and spec.policy is not None and spec.policy.quantizes and decode_kernel.has_tensor_cores():
        reason, tensor_drafts = why_not(tensor := replace(how, tensor=True), how)
        if not reason and (tensor_drafts or not drafts):
            how = tensor
        else:
            drafts_differ = "steps with drafts compute something else"
            logger.info("blocks are not read with tensor cores: %s", reason or drafts_differ)
    alike = _tokens_alike(model, spec, how, context_tokens, pieces) if drafts and whole and not shared else 0
    return replace(how.way(drafts=drafts), alike=alike)


def _tokens_alike(model: Any, spec: ModelCacheSpec, how: _Recording, context_tokens: int, pieces: Pieces) -> int:
    """As `tokens_alike`; 0 if that fails."""
    most_blocks, most_tokens = context_tokens // BLOCK_TOKENS - 1, few_rows.rows_alike(model)
    if not most_tokens:
        return 0
    try:
        with decode_kernel.tensor_cores(how.tensor):
            return tokens_alike(model, spec, how.step(model), most_blocks, most_tokens, pieces)
    except MODEL_ERRORS as error:
        logger.warning("it is not known whether drafts change bits: %s", first_sentence(error))
        return 0


@dataclass(frozen=True)
class _Recording:
    """How steps are recorded.

    Attributes:
        deferral, fusions: as for `CompiledStep`.
        tensor: whether tensor cores read sealed blocks.
    """

    deferral: Deferral | None = None
    fusions: tuple[ResidualSums | FusedProducts, ...] = ()
    tensor: bool = False

    def step(self, model: Any) -> CompiledStep:
        return CompiledStep(model, self.deferral, fusions=self.fusions)

    def way(self, *, drafts: bool = True) -> DecodeWay:
        summed, gated = (any(isinstance(each, kind) for each in self.fusions) for kind in (ResidualSums, FusedProducts))
        return DecodeWay(
            Reads.KERNEL,
            compiled=True,
            fused=self.deferral is not None,
            drafts=drafts,
            summed=summed,
            tensor=self.tensor,
            gated=gated,
        )


def _fusions(model: Any, *, sums: bool) -> list[tuple[ResidualSums | FusedProducts, ...]]:
    """Returns what may be computed by fewer operations, the first of which is used that agrees and takes less time.

    Args:
        sums: whether residual sums may be.
    """
    products = FusedProducts(model)
    # Measured on an H200: a kernel for sums and norms takes longer than both alone.
    with_norms = sums and not (products.is_empty and on_cuda())
    residual = ResidualSums(model, None if products.is_empty else products) if with_norms else None
    own = () if products.is_empty else (products,)
    found = [] if residual is None or residual.is_empty else [(*own, residual)]
    return [*found, own] if own else found


def _why_not(model: Any, spec: ModelCacheSpec, reads: Reads, pieces: Pieces, told: Tried) -> str:
    """Returns why blocks are not read in this way; empty if they may be. Then all sealed layers go through
    `attention.py` in decode steps and agree there with dequantized blocks, and a kernel is not slower."""
    kernels = reads is Reads.KERNEL
    tried: list[list[Any]] = []
    off: list[float] = []
    timed: list[tuple[float, float]] = []

    def steps(way: Reads) -> list[mx.array]:
        caches = new_caches(spec, make_prompt_cache(model), new_pool(spec, kernels=kernels), way)
        prefill(model, caches, BLOCK_TOKENS + 2, pieces)
        tried.append(caches)
        return [_step(model, caches, token, pieces) for token in (0, 1, 0)]

    def why_not(expected: Logits, got: Logits) -> str:
        off.append(farthest(expected, got))
        sealed = [cache for cache in tried[-1] if isinstance(cache, PagedKVCache)]
        if any(cache.view is not None for cache in sealed):
            return "the model computes attention itself"
        if kernels and not all(cache.writes() for cache in sealed):
            return "a kernel writes blocks wrongly"
        if not agree(expected, got):
            return f"reading {reads.value} differs from the reference"
        return "the kernel is slower" if kernels and _is_slower(model, tried[0], tried[1], timed) else ""

    verdict = try_change(lambda: steps(Reads.DEQUANTIZED), lambda: steps(reads), why_not)
    reason = _in_words(verdict, f"reading {reads.value}")
    reference_s, step_s = map(min, zip(*timed, strict=True)) if timed else (None, None)
    told(Trial(reads.value, off[0] if off else None, reason, reference_s, step_s))
    return reason


def _in_words(verdict: Verdict, what: str) -> str:
    return verdict.reason if verdict.error is None else f"{what} {_FAILS} {first_sentence(verdict.error)}"


def _is_slower(model: Any, dequantized: Sequence[Any], kernel: Sequence[Any], timed: list[tuple[float, float]]) -> bool:
    """Whether steps with the second caches take clearly longer in every round: a process's first steps on a device may
    be slow for other reasons. Adds the times of each round to `timed`."""
    # Timed in one piece.
    for _ in range(TIMED_ROUNDS):
        timed.append((_step_s(model, dequantized), _step_s(model, kernel)))
        if not is_slower(*timed[-1]):
            return False
    return True


def is_slower(dequantized_s: float, kernel_s: float) -> bool:
    """Whether steps with the kernel take clearly longer."""
    return kernel_s > SLOWER_MOST * dequantized_s


def _why_not_compiled(
    model: Any,
    spec: ModelCacheSpec,
    context_tokens: int,
    pieces: Pieces,
    told: Tried,
    how: _Recording,
    than: _Recording | None,
) -> tuple[str, bool]:
    """Returns why a recorded step does not compute what the model does, empty if it does; and whether one with several
    tokens of a sequence does. If a model's code depends on lengths, it cannot be recorded.

    Args:
        than: a way that is kept unless steps take less time; None if time does not matter.
    """
    if not all(layer.sealed for layer in spec.layers):
        return "it has layers of other kinds", False
    most_blocks = context_tokens // BLOCK_TOKENS - 1

    def steps(step: CompiledStep | None) -> list[mx.array]:
        with decode_kernel.tensor_cores(how.tensor and step is not None):
            return _batch_steps(model, spec, step, min(FAR_TOKENS_MAX // BLOCK_TOKENS - 1, most_blocks), pieces)

    step, off = how.step(model), list[float]()
    drafts: list[bool] = []
    timed: list[tuple[float, float]] = []

    def why_not(expected: Logits, got: Logits) -> str:
        off.append(farthest(expected[:-1], got[:-1]))
        drafts.append(agree(expected[-1:], got[-1:], TOLERANCE_16))
        if not drafts[-1]:
            logger.warning("drafts are not computed in recorded steps: off by %.2g", farthest(expected[-1:], got[-1:]))
        if not agree(expected[:-1], got[:-1], TOLERANCE_16):
            return "a recorded step computes something else"
        if than is not None:
            caches = _timed_sequences(model, spec, most_blocks, pieces, how)
            timed.extend(_recorded_steps_s(model, (than.step(model), step), caches, tensor=how.tensor))
        return "" if not timed or is_faster(timed) else NO_FASTER

    verdict = try_change(lambda: steps(None), lambda: steps(step), why_not)
    reason = _in_words(verdict, "recording")
    reference_s, step_s = map(min, zip(*timed, strict=True)) if timed else (None, None)
    told(Trial(how.way().describe(), off[0] if off else None, reason, reference_s, step_s))
    return reason, bool(drafts) and drafts[-1]


def _recorded_steps_s(
    model: Any, steps: tuple[CompiledStep, CompiledStep], caches: Sequence[PagedKVCache], *, tensor: bool = False
) -> list[tuple[float, float]]:
    """Returns the times of a step in both ways, in seconds, of some rounds.

    Args:
        tensor: whether the second way is with tensor cores.
    """
    tokens = mx.zeros((len(caches[0].lengths),), mx.uint32)

    def step_s(step: CompiledStep, cores: bool) -> float:
        began, last = time.perf_counter(), tokens
        with decode_kernel.tensor_cores(cores):
            # As when a model decodes: a step is launched before the one before it is waited for.
            for _ in range(TIMED_STEPS):
                logits = step(tokens, caches, {})
                assert logits is not None
                mx.async_eval(logits)
                mx.eval(last)
                last = logits
            mx.eval(last)
        return (time.perf_counter() - began) / TIMED_STEPS

    # Each has to be recorded first.
    found = [(step_s(steps[0], False), step_s(steps[1], tensor)) for _ in range(TIMED_ROUNDS + 1)]
    return found[1:]


def _timed_sequences(
    model: Any, spec: ModelCacheSpec, most_blocks: int, pieces: Pieces, how: _Recording
) -> list[PagedKVCache]:
    """Returns the caches of sequences whose steps show what a way saves: several long ones for tensor cores, several
    short ones for products of few rows, which are of more than one, and else a short one."""
    if how.tensor:
        return merge(sequences_of(model, spec, [min(LONG_BLOCKS, most_blocks)] * LONG_SEQUENCES, pieces))
    if how.way().gated:
        return merge(sequences_of(model, spec, [0] * LONG_SEQUENCES, pieces))
    caches = new_caches(spec, make_prompt_cache(model), new_pool(spec, kernels=True), Reads.KERNEL)
    prefill(model, caches, 3, pieces)
    return caches


def is_faster(timed: Sequence[tuple[float, float]]) -> bool:
    """Whether the second of two ways took less time in most rounds."""
    return median(after_s / before_s for before_s, after_s in timed) < 1


def _batch_steps(
    model: Any, spec: ModelCacheSpec, step: CompiledStep | None, far_blocks: int, pieces: Pieces
) -> list[mx.array]:
    """Returns the logits of some steps of sequences of different lengths: more than a block, less, and `far_blocks`.
    The last step has several tokens of some sequences."""
    pool, logits = new_pool(spec, kernels=True), []

    def sequence() -> list[Any]:
        return new_caches(spec, make_prompt_cache(model), pool, Reads.KERNEL)

    sequences = [sequence(), sequence()]
    prefill(model, sequences[0], BLOCK_TOKENS, pieces)
    block = SequenceView(spec, sequences[0], None, BLOCK_TOKENS).cut(0, BLOCK_TOKENS)
    prefill(model, sequences[0], 2, pieces)
    prefill(model, sequences[1], 3, pieces)
    if far_blocks > 1:
        sequences.append(far(spec, sequence(), sequences[0], block, far_blocks))
    batch = merge(sequences)
    for token in (0, 1, 0):
        inputs = mx.array([token, 1 - token, token][: len(sequences)], mx.uint32)
        logits.append(model(inputs[:, None], cache=batch)[:, -1] if step is None else step(inputs, batch, {}))
        mx.eval(logits[-1])
        pieces.pause()
    logits.append(_draft_step(model, step, batch))
    mx.eval(logits[-1])
    return logits


def _draft_step(model: Any, step: CompiledStep | None, batch: Sequence[PagedKVCache]) -> mx.array:
    """Returns the logits of up to three tokens of each sequence, in one recorded step or one after the other."""
    new = [3, 1, 2][: len(batch[0].lengths)]
    tokens = [at % 2 for count in new for at in range(count)]
    if step is not None and (logits := step(mx.array(tokens, mx.uint32), batch, {}, new)) is not None:
        return logits
    found: list[mx.array] = []
    for at in range(max(new)):
        # The others' tokens do no harm.
        found.append(model(mx.array([[at % 2]] * len(new), mx.uint32), cache=batch))
        # A step writes in place, which nothing tells the next one's kernels.
        mx.eval(found[-1])
    return mx.concatenate([found[at][sequence] for sequence, count in enumerate(new) for at in range(count)])


def _step(model: Any, caches: Sequence[Any], token: int, pieces: Pieces = IN_ONE_PIECE) -> mx.array:
    logits = model(mx.array([[token]], mx.uint32), cache=caches)[0, -1]
    mx.eval(logits)
    pieces.pause()
    return logits


def _step_s(model: Any, caches: Sequence[Any]) -> float:
    """Returns the shortest time of a step, in seconds."""
    times = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        _step(model, caches, 0)
        times.append(time.perf_counter() - began)
    return min(times)
