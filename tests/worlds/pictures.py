"""Pictures that the small vision model knows."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageDraw


def red_circle() -> bytes:
    """A red circle on white, as PNG."""
    picture, written = Image.new("RGB", (96, 96), "white"), BytesIO()
    ImageDraw.Draw(picture).ellipse((30, 30, 70, 70), fill="red")
    picture.save(written, "PNG")
    return written.getvalue()
