"""A recorded step computes what the model does, in every company and over every change of the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.messages import Sampling
from satchel.actors.replica.execution import models
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.models import LoadedModel
from satchel.actors.replica.kv import gpu_kernels
from satchel.actors.replica.kv.caches import new_pool
from satchel.actors.replica.kv.paged_cache import Reads
from tests.worlds import fake_kernels
from tests.worlds.families import write_model

GREEDY = Sampling(temperature=0.0, max_tokens=1000)
LENGTHS = (128, 128, 256, 300, 700, 3)


@pytest.fixture(params=["q4", "fp16"])
def kv(request: pytest.FixtureRequest) -> Iterator[str]:
    """With a GPU's kernels, and without one with what stands for them."""
    with nullcontext() if gpu_kernels.is_available() else fake_kernels.kernels():
        yield request.param


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_rows_that_join_fill_blocks_and_leave_get_the_same_tokens_and_kv(family: str, kv: str, tmp_path: Path):
    """Whether the graph is recorded, or blocks are read without a kernel at all."""
    write_model(tmp_path / "model", family)
    folder = str(tmp_path / "model")
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", kv=kv, warm=False)
    assert loaded.compiled, "every layer is read by the kernel"
    plain = replace(loaded, compiled=False, reads=Reads.DEQUANTIZED, pool=new_pool(loaded.spec))
    expected = story(plain)
    assert story(loaded) == expected
    assert story(replace(loaded, compiled=False)) == expected


def story(loaded: LoadedModel) -> tuple[dict[str, list[int]], list[list[bytes]]]:
    """Rows are prefilled in twos and join, decode over the ends of blocks, and half of them leave. Returns their
    tokens, and what is left in the first layer, before which nothing is rounded."""
    rng, executor, drawn = random.Random(5), BatchExecutor(loaded), {}
    executor.batched_prefill = True
    prompts = [[rng.randrange(10, 500) for _ in range(length)] for length in LENGTHS]
    for first in range(0, len(LENGTHS), 2):
        together = [(str(row), prompts[row]) for row in (first, first + 1)]
        for row, _ in together:
            executor.open(row, [], None, 0)
        executor.prefill([(row, prompt[:-1]) for row, prompt in together])
        for row, prompt in together:
            executor.join(row, prompt, GREEDY, 0)
        for _ in range(5):
            note(executor, drawn)
    executor.leave(["0", "3"])
    for _ in range(BLOCK_TOKENS):
        note(executor, drawn)
    left = []
    for row in ("1", "2", "4", "5"):
        whole = executor.length(row) // BLOCK_TOKENS * BLOCK_TOKENS
        spans = [(start, start + BLOCK_TOKENS) for start in range(0, whole, BLOCK_TOKENS)]
        pieces = [executor.copied(piece) for piece in executor.cut(row, [*spans, (whole, executor.length(row))])]
        firsts = [piece.layers[0] for piece in pieces if piece.window_from == 0]
        left.append([np.array(array).tobytes() for first in firsts if first is not None for array in first])
    executor.check()
    return drawn, left


def note(executor: BatchExecutor, drawn: dict[str, list[int]]) -> None:
    for ready in executor.step():
        drawn.setdefault(ready.row_id, []).append(ready.token)
