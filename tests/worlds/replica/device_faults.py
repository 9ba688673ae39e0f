"""A device that fails as GPUs do, on a CPU: late, told once, and with other numbers in what was lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from satchel.actors.replica.kv.caches import Record, Slab


def lost(array: mx.array) -> mx.array:
    """What a command buffer that failed leaves of an array: other numbers. Whoever waits next for the device is told,
    nobody else."""
    failed = mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu)[0, 0]
    # Depends on what fails, and is finite all the same.
    other = mx.where(mx.isnan(failed * 0), mx.zeros_like(array), array.astype(array.dtype) * 0)
    return other + array[..., ::-1] if mx.issubdtype(array.dtype, mx.floating) else other


class Fault:
    """Loses what a function computes at its calls number `first` to `last` (from 1 on), of those that `counts`."""

    def __init__(
        self, function: Callable[..., Any], first: int, last: int, counts: Callable[..., bool] = lambda *_, **__: True
    ) -> None:
        self._function, self._first, self._last, self._counts = function, first, last, counts
        self.calls = 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        made = self._function(*given, **named)
        if not self._counts(*given, **named):
            return made
        self.calls += 1
        return _lost(made) if self._first <= self.calls <= self._last else made


def _lost(made: Any) -> Any:
    if isinstance(made, mx.array):
        return lost(made)
    if isinstance(made, Record):
        return replace(made, records=replace(made.records, data=lost(made.data)))
    if isinstance(made, Slab):
        return replace(made, layers=[layer and _lost(layer) for layer in made.layers])
    return type(made)(*map(lost, made)) if hasattr(made, "_fields") else type(made)(map(_lost, made))
