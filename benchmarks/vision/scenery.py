"""Pictures, videos and conversations about them: what the embedded vision model knows to answer."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageDraw

TALK = (
    ("What is in the picture?", "A red circle."),
    ("What colour is the circle?", "Red."),
    ("Where is the red circle?", "In the middle."),
)
"""A conversation's questions and the right answers, each turn after the others."""
OTHER = ("How many objects are there?", "One.")
"""Another conversation's."""
FILM_FPS = 2
FILM = ("How does the red circle move?", "To the right.")

_GROUND, _RED = (250, 250, 250), (220, 30, 30)
_numbers: Iterator[int] = count(1)


def fresh_number() -> int:
    """For a picture or a video that nobody has seen."""
    return next(_numbers)


def circle(side: int, number: int, across: float = 0.5) -> Image.Image:
    """A red circle, its middle at `across` of the width. Another number is another picture, by a corner's colour."""
    image = Image.new("RGB", (side, side), _GROUND)
    middle, radius = across * side, 0.17 * side
    ImageDraw.Draw(image).ellipse((middle - radius, side / 2 - radius, middle + radius, side / 2 + radius), fill=_RED)
    image.putpixel((0, 0), (200 + number % 50, 200 + number // 50 % 50, 200 + number // 2500 % 50))
    return image


def url_of(image: Image.Image) -> str:
    written = BytesIO()
    image.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def picture(side: int, number: int | None = None) -> dict[str, Any]:
    """A message's part; without a number nobody has seen it."""
    image = circle(side, fresh_number() if number is None else number)
    return {"type": "image_url", "image_url": {"url": url_of(image)}}


def film(side: int, frames: int, number: int, first: int = 0) -> dict[str, Any]:
    """A message's part: consecutive frames of a circle that goes to the right, from frame `first` of video `number`
    on; those that two clips of one video share are equal."""
    return {
        "type": "video",
        "video": [url_of(frame) for frame in film_frames(side, frames, number, first)],
        "fps": FILM_FPS,
    }


def film_frames(side: int, frames: int, number: int, first: int = 0) -> list[Image.Image]:
    """The frames of `film`."""
    return [circle(side, number, 0.2 + 0.6 * (first + at) / (2 * frames)) for at in range(frames)]


def film_file(side: int, frames: int, number: int) -> dict[str, Any]:
    """As `film`, but as a file of MP4, which all servers take. Its frames have a block of a colour by the number, which
    compression keeps apart."""
    colour = (37 * number % 256, 91 * number % 256, 151 * number % 256)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FILM_FPS, (side, side))
        for frame in film_frames(side, frames, number):
            ImageDraw.Draw(frame).rectangle((0, 0, side // 8, side // 8), fill=colour)
            writer.write(np.asarray(frame)[:, :, ::-1])
        writer.release()
        written = base64.b64encode(path.read_bytes()).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{written}"}}


def asked(part: dict[str, Any], questions: Sequence[str], answers: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a turn: the part with the first question, and every earlier answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [part, {"type": "text", "text": questions[0]}]}]
    for answer, question in zip(answers, questions[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return messages
