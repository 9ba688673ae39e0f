"""Decides whether the kernel of `few_rows.py` is used, and for how many rows: it must have agreed with MLX's own
product on this device when the model was loaded, and must not have been slower."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ....model_files.source import first_sentence
from ...device.device import on_cuda
from ...kernels import gpu_kernels
from ...kernels.few_rows import (
    ROWS_LEAST,
    ROWS_MOST,
    by_kernel,
    fits,
    gates,
    multiply,
    multiply_gated,
    prepare_products,
)
from ...proving.agreement import MODEL_ERRORS, Logits, try_change
from ...proving.findings import NOWHERE, Findings
from ...proving.pieces import IN_ONE_PIECE, Pieces

logger = logging.getLogger(__name__)

ROWS_TRIED = (ROWS_MOST, 64, 32, 16, 8)
"""The most rows. A tile has 8."""

_BOUNDS = [[least, most] for least in (1, ROWS_LEAST) for most in (0, *ROWS_TRIED)]

TOLERANCE = 2e-2
"""How far a product may be off MLX's own with dequantized weights, relative to its largest number: both round to 16
bits. If a group of inputs is left out, the difference is several times as large. MLX's product with quantized weights
may round sums too: on a CPU it was off by 5e-2 itself."""

OUTPUTS_DEQUANTIZED = 8192
"""At a time."""

TIMED_LEAST, TIMED_MOST, TIMED_ROUNDS = 4, 32, 5
"""Products of one shape are timed with the weights of as many layers as there are: those of a single one would stay in
the device's cache, where no step finds them."""

ONE_ROW_SLOWER_MOST = 1.5
"""One row is multiplied by the kernel too, unless it takes this many times as long as MLX's: then a token's logits have
the same bits alone and beside others. Weights that no cache has it reads two to three times as fast on an H200, but
small products are bound by the host, which takes a little longer to launch it."""

SURE_ROWS, SLOWER_MOST = 32, 1.1
"""Up to so many rows the kernel is used unless it takes over so many times as long as MLX's: where both take as long,
noise would decide up to how many tokens a step changes no bit."""

_WHAT, _VERSION = "few_rows", 6
"""Increased whenever the kernel or its test changes."""


def install(model: nn.Module, findings: Findings = NOWHERE, pieces: Pieces = IN_ONE_PIECE) -> int:
    """Lets a model's quantized layers multiply few rows with the kernel, if it is right and not slower. The first layer
    of every shape is tested, if no earlier load did, of this or of another model. Failed tests are logged.

    Args:
        findings: of products (`products_id`).
        pieces: a piece ends after each shape.

    Returns:
        The number of layers that use the kernel.
    """
    if not (on_cuda() and gpu_kernels.is_available()):
        return 0
    modules = dict(model.named_modules())
    known = findings.read(_WHAT, _VERSION)
    # The fewest and the most rows by shape.
    bounds: dict[str, list[int]] = {}
    if isinstance(known, dict):
        bounds |= {shape: rows for shape, rows in known.items() if rows in _BOUNDS}
    better: list[tuple[str, Any]] = []
    found: list[tuple[str, Any, tuple[int, ...], str]] = []
    alike: dict[str, list[tuple[Any, _Today]]] = {}
    for name, layer in modules.items():
        if not fits(layer):
            continue
        product = modules.get(_whole(name).rpartition(".")[0])
        widths: tuple[int, ...] = getattr(product, "widths", (layer.weight.shape[0],))
        found.append((name, layer, widths, _shape_of(layer, widths)))
        alike.setdefault(found[-1][-1], []).append((layer, _product(modules[_whole(name)])))
        if found[-1][-1] not in bounds:
            prepare_products(layer, widths)
    for name, layer, widths, shape in found:
        if shape not in bounds:
            bounds[shape] = _bounds(alike[shape], widths)
            findings.note(_WHAT, _VERSION, bounds)
            pieces.pause()
        least, most = bounds[shape]
        if most:
            better.append((name, by_kernel(layer, most, least)))
    model.update_modules(tree_unflatten(better))
    return len(better)


def _whole(name: str) -> str:
    """Returns the name of a layer that may have both forms (`prepare.py`), of which this one is its `stored`."""
    return name.removesuffix(".stored")


def _shape_of(layer: Any, widths: Sequence[int]) -> str:
    """Returns all of a layer that a test depends on; `widths` as for `_bounds`."""
    kind = str(layer.scales.dtype).removeprefix("mlx.core.")
    return str((*layer.weight.shape, layer.group_size, "bias" in layer, widths, kind))


_Today = Callable[[mx.array], mx.array]
"""Computes a product without the kernel."""


def _product(layer: Any) -> _Today:
    return getattr(layer, "as_linear", layer)


