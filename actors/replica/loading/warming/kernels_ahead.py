"""Begins to compile our kernels for CUDA before a model's weights are read.

A kernel is compiled for a model's numbers of heads and channels, for its dtype and for how KV is kept, which its config
and the headers of its weight files say. So the kernels' own functions are called with made-up arrays of such shapes:
what they would launch is compiled by other threads (`gpu_kernels.only_preparing`) while weights are read. A wrong guess
costs some time of these threads: what a model needs and nobody has begun is compiled when it is launched.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx import nn

from ....model_files.context import language_parts
from ....model_files.weights import WeightFile
from ....protocol.block_ids import BLOCK_TOKENS
from ...device.device import on_cuda
from ...execution.recorded.deferral import likely_transforms
from ...kernels import block_kernels, decode_kernel, few_rows, gpu_kernels, prefill_kernel, sealing
from ...kernels.decode_views import KernelStep, KernelView, NewTokens
from ...kernels.head_transform import NOTHING, HeadTransform
from ...kernels.sealing import POLICIES, Sealed, SealPolicy
from ...kv import soft_caps
from ..joined import concatenated
from ..kv_choice import AUTO, USUAL

logger = logging.getLogger(__name__)

PROMPTS = (20, 300)
"""Tokens of prompts whose attention has small tiles, and large ones."""

_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class Shapes:
    """What a model's kernels depend on.

    Attributes:
        heads, kv_heads: of a layer, in this process.
        dim: channels of a head, of keys and of values.
        dtype: of queries, keys and values.
        sinks: the dtype of what heads add to the softmax's sum; None for nothing.
        layers: how many layers a block's record has; 0 if that is not known.
        cap: of scores, as for `decode_kernel.attend`.
    """

    heads: int
    kv_heads: int
    dim: int
    dtype: mx.Dtype
    sinks: mx.Dtype | None = None
    layers: int = 0
    cap: float = 0.0

    @classmethod
    def read(
        cls, config: Mapping[str, Any], files: Iterable[WeightFile], dtype: mx.Dtype | None, shares: int = 1
    ) -> Shapes | None:
        """Returns what a model's files say, None if they do not say it as most models do.

        Args:
            config: of config.json.
            dtype: in which the model computes; None for the weights' own.
            shares: among how many processes the heads of each layer are divided.
        """
        part = next(iter(language_parts(config)))
        heads = _count(part.get("num_attention_heads"))
        kv_heads = _count(part.get("num_key_value_heads")) or heads
        dim = _count(part.get("head_dim")) or (_count(part.get("hidden_size")) // heads if heads else 0)
        # Latent keys and values have other shapes.
        if not dim or heads % kv_heads or kv_heads % shares or part.get("kv_lora_rank"):
            return None
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        stored = Counter(tensor.dtype for tensor in tensors.values() if tensor.dtype in _DTYPES)
        if dtype is None and not stored:
            return None
        chosen = dtype or _DTYPES[stored.most_common(1)[0][0]]
        sunk = [tensor.dtype for name, tensor in tensors.items() if name.endswith(".sinks") and tensor.dtype in _DTYPES]
        sinks = (dtype or _DTYPES[sunk[0]]) if sunk else None
        layers = _count(part.get("num_hidden_layers")) if shares == 1 else 0
        cap = float(part.get(soft_caps.CAP) or 0.0)
        return cls(heads // shares, kv_heads // shares, dim, chosen, sinks, layers, cap)

    def tokens(self, heads: int, tokens: int) -> mx.array:
        """Returns lazy zeros, `(1, heads, tokens, dim)`."""
        return mx.zeros((1, heads, tokens, self.dim), self.dtype)

    def both(self, tokens: int) -> tuple[mx.array, mx.array]:
        """Returns keys and values of a sequence."""
        return self.tokens(self.kv_heads, tokens), self.tokens(self.kv_heads, tokens)

    def sunk(self) -> mx.array | None:
        """Returns sinks, or None."""
        return None if self.sinks is None else mx.zeros((self.heads,), self.sinks)


@dataclass(frozen=True)
class KernelsAhead:
    """The kernels of a model that is being loaded."""

    shapes: Shapes
    policy: SealPolicy
    decodes: bool

    def opened(self, model: Any) -> None:
        """Begins what the model's own modules say.

        Args:
            model: with lazy weights, of which none is read.
        """
        if not self.decodes:
            return
        with gpu_kernels.only_preparing():
            _each([lambda: _decode(self.shapes, self.policy, likely_transforms(model, self.shapes.dim))])
        _each([lambda: [_products(module) for _, module in model.named_modules()]])


def begin(
    config: Mapping[str, Any],
    files: Iterable[WeightFile],
    dtype: mx.Dtype | None,
    kv: str,
    *,
    shares: int = 1,
    whole: bool = True,
    decodes: bool = True,
) -> KernelsAhead | None:
    """Begins to compile a model's kernels on other threads, on CUDA with NVRTC. Never fails.

    Args:
        config, files, dtype, shares: as for `Shapes.read`.
        kv: the name of a policy, or `auto`.
        whole: whether this process has all layers.
        decodes: whether decode steps may read KV by a kernel.

    Returns:
        What else can be begun later; None if nothing can.
    """
    if not (on_cuda() and gpu_kernels.is_available() and gpu_kernels.has_nvrtc()):
        return None
    try:
        shapes, policy = Shapes.read(config, files, dtype, shares), POLICIES[USUAL if kv == AUTO else kv]
        if shapes is None:
            return None
        with gpu_kernels.only_preparing():
            _each(_launches(shapes, policy, decodes=decodes, records=whole))
    except Exception:
        logger.info("kernels are not compiled ahead", exc_info=True)
        return None
    return KernelsAhead(shapes, policy, decodes)


def _count(number: Any) -> int:
    """The number if it is a count, else 0."""
    return number if isinstance(number, int) and number > 0 else 0


def _each(launches: Iterable[Callable[[], Any]]) -> None:
    for launch in launches:
        try:
            launch()
        except Exception as error:
            # There is no kernel for such shapes, or the guess is wrong.
            logger.debug("a kernel is not compiled ahead: %s", error)


def _launches(shapes: Shapes, policy: SealPolicy, *, decodes: bool, records: bool) -> list[Callable[[], Any]]:
    """Returns what builds launches, in the order in which a load needs them."""
    prompts: list[Callable[[], Any]] = [lambda: _prompts(shapes)]
    if not decodes:
        return prompts
    pool, order, slots = _pool(shapes, policy), mx.zeros((1,), mx.uint32), mx.zeros((1,), mx.uint32)
    block, table = shapes.both(BLOCK_TOKENS), mx.zeros((1, 1), mx.uint32)
    sealing_own: list[Callable[[], Any]] = [
        lambda: sealing.seal_into(pool, slots, *block, [(0, 0)], policy, order),
        lambda: block_kernels.unseal(pool, table, *block, policy, order),
    ]
    return [
        *(sealing_own if policy.quantizes else ()),
        *prompts,
        lambda: sealing.seal(*block, policy, kernels=True),
        lambda: block_kernels.write(pool, slots, pool, order),
        lambda: block_kernels.append(block, block, [0], [1], 2 * BLOCK_TOKENS),
        lambda: block_kernels.stack(block, block, 2),
        lambda: _decode(shapes, policy, [NOTHING]),
        lambda: block_kernels.append(block, block, [0], [0], BLOCK_TOKENS),
        lambda: block_kernels.read_records(pool, slots, order),
        lambda: _write_records(pool, slots, order, shapes.layers if records else 0),
    ]


def _pool(shapes: Shapes, policy: SealPolicy) -> Sealed:
    """Returns a layer's slots, of which there is one."""
    return sealing.seal(*shapes.both(BLOCK_TOKENS), policy)


