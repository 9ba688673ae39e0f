"""Runs batches of usual sizes in advance, for devices that compile kernels for every new shape.

CUDA compiles kernels, plans attention and allocates memory at the first use of a shape, and a step waits for that: the
first answers of each number of rows would take several times as long as later ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.messages import Sampling
from ..kv.device import device_bytes, on_cuda
from .executor import SHAPE_TOKENS, BatchExecutor
from .vision import RowPictures, Vision

if TYPE_CHECKING:
    from .models import LoadedModel

logger = logging.getLogger(__name__)

CUDA_BUDGET_S = 45.0
"""The first start on a machine takes most of it; later ones find the kernels on disk and take a tenth."""

ROWS = (1, 2, 4, 8, 16, 32)
MEMORY_FRACTION = 1 / 16
"""Share of the free memory for the made-up rows."""

PICTURE_SIDE = 448
"""Side of the made-up picture, pixels."""

PROMPT_TOKENS = BLOCK_TOKENS - 24
STEPS = 16


def default_budget_s() -> float:
    """Returns how long to warm up on this device, seconds: 0 unless measurements show that it helps."""
    return CUDA_BUDGET_S if on_cuda() else 0.0


def warm_up(loaded: LoadedModel, budget_s: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Runs rounds of prefill, decode, filling a block, cutting and leaving, with more and more rows, until the budget
    is used. After one row a picture is encoded too.

    A round that has begun is finished. One that fails ends the warm-up, which only saves time.

    Args:
        loaded: the model; its arrays belong to the calling thread.
        budget_s: seconds after which no round begins.

    Returns:
        The most rows of a finished round; 0 if there was none.
    """
    started, reached = clock(), 0
    per_row = loaded.spec.bytes_per_row + 2 * BLOCK_TOKENS * loaded.spec.bytes_per_token
    rows_max = min(int(device_bytes(free=True) * MEMORY_FRACTION / per_row), ROWS[-1])
    for rows in ROWS:
        began = clock()
        if rows > rows_max or began - started >= budget_s:
            break
        try:
            _round(loaded, rows)
        except RuntimeError as error:
            logger.warning("the warm-up of %d rows failed: %s", rows, error)
            break
        if rows == 1 and loaded.vision is not None:
            try:
                _see(loaded, loaded.vision)
            except (RuntimeError, ValueError) as error:
                logger.warning("the warm-up of pictures failed: %s", error)
        reached = rows
        logger.debug("warming up for %d rows took %.1f s", rows, clock() - began)
    mx.clear_cache()
    logger.info("warmed up for %d rows in %.1f s", reached, clock() - started)
    return reached


def _see(loaded: LoadedModel, vision: Vision) -> None:
    """Runs a picture from its pixels to a first token."""
    span, embeddings = vision.example(PICTURE_SIDE)
    pictures, tokens = RowPictures([(0, len(span.tokens))], {0: embeddings}), list(span.tokens)
    vision.set_positions(pictures, tokens, [(span.grid, False)])
    executor = BatchExecutor(loaded)
    executor.open("", [], None, 0, pictures)
    executor.prefill([("", tokens)])
    executor.join("", [*tokens, 0], Sampling(temperature=0.0, max_tokens=2), 0)
    executor.step()
    executor.leave([""])


def _round(loaded: LoadedModel, rows: int) -> None:
    """Prefills prompts of all padded lengths up to a block. Then decodes rows of equal lengths, which need no mask, and
    of different ones; each fills a block."""
    for length in range(SHAPE_TOKENS, BLOCK_TOKENS + 1, SHAPE_TOKENS):
        executor = BatchExecutor(loaded)
        for row in range(rows):
            executor.open(str(row), [], None, 0)
        executor.prefill([(str(row), [0] * length) for row in range(rows)])
    for spread in (0, 1):
        executor = BatchExecutor(loaded)
        names = [str(row) for row in range(rows)]
        prompts = {name: [0] * (PROMPT_TOKENS + spread * (row % 8)) for row, name in enumerate(names)}
        for name in names:
            executor.open(name, [], None, 0)
        executor.prefill(list(prompts.items()))
        for name in names:
            executor.join(name, [*prompts[name], 0], Sampling(temperature=0.0, max_tokens=2 * BLOCK_TOKENS), 0)
        while executor.length(names[0]) < BLOCK_TOKENS + STEPS:
            executor.step()
        if loaded.spec.reusable:
            length = executor.length(names[0])
            executor.cut(names[0], [(0, BLOCK_TOKENS), (BLOCK_TOKENS, length)])
        executor.leave(names[1::2])
        executor.step()
        executor.leave(names)
