"""OpenAI's routes for images."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest
from ...http.adding import EVENTS, JSON, add_route
from ...http.answering import Answering
from ...http.event_stream import ResultStream
from ...http.exchange import CancelOnDisconnect
from ...http.forms import FORM, Form, parse_form
from ...pipeline.images import ImageMaker
from .answers import failed_event
from .image_answers import ImageEvents, images_body
from .image_bodies import ImageBody, check_files, edit_body


class ImageRoutes:
    """Handlers for images from prompts, and for edits."""

    def __init__(self, answering: Answering, maker: ImageMaker, limits: Endpoint) -> None:
        self._answering, self._maker, self._limits = answering, maker, limits

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/images/generations", self.generations, ImageBody, answers=(JSON, EVENTS))
        add_route(app, "POST", "/v1/images/edits", self.edits, takes=FORM, answers=(JSON, EVENTS))
        add_route(app, "POST", "/v1/images/variations", self.variations, takes=FORM)

    async def generations(self, request: Request) -> Response:
        """Makes images from a prompt."""
        body = await self._answering.bodies.read(request, ImageBody)
        return await self._answer(request, body, [], "image_generation")

    async def edits(self, request: Request) -> Response:
        """Edits an image, or makes one from several, by a prompt."""

        def read(data: bytearray) -> tuple[ImageBody, list[tuple[str, bytes]]]:
            form: Form = parse_form(request.headers.get("content-type", ""), data)
            return edit_body(form.fields, self._limits), check_files(form.files)

        body, files = await self._answering.bodies.read_with(request, read, lambda made: made[0].ignored)
        return await self._answer(request, body, files, "image_edit")

    async def variations(self, request: Request) -> NoReturn:
        """Is not supported."""
        raise InvalidRequest("variations are not supported: POST /v1/images/edits takes an image and a prompt")

    async def _answer(self, request: Request, body: ImageBody, files: list[tuple[str, bytes]], task: str) -> Response:
        work = self._answering.complete(request, body.request(files), any_model=False)
        if body.stream:
            events = ImageEvents(task, *body.form_of_output).encoded(self._maker.stream(work))
            return ResultStream(events, failed_event)
        async with CancelOnDisconnect(request.receive):
            made = await self._maker.make(work)
        shown = await asyncio.to_thread(images_body, made, *body.form_of_output)
        return Response(shown, headers=self._answering.placed(work, [made]), media_type="application/json")
