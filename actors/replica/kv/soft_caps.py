"""Attention with soft-capped scores, `cap * tanh(score / cap)` as in Gemma 2, in decode steps.

MLX's attention has no such cap, so these models compute theirs with plain products, and never call the function that
`attention.install` rebinds. A decode step that reads blocks in place gets from its cache only the open block, which
such code would take for the whole sequence. So here a layer's step is computed with the layer's own parts and Satchel's
attention. Prompts, and steps that gather blocks, are the model's own code.

Source: Gemma Team, "Gemma 2", arXiv 2408.00118, section 2, "Logit soft-capping".
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from ..kernels import decode_kernel
from ..kernels.decode_views import KernelView
from .attention import NAME, attend

CAP = "attn_logit_softcapping"
"""The name of the cap, in models' configs and layers."""

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "rope", "n_heads", "n_kv_heads", "scale")


def install(model: Any) -> bool:
    """Lets the model's layers with soft-capped scores attend to blocks in the pool, if their caches say so.

    Returns:
        Whether there are any. Whether they are computed rightly is found out by a test, as for any model.
    """
    layers = [layer for _, layer in model.named_modules() if _is_capped(layer)]
    for layer in layers:
        if not isinstance(layer, _InPlace):
            recast(layer, _in_place(type(layer)))
    return bool(layers)


def _is_capped(layer: Any) -> bool:
    """Whether a layer computes attention with capped scores itself. Code that also calls MLX's attention, as
    PaliGemma's for both Gemmas, may have a cap that it does not use."""
    own = not hasattr(sys.modules[type(layer).__module__], NAME)
    return own and bool(getattr(layer, CAP, None)) and all(hasattr(layer, name) for name in _PARTS)


class _InPlace(nn.Module):
    """The beginning of such a layer's class."""

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not (hasattr(cache, "reads_in_place") and cache.reads_in_place(x.shape[1])):
            return super().__call__(x, mask, cache)
        sequences = x.shape[0]
        queries, keys, values = (
            made.reshape(sequences, 1, heads, -1).transpose(0, 2, 1, 3)
            for made, heads in (
                (self.q_proj(x), self.n_heads),
                (self.k_proj(x), self.n_kv_heads),
                (self.v_proj(x), self.n_kv_heads),
            )
        )
        queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
        cache.update_and_fetch(keys, values)
        # Clearing the view shows later that the layer's attention came through here.
        view, cache.view = cache.view, None
        read: Any = decode_kernel.attend if isinstance(view, KernelView) else attend
        out = read(queries, view, cache.policy, self.scale, cap=getattr(self, CAP))
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(sequences, 1, -1))


@cache
def _in_place(kind: type[Any]) -> type[Any]:
    # Its code is where other changes of this model's code look for names.
    return type(kind.__name__, (_InPlace, kind), {"__module__": kind.__module__})
