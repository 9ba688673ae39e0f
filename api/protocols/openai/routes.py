"""OpenAI's routes that generate text: chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ...http.adding import EVENTS, JSON, add_route
from ...http.answering import Answering
from ...http.event_stream import EventStream
from ...pipeline.streams import TextStream, Usage
from ...requests.agent_identity import Identity
from .answers import (
    AnswerStyle,
    ChatChunks,
    CompletionChunks,
    best_answers,
    chat_body,
    completion_body,
    failed_event,
    system_fingerprint,
)
from .bodies import ChatBody, CompletionBody, GenerationBody

Body = TypeVar("Body", bound=GenerationBody)


class OpenAIRoutes:
    """Handlers for chat completions and completions.

    Args:
        version: Satchel's version, which is part of the answers' `system_fingerprint`.
    """

    def __init__(self, answering: Answering, version: str) -> None:
        self._answering = answering
        self._version = version

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/chat/completions", self.chat_completions, ChatBody, answers=(JSON, EVENTS))
        add_route(app, "POST", "/v1/completions", self.completions, CompletionBody, answers=(JSON, EVENTS))

    async def chat_completions(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        body, whose = await self._read(request, ChatBody)
        chat = self._answering.complete(request, body.request(whose.agent), whose, any_model=False)
        functions = body.has_functions
        if body.stream:
            return EventStream(
                self._answering,
                chat,
                lambda streams: ChatChunks(streams[0].model.info.name, self._style(body, streams, functions=functions)),
                failed_event,
            )
        streams, answers = await self._answering.answer(request, chat)
        style = self._style(body, streams, functions=functions)
        shown = chat_body(streams[0].model.info.name, answers, streams[0].remembered, style)
        return JSONResponse(shown, headers=self._answering.headers(chat, streams))

    async def completions(self, request: Request) -> Response:
        """Continues one or several texts."""
        body, whose = await self._read(request, CompletionBody)
        work = self._answering.complete(request, body.request(whose.agent), whose, any_model=False)
        if body.stream:
            return EventStream(
                self._answering,
                work,
                lambda streams: CompletionChunks(streams[0].model.info.name, self._style(body, streams)),
                failed_event,
            )
        streams, answers = await self._answering.answer(request, work)
        usage = sum((answer.usage for answer in answers), Usage(0, 0, 0))
        if body.sequences > body.choices:
            answers = best_answers(answers, body.sequences, body.choices)
        if body.logprobs is None:
            answers = [replace(answer, logprobs=None) for answer in answers]
        shown = completion_body(streams[0].model.info.name, answers, self._style(body, streams), usage)
        return JSONResponse(shown, headers=self._answering.headers(work, streams))

    def _style(self, body: GenerationBody, streams: Sequence[TextStream], *, functions: bool = False) -> AnswerStyle:
        return AnswerStyle(
            fingerprint=system_fingerprint(streams[0].model, self._version),
            functions=functions,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body, Identity]:
        """Returns the body, and its agent."""
        body = await self._answering.read(request, kind)
        whose = self._answering.whose(
            request,
            agent_id=body.agent_id,
            cache_salt=body.cache_salt,
            conversation=body.conversation,
            prompt_cache_key=body.prompt_cache_key,
            metadata=body.metadata,
            messages=body.messages if isinstance(body, ChatBody) else (),
        )
        return body, whose
