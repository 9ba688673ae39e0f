"""Chooses how a decode step attends to sealed blocks, by a measurement that is made once per device and stored.

Multiplying the 4-bit codes reads the least memory; dequantizing for MLX's fused kernel computes fastest. Which one wins
differs between a CPU, Metal and CUDA, and with the rows and tokens of the batch.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from . import sealing
from .attention import attend
from .device import device_name, on_gpu
from .sealed_cache import Choose, View
from .sealing import SealPolicy

logger = logging.getLogger(__name__)

ROWS = (1, 4, 16)
TOKENS = (256, 1024, 4096)
REPEATS = 5
CLEAR = 1.5
"""Ways that differ by this factor are timed only twice."""

GPU_CHAIN = 8
BUDGET_S = 2.0
"""Time for the measurement. Points beyond it get the result of the point before."""

Shape = tuple[int, int, int, int]
"""A layer's heads, KV heads, key channels and value channels."""

Table = dict[tuple[int, int], float]
"""By (rows, tokens): the time of multiplying codes over that of dequantizing."""


def choose_from(table: Table) -> Choose:
    """Returns a function that chooses the faster way at the next larger measured point, or at the largest one."""
    rows, tokens = (sorted({key[axis] for key in table}) for axis in (0, 1))

    def choose(row_count: int, token_count: int) -> bool:
        row = rows[min(bisect_left(rows, row_count), len(rows) - 1)]
        return table[row, tokens[min(bisect_left(tokens, token_count), len(tokens) - 1)]] < 1.0

    return choose


def measured_choice(path: Path | None, shape: Shape, policy: SealPolicy, dtype: mx.Dtype) -> Choose | None:
    """Returns the choice for layers of `shape`, from the table in the file `path`, or measured now and stored there;
    None if the device cannot multiply codes of that shape."""
    key = _key(shape, policy, dtype)
    tables = _read(path)
    if key not in tables:
        try:
            table = measure(shape, policy, dtype)
        except RuntimeError as error:
            logger.warning("sealed blocks are dequantized in every step: %s", error)
            return None
        tables[key] = [[*point, round(ratio, 3)] for point, ratio in table.items()]
        _write(path, tables)
    return choose_from({(rows, tokens): ratio for rows, tokens, ratio in tables[key]})


def measure(shape: Shape, policy: SealPolicy, dtype: mx.Dtype, clock: Callable[[], float] = time.perf_counter) -> Table:
    """Times both ways at every point, within about `BUDGET_S`.

    Raises:
        RuntimeError: the device cannot multiply codes of that shape.
    """
    # A warm-up, because a device may have to compile both first.
    _ratio(*_example(ROWS[0], TOKENS[0], shape, policy, dtype), policy, clock)
    ends, table, last = clock() + BUDGET_S, Table(), 1.0
    for rows in ROWS:
        for tokens in TOKENS:
            if clock() < ends:
                last = _ratio(*_example(rows, tokens, shape, policy, dtype), policy, clock)
            table[rows, tokens] = last
    return table


def _example(rows: int, tokens: int, shape: Shape, policy: SealPolicy, dtype: mx.Dtype) -> tuple[mx.array, View]:
    """Returns random queries, `(rows, heads, 1, key_dim)` in `dtype`, and a view with half a block as tail."""
    heads, kv_heads, key_dim, value_dim = shape
    keys = mx.random.normal((rows, kv_heads, tokens, key_dim)).astype(dtype)
    values = mx.random.normal((rows, kv_heads, tokens, value_dim)).astype(dtype)
    opened = (keys[:, :, : BLOCK_TOKENS // 2], values[:, :, : BLOCK_TOKENS // 2])
    queries = mx.random.normal((rows, heads, 1, key_dim)).astype(dtype)
    return queries, View(sealing.seal(keys, values, policy), *opened, keys)


def _ratio(queries: mx.array, view: View, policy: SealPolicy, clock: Callable[[], float]) -> float:
    """Returns the time of multiplying codes over that of dequantizing, for queries `(rows, heads, 1, key_dim)`."""
    scale, value_dim = queries.shape[3] ** -0.5, view.values.shape[3]
    gpu = on_gpu()
    columns = mx.arange(view.sealed.tokens + view.keys.shape[2])
    # Rows of a batch differ in length, and a GPU has a fused kernel only if nothing is masked.
    mask = (columns > mx.arange(queries.shape[0])[:, None])[:, None, None] if gpu and queries.shape[0] > 1 else None

    def chained(attended: Callable[[mx.array], mx.array]) -> mx.array:
        asked = queries
        # Several in sequence, as in a model's layers: one alone would take a GPU less time than waiting for it.
        for _ in range(GPU_CHAIN - 1 if gpu else 0):
            asked = queries + attended(asked).mean()
        return attended(asked)

    def direct() -> mx.array:
        return chained(lambda asked: attend(asked, view, policy, scale, mask))

    def joined(asked: mx.array) -> mx.array:
        keys, values = sealing.unseal(view.sealed, policy, value_dim, queries.dtype)
        keys, values = mx.concatenate([keys, view.keys], axis=2), mx.concatenate([values, view.values], axis=2)
        return mx.fast.scaled_dot_product_attention(asked, keys, values, scale=scale, mask=mask)

    def plain() -> mx.array:
        return chained(joined)

    mx.eval(queries, view.keys, view.values, view.sealed, mask, direct(), plain())
    best = [inf, inf]
    for number in range(REPEATS):
        for index, way in enumerate((direct, plain)):
            started = clock()
            mx.eval(way())
            best[index] = min(best[index], clock() - started)
        if number and not best[1] / CLEAR < best[0] < best[1] * CLEAR:
            break
    return best[0] / best[1]


def _key(shape: Shape, policy: SealPolicy, dtype: mx.Dtype) -> str:
    return f"{device_name()}, mlx {version('mlx')}, {'x'.join(map(str, shape))}, {policy.name}, {dtype}"


def _read(path: Path | None) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, kernels are measured again: %s", path, error)
        return {}
    return data if isinstance(data, dict) else {}


def _write(path: Path | None, tables: dict[str, Any]) -> None:
    if path is None:
        return
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        # The file only saves three seconds at the next start.
        logger.warning("%s cannot be written: %s", path, error)
        temporary.unlink(missing_ok=True)
