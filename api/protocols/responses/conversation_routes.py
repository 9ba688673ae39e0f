"""The routes of OpenAI's conversations, each of which is an agent's transcript."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from ....cluster.errors import AgentNotFound, InvalidRequest, ResponseNotFound, quoted
from ...http.adding import add_route
from ...http.answering import Answering
from ...http.exchange import CancelOnDisconnect
from ...requests.callers import Caller
from ...requests.requests import ChatRequest, agent_key
from ...views.agents import forget_agent
from .conversations import (
    ConversationBody,
    KnownConversations,
    conversation_agent,
    conversation_object,
    new_conversation,
    transcript_items,
)
from .items import messages_of
from .listing import item_page


class ConversationRoutes:
    """Handlers for conversations. Their metadata is kept in this process only."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._known = KnownConversations()

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/conversations", self.create, ConversationBody)
        add_route(app, "GET", "/v1/conversations/{conversation_id}", self.show)
        add_route(app, "POST", "/v1/conversations/{conversation_id}", self.update, ConversationBody)
        add_route(app, "DELETE", "/v1/conversations/{conversation_id}", self.delete)
        add_route(app, "GET", "/v1/conversations/{conversation_id}/items", self.items)

    async def create(self, request: Request) -> Response:
        """Makes a conversation, and prefills its first items if it has any."""
        body = await self._answering.bodies.read(request, ConversationBody)
        caller: Caller = request.state.caller
        made = new_conversation(body.metadata)
        if messages := messages_of(body.items.parts):
            chat = ChatRequest(messages=messages, model=body.model or "", agent=conversation_agent(made["id"]))
            async with CancelOnDisconnect(request.receive):
                work = self._answering.complete(request, chat, any_model=False)
                await self._answering.generator.inject(work)
        self._known.keep(caller.tenant, made)
        return JSONResponse(made)

    async def show(self, request: Request, conversation_id: str) -> Response:
        """Shows a conversation."""
        return JSONResponse(await self._found(request, conversation_id))

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replaces a conversation's metadata."""
        body = await self._answering.bodies.read(request, ConversationBody)
        if body.items.given:
            raise InvalidRequest("items: only a new conversation takes them", param="items")
        found = await self._found(request, conversation_id)
        changed = conversation_object(conversation_id, found["created_at"], body.metadata)
        caller: Caller = request.state.caller
        self._known.keep(caller.tenant, changed)
        return JSONResponse(changed)

    async def delete(self, request: Request, conversation_id: str) -> Response:
        """Deletes a conversation, with its agent's memory."""
        caller: Caller = request.state.caller
        await self._found(request, conversation_id)
        self._known.delete(caller.tenant, conversation_id)
        if (memory := self._answering.generator.memory) is not None:
            await forget_agent(memory, agent_key(conversation_agent(conversation_id), caller.tenant))
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def items(
        self,
        request: Request,
        conversation_id: str,
        limit: int = Query(20),
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> Response:
        """Lists the items of a conversation, the newest first."""
        await self._found(request, conversation_id)
        caller: Caller = request.state.caller
        memory, transcript = self._answering.generator.memory, b"[]"
        if memory is not None:
            with suppress(AgentNotFound):
                key = agent_key(conversation_agent(conversation_id), caller.tenant)
                transcript = await memory.store.transcript(key)
        said = await asyncio.to_thread(lambda: transcript_items(json.loads(transcript)))
        return JSONResponse(item_page(said, conversation_id, limit, order, after))

    async def _found(self, request: Request, id: str) -> dict[str, Any]:
        """Returns a conversation that this process made, or that has a transcript.

        Raises:
            ResponseNotFound: there is none.
            Unavailable: the store does not answer.
        """
        caller: Caller = request.state.caller
        if (known := self._known.get(caller.tenant, id)) is not None:
            return known
        memory = self._answering.generator.memory
        if memory is not None:
            try:
                described = await memory.store.info(agent_key(conversation_agent(id), caller.tenant))
            except AgentNotFound:
                pass
            else:
                return conversation_object(id, int(min(head.created for head in described.branches)))
        raise ResponseNotFound(f"there is no conversation {quoted(id)} here", param="conversation_id")
