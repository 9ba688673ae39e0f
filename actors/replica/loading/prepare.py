"""Prepares weights for the fastest products on this device: compute dtype, quantized or not, memory layout.

Quantized weights are small on disk and in memory, but not fast everywhere. Times of products measured with MLX 0.32 (4
bits, groups of 64), first with the weights as stored, then dequantized:

    an output layer 151,936 x 1,024 for 16 rows, H200      1,038 us and 131 us
    a decode step of Qwen3-0.6B's shape, 4/16/32 rows, H200    4.43/7.35/11.41 ms and 5.91/5.84/7.53 ms
    its prefill of 2,048 tokens, H200                      28.8 ms and 17.6 ms
    1,024 x 1,024 for 4 rows, float32, a CPU               3.7 ms and 1.4 ms; with OpenBLAS 0.8 ms

So on CUDA both forms are kept, and each product uses the faster one. If memory is too scarce for both, products of many
rows dequantize the weights that they need (`kernels/many_rows.py`). On Metal weights stay as stored: its quantized
kernels are well tuned, and memory is scarce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...patches import recast
from ..device import blas
from ..device.device import device_bytes, on_gpu
from ..kernels import few_rows, many_rows

DEQUANTIZED_FRACTION = 0.25
"""The share of the device's memory that `auto` allows for dequantized weights."""

STORED_PRODUCTS_MAX = 15_000_000
"""With `both`, products of up to this many multiplications (rows x inputs x outputs) use the weights as stored. On an
H200 the two forms are equally fast at 12 rows of 1,024 x 1,024, 8 of 1,024 x 2,048, 5 of 1,024 x 3,072, and below one
row of 4,096 x 4,096."""


def prepare_weights(
    model: Any,
    dtype: mx.Dtype | None,
    weights: str,
    progress: Callable[[float], None],
    memory_bytes_max: int | None = None,
) -> str:
    """Loads a model's lazy weights into memory and converts them.

    Args:
        dtype: the compute dtype, None for the weights' own.
        weights: `stored`, `dequantized`, `both`, or `auto`, which decides by device and size, equally on all machines
            of a kind.
        progress: called with the fraction of bytes that are loaded.
        memory_bytes_max: what `auto` takes for the device's memory, if that is less.

    Returns:
        The form used, one of the first three. It is a part of the model's identity, because results differ by rounding.
    """
    if dtype is not None:
        model.set_dtype(dtype)
    quantized = {name: module for name, module in model.named_modules() if _is_quantized(module)}
    if weights == "auto":
        fast = "both" if on_gpu() else "dequantized"
        weights = fast if _pays(quantized, memory_bytes_max) else "stored"
    if weights != "stored":
        make = _both if weights == "both" else _dequantized
        model.update_modules(tree_unflatten([(name, make(module)) for name, module in quantized.items()]))
    else:
        many_rows.install(model)
    if not on_gpu():
        model.apply(_column_major, _is_transposed_in_use)
        _add_biases_last(model)
    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    total, done = sum(array.nbytes for array in arrays), 0
    for array in arrays:
        mx.eval(array)
        done += array.nbytes
        progress(done / max(1, total))
    return weights if quantized else "stored"


def _is_quantized(module: Any) -> bool:
    return isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)


def _pays(quantized: dict[str, Any], memory_bytes_max: int | None) -> bool:
    if mx.metal.is_available() or not quantized:
        return False
    needed = sum(module.weight.size * 32 // module.bits * module.scales.itemsize for module in quantized.values())
    return needed <= DEQUANTIZED_FRACTION * min(device_bytes(), memory_bytes_max or device_bytes())


class LinearByRows(nn.Linear):
    """A dequantized layer that uses its stored weights for small products, and for products of few rows if a kernel
    reads the stored weights."""

    stored: Any

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for `x` `(..., inputs)`, both in the model's dtype."""
        return self.stored(x) if _is_stored(x, self) else super().__call__(x)


class _EmbeddingByRows(nn.Embedding):
    """The same for an embedding that is the output layer too."""

    stored: Any

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns logits `(..., vocabulary)` for `x` `(..., dim)`, both in the model's dtype."""
        return self.stored.as_linear(x) if _is_stored(x, self) else super().as_linear(x)


def _is_stored(x: mx.array, layer: Any) -> bool:
    """Whether `x` `(..., inputs)` times a layer's weights `(outputs, inputs)` transposed is faster with stored ones.
    For more rows MLX would have to compile a kernel first, see `many_rows.py`."""
    is_small = x.size * layer.weight.shape[0] <= STORED_PRODUCTS_MAX
    return (is_small and x.size // x.shape[-1] < many_rows.ROWS_LEAST) or few_rows.takes(layer.stored, x)


def _dequantized(module: Any, linear: type[nn.Linear] = nn.Linear, embedding: type[nn.Embedding] = nn.Embedding) -> Any:
    """Returns the layer with plain weights, `(outputs, inputs)` in the dtype of its scales."""
    matrix = mx.dequantize(
        module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits, mode=module.mode
    )
    if isinstance(module, nn.QuantizedEmbedding):
        plain: Any = embedding(1, 1)
    else:
        plain = linear(1, 1, bias="bias" in module)
        if "bias" in module:
            plain.bias = module.bias
    plain.weight = matrix
    return plain


def _both(module: Any) -> Any:
    plain = _dequantized(module, LinearByRows, _EmbeddingByRows)
    plain.stored = module
    return plain


class LinearThenBias(nn.Linear):
    """A layer that adds its bias after the product. MLX's own layer starts the sums with the bias, which each BLAS does
    in its own way."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for `x` `(..., inputs)`, both in the model's dtype."""
        return x @ self.weight.T + self.bias


def _add_biases_last(model: Any) -> None:
    """Makes layers compute equal bits for any number of rows if OpenBLAS computes some of the products."""
    for _, module in model.named_modules() if blas.chosen().name else []:
        if type(module) is nn.Linear and "bias" in module:
            recast(module, LinearThenBias)


def _is_transposed_in_use(module: nn.Module, name: str, value: Any) -> bool:
    """Whether layers multiply by the parameter's transpose, as with all matrices except an adapter's."""
    return nn.Module.valid_parameter_filter(module, name, value) and name not in ("lora_a", "lora_b")


def _column_major(weight: mx.array) -> mx.array:
    """Returns a float32 matrix `(outputs, inputs)` with contiguous columns; other arrays unchanged.

    A layer computes x @ weight.T; MLX's own BLAS multiplies about twice as fast if that transpose is contiguous
    (256 x 3072 float32: 145 ms against 301 at 512 rows, 8.2 against 14.1 at 16). To OpenBLAS it is nearly the same.
    """
    return mx.contiguous(weight.T).T if weight.ndim == 2 and weight.dtype == mx.float32 else weight
