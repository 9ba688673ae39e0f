"""The product of few rows with 4-bit weights as one CUDA kernel.

A decode step of some sequences consists of many small products. MLX's kernel for quantized weights reads the weights
once for each row. With dequantized weights products go through cuBLAS, which takes 25 us of the host for each. This
kernel reads 4-bit weights from memory once, uses tensor cores, and is launched like other kernels.

When a model is loaded, tests decide whether the kernel is used, and for how many rows (`few_rows_check.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from .few_rows_text import EACH_WARP_ITS_INPUTS, FINISH, ROW_BYTES, SHARED_ROWS, TILE_BYTES
from .gpu_kernels import MULTIPLY, int_numbers, kernel, prepare

ROWS_LEAST = 2
"""The fewest rows for the kernel, unless it was measured for one: there MLX's kernel reads weights only once too."""

ROWS_MOST = 128
_BITS, _GROUP_SIZES = 4, (64, 128)

_INPUTS = ("words", "scales", "biases", "bias_of", "more", "x", "sizes")
KINDS = {
    mx.bfloat16: ("bf16", "0x3f803f80u", "0x43004300u", "0xc300c300u", "128.f"),
    mx.float16: ("f16", "0x3c003c00u", "0x64006400u", "0xe400e400u", "1024.f"),
}
"""By dtype: its name in PTX, two ones, and the number above which its lowest bits count by one, twice, twice negated,
and once."""


def multiply(layer: Any, x: mx.array, widths: Sequence[int], add: mx.array | None = None) -> list[mx.array]:
    """Multiplies rows with a layer's transposed weights, and adds its bias if it has one.

    Args:
        layer: has `weight` `(outputs, inputs / 8)` uint32, and `scales` and `biases` `(outputs, inputs / group_size)`
            in the dtype of `x`; see `fits`.
        x: `(..., inputs)`, bfloat16 or float16, 1 to 128 rows.
        widths: the widths of the parts, which together are all outputs.
        add: `(..., outputs)` in the dtype of `x`, which is added to a product of one part after that was rounded, and
            the sum is rounded again; None for nothing.

    Returns:
        The parts, each `(..., width)`, contiguous, in the dtype of `x`.
    """
    assert add is None or (len(widths) == 1 and add.dtype == x.dtype and add.shape == (*x.shape[:-1], *widths))
    return _launch(layer, x, widths, add)


