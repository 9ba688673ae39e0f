"""Limits the temporary memory of what is launched.

MLX launches ahead of the device, and what is computed in between is kept until the graph that computes it has ended.
Above its memory limit MLX waits for launched graphs before it launches more. So that limit is lowered while a prompt is
launched, to what may be needed besides what there is then. For operations that need more it is only a wish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .device import on_cuda


class TemporaryMemory:
    """What prompts of this process may need besides weights and KV. Used on the engine's thread, like MLX's limit.

    Attributes:
        bytes_max: so many bytes; None: as much as there is.
    """

    bytes_max: int | None = None

    @contextmanager
    def limited(self) -> Iterator[None]:
        """While this is open, what is launched waits for what was launched before, rather than need more."""
        if self.bytes_max is None or not on_cuda():
            yield
            return
        before = mx.set_memory_limit(mx.get_active_memory() + self.bytes_max)
        try:
            yield
        finally:
            mx.set_memory_limit(before)


TEMPORARY = TemporaryMemory()
"""Of this process: MLX's limit is one of the process too."""
