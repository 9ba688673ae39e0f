"""Decodes picture files to RGB pixels, with Pillow. Blocking: for worker threads.

The size is checked before a pixel is decoded, and every failure is an `Undecodable`.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

from ...actors.protocol.media_ids import picture_hash
from .sources import Picture, PictureSource

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
# Pillow's warnings quote the file, so callers could write into the log.
warnings.filterwarnings("ignore", module=r"PIL\.")

_LOW_SIDE = 512
_SIDES_MAX = 200
"""The largest aspect ratio: some processors enlarge the shorter side to a full size."""
_SCANNED_PIXELS_MAX = 2 * 10**9
# The marker and length of a JPEG scan, which depends on its number of components.
_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
_TILE_WIDTH, _TILE_LENGTH = 322, 323
_PNG_DEPTH_OFFSET = 24
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transformations by EXIF orientation."""


class Undecodable(Exception):
    """A file that is refused. Its message continues after the file's position: "is no picture ..."."""


class UnknownFormat(Undecodable):
    pass


@dataclass(frozen=True)
class Shown:
    """The limits of a shown picture: within a square of `side`, and if possible between two numbers of pixels."""

    side: int | None = None
    pixels_min: int | None = None
    pixels_max: int | None = None

    @classmethod
    def of(cls, source: PictureSource) -> Shown:
        return cls(_LOW_SIDE if source.detail == "low" else None, source.pixels_min, source.pixels_max)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the shown (width, height) of a picture. Keeps the aspect ratio; no side is less than 1."""
        scale = 1.0
        if self.side is not None:
            scale = min(scale, self.side / max(width, height))
        if self.pixels_max is not None:
            scale = min(scale, math.sqrt(self.pixels_max / (width * height)))
        if self.pixels_min is not None and scale == 1.0:
            scale = max(scale, math.sqrt(self.pixels_min / (width * height)))
        if scale == 1.0:
            return width, height
        # Up if a picture grows, down if it shrinks, so that rounding crosses no limit.
        rounded = math.ceil if scale > 1.0 else math.floor
        shorter = max(1, rounded(min(width, height) * scale))
        longer = max(1, rounded(max(width, height) * scale))
        if self.pixels_max is not None:
            longer = max(1, min(longer, self.pixels_max // shorter))
        if self.side is not None:
            longer = min(longer, self.side)
            shorter = min(shorter, longer)
        return (longer, shorter) if width >= height else (shorter, longer)


def measure(data: bytes, shown: Shown, pixels_max: int) -> int:
    """Returns how many pixels decoding this file takes: its own, or those that it is enlarged to.

    Raises:
        Undecodable: it is not a picture, or takes more than `pixels_max`.
    """
    with opened(data, pixels_max) as image:
        width, height = shown.size(*image.size)
        if width * height > pixels_max:
            raise Undecodable(f"is to be enlarged to {width} x {height} pixels: {_too_large(pixels_max)}")
        return max(image.width * image.height, width * height)


def decode(data: bytes, shown: Shown, pixels_max: int) -> Picture:
    """Returns the first picture in a file: upright, on a white background, in its shown size.

    Raises:
        Undecodable: it is not a picture, has more than `pixels_max` pixels, or is damaged.
    """
    with opened(data, pixels_max) as image:
        scans = sum(1 for _ in _SCAN.finditer(data)) if image.format in ("JPEG", "MPO") else 1
        if scans * image.width * image.height > _SCANNED_PIXELS_MAX:
            raise Undecodable(f"is a JPEG of {scans} scans, too many for its size")
        depth = data[_PNG_DEPTH_OFFSET] if image.format == "PNG" else 8
        return as_picture(rgb(image, depth), shown)


@contextmanager
def opened(data: bytes, pixels_max: int) -> Iterator[Image.Image]:
    """Reads and checks the file's header. Pillow's errors in the `with` block become `Undecodable` too.

    Raises:
        Undecodable: it is not a picture, is too large or is damaged.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            check_size(*image.size, pixels_max)
            if image.format == "TIFF":
                _check_tiles(image, pixels_max)
            yield image
    except (Undecodable, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise UnknownFormat("is no picture that can be read; known are PNG, JPEG, WebP, BMP, TIFF and GIF") from None
    except Image.DecompressionBombError:
        raise Undecodable(f"has {_too_large(pixels_max)}") from None
    except Exception as error:
        # Pillow raises nearly anything for a damaged file: OSError, SyntaxError, ValueError, struct.error ...
        raise Undecodable("is damaged or cut off") from error


def check_size(width: int, height: int, pixels_max: int) -> None:
    """Checks a picture's size.

    Raises:
        Undecodable: it has more than `pixels_max` pixels, or none, or one side is far longer than the other.
    """
    _check_pixels(width, height, pixels_max)
    if max(width, height) > _SIDES_MAX * min(width, height):
        raise Undecodable(f"has {width} x {height} pixels: one side is more than {_SIDES_MAX} times the other")


def _check_pixels(width: int, height: int, pixels_max: int) -> None:
    if width <= 0 or height <= 0:
        raise Undecodable("is damaged or cut off")
    if width * height > pixels_max:
        raise Undecodable(f"has {width} x {height} pixels: {_too_large(pixels_max)}")


def _too_large(pixels_max: int) -> str:
    return f"more than {pixels_max} pixels (media.pixels_max)"


def _check_tiles(image: Image.Image, pixels_max: int) -> None:
    """Checks the size of a TIFF's tiles, which may be larger than the picture and are decoded whole."""
    tags = image.tag_v2  # pyright: ignore[reportAttributeAccessIssue]
    _check_pixels(tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1), pixels_max)


