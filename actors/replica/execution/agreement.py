"""Whether a model computes the same in another way, as a trial at load asks: it runs, is changed, runs again, and both
are compared. What does not agree is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ...patches import NO_CHANGE, Change
from ..device.device import multiplies_exactly

Logits = Sequence[mx.array]

TOLERANCE, TOLERANCE_16 = 1e-4, 3e-2
"""How far logits may differ, of their scale, in exact float32 and else: sums may be added in another order. A mask or a
bias that is left out shows as much more."""

MODEL_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError)
"""What models raise if they are called in a way that they are not made for."""


def agree(expected: Logits, got: Logits, tolerance: float | None = None) -> bool:
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


@dataclass(frozen=True)
class Verdict:
    """What a trial showed.

    Attributes:
        reason: why what was tried is not used; empty if it computed the same, or raised.
        error: what the model raised, None for nothing. It may be another one's business: memory may have been short.
    """

    reason: str = ""
    error: Exception | None = None

    @property
    def holds(self) -> bool:
        """Whether the model computes the same."""
        return not self.reason and self.error is None


def unless_equal(reason: str, tolerance: float | None = None) -> Callable[[Logits, Logits], str]:
    """Returns what gives this reason for logits that do not `agree`, and none for those that do."""
    return lambda expected, got: "" if agree(expected, got, tolerance) else reason


def try_change(
    before: Callable[[], Logits],
    after: Callable[[], Logits],
    why_not: Callable[[Logits, Logits], str],
    change: Change = NO_CHANGE,
) -> Verdict:
    """Runs a model, changes it, runs it again, and undoes the change unless there is no reason to.

    Args:
        before, after: return what it computes. If they run it in two ways, there is nothing to change.
        why_not: given what both returned, says why the change is undone; empty if it stays.
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
