"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ....cluster.config.config import Endpoint
from ....cluster.errors import (
    AgentNotFound,
    ContextLengthExceeded,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
    SatchelError,
    quoted,
)
from ...http.adding import EVENTS, JSON, add_route
from ...http.answering import Answering
from ...http.event_stream import EventStream, FollowedStream, encoded
from ...http.exchange import CancelOnDisconnect, log_failure
from ...pipeline.streams import WAITING, abort_all, interleave
from ...requests.agent_identity import Identity
from ...requests.callers import Caller
from ...requests.history import Message
from ...requests.requests import ChatRequest, agent_key
from ...views.agents import agent_transcripts, forget_agent
from .answers import COMPLETED, INCOMPLETE, ResponseObject
from .background import BackgroundResponse, BackgroundResponses
from .bodies import AskedBody, InputTokensBody, ResponseBody
from .chains import (
    KeptResponse,
    ResponseChains,
    ResponseId,
    background_id,
    background_model,
    new_response_id,
    only_text,
    read_response_id,
)
from .event_log import EventLog
from .events import ResponseEvents, recovered, whole
from .listing import item_page

_log = logging.getLogger(__name__)

_APPENDED = (
    "previous_response_id: this response was appended to a transcript; continue it by conversation, or by agent_id "
    "with agent_continue"
)
_SYNCHRONOUS = "a response that is not in the background cannot be cancelled; closing its connection ends it"


@dataclass(frozen=True)
class _Before:
    """What a request continues: earlier messages, their agent, the root of the chain, and the tools among its items."""

    messages: list[Message]
    agent: str = ""
    root: str = ""
    tools: Sequence[tuple[Any, str]] = ()


