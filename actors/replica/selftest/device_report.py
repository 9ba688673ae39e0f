"""Tells what a model does on this device: which ways to decode were tried and how far each was from the reference, what
the self-test found, how far the kernels are off at every shape, and how many tokens a second it computes.

What is found is told at once: on a device where nothing ran before, the next step may end the process.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx

from ....cluster.config.config import Model
from ....cluster.environment import mlx_rounding
from ....cluster.errors import ModelLoadError
from ...model_files.source import first_sentence
from ...protocol.replica_messages import Sampling
from ..device.device import device_bytes, device_kind, device_name, has_tensor_units
from ..device.device_errors import DeviceFailed
from ..device.wired import Wired
from ..execution.decode_way import Trial
from ..execution.executor import BatchExecutor
from ..execution.loaded_model import LoadedModel
from ..kernels import gpu_kernels
from ..kernels.sealing import POLICIES
from ..loading.models import load
from ..proving.agreement import MODEL_ERRORS
from . import kernel_check
from .self_test import prove

LENGTHS = (256, 1024, 4096, 16_384)
"""Prompts of the benchmark, tokens."""

TOGETHER, TOGETHER_TOKENS = 4, 1024
"""How many sequences decode at once in the benchmark's last part, and the tokens of their prompts."""

CHUNK_TOKENS = 1024
STEPS_BEFORE, STEPS = 4, 48
"""Decode steps that are not timed, because kernels may be compiled at the first, and steps that are."""

BENCHMARK_S = 60.0
"""How long the benchmark takes at most, apart from its last chunk or step."""

KERNELS_S = 180.0
"""How long kernels are checked at most: each shape is compiled."""

LISTED_MAX = 40
"""So many shapes at which a kernel is off are listed."""

FAILS_MAX = 8
"""After so many shapes in a row at which a kernel cannot run, no more are tried."""

Tell = Callable[[str, Any], None]
"""Is told a fact: its name, and a JSON value."""

ERRORS = (*MODEL_ERRORS, DeviceFailed, MemoryError)


@dataclass(frozen=True)
class Rate:
    """What a number of `sequences` with prompts of `tokens` tokens computed a second, all together. None if it was not
    measured. `first_s` is the time of the first prompt of this length, in which kernels may be compiled."""

    tokens: int
    sequences: int
    first_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    peak_bytes: int = 0


def tell_all(source: str, tell: Tell, step: Callable[[str], None]) -> None:
    """Loads a model without the findings of earlier loads, and tests and measures it.

    Args:
        source: a Hub id, a folder, or `embedded:NAME`.
        tell: is told each fact as soon as it is known.
        step: is told what runs next.

    Raises:
        SatchelError: the model cannot be loaded.
    """
    step("asking the device")
    tell("device", _device())
    with _logged(tell):
        step(f"loading {source}")
        loaded = _loaded(source, tell, step)
        step("the self-test")
        loaded = _proven(loaded, tell)
        wired = Wired()
        wired.keep(mx.get_active_memory())
        tell("wired_bytes", wired.bytes)
        step("the benchmark")
        _benchmark(loaded, tell)
        if gpu_kernels.is_available():
            step("kernels at every shape")
            _check_kernels(tell)


def _device() -> dict[str, Any]:
    facts = {name: value for name, value in mx.device_info().items() if isinstance(value, int | float | str)}
    return {
        "kind": device_kind(),
        "name": device_name(),
        "mlx_says": facts,
        "tensor_units": has_tensor_units(),
        "kernels": gpu_kernels.is_available(),
        "float32_products": mlx_rounding(),
        "memory_bytes": device_bytes(),
        "memory_free_bytes": device_bytes(free=True),
    }


def _loaded(source: str, tell: Tell, step: Callable[[str], None]) -> LoadedModel:
    trials: list[Trial] = []

    def tried(trial: Trial) -> None:
        if trial.off is not None and not math.isfinite(trial.off):
            # JSON has no such numbers.
            trial = replace(trial, off=None, reason=f"it computes numbers that are not finite; {trial.reason}")
        trials.append(trial)
        tell("decode_ways", [asdict(each) for each in trials])

    def progress(what: str, fraction: float | None) -> None:
        if fraction is None:
            step(what)

    began = time.monotonic()
    loaded = load(source, context_tokens_max=None, progress=progress, tried=tried)
    tell(
        "model",
        {
            "source": source,
            "load_s": round(time.monotonic() - began, 2),
            "layers": loaded.spec.describe(),
            "dtype": loaded.dtype,
            "weights": loaded.weights,
            "kv": loaded.kv,
            "kv_why": loaded.kv_why,
            "context_tokens": loaded.context_tokens,
            "decodes": loaded.way.describe(),
            "unbatched": loaded.unbatched,
            "multiplies": loaded.multiplying,
            "no_pictures_because": loaded.blind,
            "bytes": mx.get_active_memory(),
        },
    )
    return loaded


