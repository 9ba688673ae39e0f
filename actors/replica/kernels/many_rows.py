"""Products of many rows with weights that are kept quantized, on CUDA: the weights are dequantized for each product.

MLX's own kernels for such products (`qmm_sm80`, for 8 rows and more) are compiled when they are first used, from
CUTLASS's headers: one for up to 16 rows, one for up to 32, one for more, each for every number of bits and group size.
NVRTC took 34 to 44 s of a processor and 3 GB for each of them, one after the other, so a first start waited for
minutes. Dequantizing and MLX's plain product compile nothing. What dequantizing costs is a pass over the weights, which
takes as long as a product of some hundred rows.

Fewer rows are left to the kernel of `few_rows.py`, if it was found right and not slower, and less than 8 to MLX, whose
kernel for them is compiled already.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from ..device.device import on_cuda
from . import gpu_kernels
from .few_rows import FewRowsEmbedding, FewRowsLinear, takes

ROWS_LEAST = 8
"""The fewest rows for which MLX compiles a kernel."""

PIECE_BYTES = 2**27
"""At most so much of a matrix is dequantized at a time."""


class StoredLinear(FewRowsLinear):
    """A quantized layer that multiplies many rows with dequantized weights."""

    rows_most: int = 0

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for `x` `(..., inputs)`."""
        return product(self, x) if _is_ours(self, x) else super().__call__(x)


class StoredEmbedding(FewRowsEmbedding):
    """The same for an embedding that is the output layer too."""

    rows_most: int = 0

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns logits `(..., vocabulary)` for `x` `(..., dim)`."""
        return product(self, x) if _is_ours(self, x) else super().as_linear(x)


_FORMS: dict[type[nn.Module], type[Any]] = {nn.QuantizedLinear: StoredLinear, nn.QuantizedEmbedding: StoredEmbedding}


def install(model: nn.Module) -> int:
    """Has a model's quantized layers multiply many rows in this way, on CUDA. Returns how many do."""
    if not (on_cuda() and gpu_kernels.is_available()):
        return 0
    layers = [layer for _, layer in model.named_modules() if type(layer) in _FORMS and layer.mode == "affine"]
    for layer in layers:
        recast(layer, _FORMS[type(layer)])
    return len(layers)


def _is_ours(layer: Any, x: mx.array) -> bool:
    """Whether a layer's product of `x` is computed here."""
    if takes(layer, x) or x.size // x.shape[-1] < ROWS_LEAST:
        return False
    # Without the kernel for few rows a decode step of many sequences, of one row each, is left to MLX: its kernel reads
    # the weights only once.
    return bool(layer.rows_most) or (x.ndim > 1 and x.shape[-2] > 1)


def product(layer: Any, x: mx.array) -> mx.array:
    """Multiplies rows with a quantized layer's transposed weights, and adds its bias if it has one.

    Args:
        layer: has `weight`, `scales` and `biases` as MLX's affine quantization makes them, of `outputs` rows.
        x: `(..., inputs)`.

    Returns:
        `(..., outputs)`.
    """
    outputs, inputs = layer["weight"].shape[0], x.shape[-1]
    height = -(-outputs // -(-outputs * inputs * x.dtype.size // PIECE_BYTES))
    pieces = []
    for start in range(0, outputs, height):
        words, scales, biases = (layer[name][start : start + height] for name in ("weight", "scales", "biases"))
        weight = mx.dequantize(words, scales, biases, group_size=layer.group_size, bits=layer.bits)
        pieces.append(x @ weight.T)
    found = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-1)
    return found + layer["bias"] if "bias" in layer else found