def _bounds(alike: Sequence[tuple[Any, _Today]], widths: Sequence[int]) -> list[int]:
    """Returns for how many rows, at least and at most, the kernel is to be used for some layers of one shape, 0 for
    none.

    Args:
        widths: the parts in which a product is computed. If there are two, one may have the gates of the other
            (`recorded/fused_products.py`).
    """
    (layer, _), gated = alike[0], gates(widths)
    shape = f"{layer.weight.shape[0]} x {layer.weight.shape[1] * 8}"
    inputs = [_inputs(layer, count, 1)[0] for rows in ROWS_TRIED for count in (rows, rows - 3)]
    inputs += _inputs(layer, 1, 1)

    def expected() -> list[mx.array]:
        products = [_plain_product(layer, x).astype(mx.float32) for x in inputs]
        halves = [mx.split(product, 2, axis=-1) for product in products] if gated else []
        # On CUDA MLX would compile a kernel for `nn.silu`, which takes seconds.
        return products + [gate * mx.sigmoid(gate) * up for gate, up in halves]

    def got() -> list[mx.array]:
        products = [mx.concatenate(multiply(layer, x, widths), axis=-1) for x in inputs]
        products += [multiply_gated(layer, x) for x in inputs] if gated else []
        return [product.astype(mx.float32) for product in products]

    verdict = try_change(expected, got, _why_not)
    error = verdict.error
    if verdict.holds:
        try:
            most = next((rows for rows in ROWS_TRIED if not _kernel_is_slower(alike, rows, widths, _times(rows))), 0)
            takes_one = most and not _kernel_is_slower(alike, 1, widths, ONE_ROW_SLOWER_MOST)
            return [1 if takes_one else ROWS_LEAST, most]
        except MODEL_ERRORS as failed:
            error = failed
    reason = verdict.reason if error is None else first_sentence(error)
    logger.warning("few rows are multiplied with %s without the kernel: %s", shape, reason)
    return [ROWS_LEAST, 0]


def _times(rows: int) -> float:
    """Returns how many times as long as MLX's own the kernel may take for so many rows."""
    return SLOWER_MOST if rows <= SURE_ROWS else 1.0


def _why_not(expected: Logits, got: Logits) -> str:
    """Returns why the kernel is not used; empty if its products agree with MLX's."""
    for one, other in zip(expected, got, strict=True):
        error, scale = (float(array.abs().max()) for array in (other - one, one))
        # In this form a NaN is refused too.
        if not error <= TOLERANCE * scale:
            return f"the kernel is off by {error:.2g} of {scale:.2g} for {len(one)} rows"
    return ""


def _kernel_is_slower(alike: Sequence[tuple[Any, _Today]], rows: int, widths: Sequence[int], times: float) -> bool:
    """Whether products take more than so many times as long with the kernel."""
    (layer, _), ends = alike[0], [*accumulate(widths[:-1])]
    shape = f"{layer.weight.shape[0]} x {layer.weight.shape[1] * 8}"
    timed = [*islice(cycle(alike), max(TIMED_LEAST, min(len(alike), TIMED_MOST)))]
    inputs = _inputs(layer, rows, len(timed))

    def parts(today: _Today, x: mx.array) -> list[mx.array]:
        # Queries, keys and values are copied before other kernels read them. What reads gates needs no copy.
        found = mx.split(today(x), ends, axis=-1) if ends else [today(x)]
        return [part if gates(widths) or not ends else mx.contiguous(part) for part in found]

    def products(xs: list[mx.array]) -> list[list[mx.array]]:
        return [parts(today, x) for (_, today), x in zip(timed, xs, strict=True)]

    def by_the_kernel(xs: list[mx.array]) -> list[list[mx.array]]:
        return [multiply(layer, x, widths) for (layer, _), x in zip(timed, xs, strict=True)]

    today_s, kernel_s = (_product_s(run, inputs) for run in (products, by_the_kernel))
    logger.info("%s, rows: %d: %.1f us, by the kernel %.1f us", shape, rows, today_s * 1e6, kernel_s * 1e6)
    return is_slower(today_s * times, kernel_s)


def _plain_product(layer: Any, x: mx.array) -> mx.array:
    pieces = []
    for start in range(0, layer.weight.shape[0], OUTPUTS_DEQUANTIZED):
        quantized = (layer[name][start : start + OUTPUTS_DEQUANTIZED] for name in ("weight", "scales", "biases"))
        weight = mx.dequantize(*quantized, group_size=layer.group_size, bits=layer.bits)
        pieces.append(x @ weight.T)
    product = mx.concatenate(pieces, axis=-1)
    return product + layer.bias if "bias" in layer else product


def _inputs(layer: Any, rows: int, count: int) -> list[mx.array]:
    shape = (count, rows, layer.weight.shape[1] * 8)
    return list(mx.random.normal(shape, key=mx.random.key(rows)).astype(layer.scales.dtype))


def _product_s(products: Callable[[list[mx.array]], list[list[mx.array]]], inputs: list[mx.array]) -> float:
    """Returns the shortest time of a product, in seconds, among others in a recorded graph, as in decode steps."""
    run, times = mx.compile(products), []
    mx.eval(run(inputs))
    for _ in range(TIMED_ROUNDS):
        began = time.perf_counter()
        mx.eval(run(inputs))
        times.append(time.perf_counter() - began)
    return min(times) / len(inputs)


def is_slower(today_s: float, kernel_s: float) -> bool:
    """Whether a product takes longer with the kernel."""
    return kernel_s > today_s