def _proven(loaded: LoadedModel, tell: Tell) -> LoadedModel:
    """Returns the model as it would be served; unchanged if it would be refused."""
    began = time.monotonic()
    try:
        # By its folder, because models that ship with Satchel have no self-test on a CPU.
        proven = prove(loaded, Model(name="report", source=str(loaded.folder)), lambda *_: None)
    except ModelLoadError as error:
        tell("self_test", {"served": False, "notes": [error.message], "took_s": _since(began)})
        return loaded
    found = {"served": True, "batched": proven.together, "notes": list(proven.notes), "took_s": _since(began)}
    tell("self_test", found | {"decodes": proven.loaded.way.describe(), "kv": proven.loaded.kv})
    return proven.loaded


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _benchmark(loaded: LoadedModel, tell: Tell) -> None:
    """Tells rates, the short prompts first; longer ones only if the time is enough for them."""
    ends, rates, left_out = time.monotonic() + BENCHMARK_S, list[Rate](), list[str]()
    per_token_s = 0.0
    parts = sorted([(length, 1) for length in LENGTHS] + [(TOGETHER_TOKENS, TOGETHER)] * (not loaded.unbatched))
    for tokens, sequences in parts:
        name = f"{tokens} tokens" if sequences == 1 else f"{sequences} sequences of {tokens} tokens"
        if tokens + STEPS_BEFORE + STEPS + 2 > loaded.context_tokens:
            left_out.append(f"{name}: the model's context is {loaded.context_tokens} tokens")
            continue
        # Attention takes longer for each token of a longer prompt.
        if time.monotonic() + 2 * sequences * tokens * per_token_s > ends:
            left_out.append(f"{name}: it would take too long")
            continue
        try:
            rate = _rate(loaded, tokens, sequences, ends)
        except ERRORS as error:
            left_out.append(f"{name}: {first_sentence(error)}")
            continue
        rates.append(rate)
        if rate.prefill_tokens_per_s:
            per_token_s = max(per_token_s, 1 / rate.prefill_tokens_per_s)
        tell("benchmark", {"rates": [asdict(each) for each in rates], "left_out": left_out})
    tell("benchmark", {"rates": [asdict(each) for each in rates], "left_out": left_out})


def _rate(loaded: LoadedModel, tokens: int, sequences: int, ends: float) -> Rate:
    draw, executor = random.Random(tokens), BatchExecutor(loaded)
    names = [str(number) for number in range(sequences)]
    prompts = {name: [draw.randrange(loaded.vocabulary_size) for _ in range(tokens)] for name in names}
    mx.reset_peak_memory()
    first_s = _prefill_s(executor, prompts)
    prefill_s = first_s
    if time.monotonic() + first_s < ends:
        for name in names:
            executor.leave([name])
        prefill_s = min(first_s, _prefill_s(executor, prompts))
    for name in names:
        sampling = Sampling(temperature=0.0, max_tokens=2 * (STEPS_BEFORE + STEPS), ignore_eos=True)
        executor.join(name, [*prompts[name], 0], sampling, 0)
    for _ in range(STEPS_BEFORE):
        executor.step()
    steps, began = 0, time.monotonic()
    while steps < STEPS and (not steps or time.monotonic() < ends):
        executor.step()
        steps += 1
    decode_s = time.monotonic() - began
    executor.leave(names)
    peak = mx.get_peak_memory()
    executor.clear_batch()
    mx.clear_cache()
    return Rate(
        tokens,
        sequences,
        round(first_s, 3),
        round(sequences * tokens / prefill_s, 1),
        round(sequences * steps / decode_s, 2),
        peak,
    )


def _prefill_s(executor: BatchExecutor, prompts: dict[str, list[int]]) -> float:
    """Prefills prompts of one length in chunks. Returns how long it took, in seconds."""
    for name in prompts:
        executor.open(name, [], None, 0)
    (tokens,) = {len(prompt) for prompt in prompts.values()}
    began = time.monotonic()
    for start in range(0, tokens, CHUNK_TOKENS):
        executor.prefill([(name, prompt[start : start + CHUNK_TOKENS]) for name, prompt in prompts.items()])
    mx.synchronize()
    return time.monotonic() - began


def _check_kernels(tell: Tell) -> None:
    """Tells how far the decode kernel is off, the worst of each policy, dtype and size of heads."""
    ends, worst, wrong, count = time.monotonic() + KERNELS_S, dict[str, float](), list[str](), 0
    failed, fails = "", 0
    try:
        for shape in kernel_check.checked(sorted(POLICIES), ("bfloat16", "float16")):
            name = f"{shape.policy} {shape.dtype} {shape.dims[0]}/{shape.dims[1]}"
            count += 1
            if not shape.agrees and len(wrong) < LISTED_MAX:
                wrong.append(str(shape))
            if not shape.failed:
                worst[name] = max(worst.get(name, 0.0), shape.off)
            fails = fails + 1 if shape.failed else 0
            if fails == FAILS_MAX:
                failed = f"{fails} shapes in a row failed"
                break
            if count % 16 == 0:
                tell("kernels", _kernels(count, worst, wrong, "more were to come"))
            if time.monotonic() > ends:
                failed = "the rest would take too long"
                break
    except ERRORS as error:
        failed = first_sentence(error)
    tell("kernels", _kernels(count, worst, wrong, failed))


def _kernels(count: int, worst: dict[str, float], wrong: Sequence[str], failed: str) -> dict[str, Any]:
    return {"shapes": count, "farthest": dict(worst), "wrong": list(wrong), "stopped": failed}


@contextmanager
def _logged(tell: Tell) -> Iterator[None]:
    """Tells what Satchel's modules log meanwhile: which tests failed, and why."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname.lower()}: {record.getMessage()}")
            tell("log", lines[-100:])

    handler, logger = Handler(logging.INFO), logging.getLogger("satchel")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
