"""The peak of MLX's memory while an engine runs a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from .protocol import Trace


def with_peak(run: Callable[[Any], Trace]) -> Callable[[Any], Trace]:
    """Returns `run`, whose traces have `peak_bytes`."""

    def measured(command: Any) -> Trace:
        mx.reset_peak_memory()
        trace = run(command)
        return replace(trace, peak_bytes=mx.get_peak_memory())

    return measured
