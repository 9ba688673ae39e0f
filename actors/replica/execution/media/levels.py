"""Levels: what a picture adds to the hidden states after the language part's first layers, as in DeepStack.

mlx-vlm's models have levels in three forms: one array per level for the masked tokens, the same with a mask, and one
array for all tokens and levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...proving.agreement import MODEL_ERRORS


def levels_of(made: dict[str, Any]) -> list[mx.array]:
    """Returns the arrays that are added after the first layers, each `(masked tokens, dim)`, from the outputs of
    `get_input_embeddings`. Some models keep them with their mask, others in one array for all tokens."""
    levels: Any = made.get("deepstack_visual_embeds")
    if not _is_dense(levels):
        return list(getattr(levels, "embeddings", levels) or ())
    if (mask := made.get("visual_pos_masks")) is None:
        return []
    masked = levels.reshape(-1, *levels.shape[2:])[mx.array(np.flatnonzero(np.array(mask)))]
    return [masked[:, level] for level in range(masked.shape[1])]


def _is_dense(levels: Any) -> bool:
    """Whether levels are one array `(sequences, tokens, levels, dim)`."""
    return isinstance(levels, mx.array) and levels.ndim == 4


def has_dense_levels(model: Any) -> bool:
    """Whether a model of mlx-vlm takes its levels in one array."""
    try:
        return _is_dense(model.get_input_embeddings(mx.array([[0, 0]]), None).deepstack_visual_embeds)
    except MODEL_ERRORS:
        return False


def spread_levels(levels: Sequence[mx.array], seen: np.ndarray) -> mx.array:
    """Returns levels, each `(masked tokens, dim)`, as one array `(sequences, tokens, levels, dim)`, zero for tokens
    outside the mask `(sequences, tokens)`."""
    spread = mx.zeros((seen.size, len(levels), levels[0].shape[-1]), levels[0].dtype)
    spread[mx.array(np.flatnonzero(seen))] = mx.stack([*levels], axis=1)
    return spread.reshape(*seen.shape, *spread.shape[1:])
