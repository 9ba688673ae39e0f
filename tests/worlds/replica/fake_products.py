"""CUDA's kernel for products of few rows, by plain operations: the same arguments, results and roundings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from satchel.actors.replica.kernels import few_rows
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.ways import decode_ways, few_rows_check

from . import fake_kernels


@contextmanager
def cuda() -> Iterator[list[str]]:
    """Lets this device be one with CUDA, as far as a load asks, on which kernels are right and fast. Yields the names
    of what is launched: `product`, `sum` or `gates`."""
    launched: list[str] = []

    def multiply(layer: Any, x: mx.array, widths: Sequence[int], add: mx.array | None = None) -> list[mx.array]:
        launched.append("product" if add is None else "sum")
        return product(layer, x, widths, add)

    def multiply_gated(layer: Any, x: mx.array) -> mx.array:
        launched.append("gates")
        return gated(layer, x)

    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "on_gpu", lambda: True)
        patch.setattr(few_rows_check, "on_cuda", lambda: True)
        patch.setattr(few_rows_check, "is_slower", lambda *_: False)
        patch.setattr(few_rows_check, "TIMED_LEAST", 1)
        patch.setattr(few_rows_check, "TIMED_ROUNDS", 1)
        patch.setattr(decode_ways, "TIMED_STEPS", 1)
        patch.setattr(decode_ways, "TIMED_ROUNDS", 1)
        patch.setattr(few_rows_check, "prepare_products", lambda layer, widths: None)
        patch.setattr(few_rows_check, "multiply", product)
        patch.setattr(few_rows_check, "multiply_gated", gated)
        patch.setattr(few_rows, "multiply", multiply)
        patch.setattr(few_rows, "multiply_gated", multiply_gated)
        patch.setattr(mx, "quantized_matmul", quantized_matmul)
        yield launched


_quantized_matmul = mx.quantized_matmul


def quantized_matmul(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *how: Any, **named: Any) -> mx.array:
    """Products of float16 are added up in float32, as on a GPU. On a CPU MLX takes thirty times as long for others."""
    if x.dtype != mx.float16:
        return _quantized_matmul(x, w, scales, biases, *how, **named)
    wide, scales, biases = (each.astype(mx.float32) for each in (x, scales, biases))
    return _quantized_matmul(wide, w, scales, biases, *how, **named).astype(x.dtype)


def product(layer: Any, x: mx.array, widths: Sequence[int], add: mx.array | None = None) -> list[mx.array]:
    scales, biases = (layer[name].astype(mx.float32) for name in ("scales", "biases"))
    weight = mx.dequantize(layer["weight"], scales, biases, layer.group_size, layer.bits)
    sums = x.astype(mx.float32) @ weight.T
    if "bias" in layer:
        sums = sums + layer["bias"].astype(mx.float32)
    out = sums.astype(x.dtype)
    return [*mx.split(out if add is None else out + add, [*accumulate(widths[:-1])], axis=-1)]


def gated(layer: Any, x: mx.array) -> mx.array:
    gate, up = product(layer, x, [layer["weight"].shape[0] // 2] * 2)
    return nn.silu(gate) * up
