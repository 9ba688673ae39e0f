"""Attention with soft-capped scores, `cap * tanh(score / cap)` as in Gemma 2, in decode steps.

MLX's attention has no such cap, so these models compute theirs with plain products, and never call the function that
`attention.install` rebinds. A decode step that reads blocks in place gets from its cache only the open block, which
such code would take for the whole sequence. So here a layer's step is computed with the layer's own parts and Satchel's
attention. Prompts, and steps that gather blocks, are the model's own code, for some tokens at a time: it needs memory
for all scores of a call.

Source: Gemma Team, "Gemma 2", arXiv 2408.00118, section 2, "Logit soft-capping".
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...patches import recast
from ..device.device import on_gpu
from ..kernels import decode_kernel
from ..kernels.decode_views import KernelView
from .attention import NAME, attend

CAP = "attn_logit_softcapping"
"""The name of the cap, in models' configs and layers."""

SCORES_MOST, SCORES_MOST_GPU = 2**20, 2**26
"""The most scores that a prompt's attention has at once: on a CPU few fit into its caches."""

TOKENS_LEAST = 64
"""The least tokens whose scores are computed at once."""

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


class _Fetched:
    """Stands for a layer's cache if its keys and values are known: (sequences, kv_heads, columns, dim) each."""

    def __init__(self, offset: Any, keys: mx.array, values: mx.array) -> None:
        self.offset, self._both = offset, (keys, values)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._both


class _InPlace(nn.Module):
    """The beginning of such a layer's class."""

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        tokens, own = x.shape[1], super().__call__
        if not hasattr(cache, "reads_in_place"):
            return own(x, mask, cache)
        if cache.reads_in_place(tokens):
            return _step(self, x, cache)
        most = tokens if mask is None else _at_once(len(x) * self.n_heads, mask.shape[-1])
        if mask is None or tokens <= most:
            return own(x, mask, cache)
        offset = cache.offset
        keys, values = _heads(self.k_proj(x), self.n_kv_heads), _heads(self.v_proj(x), self.n_kv_heads)
        both = cache.update_and_fetch(self.rope(keys, offset=offset), values)
        # What this computes of the pieces' own keys and values is used by nobody, so MLX does not compute it.
        outs: list[mx.array] = []
        for at in range(0, tokens, most):
            # One after the other, or all scores would exist at once.
            piece = mx.depends([x[:, at : at + most]], outs[-1:])[0] if outs else x[:, :most]
            outs.append(own(piece, mask[..., at : at + most, :], _Fetched(offset + at, *both)))
        return mx.concatenate(outs, axis=1)


def _step(layer: Any, x: mx.array, cache: Any) -> mx.array:
    """Computes a layer for the next token of each sequence, `(sequences, 1, width)`."""
    queries, keys = _heads(layer.q_proj(x), layer.n_heads), _heads(layer.k_proj(x), layer.n_kv_heads)
    values = _heads(layer.v_proj(x), layer.n_kv_heads)
    queries, keys = layer.rope(queries, offset=cache.offset), layer.rope(keys, offset=cache.offset)
    cache.update_and_fetch(keys, values)
    # Clearing the view shows later that the layer's attention came through here.
    view, cache.view = cache.view, None
    read: Any = decode_kernel.attend if isinstance(view, KernelView) else attend
    out = read(queries, view, cache.policy, layer.scale, cap=getattr(layer, CAP))
    return layer.o_proj(out.transpose(0, 2, 1, 3).reshape(len(x), 1, -1))


def _heads(made: mx.array, heads: int) -> mx.array:
    """Returns `(sequences, tokens, heads * dim)` as `(sequences, heads, tokens, dim)`."""
    return made.reshape(*made.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _at_once(heads: int, columns: int) -> int:
    """Returns of how many tokens a prompt's scores are computed at once, of all `heads` of all sequences: they exist
    several times."""
    return max(TOKENS_LEAST, (SCORES_MOST_GPU if on_gpu() else SCORES_MOST) // (heads * columns))


@cache
def _in_place(kind: type[Any]) -> type[Any]:
    # Its code is where other changes of this model's code look for names.
    return type(kind.__name__, (_InPlace, kind), {"__module__": kind.__module__})