def rgb(image: Image.Image, depth: int = 8) -> Image.Image:
    """Returns an opened image as RGB, upright, with transparent parts on white.

    Args:
        depth: bits per sample if the file is a PNG.

    Raises:
        Undecodable: it has samples of 32 bits.
    """
    image = _upright(image)
    transparent = _transparent(image, depth)
    if image.mode.startswith("I;16"):
        return _from_16_bits(image, transparent).convert("RGB")
    if image.mode in ("I", "F"):
        raise Undecodable("has samples of 32 bits; 8 and 16 are possible")
    if transparent is None and not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if transparent is not None:
        image.info["transparency"] = transparent
    opaque = Image.new("RGB", image.size, (255, 255, 255))
    colours = image if image.mode == "RGBA" else image.convert("RGBA")
    opaque.paste(colours, mask=colours)
    return opaque


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        # Cameras and editors write all kinds of metadata. Unreadable metadata is ignored.
        turn = None
    return image if turn is None else image.transpose(turn)


def _transparent(image: Image.Image, depth: int) -> int | bytes | tuple[int, ...] | None:
    """Returns the transparent colour or palette entries, in the range of the decoded pixels.

    Pillow scales samples of 2 and 4 bits to 8, and cuts colours of 16 bits to 8, but does not convert this value.
    """
    given = image.info.get("transparency")
    if image.mode == "L" and depth < 8 and isinstance(given, int):
        return given * 255 // (2**depth - 1)
    if image.mode == "RGB" and depth == 16 and isinstance(given, tuple):
        return tuple(value >> 8 for value in given)
    return given


def _from_16_bits(image: Image.Image, transparent: int | bytes | tuple[int, ...] | None) -> Image.Image:
    """Converts 16-bit grey, `(height, width) uint16`, to 8 bits by its upper byte, as Pillow does for colours."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def as_picture(image: Image.Image, shown: Shown, seconds: float = 0.0) -> Picture:
    """Returns an RGB image in its shown size."""
    size = shown.size(*image.size)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    pixels = image.tobytes()
    return Picture(*size, pixels, picture_hash(*size, pixels), seconds)
