"""OpenAI's routes for audio. Models of speech write speech down and speak, and models that take audio in chats write it
down too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from ....actors.protocol.speech_messages import TRANSCRIBE, TRANSLATE
from ...http.adding import BYTES, EVENTS, JSON, TEXT, add_route
from ...http.answering import Answering
from ...http.byte_stream import ByteStream
from ...http.event_stream import EventStream, ResultStream
from ...http.exchange import CancelOnDisconnect
from ...http.forms import FORM, parse_form
from ...pipeline.speech import SpeechAsked, SpeechMaker
from ...requests.requests import ChatRequest
from .answers import failed_event
from .audio_answers import TranscriptEvents, transcript_body
from .audio_bodies import SpeakBody, SpeechForm, read_speech_form
from .speech_answers import (
    audio_file,
    file_pieces,
    media_type,
    speech_events,
    subtitles,
    transcript_events,
    transcript_json,
    transcript_verbose,
)


class AudioRoutes:
    """Handlers for transcriptions and translations of speech, and for speech."""

    def __init__(self, answering: Answering, maker: SpeechMaker) -> None:
        self._answering, self._maker = answering, maker

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        answers = (JSON, TEXT, EVENTS)
        add_route(app, "POST", "/v1/audio/transcriptions", self.transcriptions, takes=FORM, answers=answers)
        add_route(app, "POST", "/v1/audio/translations", self.translations, takes=FORM, answers=(JSON, TEXT))
        add_route(app, "POST", "/v1/audio/speech", self.speech, SpeakBody, answers=(BYTES, EVENTS))

    async def transcriptions(self, request: Request) -> Response:
        """Writes down the speech in an audio file."""
        return await self._written_down(request, translates=False)

    async def translations(self, request: Request) -> Response:
        """Translates the speech in an audio file into English."""
        return await self._written_down(request, translates=True)

    async def speech(self, request: Request) -> Response:
        """Speaks a text."""
        body = await self._answering.bodies.read(request, SpeakBody)
        work = self._answering.complete(request, body.request(), any_model=False)
        kind = body.response_format or "wav"
        if body.stream_format == "sse":
            return ResultStream(self._spoken_events(work, kind), failed_event)
        # The headers and the file say the rate, which is that of the model.
        async with CancelOnDisconnect(request.receive):
            rate = (await self._maker.loaded(work)).info.speech.rate
        if body.stream_format == "audio":
            return ByteStream(file_pieces(self._maker.stream(work), kind, rate), media_type(kind, rate))
        pieces: list[bytes] = []
        async with CancelOnDisconnect(request.receive):
            made = await self._maker.make(work, lambda piece: pieces.append(piece.audio))
        headers = self._answering.placed(work, [made])
        return Response(audio_file(b"".join(pieces), kind, rate), headers=headers, media_type=media_type(kind, rate))

    async def _spoken_events(self, work: SpeechAsked, kind: str) -> AsyncGenerator[bytes, None]:
        # A client hears that the server is busy while the model is loaded.
        model = await self._maker.loaded(work)
        async with aclosing(speech_events(self._maker.stream(work), kind, model.info.speech.rate)) as events:
            async for event in events:
                yield event

    async def _written_down(self, request: Request, *, translates: bool) -> Response:
        def read(data: bytearray) -> tuple[SpeechForm, list[bytes]]:
            return read_speech_form(parse_form(request.headers.get("content-type", ""), data), translates=translates)

        # The file is in its list alone, so that it is gone once that is emptied.
        body, file = await self._answering.bodies.read_with(request, read)
        if await self._listens(request, body, TRANSLATE if translates else TRANSCRIBE):
            return await self._by_speech(request, body, file, translates=translates)
        chat = await asyncio.to_thread(body.chat, file, translates=translates)
        work = self._answering.complete(request, chat, any_model=False)
        if body.stream:
            return EventStream(self._answering, work, TranscriptEvents, failed_event)
        return await self._by_chat(request, body, work)

    async def _listens(self, request: Request, body: SpeechForm, task: str) -> bool:
        """Returns whether a model of speech answers; without a name that is the first one which is loaded and does the
        task. A model that is not here yet is loaded only if nothing else says what it is: then the stream begins."""
        caller = request.state.caller
        if not body.model:
            return bool(await self._maker.first(caller, task))
        any_model = self._answering.takes_any(any_model=False)
        if (known := await self._maker.is_of_speech(body.model, caller, any_model=any_model)) is not None:
            return known
        return bool((await self._answering.loaded(request, body.model, body.options)).info.speech.family)

    async def _by_speech(self, request: Request, body: SpeechForm, file: list[bytes], *, translates: bool) -> Response:
        work = self._answering.complete(request, body.speech(file, translates=translates), any_model=False)
        if body.stream:
            return ResultStream(transcript_events(self._maker.stream(work)), failed_event)
        async with CancelOnDisconnect(request.receive):
            made = await self._maker.make(work)
        headers = self._answering.placed(work, [made])
        if body.response_format in ("srt", "vtt"):
            return PlainTextResponse(subtitles(made, body.response_format), headers=headers)
        if body.response_format == "text":
            assert made.transcript is not None
            return PlainTextResponse(f"{made.transcript.text.strip()}\n", headers=headers)
        if body.response_format == "verbose_json":
            task = TRANSLATE if translates else TRANSCRIBE
            verbose = transcript_verbose(made, task, body.timestamp_granularities or ())
            return JSONResponse(verbose, headers=headers)
        return JSONResponse(transcript_json(made), headers=headers)

    async def _by_chat(self, request: Request, body: SpeechForm, work: ChatRequest) -> Response:
        streams, answers = await self._answering.answer(request, work)
        headers = self._answering.headers(work, streams)
        if body.response_format == "text":
            return PlainTextResponse(f"{answers[0].text.strip()}\n", headers=headers)
        return JSONResponse(transcript_body(answers[0]), headers=headers)
