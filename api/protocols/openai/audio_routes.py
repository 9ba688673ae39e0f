"""OpenAI's routes for audio. Models that take audio in chats transcribe and translate it; none speaks."""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from ....cluster.errors import InvalidRequest
from ...http.adding import EVENTS, JSON, TEXT, add_route
from ...http.answering import Answering
from ...http.event_stream import EventStream
from ...http.forms import FORM, parse_form
from ...requests.requests import ChatRequest
from .answers import failed_event
from .audio_answers import TranscriptEvents, transcript_body
from .audio_bodies import SpeechForm, read_speech_form


class AudioRoutes:
    """Handlers for transcriptions and translations of speech."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        answers = (JSON, TEXT, EVENTS)
        add_route(app, "POST", "/v1/audio/transcriptions", self.transcriptions, takes=FORM, answers=answers)
        add_route(app, "POST", "/v1/audio/translations", self.translations, takes=FORM, answers=(JSON, TEXT))
        add_route(app, "POST", "/v1/audio/speech", self.speech)

    async def transcriptions(self, request: Request) -> Response:
        """Writes down the speech in an audio file."""
        body, work = await self._read(request, translates=False)
        if body.stream:
            return EventStream(self._answering, work, TranscriptEvents, failed_event)
        return await self._answer(request, body, work)

    async def translations(self, request: Request) -> Response:
        """Translates the speech in an audio file into English."""
        return await self._answer(request, *await self._read(request, translates=True))

    async def speech(self, request: Request) -> NoReturn:
        """Is not supported."""
        raise InvalidRequest("speech is not supported: no model that is served here makes audio", param="model")

    async def _read(self, request: Request, *, translates: bool) -> tuple[SpeechForm, ChatRequest]:
        def read(data: bytearray) -> tuple[SpeechForm, ChatRequest]:
            form = parse_form(request.headers.get("content-type", ""), data)
            body, file = read_speech_form(form, translates=translates)
            return body, body.request(file, translates=translates)

        body, work = await self._answering.bodies.read_with(request, read)
        return body, self._answering.complete(request, work, any_model=False)

    async def _answer(self, request: Request, body: SpeechForm, work: ChatRequest) -> Response:
        streams, answers = await self._answering.answer(request, work)
        headers = self._answering.headers(work, streams)
        if body.response_format == "text":
            return PlainTextResponse(f"{answers[0].text.strip()}\n", headers=headers)
        return JSONResponse(transcript_body(answers[0]), headers=headers)
