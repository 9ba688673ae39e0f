"""Whether a model computes the same in another way, as a trial at load asks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..kv.device import multiplies_exactly

TOLERANCE, TOLERANCE_16 = 1e-4, 3e-2
"""How far logits may differ, of their scale, in exact float32 and else: sums may be added in another order. A mask or a
bias that is left out shows as much more."""

MODEL_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError)
"""What models raise if they are called in a way that they are not made for."""


def agree(expected: Sequence[mx.array], got: Sequence[mx.array], tolerance: float | None = None) -> bool:
    """Whether all logits are close to those expected; both may have any shape, the same for a pair.

    Args:
        tolerance: of their scale; None for that of their dtype.
    """
    if tolerance is None:
        tolerance = TOLERANCE if multiplies_exactly(expected[0].dtype) else TOLERANCE_16
    return all(
        bool(mx.abs(one - other).astype(mx.float32).max() <= tolerance * mx.abs(one).max())
        for one, other in zip(expected, got, strict=True)
    )
