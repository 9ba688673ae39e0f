"""Images from prompts, and edits of images: the pipeline behind the routes. Independent of HTTP and Ray.

A request for several images is one request to the backend for each, so that replicas share them.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ...actors.protocol.replica_messages import (
    IMAGE_SIDE_MAX,
    ImageInfo,
    ImageRequest,
    ImageUpdate,
    Pixels,
    image_refusal,
    image_tokens,
)
from ...cluster.errors import InvalidRequest
from ...cluster.telemetry.context import span
from ..media.sources import Picture
from ..requests.backend import ImageAnswer, ServedModel
from ..requests.requests import Request
from .generation import Generator
from .kinds import check_makes_images, image_models
from .sending import sent_fields
from .spans import IMAGES, note_model, note_usage
from .told import news_and_result

USUAL_SIDE = 1024
"""The width and height of an image whose size is `auto`, in pixels."""

SEEDS = 2**32

Told = Callable[[ImageUpdate], None]


@dataclass(frozen=True, kw_only=True)
class ImagesRequest(Request):
    """A request for images; otherwise as `Request`, whose `choices` is their number.

    Attributes:
        size: (width, height) in pixels; None leaves it to the model.
        seed: of the first image; each further one has the next. None draws one.
        steps, guidance: None for the model's own.
        partial_images: how many partial images a stream has.
        files: (name of the field, content) of the images that are edited; none generates images. Emptied once they are
            decoded.
    """

    prompt: str
    size: tuple[int, int] | None = None
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    partial_images: int = 0
    files: list[tuple[str, bytes]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class MadeImage:
    """One image, with its seed."""

    pixels: Pixels
    seed: int


@dataclass(frozen=True)
class ImageUsage:
    """Tokens of the prompt, and patches of 16 x 16 pixels of the images that are edited and of those that are made."""

    text: int
    given: int
    made: int


@dataclass(frozen=True)
class MadeImages:
    """The images of a request, in order. `replica`, `node` and `why` are as in `Vectors`, of the first."""

    model: ServedModel
    images: list[MadeImage]
    usage: ImageUsage
    replica: str
    node: str
    why: str


class ImageMaker:
    """Makes images on the generator's backend."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def make(self, request: ImagesRequest, told: Told = lambda update: None) -> MadeImages:
        """Returns images.

        Args:
            told: called with how far an image is.

        Raises:
            RequestError: the request is invalid, or the model makes no images.
            Unavailable: no replica takes it now.
            DeadlineExceeded: it took too long.
        """
        generator, caller = self._generator, request.caller
        async with generator.deadline(request, "the images were not made") as deadline:
            model = await self._model(request)
            priority = caller.priority(request.options.priority)
            given = [await self._given(*each) for each in request.files]
            # Only their pixels are needed from now on.
            request.files.clear()
            first = _checked(request, model, given)
            note_model(IMAGES, request.model, model.info.name)
            shown = sum(image_tokens(each.width, each.height) for each in given)
            size = image_tokens(first.width, first.height)
            admitted = caller.admit(request.choices, shown)
            seed = secrets.randbelow(SEEDS) if request.seed is None else request.seed
            asked = [
                replace(
                    first,
                    seed=(seed + index) % SEEDS,
                    priority=priority,
                    **sent_fields(request, "image", deadline),
                )
                for index in range(request.choices)
            ]
            try:
                answers = await _all([generator.backend.make_image(model, each, told) for each in asked])
                for _ in answers:
                    admitted.end_sequence(size)
            finally:
                admitted.close()
            usage = ImageUsage(answers[0].update.prompt_tokens, shown, size * len(answers))
            note_usage(span(), usage.text + usage.given, completion_tokens=usage.made)
            return _made(model, asked, answers, usage)

    def stream(self, request: ImagesRequest) -> AsyncGenerator[ImageUpdate | MadeImages, None]:
        """Yields how far an image is, and then the images. Raises as `make`. Closing it ends the request."""
        return news_and_result(partial(self.make, request))

    async def _model(self, request: ImagesRequest) -> ServedModel:
        """Returns the model called `request.model`, and for "" the first one that makes images."""
        generator = self._generator
        name = request.model
        if not name:
            makers = image_models(await generator.backend.models())
            name = next((each for each in makers if request.caller.may_use(each)), "")
        model = await generator.served(name, request.caller, any_model=request.any_model, loading=request.loading)
        check_makes_images(model)
        return model

    async def _given(self, where: str, data: bytes) -> Picture:
        """Returns an image that is edited."""
        return await self._generator.loader.load_file(data, where, IMAGE_SIDE_MAX)


async def _all(calls: list[asyncio.Future[ImageAnswer]] | list) -> list[ImageAnswer]:
    """Returns the results in order. The first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _made(model: ServedModel, asked: list[ImageRequest], answers: list[ImageAnswer], usage: ImageUsage) -> MadeImages:
    images = []
    for request, answer in zip(asked, answers, strict=True):
        assert answer.update.image is not None
        images.append(MadeImage(answer.update.image, request.seed))
    first = answers[0]
    return MadeImages(model, images, usage, first.replica, first.node, first.why)


def _checked(request: ImagesRequest, model: ServedModel, given: list[Picture]) -> ImageRequest:
    """Returns the request for the first image.

    Raises:
        InvalidRequest: the model does not do this.
    """
    info = model.info.images
    width, height = request.size or _usual_size(info, given)
    first = ImageRequest(
        request_id="",
        model=model.info.name,
        prompt=request.prompt,
        width=width,
        height=height,
        seed=0,
        steps=request.steps or (info.edit_steps if given else info.steps),
        guidance=request.guidance,
        partial_images=request.partial_images,
        images=[Pixels(each.width, each.height, each.pixels) for each in given],
    )
    if (refusal := image_refusal(info, first, first.steps or 0)) is not None:
        raise InvalidRequest(refusal[1], param=refusal[0])
    return first


def _usual_size(info: ImageInfo, given: list[Picture]) -> tuple[int, int]:
    """Returns the size of an image for which the caller names none: of an edit about that of the first image, within as
    many pixels as a generated one has."""
    if not given:
        return USUAL_SIDE, USUAL_SIDE
    width, height = given[0].width, given[0].height
    scale = min(1.0, math.sqrt(USUAL_SIDE * USUAL_SIDE / (width * height)))

    def fitting(side: float) -> int:
        return max(info.side_min, min(info.side_max, int(side) // info.multiple * info.multiple))

    return fitting(width * scale), fitting(height * scale)
