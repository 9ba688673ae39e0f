"""Cuts a model to one rank's share, with mlx-lm's own functions, and says why a model cannot be cut.

A model's `shard` divides heads and features by whole numbers and checks little. So the share is compared with the whole
model: every weight must be whole or have exactly its part, and so must the KV of every layer.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from .....cluster.errors import ModelLoadError
from ....model_files.source import first_sentence
from ....patches import recast
from .ranks import Ranks

SHARDED_TYPES = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash", "longcat_flash_ngram", "minimax"),
    *("minimax_m3_vl", "ministral3", "mistral4", "muse_spark", "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "step3p5"),
)
"""Types of models that mlx-lm 0.32.2 can cut."""

_HEADS = (
    *("num_attention_heads", "num_key_value_heads", "n_heads", "n_kv_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Names of numbers of heads in models' settings."""
_ERRORS = (Exception, SystemExit)


def shard(model: Any, ranks: Ranks, called: Any = None) -> None:
    """Cuts a model to a rank's share. Its weights may be lazy: then only the share of each is kept once it is read.

    Args:
        called: takes tokens and caches as mlx-lm's models do, if the model is the language part of a vision model.

    Raises:
        ModelLoadError: it cannot be cut into so many shares; the message says why in one sentence.
    """
    count = ranks.size()
    seeing = called is not None and called is not model
    if seeing and not callable(getattr(model, "shard", None)):
        raise _refused(count, "mlx-vlm has no shares for models with pictures of its type")
    if not callable(getattr(model, "shard", None)):
        raise _refused(count, f"models of its type have no shares; these have: {', '.join(SHARDED_TYPES)}")
    if why := _indivisible(model, count):
        raise _refused(count, why)
    called = model if called is None else called
    before, caches = _sizes(model), _cache_shapes(called)
    try:
        model.shard(ranks)
        after, own = _sizes(model), _cache_shapes(called)
    except _ERRORS as error:
        raise _refused(count, _in_words(model, error)) from error
    if why := _unequal(before, after, count) or _unequal_kv(caches, own, count):
        raise _refused(count, why)
    made = [(name, _usual(module, ranks)) for name, module in model.named_modules() if type(module) in _USUAL]
    model.update_modules(tree_unflatten(made))


class SummedLinear(nn.Module):
    """A layer of which every rank multiplies its part of the inputs, and whose outputs are the sum over all ranks.

    Args:
        part: this rank's layer, without a bias.
    """

    def __init__(self, part: Any, bias: mx.array | None, ranks: Ranks) -> None:
        super().__init__()
        self.part, self._ranks = part, ranks
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """Returns `(..., outputs)` for this rank's inputs `x` `(..., inputs)`."""
        total = mx.distributed.all_sum(self["part"](x), group=self._ranks)  # type: ignore[arg-type]
        return total + self["bias"] if "bias" in self else total


def _usual(module: Any, ranks: Ranks) -> Any:
    """Returns one of MLX's divided layers as a usual layer, or as one and a sum, with the same arrays. Faster forms of
    usual layers are known (`loading/prepare.py`, `loading/joined.py`)."""
    summed = type(module) in _SUMMED
    layer = recast(module, _USUAL[type(module)])
    if not summed:
        return layer
    bias = layer.pop("bias", None)
    return SummedLinear(layer, bias, ranks)


_SUMMED = (ShardedToAllLinear, QuantizedShardedToAllLinear)
_USUAL: dict[type[Any], type[Any]] = {
    AllToShardedLinear: nn.Linear,
    ShardedToAllLinear: nn.Linear,
    QuantizedAllToShardedLinear: nn.QuantizedLinear,
    QuantizedShardedToAllLinear: nn.QuantizedLinear,
}


def _refused(count: int, why: str) -> ModelLoadError:
    return ModelLoadError(f"the model cannot be divided into {count} equal shares: {why}")


def _indivisible(model: Any, count: int) -> str:
    """Returns which number of heads is no multiple of `count`; empty if all are."""
    args = getattr(model, "args", None)
    # Types with pictures keep the language model's settings in a part.
    text = getattr(args, "text_config", None)
    named = {**(vars(args) if hasattr(args, "__dict__") else {}), **(text if isinstance(text, dict) else {})}
    for name in _HEADS:
        heads = named.get(name)
        if isinstance(heads, int) and heads % count:
            return f"its {name} is {heads}"
    return ""


def _in_words(model: Any, error: BaseException) -> str:
    """Returns why mlx-lm cannot cut it. MLX says of a weight only that its parts would be unequal."""
    sizes = sorted({int(module.group_size) for _, module in model.named_modules() if hasattr(module, "group_size")})
    groups = f" or of its quantization groups of {', '.join(map(str, sizes))}" if sizes else ""
    if any(words in str(error) for words in ("equal", "Cannot shard", "group size")):
        return f"a size of its weights{groups} is no multiple of that ({first_sentence(error)})"
    return first_sentence(error)


def _sizes(model: Any) -> dict[str, int]:
    return {name: array.size for name, array in dict(tree_flatten(model.parameters())).items()}


def _cache_shapes(model: Any) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of the KV of two tokens, by cache. Nothing is computed."""
    caches = make_prompt_cache(model)
    model(mx.array([[0, 0]], mx.uint32), cache=caches)
    return [[array.shape for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)] for cache in caches]


def _unequal(whole: dict[str, int], share: dict[str, int], count: int) -> str:
    """Returns which weight is neither whole nor a `count`th; empty if none is. Pure."""
    if whole.keys() != share.keys():
        name = sorted(whole.keys() ^ share.keys())[0]
        return f"{name} is not in both the whole model and a share"
    for name, size in whole.items():
        if share[name] not in (size, size / count):
            return f"{name} would have {share[name]} of {size} numbers"
    divided = count == 1 or any(share[name] < size for name, size in whole.items())
    return "" if divided else "no weight of it is divided"


def _unequal_kv(whole: list[Any], share: list[Any], count: int) -> str:
    """As `_unequal`, for the shapes of every layer's KV, of which one axis is divided, or none."""
    for layer, (before, after) in enumerate(zip(whole, share, strict=True)):
        for one, other in zip(before, after, strict=True):
            changed = [(old, new) for old, new in zip(one, other, strict=True) if old != new]
            if len(changed) > 1 or any(old != new * count for old, new in changed):
                return f"the KV of layer {layer} would be {other} instead of {one}"
    return ""