class ResponseRoutes:
    """Handlers that make, continue, show and delete responses, and count the tokens of their input."""

    def __init__(self, answering: Answering, limits: Endpoint) -> None:
        self._answering = answering
        self._chains = ResponseChains(limits.responses_bytes_max)
        most = limits.background_responses_max
        self._background = BackgroundResponses(most, limits.responses_bytes_max // most)

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/responses", self.create, ResponseBody, answers=(JSON, EVENTS))
        add_route(app, "POST", "/v1/responses/input_tokens", self.input_tokens, InputTokensBody)
        add_route(app, "GET", "/v1/responses/{response_id}", self.show, answers=(JSON, EVENTS))
        add_route(app, "DELETE", "/v1/responses/{response_id}", self.delete)
        add_route(app, "POST", "/v1/responses/{response_id}/cancel", self.cancel)
        add_route(app, "GET", "/v1/responses/{response_id}/input_items", self.input_items)

    async def create(self, request: Request) -> Response:
        """Generates the next response of a conversation."""
        body = await self._answering.read(request, ResponseBody)
        whose = self._answering.whose(
            request,
            agent_id=body.agent_id,
            conversation=body.conversation,
            prompt_cache_key=body.prompt_cache_key,
            metadata=body.metadata,
        )
        caller: Caller = request.state.caller
        before = await self._before(body, caller, whose)
        body.go_on_with(before.tools)

        def said() -> tuple[list[Message], str, str]:
            messages, begun = body.parted(body.messages(before.messages, self._look_up(caller)))
            return messages, begun, new_response_id(messages, root=before.root)

        messages, begun, id = await asyncio.to_thread(said)
        agent = whose.agent or before.agent
        if not agent and body.kept and self._answering.generator.memory is not None and (own := read_response_id(id)):
            agent = own.agent
        chat = body.chat(
            messages,
            agent=agent,
            agent_continue=bool(body.agent_continue) or body.conversation is not None,
            options=body.options,
            prefill=begun,
        )
        chat = self._answering.complete(request, chat, whose, any_model=False)
        if body.background:
            return await self._begin(request, body, chat, id, messages)

        def ended(shown: dict[str, Any], answer: Message) -> None:
            if body.kept:
                whole_chain = None if chat.agent_continue else [*messages, _behind(begun, answer)]
                kept = KeptResponse(shown, body.input.given, whole_chain, agent, tools=body.item_tools)
                self._chains.keep(caller.tenant, id, kept)

        def events(model: str) -> ResponseEvents:
            return ResponseEvents(ResponseObject(id, body, model), body.offered, ended)

        if body.stream:
            return _ResponseStream(self._answering, chat, body, events)
        try:
            (stream,), (answer,) = await self._answering.answer(request, chat)
        except ContextLengthExceeded as error:
            raise _too_long(error, body) from None
        shown = whole(events(stream.model.info.name), answer, stream)
        return JSONResponse(shown, headers=self._answering.headers(chat, [stream]))

    async def _begin(
        self,
        request: Request,
        body: ResponseBody,
        chat: ChatRequest,
        id: str,
        messages: list[Message],
    ) -> Response:
        """Starts a background response, and returns it as it is now, or its events as they come."""
        # An unknown model is an error at once.
        model = await self._answering.named(request, chat.model)
        if not model.comes_and_goes:
            await self._answering.served(request, chat.model)
        tenant = chat.caller.tenant
        log, id = self._background.log(tenant, shares=bool(chat.caller.key)), background_id(id, tenant, model.name)

        def ended(shown: dict[str, Any], answer: Message) -> None:
            made.answer = _behind(chat.prefill, answer)

        events = ResponseEvents(ResponseObject(id, body, model.name), body.offered, ended)
        earlier = None if chat.agent_continue else messages
        made = BackgroundResponse(events, body.input.given, earlier, chat.agent, log, body.item_tools)
        make = self._make(made, chat, body)
        self._background.begin(tenant, id, made, make, lambda kept: self._chains.keep(tenant, id, kept))
        if body.stream:
            return FollowedStream(log.follow(-1), events.idle)
        return JSONResponse(events.now)

    async def _make(self, made: BackgroundResponse, chat: ChatRequest, body: ResponseBody) -> None:
        """Makes a background response. Its log gets all of its events, however it ends."""
        add, events, request_id = made.log.add, made.events, chat.request_id
        try:
            streams = await self._answering.start(chat)
            try:
                async with (
                    aclosing(interleave(streams)) as items,
                    aclosing(encoded(events, streams, anext(items), items, request_id)) as chunks,
                ):
                    async for chunk in chunks:
                        add(chunk)
            finally:
                await abort_all(streams)
        except asyncio.CancelledError:
            if not events.last:
                add(events.cancelled())
        except SatchelError as error:
            log_failure(_log, f"request {request_id} in the background", error, told=False)
            add(events.failed(_too_long(error, body) if isinstance(error, ContextLengthExceeded) else error, ""))
        except Exception:
            _log.exception("request %s failed in the background", request_id)
            add(events.failed(SatchelError(f"internal error in request {request_id}"), request_id))

    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of a prompt, of any length, without generating anything."""
        body = await self._answering.bodies.read(request, InputTokensBody)
        caller: Caller = request.state.caller
        whose = self._answering.whose(request, agent_id=None, conversation=body.conversation)
        before = await self._before(body, caller, whose)
        body.go_on_with(before.tools)
        if body.conversation is not None:
            before = await self._transcript(whose, caller)
        messages = await asyncio.to_thread(body.messages, before.messages, self._look_up(caller))
        if before.messages and body.conversation is not None:
            # A transcript already begins with the instructions of its first turn.
            body.instructions = None
        messages, begun = body.parted(messages)
        chat = self._answering.complete(request, body.chat(messages, prefill=begun), any_model=False)
        async with CancelOnDisconnect(request.receive):
            tokens = await self._answering.generator.count(chat)
        shown = {"object": "response.input_tokens", "input_tokens": tokens}
        return JSONResponse(shown)

    async def show(
        self,
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: int | None = Query(None, ge=0, le=2**31),
    ) -> Response:
        """Shows a response so far, or the events of a background response, from any of them on."""
        after = -1 if starting_after is None else starting_after
        kept = await self._kept_or_lost(request, response_id, after)
        if not stream and starting_after is not None:
            raise InvalidRequest("starting_after: only possible with stream", param="starting_after")
        if not stream:
            return JSONResponse(kept.shown)
        if kept.log is None:
            message = "stream: the events of a response that is not in the background are sent only once"
            raise InvalidRequest(message, param="stream")
        kept.log.check(after)
        return FollowedStream(kept.log.follow(after), WAITING)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Deletes a response. If it is the last one of a chain without a named agent, the chain's memory is erased."""
        caller: Caller = request.state.caller
        found, said = await self._kept_or_lost(request, response_id), read_response_id(response_id)
        if (made := self._background.get(caller.tenant, response_id)) is not None:
            await made.cancel()
        self._chains.delete(caller.tenant, response_id)
        memory = self._answering.generator.memory
        own = "" if said is None or found.agent != said.agent else said.agent
        if own and memory is not None and not self._chains.others(caller.tenant, own):
            await forget_agent(memory, agent_key(own, caller.tenant))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancels a background response, and shows it as it is then. A response that has ended does not change."""
        caller: Caller = request.state.caller
        kept = await self._kept_or_lost(request, response_id)
        if kept.log is None:
            raise InvalidRequest(_SYNCHRONOUS, param="response_id")
        if (made := self._background.get(caller.tenant, response_id)) is not None:
            await made.cancel()
            kept = made.kept
        return JSONResponse(kept.shown)

    async def input_items(
        self,
        request: Request,
        response_id: str,
        limit: int = Query(20),
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> Response:
        """Lists the items of a response's input, the newest first, without those of earlier responses."""
        kept = await self._kept_or_lost(request, response_id)
        return JSONResponse(item_page(kept.items, response_id, limit, order, after))

    def _kept(self, tenant: str, id: str) -> KeptResponse | None:
        """Returns a response that is stored or running."""
        made = self._background.get(tenant, id)
        return self._chains.get(tenant, id) if made is None else made.kept

    async def _kept_or_lost(self, request: Request, id: str, after: int = -1) -> KeptResponse:
        """Returns a response. A background response of an earlier process is either in its agent's transcript, or
        counts as failed; it has only one event, with the number behind `after`.

        Raises:
            ResponseNotFound: there is none.
            Unavailable: the transcript in which it may be cannot be read now.
        """
        caller: Caller = request.state.caller
        if (kept := self._kept(caller.tenant, id)) is not None:
            return kept
        said = read_response_id(id)
        model = background_model(id, caller.tenant)
        if said is None or model is None or self._chains.deleted(caller.tenant, id):
            raise ResponseNotFound(f"there is no response {quoted(id)} here", param="response_id")
        agent = self._answering.whose(request, agent_id=None).agent or said.agent
        messages = await self._found(said, agent, caller)
        log = EventLog(sys.maxsize, after + 1)
        shown, event = recovered(id, model, None if messages is None else messages[-1], after + 1)
        log.add(event)
        log.end()
        return KeptResponse(shown, [], messages, agent, log)

    def _look_up(self, caller: Caller) -> Callable[[str], dict[str, Any] | None]:
        return lambda id: self._chains.item(caller.tenant, id)

    async def _before(self, body: AskedBody, caller: Caller, whose: Identity) -> _Before:
        """Returns what the request continues.

        Raises:
            PreviousResponseNotFound: its previous response is not stored, or no longer.
            InvalidRequest: its previous response belongs to a transcript, which is continued in another way.
            Unavailable: the transcript in which it may be cannot be read now.
        """
        if (id := body.previous_response_id) is None:
            return _Before([])
        said = read_response_id(id)
        if said is not None and (kept := self._kept(caller.tenant, id)) is not None:
            if (status := kept.shown["status"]) not in (COMPLETED, INCOMPLETE):
                message = f"previous_response_id: that response is {status}, so there is no answer to continue"
                raise InvalidRequest(message, param="previous_response_id")
            if kept.messages is None:
                raise InvalidRequest(_APPENDED, param="previous_response_id")
            return _Before(kept.messages, kept.agent, said.root, kept.tools)
        if said is not None and not self._chains.deleted(caller.tenant, id):
            agent = whose.agent or said.agent
            if (found := await self._found(said, agent, caller)) is not None:
                return _Before(found, agent, said.root)
        raise PreviousResponseNotFound(f"there is no response {quoted(id)} here", param="previous_response_id")

    async def _found(self, said: ResponseId, agent: str, caller: Caller) -> list[Message] | None:
        """Returns the messages up to and including a response's answer, if one of the agent's transcripts has them."""
        if (memory := self._answering.generator.memory) is None:
            return None
        for transcript in await agent_transcripts(memory.store, agent_key(agent, caller.tenant)):
            found = await asyncio.to_thread(lambda line: said.found_in(json.loads(line)), transcript)
            if found is not None:
                return found
        return None

    async def _transcript(self, whose: Identity, caller: Caller) -> _Before:
        """Returns the messages of a conversation, for counting.

        Raises:
            InvalidRequest: it has pictures, of which only hashes are stored.
            Unavailable: it cannot be read now.
        """
        memory = self._answering.generator.memory
        try:
            key = agent_key(whose.agent, caller.tenant)
            transcript = b"[]" if memory is None else await memory.store.transcript(key)
        except AgentNotFound:
            transcript = b"[]"
        messages = await asyncio.to_thread(json.loads, transcript)
        if not only_text(messages):
            raise InvalidRequest(
                "conversation: the tokens of a conversation with pictures cannot be counted", param="conversation"
            )
        return _Before(messages, whose.agent)


class _ResponseStream(EventStream):
    """A streamed response. If its prompt is too long, that is an event too, because clients that compact expect it
    there."""

    def __init__(
        self,
        answering: Answering,
        chat: ChatRequest,
        body: ResponseBody,
        events: Callable[[str], ResponseEvents],
    ) -> None:
        super().__init__(answering, chat, lambda streams: events(streams[0].model.info.name), self._told)
        self._body = body
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ContextLengthExceeded as error:
            # This error comes before anything is sent; later errors become events anyway.
            request_id = scope["state"]["request_id"]
            _log.debug("request %s is too long", request_id)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._told(error, request_id)})

    def _told(self, error: SatchelError, request_id: str) -> bytes:
        """Returns the events of a response that failed before it began."""
        if isinstance(error, ContextLengthExceeded):
            error = _too_long(error, self._body)
        events = self._events(self._body.model or "")
        return events.start([]) + events.failed(error, request_id)


def _behind(begun: str, answer: Message) -> Message:
    """Returns an answer, together with the beginning that the request had, as one message."""
    return {**answer, "content": f"{begun}{answer['content']}"} if begun else answer


def _too_long(error: ContextLengthExceeded, body: ResponseBody) -> ContextLengthExceeded:
    """Returns the error with a message in the terms of this protocol."""
    message = error.message.replace("messages", "input", 1)
    if body.truncation == "auto":
        message += (
            "; truncation 'auto' leaves out what is old, but neither instructions, nor the last message, nor what is "
            "in a conversation's transcript"
        )
    return ContextLengthExceeded(message, param="input", tokens=error.tokens, tokens_max=error.tokens_max)
