"""OpenAI's images on the way out: files in base64, the answer, and the events of a stream."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from PIL import Image

from ....actors.protocol.replica_messages import ImageUpdate, Pixels
from ...http.event_stream import comment
from ...pipeline.images import ImageUsage, MadeImages


def encoded_image(pixels: Pixels, kind: str, quality: int) -> str:
    """Returns an image as a file in base64. Takes a moment: for a worker thread.

    Args:
        kind: `png`, `jpeg` or `webp`.
        quality: of JPEG and WebP, in percent.
    """
    mode = "RGBA" if pixels.channels == 4 else "RGB"
    image = Image.frombytes(mode, (pixels.width, pixels.height), pixels.data)
    if kind == "jpeg" and mode == "RGBA":
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, kind, **({} if kind == "png" else {"quality": quality}))
    return base64.b64encode(file.getvalue()).decode("ascii")


def images_body(made: MadeImages, kind: str, quality: int) -> bytes:
    """Returns the answer, as JSON. `seed` of each image is an extension. Takes a moment, as `encoded_image`."""
    first = made.images[0].pixels
    data = [{"b64_json": encoded_image(each.pixels, kind, quality), "seed": each.seed} for each in made.images]
    body = {
        "created": int(time.time()),
        "background": _background(first),
        "data": data,
        "output_format": kind,
        "size": f"{first.width}x{first.height}",
        "usage": _usage(made.usage),
        "model": made.model.info.name,
    }
    return json.dumps(body).encode("ascii")


def _background(pixels: Pixels) -> str:
    return "transparent" if pixels.channels == 4 else "opaque"


def _usage(usage: ImageUsage) -> dict[str, Any]:
    given = usage.text + usage.given
    return {
        "input_tokens": given,
        "input_tokens_details": {"text_tokens": usage.text, "image_tokens": usage.given},
        "output_tokens": usage.made,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": usage.made},
        "total_tokens": given + usage.made,
    }


class ImageEvents:
    """The server-sent events of one image. Between partial images a comment says how far it is; clients ignore it.

    Args:
        task: `image_generation` or `image_edit`, with which the events' names begin.
        kind, quality: as for `encoded_image`.
    """

    def __init__(self, task: str, kind: str, quality: int) -> None:
        self._task, self._kind, self._quality = task, kind, quality

    async def encoded(self, updates: AsyncGenerator[ImageUpdate | MadeImages, None]) -> AsyncGenerator[bytes, None]:
        """Yields whole events."""
        shown = 0
        async with aclosing(updates):
            async for update in updates:
                if isinstance(update, MadeImages):
                    yield await self._completed(update)
                    continue
                if not update.partial:
                    yield comment(f"step {update.step} of {update.steps}")
                for pixels in update.partial:
                    yield await self._event("partial_image", pixels, {"partial_image_index": shown})
                    shown += 1

    async def _completed(self, made: MadeImages) -> bytes:
        (image,) = made.images
        return await self._event("completed", image.pixels, {"usage": _usage(made.usage), "seed": image.seed})

    async def _event(self, name: str, pixels: Pixels, more: dict[str, Any]) -> bytes:
        kind = f"{self._task}.{name}"
        body = {
            "type": kind,
            "b64_json": await asyncio.to_thread(encoded_image, pixels, self._kind, self._quality),
            "created_at": int(time.time()),
            "size": f"{pixels.width}x{pixels.height}",
            "quality": "auto",
            "background": _background(pixels),
            "output_format": self._kind,
            **more,
        }
        return b"event: " + kind.encode("ascii") + b"\ndata: " + json.dumps(body).encode("ascii") + b"\n\n"
