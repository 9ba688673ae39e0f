"""OpenAI's images on the way in: the body of generations, and the fields of edits, which come as a form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ....actors.protocol.replica_messages import IMAGE_STEPS_MAX
from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest, quoted
from ...http.forms import value_of
from ...pipeline.images import SEEDS, ImagesRequest
from ...requests.options import WHOLE, Priority, TimeoutS, invalid, make_options
from ...requests.request_body import RequestBody
from .unsupported import refuse_unsupported

IMAGES_MAX = 10
"""The most images that one request asks for, as in OpenAI's API."""

GIVEN_MAX = 16
"""The most images that one request edits, as in OpenAI's API."""

PROMPT_CHARACTERS_MAX = 32_000
GUIDANCE_MAX = 100.0
PARTIAL_IMAGES_MAX = 3

_SIZE = re.compile(r"([1-9][0-9]{0,5})[xX×]([1-9][0-9]{0,5})")
_NO_MASK = "no model that is served here takes a mask"

_UNDONE = MappingProxyType(
    {
        "style": (),
        "background": ("auto", "opaque"),
        "quality": ("auto", "standard"),
        "moderation": ("auto", "low"),
        "input_fidelity": (),
        "complexity": (),
        "frame_count": (),
        "frame_duration_ms": (),
        "svg": (),
        "mask": (),
        "markup": (),
    }
)
"""OpenAI's fields that are not supported, with the values that change nothing."""

Count = Annotated[int, Field(ge=1, le=IMAGES_MAX), WHOLE]
Seed = Annotated[int, Field(ge=0, lt=SEEDS), WHOLE]
Steps = Annotated[int, Field(ge=1, le=IMAGE_STEPS_MAX), WHOLE]
Guidance = Annotated[float, Field(ge=0.0, le=GUIDANCE_MAX, allow_inf_nan=False)]


class ImageBody(RequestBody):
    """The body of `/v1/images/generations`. `null` means the default."""

    prompt: Annotated[str, Field(min_length=1, max_length=PROMPT_CHARACTERS_MAX)]
    model: str | None = None
    n: Count | None = None
    size: str | None = None
    seed: Seed | None = None
    steps: Steps | None = None
    guidance: Guidance | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100), WHOLE] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=PARTIAL_IMAGES_MAX), WHOLE] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None

    tolerated = frozenset(_UNDONE)

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        refuse_unsupported(fields, _UNDONE)

    def check(self) -> None:
        if not self.prompt.strip():
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        if self.response_format == "url":
            message = "response_format: only b64_json is possible; images are not stored, so they have no URL"
            raise InvalidRequest(message, param="response_format")
        if self.output_compression not in (None, 100) and self.output_format not in ("jpeg", "webp"):
            message = "output_compression: only possible with output_format jpeg or webp; png loses nothing"
            raise InvalidRequest(message, param="output_compression")
        if self.partial_images and not self.stream:
            raise InvalidRequest("partial_images: only possible with stream", param="partial_images")
        if self.stream and (self.n or 1) > 1:
            raise InvalidRequest("n: a stream has one image", param="n")
        _ = self.pixels  # Raises if it is malformed.

    @property
    def pixels(self) -> tuple[int, int] | None:
        """The size in pixels, None for `auto`.

        Raises:
            InvalidRequest: it is no size.
        """
        if self.size in (None, "auto"):
            return None
        found = _SIZE.fullmatch(self.size)
        if found is None:
            raise InvalidRequest(f"size: {quoted(self.size)} is neither auto nor of the form 512x512", param="size")
        return int(found[1]), int(found[2])

    @property
    def form_of_output(self) -> tuple[str, int]:
        """The images' format, and the quality of one that loses something, in percent."""
        return self.output_format or "png", 100 if self.output_compression is None else self.output_compression

    def request(self, files: list[tuple[str, bytes]]) -> ImagesRequest:
        """Returns the request.

        Args:
            files: the images that are edited, with the names of their fields.
        """
        return ImagesRequest(
            model=self.model or "",
            prompt=self.prompt,
            choices=self.n or 1,
            size=self.pixels,
            seed=self.seed,
            steps=self.steps,
            guidance=self.guidance,
            partial_images=self.partial_images or 0,
            files=files,
            options=make_options(priority=self.priority, timeout_s=self.timeout_s),
        )


_NUMBERS = ("n", "seed", "steps", "output_compression", "partial_images", "priority")
_KINDS = MappingProxyType({**dict.fromkeys(_NUMBERS, int), "guidance": float, "timeout_s": float, "stream": bool})
IMAGE_FIELDS = ("image", "image[]")


def edit_body(fields: Mapping[str, str], limits: Endpoint) -> ImageBody:
    """Returns the body that the texts of a form say, whose fields are those of `ImageBody`.

    Raises:
        InvalidRequest: as for a JSON body.
    """
    given: dict[str, Any] = {name: value_of(text, _KINDS.get(name, str)) for name, text in fields.items() if text != ""}
    if "prompt" in fields:
        given["prompt"] = fields["prompt"]
    ImageBody.check_fields(given, len(given), limits)
    try:
        body = ImageBody.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from None
    body.check()
    return body


def check_files(files: Mapping[str, list[bytes]]) -> list[tuple[str, bytes]]:
    """Returns the images of a form, with the names of their fields.

    Raises:
        InvalidRequest: there are none, too many, or other files.
    """
    for name in files:
        if name in ("mask", "markup"):
            raise InvalidRequest(f"{name}: {_NO_MASK}", param=name)
        if name not in IMAGE_FIELDS:
            raise InvalidRequest(f"{quoted(name)} is no file of this form; image and image[] are", param=name[:100])
    found = [(name, data) for name in IMAGE_FIELDS for data in files.get(name, [])]
    if not found:
        raise InvalidRequest("image: the form has no image; send it as the file `image`", param="image")
    if len(found) > GIVEN_MAX:
        raise InvalidRequest(f"image: at most {GIVEN_MAX} images go into one request", param="image")
    return found
