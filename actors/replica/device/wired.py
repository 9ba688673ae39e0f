"""Memory that macOS does not page out.

Between two turns macOS pages out what the GPU has not used for seconds. A large model then reads its weights again at
the next token. MLX keeps as much resident as its wired limit says, which is 0 unless somebody sets it (macOS 15 and
later; `mx.set_wired_limit`).
"""

from __future__ import annotations

import logging

import mlx.core as mx

from .device import device_kind

RESERVE_PART, RESERVE_BYTES = 1 / 32, 2**29
"""What stays unwired of the recommended working set, at the least: for other programs' windows, and MLX's buffers."""

STEP_BYTES = 2**26
"""A limit that would change by less stays as it is."""

logger = logging.getLogger(__name__)


def wired_bytes(held: int, recommended: int) -> int:
    """Returns how much a replica keeps resident.

    Args:
        held: its weights, and the most that its KV may take, in bytes.
        recommended: the GPU's recommended working set, in bytes. A larger wired limit is an error.
    """
    return max(0, min(held, recommended - max(RESERVE_BYTES, int(recommended * RESERVE_PART))))


class Wired:
    """The wired limit of this process. Does nothing on other devices than Metal's. For one thread at a time."""

    def __init__(self) -> None:
        self._bytes = 0
        self._refused = device_kind() != "metal"

    @property
    def bytes(self) -> int:
        """What MLX may keep resident now."""
        return self._bytes

    def keep(self, held: int) -> None:
        """Lets MLX keep `held` bytes resident, as far as the system allows."""
        if self._refused:
            return
        wanted = wired_bytes(held, int(mx.device_info().get("max_recommended_working_set_size", 0)))
        if abs(wanted - self._bytes) < STEP_BYTES:
            return
        try:
            mx.set_wired_limit(wanted)
        except (RuntimeError, ValueError) as error:
            # macOS 14 has no residency sets.
            self._refused = True
            logger.warning("macOS may page the model out between turns: %s", error)
            return
        self._bytes = wanted
