"""Colours of shapes and of the grounds they lie on, as (red, green, blue) from 0 to 255.

Between the shades of two colours there is a gap that no picture uses, so that every shade has one right name.
"""

from __future__ import annotations

import colorsys
import random
from dataclasses import dataclass

from PIL import ImageColor

Rgb = tuple[int, int, int]
WHITE: Rgb = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class Shades:
    """All shades with one name: ranges of hue in degrees, saturation and value, and what else has the name."""

    hue: tuple[float, float]
    saturation: tuple[float, float]
    value: tuple[float, float]
    named: tuple[str, ...]


SHADES = {
    "red": Shades((347, 366), (0.65, 1), (0.5, 1), ("red", "red", "red", "darkred", "firebrick", "crimson")),
    "orange": Shades((23, 41), (0.75, 1), (0.85, 1), ("orange", "orange", "orange", "darkorange")),
    "yellow": Shades((51, 64), (0.6, 1), (0.82, 1), ("yellow", "yellow", "yellow", "gold")),
    "green": Shades((90, 155), (0.45, 1), (0.35, 1), ("green", "green", "lime", "forestgreen", "darkgreen")),
    "blue": Shades((200, 248), (0.48, 1), (0.42, 1), ("blue", "blue", "blue", "navy", "royalblue", "dodgerblue")),
    "black": Shades((0, 360), (0, 0.5), (0, 0.13), ("black", "black", "black", "#111111", "#1c1c1c")),
}
COLOURS = tuple(SHADES)


def _rgb(hue: float, saturation: float, value: float) -> Rgb:
    red, green, blue = colorsys.hsv_to_rgb((hue % 360) / 360, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def any_shade(rng: random.Random, colour: str) -> Rgb:
    """A shade with the name `colour`; two in five are one of Pillow's own colours."""
    shades = SHADES[colour]
    if rng.random() < 0.4:
        red, green, blue = ImageColor.getrgb(rng.choice(shades.named))[:3]
        return red, green, blue
    return _rgb(rng.uniform(*shades.hue), rng.uniform(*shades.saturation), rng.uniform(*shades.value))


def any_ground(rng: random.Random) -> Rgb:
    """A light colour: white, grey, cream or pastel."""
    kind = rng.random()
    if kind < 0.4:
        return WHITE
    if kind < 0.6:
        grey = rng.randint(205, 255)
        return grey, grey, grey
    if kind < 0.75:
        return _rgb(rng.uniform(30, 60), rng.uniform(0.02, 0.19), rng.uniform(0.94, 1))
    return _rgb(rng.uniform(0, 360), rng.uniform(0.02, 0.19), rng.uniform(0.86, 1))
