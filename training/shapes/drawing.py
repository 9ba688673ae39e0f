"""Scenes as pictures, with Pillow, and as the bytes of a file."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from .palette import Rgb
from .scenes import Film, Look, Scene, Thing

Point = tuple[float, float]
FINE = 4  # soft edges are drawn this much larger
RIM = 0.035  # of the size: how thick an outline is


def _star(slimness: float) -> list[Point]:
    inner = 0.34 + 0.16 * slimness
    corners = [(1.0 if index % 2 == 0 else inner, math.pi * index / 5) for index in range(10)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for radius, angle in corners]


def _triangle(slimness: float) -> list[Point]:
    if slimness < 0.6:  # equal sides
        return [(0.0, -1.0), (math.sqrt(3) / 2, 0.5), (-math.sqrt(3) / 2, 0.5)]
    if slimness < 0.75:  # a right angle
        return [(-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    half = 0.65 + 2.4 * (slimness - 0.75)
    return [(0.0, -1.0), (half, 1.0), (-half, 1.0)]


def outline_of(thing: Thing) -> list[Point]:
    """Corners of a thing in a box of 1 around (0, 0), turned; a circle's are the corners of its box."""
    if thing.shape in ("circle", "square"):
        corners = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    else:
        corners = _star(thing.slimness) if thing.shape == "star" else _triangle(thing.slimness)
    if thing.shape != "circle" and thing.turn:
        sine, cosine = math.sin(math.radians(thing.turn)), math.cos(math.radians(thing.turn))
        corners = [(x * cosine - y * sine, x * sine + y * cosine) for x, y in corners]
    corners = [(x * thing.stretch, y) for x, y in corners]
    left, right = min(x for x, _ in corners), max(x for x, _ in corners)
    top, bottom = min(y for _, y in corners), max(y for _, y in corners)
    longer = max(right - left, bottom - top)
    return [((x - (left + right) / 2) / longer, (y - (top + bottom) / 2) / longer) for x, y in corners]


def _draw(draw: ImageDraw.ImageDraw, thing: Thing, middle: Point, scale: float, fill: Rgb | int) -> None:
    corners = [(middle[0] + x * scale, middle[1] + y * scale) for x, y in outline_of(thing)]
    if thing.shape == "circle":
        draw.ellipse([corners[0], corners[2]], fill=fill)
    elif thing.shape == "square" and not thing.turn:
        draw.rectangle([corners[0], corners[2]], fill=fill)
    else:
        draw.polygon(corners, fill=fill)


def _paste_soft(picture: Image.Image, thing: Thing, middle: Point, scale: float, fill: Rgb) -> None:
    """Draws one thing with smooth edges."""
    left, top = int(middle[0] - scale / 2) - 1, int(middle[1] - scale / 2) - 1
    side = int(scale) + 4
    fine = Image.new("L", (side * FINE, side * FINE))
    shifted = ((middle[0] - left) * FINE, (middle[1] - top) * FINE)
    _draw(ImageDraw.Draw(fine), thing, shifted, scale * FINE, 255)
    picture.paste(fill, (left, top), fine.reduce(FINE))


def _ground(look: Look, size: tuple[int, int]) -> Image.Image:
    picture = Image.new("RGB", size, look.ground)
    if look.fade is not None:
        slope = Image.linear_gradient("L").rotate(look.fade_turn).resize(size)
        picture = Image.composite(Image.new("RGB", size, look.fade), picture, slope)
    return picture


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB picture, before it is stored."""
    look = scene.look
    picture = _ground(look, (scene.width, scene.height))
    pen = ImageDraw.Draw(picture)
    for thing in scene.things:
        middle = (thing.x * scene.width, thing.y * scene.height)
        layers = [(thing.size, thing.rgb)]
        if thing.rim is not None:
            layers = [(thing.size, thing.rim), (thing.size * (1 - 2 * RIM), thing.rgb)]
        for scale, fill in layers:
            if look.soft:
                _paste_soft(picture, thing, middle, scale, fill)
            else:
                _draw(pen, thing, middle, scale, fill)
    if look.noise:
        shape = (scene.height, scene.width, 3 if look.seed % 2 else 1)
        grain = np.random.default_rng(look.seed).standard_normal(shape, np.float32) * look.noise
        picture = Image.fromarray((np.asarray(picture) + grain).clip(0, 255).astype(np.uint8))
    return picture.filter(ImageFilter.GaussianBlur(look.blur)) if look.blur else picture


def encode(picture: Image.Image, kind: str, quality: int) -> bytes:
    """The bytes of a file: `png`, `jpeg` or `webp`."""
    file = io.BytesIO()
    picture.save(file, kind, quality=quality, method=2)
    return file.getvalue()


def decode(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def shown(scene: Scene) -> Image.Image:
    """The scene as whoever opens its file sees it."""
    picture = draw(scene)
    if scene.look.kind == "png":
        return picture  # nothing is lost
    return decode(encode(picture, scene.look.kind, scene.look.quality))


def frames_of(film: Film) -> list[Image.Image]:
    """A film's frames in order."""
    return [shown(scene) for scene in film.frames()]


def patches_of(picture: Image.Image, height: int, width: int, patch: int, merge: int) -> np.ndarray:
    """A picture resized and cut as mlx-vlm's processor does: bytes (patches, 3, patch, patch), merged ones together."""
    if picture.size != (width, height):
        picture = picture.resize((width, height), resample=Image.Resampling.BICUBIC)
    rows, columns = height // patch // merge, width // patch // merge
    cut = np.asarray(picture).reshape(rows, merge, patch, columns, merge, patch, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
