"""Tests whether a model computes the same after a change, for tests at load: the model runs, is changed, runs again,
and both results are compared. If they do not agree, the change is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ...patches import NO_CHANGE, Change
from ..device.device import multiplies_exactly

Logits = Sequence[mx.array]

TOLERANCE, TOLERANCE_16 = 1e-4, 3e-2
"""How far logits may differ, relative to their scale, in exact float32 and otherwise: sums may be added in another
order. If a mask or a bias is left out, the difference is much larger."""

MODEL_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError)
"""What models raise if they are called in a way that they do not support."""


def agree(expected: Logits, got: Logits, tolerance: float | None = None) -> bool:
    """Whether all logits are close to those expected. Arrays may have any shape, but both of a pair have the same.

    Args:
        tolerance: relative to their scale; None for that of their dtype.
    """
    if tolerance is None:
        tolerance = TOLERANCE if multiplies_exactly(expected[0].dtype) else TOLERANCE_16
    return all(
        bool(mx.abs(one - other).astype(mx.float32).max() <= tolerance * mx.abs(one).max())
        for one, other in zip(expected, got, strict=True)
    )


def farthest(expected: Logits, got: Logits) -> float:
    """Returns how far logits are from those expected: the largest difference, relative to their scale."""
    return max(
        float(mx.abs(one - other).astype(mx.float32).max() / mx.maximum(mx.abs(one).max(), 1e-30))
        for one, other in zip(expected, got, strict=True)
    )


@dataclass(frozen=True)
class Verdict:
    """The result of a test.

    Attributes:
        reason: why the change is not used; empty if the model computed the same, or raised.
        error: what the model raised, None for nothing. The change need not be the cause: memory may have been short.
    """

    reason: str = ""
    error: Exception | None = None

    @property
    def holds(self) -> bool:
        """Whether the model computes the same."""
        return not self.reason and self.error is None


def unless_equal(reason: str, tolerance: float | None = None) -> Callable[[Logits, Logits], str]:
    """Returns a function that returns this reason for logits that do not `agree`, and an empty one otherwise."""
    return lambda expected, got: "" if agree(expected, got, tolerance) else reason


def try_change(
    before: Callable[[], Logits],
    after: Callable[[], Logits],
    why_not: Callable[[Logits, Logits], str],
    change: Change = NO_CHANGE,
) -> Verdict:
    """Runs a model, changes it, runs it again, and undoes the change if there is a reason to.

    Args:
        before, after: run the model and return its logits. If they already run it in two ways, no change is needed.
        why_not: given both results, returns why the change is undone; empty if it stays.
    """
    try:
        expected = before()
    except MODEL_ERRORS as error:
        return Verdict(error=error)
    change.make()
    verdict = Verdict("it was not compared")
    try:
        verdict = Verdict(why_not(expected, after()))
    except MODEL_ERRORS as error:
        verdict = Verdict(error=error)
    finally:
        if not verdict.holds:
            change.undo()
    return verdict