def multiply_gated(layer: Any, x: mx.array) -> mx.array:
    """Multiplies rows with a layer of which the first half of the outputs are gates, and the second half what they let
    through; see `gates`. Each number is rounded as MLX rounds it in `silu(gate) * up`: products, exponential, sigmoid,
    and what is computed with it.

    Args:
        layer, x: as for `multiply`.

    Returns:
        `(..., outputs / 2)`, contiguous, in the dtype of `x`.
    """
    return _launch(layer, x, (layer["weight"].shape[0] // 2,), gated=True)[0]


def gates(widths: Sequence[int]) -> bool:
    """Whether `multiply_gated` computes a layer with parts of these widths."""
    return len(widths) == 2 and widths[0] == widths[1] and widths[0] % 16 == 0


def _launch(
    layer: Any, x: mx.array, widths: Sequence[int], add: mx.array | None = None, *, gated: bool = False
) -> list[mx.array]:
    words, scales, bias = layer["weight"], layer["scales"], layer.get("bias")
    lead, inputs, outputs = x.shape[:-1], x.shape[-1], words.shape[0]
    rows, tiles = x.size // inputs, _tiles(x.size // inputs)
    shape = _shape(tiles, outputs, inputs, gated)
    plan = _plan(x.dtype, layer.group_size, tiles, shape, bias is not None, gated, len(widths))
    # What is not read must be an array too.
    other = [scales if array is None else array for array in (bias, add)]
    sizes = int_numbers(rows, outputs, inputs, int(add is not None), *accumulate(widths))
    return plan.launch(
        inputs=[words, scales, layer["biases"], *other, x, sizes],
        template=plan.template,
        grid=(-(-sum(widths) // plan.outputs) * -(-rows // (8 * tiles)) * plan.threads, 1, 1),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[(*lead, width) for width in widths],
        output_dtypes=[x.dtype] * len(widths),
        shared_memory=plan.shared_memory,
    )


def prepare_products(layer: Any, widths: Sequence[int]) -> None:
    """Begins to compile all that `multiply`, and `multiply_gated` if `gates`, need for a layer, on other threads.

    Args:
        layer, widths: as for `multiply`.
    """
    dtype, outputs, bias = layer["scales"].dtype, layer["weight"].shape[0], layer.get("bias") is not None
    inputs = [mx.uint32, *[dtype] * (len(_INPUTS) - 2), mx.int32]
    for gated in (False, True) if gates(widths) else (False,):
        parts = 1 if gated else len(widths)
        for tiles in _SHAPES:
            shape = _shape(tiles, outputs, layer["weight"].shape[1] * 8, gated)
            plan = _plan(dtype, layer.group_size, tiles, shape, bias, gated, parts)
            prepare(plan.launch, plan.template, inputs, [dtype] * parts)


def _tiles(rows: int) -> int:
    """Returns how many tiles of 8 rows a group has: 1, 2, 4 or 8, so that few kernels are compiled."""
    return next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles or tiles == 8)


class _Shape(NamedTuple):
    """What a group of threads multiplies.

    Attributes:
        tiles: of outputs, 16 each, that a warp has.
        warps: among which the inputs are divided.
        run: the most steps of 64 inputs for which a warp loads everything together; 0 if rows are shared.
        side: warps of a division, with different outputs, if rows are shared.
        stages: as many steps are in shared memory, if rows are shared.
    """

    tiles: int
    warps: int
    run: int = 0
    side: int = 1
    stages: int = 0


_SHAPES = {
    1: {65536: _Shape(4, 8, 2), 8192: _Shape(2, 8, 2), 0: _Shape(1, 4, 4)},
    2: {65536: _Shape(4, 4, 2), 8192: _Shape(2, 4, 2), 4096: _Shape(2, 8, 2), 0: _Shape(1, 8, 4)},
    4: {4096: _Shape(2, 2, side=4, stages=4), 0: _Shape(1, 4, side=2, stages=4)},
    8: {4096: _Shape(2, 2, side=4, stages=4), 0: _Shape(1, 4, side=2, stages=4)},
}
"""By tiles of rows and the least outputs. The fastest on an H200 for the products of an 8B model."""


_SHAPE_GATED = _Shape(2, 8, 2)
"""Of a gated product with so few outputs that a group would have one tile."""


def _shape(tiles: int, outputs: int, inputs: int, gated: bool = False) -> _Shape:
    """Returns the shape for so many tiles of rows. All warps have a run if there are enough inputs, and a run's scales
    can be loaded together."""
    shape = next(shape for least, shape in _SHAPES[tiles].items() if outputs >= least)
    if not shape.run:
        return shape
    if gated and shape.tiles == 1:
        shape = _SHAPE_GATED
    runs = (run for run in (4, 2) if run <= shape.run and inputs % (64 * run) == 0)
    return shape._replace(run=next((run for run in runs if inputs >= 64 * run * shape.warps), 1))


@dataclass(frozen=True)
class _Plan:
    """The kernel for given shapes: a group has `threads` threads and computes `outputs` outputs."""

    launch: Any
    template: list[tuple[str, Any]]
    outputs: int
    threads: int
    shared_memory: int


@cache
def _plan(dtype: mx.Dtype, group_size: int, tiles: int, shape: _Shape, bias: bool, gated: bool, parts: int) -> _Plan:
    kind, ones, base_bits, minus_bits, base = KINDS[dtype]
    body = MULTIPLY + (EACH_WARP_ITS_INPUTS if shape.run else SHARED_ROWS) + FINISH
    for name, value in (
        ("KIND", kind),
        ("ONE_BITS", ones),
        ("BASE_BITS", base_bits),
        ("MINUS_BITS", minus_bits),
        ("BASE", base),
    ):
        body = body.replace(name, value)
    names = tuple(f"y{part}" for part in range(parts))
    chosen = names[-1]
    for part in reversed(range(parts - 1)):
        chosen = f"part == {part} ? {names[part]} : {chosen}"
    body = body.replace("PART", chosen)
    template = [("T", dtype), ("GS", group_size), ("NT", tiles), ("BIAS", bias), ("GATED", gated), ("R", shape.tiles)]
    if shape.run:
        template += [("W", shape.warps), ("RUN", shape.run)]
    else:
        template += [("WN", shape.side), ("WK", shape.warps), ("STAGES", shape.stages)]
    all_tiles = shape.tiles * shape.side
    stage, sums = 8 * tiles * ROW_BYTES + all_tiles * TILE_BYTES, 4 * 8 * tiles * (16 * all_tiles + 4)
    launch = kernel(f"few_rows_{kind}_{parts}", _INPUTS, names, body)
    return _Plan(
        launch,
        template,
        16 * all_tiles // (2 if gated else 1),
        32 * shape.warps * shape.side,
        0 if shape.run else shape.warps * max(shape.stages * stage, sums),
    )


@dataclass(frozen=True, eq=False)
class Product:
    """What a layer has multiplied with the kernel: `outputs` are the parts that `multiply` returned."""

    layer: Any
    x: mx.array
    outputs: list[mx.array]


class FewRowsLinear(nn.QuantizedLinear):
    """A quantized layer that multiplies `rows_least` to `rows_most` rows with the kernel.

    Attributes:
        note: is told each product of the kernel; None for nobody.
    """

    rows_most: int
    rows_least: int = ROWS_LEAST
    note: Callable[[Product], None] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for `x` `(..., inputs)`."""
        return self.parts(x, (self.weight.shape[0],))[0] if takes(self, x) else super().__call__(x)

    def parts(self, x: mx.array, widths: Sequence[int]) -> list[mx.array]:
        """As `multiply`, with this layer, which `takes` the rows."""
        outputs = multiply(self, x, widths)
        if self.note is not None:
            self.note(Product(self, x, outputs))
        return outputs


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """The same for an embedding that is the output layer too."""

    rows_most: int
    rows_least: int = ROWS_LEAST

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns logits `(..., vocabulary)` for `x` `(..., dim)`."""
        return multiply(self, x, (self.weight.shape[0],))[0] if takes(self, x) else super().as_linear(x)


_FORMS: dict[type[nn.Module], type[Any]] = {
    nn.QuantizedLinear: FewRowsLinear,
    nn.QuantizedEmbedding: FewRowsEmbedding,
}


def takes(layer: Any, x: mx.array) -> bool:
    """Whether a layer multiplies `x` `(..., inputs)` with the kernel."""
    if not isinstance(layer, FewRowsLinear | FewRowsEmbedding) or x.dtype != layer["scales"].dtype:
        return False
    return layer.rows_least <= x.size // x.shape[-1] <= layer.rows_most


def by_kernel(layer: Any, rows_most: int, rows_least: int = ROWS_LEAST) -> Any:
    """Returns a quantized layer as one that multiplies `rows_least` to `rows_most` rows with the kernel."""
    made = recast(copy.copy(layer), _form(layer) or type(layer))
    made.rows_most, made.rows_least = rows_most, rows_least
    return made


def _form(layer: Any) -> type[Any] | None:
    """Returns the class of a layer that uses the kernel; None for other layers."""
    return type(layer) if isinstance(layer, FewRowsLinear | FewRowsEmbedding) else _FORMS.get(type(layer))


def fits(layer: Any) -> bool:
    """Whether the kernel can read a layer's weights."""
    if _form(layer) is None or layer.mode != "affine" or layer.bits != _BITS:
        return False
    outputs, words = layer.weight.shape
    of_16_bits = layer.scales.dtype in KINDS and layer.get("bias", layer.scales).dtype == layer.scales.dtype
    return of_16_bits and layer.group_size in _GROUP_SIZES and outputs % 16 == 0 and words * 8 % layer.group_size == 0
