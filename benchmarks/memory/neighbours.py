"""What a long sequence costs the short ones in its batch: decode steps of the executor; each sequence reads its own
blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import mlx.core as mx

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel

from ..parts import Budget, ResultTable, Say, median

ROWS, SHORT_TOKENS, LONG_TOKENS, RATIO_MAX = 16, 400, 6400, 1.3
STEPS = 40
CHUNK_TOKENS = 512


def neighbours(loaded: LoadedModel, rounds: int, budget: Budget, say: Say) -> ResultTable:
    """Measures a step of equal sequences and a step with a long one among them, in turns."""
    table = ResultTable(f"Decode steps beside a long row, KV {loaded.kv}, {loaded.way.describe()}")
    even, uneven = [SHORT_TOKENS] * ROWS, [SHORT_TOKENS] * (ROWS - 1) + [LONG_TOKENS]
    batches = {f"{ROWS} rows of {SHORT_TOKENS:,} tokens": even}
    batches[f"{ROWS - 1} of them beside one of {LONG_TOKENS:,}"] = uneven
    executors = {name: decoding(loaded, lengths) for name, lengths in batches.items()}
    found: dict[str, list[float]] = {name: [] for name in batches}
    for _ in budget.rounds(rounds):
        for name, executor in executors.items():
            found[name].append(_step_ms(executor))
            say(f"  {name}: {found[name][-1]:.1f} ms a step")
    even_ms, uneven_ms = (median(times) for times in found.values())
    for name, step_ms in zip(batches, (even_ms, uneven_ms), strict=True):
        table.rows.append({"batch": name, "ms a step": round(step_ms, 2), "ratio": round(step_ms / even_ms, 2)})
    table.at_most("a step with the long row, of one without", uneven_ms / even_ms, RATIO_MAX)
    return table


def decoding(loaded: LoadedModel, lengths: Sequence[int]) -> BatchExecutor:
    """Returns an executor with a sequence of each length, all of which decode."""
    rng, executor = random.Random(0), BatchExecutor(loaded)
    for row, length in enumerate(lengths):
        tokens = [rng.randrange(loaded.vocabulary_size - 100) for _ in range(length)]
        executor.open(str(row), [], None, 0)
        for start in range(0, length - 1, CHUNK_TOKENS):
            executor.prefill([(str(row), tokens[start : min(start + CHUNK_TOKENS, length - 1)])])
        executor.join(str(row), tokens, Sampling(temperature=0.0, max_tokens=loaded.context_tokens), 0)
    executor.step()
    mx.synchronize()
    return executor


def _step_ms(executor: BatchExecutor) -> float:
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        executor.step()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)