def _prompts(shapes: Shapes) -> None:
    heads, dims = (shapes.heads, shapes.kv_heads), (shapes.dim, shapes.dim)
    if not (decode_kernel.has_tensor_cores() and prefill_kernel.fits(heads, dims, shapes.dtype)):
        return
    for count in PROMPTS:
        chunk = prefill_kernel.Chunk([0], [count], [0], 0, False)
        queries, columns = shapes.tokens(shapes.heads, count), shapes.both(2 * BLOCK_TOKENS)
        prefill_kernel.attend(queries, *columns, chunk, 1.0, 0, shapes.sunk())


def _decode(shapes: Shapes, policy: SealPolicy, transforms: Sequence[HeadTransform]) -> None:
    """Begins all kernels of decode steps.

    Args:
        transforms: what models may leave to them.
    """
    read = NewTokens.of(mx.zeros((64,), mx.uint32), [0, 0], [0], [0], 0, shapes.kv_heads)
    step = KernelStep(shapes.both(BLOCK_TOKENS), _pool(shapes, policy), read, mx.zeros((1,), mx.uint32))
    for transform in transforms:
        view = KernelView(*shapes.both(1), step, lambda dim, transform=transform: transform)
        decode_kernel.attend(shapes.tokens(shapes.heads, 1), view, policy, 1.0, shapes.sunk(), cap=shapes.cap)


_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that mostly become one product (`joined.py`)."""


def _products(module: Any) -> None:
    """Begins the products of few rows of a module's layers."""
    layers: dict[str, Any] = {
        name: child for name, child in module.items() if isinstance(child, nn.Module) and few_rows.fits(child)
    }
    for names in _JOINED:
        if all(name in layers for name in names):
            together = [layers.pop(name) for name in names]
            few_rows.prepare_products(concatenated(together), [layer.weight.shape[0] for layer in together])
    for layer in layers.values():
        few_rows.prepare_products(layer, (layer.weight.shape[0],))


def _write_records(pool: Sealed, slots: mx.array, order: mx.array, layers: int) -> None:
    starts = [0, *accumulate(array.nbytes for array in pool)]
    if layers:
        records = mx.zeros((1, layers * starts[-1]), mx.uint8)
        block_kernels.write_records(pool, slots, records, starts[:-1], order)
