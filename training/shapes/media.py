"""Pictures and videos as the model is given them: the arithmetic of mlx-vlm's Qwen3-VL processor, without it.

The machine that trains has no MLX. `tests/training/test_shapes.py` holds both against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .drawing import frames_of, patches_of, shown
from .layout import FACTOR, FRAMES, MERGE, PATCH, PICTURE_PIXELS, VIDEO_PIXELS
from .scenes import Film, Scene

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class PatchedMedium:
    """A picture or video in patches.

    Attributes:
        kind: `image` or `video`.
        patches: bytes (frames, patches of a frame, 3, 16, 16); a picture has one frame.
        grid: rows and columns of a frame's patches.
        seconds: the middle of each pair of frames; empty for a picture.
    """

    kind: str
    patches: Array
    grid: tuple[int, int]
    seconds: list[float]

    @property
    def tokens(self) -> int:
        """Tokens of a picture, or of one pair of frames."""
        return self.grid[0] * self.grid[1] // MERGE**2

    def text(self) -> str:
        """What stands for it in the prompt."""
        pad = f"<|vision_start|>{f'<|{self.kind}_pad|>' * self.tokens}<|vision_end|>"
        return "".join(f"<{second:.1f} seconds>{pad}" for second in self.seconds) if self.seconds else pad


def resized(frames: int, height: int, width: int, pixels: tuple[int, int]) -> tuple[int, int]:
    """Height and width after resizing: multiples of 32, about the same shape, within the limits of pixels."""
    least, most = pixels
    new_height, new_width = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    even = frames if frames == 1 else math.ceil(frames / FRAMES) * FRAMES
    if even * new_height * new_width > most:
        shrink = math.sqrt(frames * height * width / most)
        new_height = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        new_width = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif even * new_height * new_width < least:
        grow = math.sqrt(least / (frames * height * width))
        new_height = math.ceil(height * grow / FACTOR) * FACTOR
        new_width = math.ceil(width * grow / FACTOR) * FACTOR
    return new_height, new_width


def prepare(medium: Scene | Film) -> PatchedMedium:
    """Draws it and cuts it into patches; the last frame of an odd number stands twice."""
    if isinstance(medium, Scene):
        kind, frames, seconds, pixels = "image", [shown(medium)], [], PICTURE_PIXELS
    else:
        kind, frames, pixels = "video", frames_of(medium), VIDEO_PIXELS
        times = medium.times + medium.times[-1:] * (-len(medium.times) % FRAMES)
        seconds = [(first + last) / 2 for first, last in zip(times[::2], times[1::2], strict=True)]
    width, height = frames[0].size
    height, width = resized(len(frames), height, width, pixels)
    cut = [patches_of(frame, height, width, PATCH, MERGE) for frame in frames]
    if kind == "video" and len(cut) % FRAMES:
        cut.append(cut[-1])
    return PatchedMedium(kind, np.stack(cut), (height // PATCH, width // PATCH), seconds)
