"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ...http.adding import EVENTS, JSON, add_route
from ...http.answering import Answering
from ...http.error_shapes import MESSAGES
from ...http.event_stream import EventStream
from ...http.exchange import CancelOnDisconnect
from .answers import message_body
from .bodies import CountBody, MessagesBody
from .events import MessageEvents, failed_event


class MessageRoutes:
    """Handlers for messages, and for counting their prompt tokens."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", MESSAGES, self.messages, MessagesBody, answers=(JSON, EVENTS))
        add_route(app, "POST", f"{MESSAGES}/count_tokens", self.count_tokens, CountBody)

    async def messages(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        body = await self._answering.read(request, MessagesBody)
        whose = self._answering.whose(request, agent_id=body.agent_id, metadata=body.user)
        chat = body.chat(
            agent=whose.agent,
            agent_continue=bool(body.agent_continue),
            options=body.options,
            # With no tokens to generate the prompt is still prefilled, as for an injection.
            max_tokens_default=None if body.max_tokens else 0,
        )
        chat = self._answering.complete(request, chat, whose, any_model=True)
        edits = body.context_management is not None
        if body.stream:
            return EventStream(
                self._answering,
                chat,
                lambda streams: MessageEvents(chat.model or streams[0].model.info.name, body.max_tokens, edits=edits),
                failed_event,
            )
        (stream,), (answer,) = await self._answering.answer(request, chat)
        model = chat.model or stream.model.info.name
        message = message_body(model, answer, body.max_tokens, edits=edits, remembered=stream.remembered)
        return JSONResponse(message, headers=self._answering.headers(chat, [stream]))

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a conversation's prompt, of any length, without generating anything."""
        body = await self._answering.bodies.read(request, CountBody)
        chat = self._answering.complete(request, body.chat(), any_model=True)
        async with CancelOnDisconnect(request.receive):
            tokens = await self._answering.generator.count(chat)
        return JSONResponse({"input_tokens": tokens})
