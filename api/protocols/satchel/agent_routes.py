"""The routes under `/v1/agents` and `/v1/cache`."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict

from ....cluster.audit import Audit
from ....cluster.errors import AgentNotFound, DeadlineExceeded, Unavailable
from ....cluster.keys import KeyRing
from ...agents.memory import AgentMemory
from ...agents.satchels import packed, unpacked
from ...http.adding import BYTES, add_route
from ...http.auditing import note
from ...http.exchange import BodyReader, CancelOnDisconnect
from ...http.guard import check_owner, require_admin, tenant_of
from ...pipeline.generation import Generator
from ...requests.callers import Caller
from ...requests.remembered import HEADER
from ...requests.requests import ChatRequest, agent_key
from ...views.agents import PAGE_MAX, agent_info, agent_page, forget_agent, fork_agent, give_agent, release_agent
from ..openai.bodies import ForkBody, InjectBody


class MoveBody(BaseModel):
    """The body of `/v1/agents/{id}/move`; `to` is the name of a node."""

    model_config = ConfigDict(strict=True, extra="ignore")

    to: str


class GiveBody(BaseModel):
    """The body of `/v1/agents/{id}/give`; `to` is the name of a key."""

    model_config = ConfigDict(strict=True, extra="ignore")

    to: str


class AgentRoutes:
    """Handlers for agents, and for the replicas' cached KV. A caller sees only its own agents; an administrator can
    name another tenant with `?tenant=NAME`."""

    def __init__(
        self, generator: Generator, bodies: BodyReader, audit: Audit | None = None, keys: KeyRing | None = None
    ) -> None:
        self._generator = generator
        self._bodies = bodies
        self._audit = audit
        self._keys = keys

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", "/v1/agents", self.list_agents)
        add_route(app, "GET", "/v1/agents/{agent_id}", self.get_agent)
        add_route(app, "DELETE", "/v1/agents/{agent_id}", self.forget)
        add_route(app, "GET", "/v1/agents/{agent_id}/transcript", self.transcript)
        add_route(app, "POST", "/v1/agents/{agent_id}/inject", self.inject, InjectBody)
        add_route(app, "POST", "/v1/agents/{agent_id}/fork", self.fork, ForkBody)
        add_route(app, "POST", "/v1/agents/{agent_id}/release", self.release)
        add_route(app, "POST", "/v1/agents/{agent_id}/move", self.move, MoveBody)
        add_route(app, "POST", "/v1/agents/{agent_id}/give", self.give, GiveBody)
        add_route(app, "GET", "/v1/agents/{agent_id}/satchel", self.pack, answers=(BYTES,))
        add_route(app, "PUT", "/v1/agents/{agent_id}/satchel", self.unpack, takes=BYTES)
        add_route(app, "DELETE", "/v1/cache", self.clear_cache)
        add_route(app, "GET", "/v1/cache/stats", self.cache_stats)

    async def list_agents(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20, after: str = ""
    ) -> Response:
        """Lists agents by their ids; `limit` and `after` page through them. `tenant=*` lists those of all tenants."""
        caller: Caller = request.state.caller
        tenant = tenant_of(request, every=True)
        page = await agent_page(self._memory.store, self._generator.backend, tenant, limit, after)
        # This count includes agents of other tenants.
        return JSONResponse(page if caller.admin else {**page, "let_go": None})

    async def get_agent(self, request: Request, agent_id: str) -> Response:
        """Shows one agent."""
        return JSONResponse(await agent_info(self._memory.store, self._generator.backend, _key(request, agent_id)))

    async def transcript(self, request: Request, agent_id: str) -> Response:
        """Shows the conversation of an agent's main branch as OpenAI messages. Pictures are references."""
        key = _key(request, agent_id)
        await self._memory.store.info(key)
        messages = await self._memory.store.transcript(key)
        # The id needs no escaping in JSON.
        head = f'{{"object":"agent.transcript","id":"{agent_id}","messages":'
        return Response(head.encode() + messages + b"}", media_type="application/json")

    async def inject(self, request: Request, agent_id: str) -> Response:
        """Puts messages into an agent's memory, without a reply."""
        _key(request, agent_id)
        body = await self._bodies.read(request, InjectBody)
        work = ChatRequest(
            messages=body.messages,
            model=body.model or "",
            agent=agent_id,
            agent_continue=True,
            request_id=request.state.request_id,
            arrived=request.state.arrived,
            caller=replace(request.state.caller, tenant=tenant_of(request)),
            left_out=request.state.left_out,
        )
        async with CancelOnDisconnect(request.receive):
            usage, remembered = await self._generator.inject(work)
        answer = {
            "id": f"inject-{secrets.token_hex(12)}",
            "object": "agent.injection",
            "agent_id": agent_id,
            "tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
        }
        if (memory := remembered.body) is None:
            return JSONResponse(answer)
        return JSONResponse({**answer, "satchel": memory}, headers={HEADER: remembered.header})

    async def fork(self, request: Request, agent_id: str) -> Response:
        """Copies an agent to a new id."""
        key = _key(request, agent_id)
        body = await self._bodies.read(request, ForkBody)
        return JSONResponse(await fork_agent(self._memory.store, key, body.target, _disk_limits(request)))

    async def give(self, request: Request, agent_id: str) -> Response:
        """Gives an agent to another tenant. For administrators."""
        require_admin(request.state.caller)
        key = _key(request, agent_id)
        body = await self._bodies.read(request, GiveBody)
        check_owner(self._keys, body.to)
        done = await give_agent(self._memory, key, body.to)
        note(self._audit, request, "agent given", agent=agent_id, owner=done["from"], to=body.to)
        return JSONResponse(done)

    async def release(self, request: Request, agent_id: str) -> Response:
        """Drops an agent's KV from the replicas' memory; KV on disk stays."""
        return JSONResponse(await release_agent(self._memory.store, _key(request, agent_id)))

    async def move(self, request: Request, agent_id: str) -> Response:
        """Moves an agent's primary to another node. The move continues if the client disconnects. For
        administrators."""
        require_admin(request.state.caller)
        key = _key(request, agent_id)
        body = await self._bodies.read(request, MoveBody)
        limit_s = self._generator.config.timeouts.request_s
        try:
            async with asyncio.timeout(limit_s):
                done = await self._memory.moves.move(key, body.to)
        except TimeoutError:
            raise DeadlineExceeded(f"the agent was not moved within {limit_s:g} s (timeouts.request_s)") from None
        if done["moved"]:
            note(self._audit, request, "agent moved", agent=agent_id, to=body.to)
        return JSONResponse(done)

    async def pack(self, request: Request, agent_id: str) -> Response:
        """Sends an agent as a file: transcripts, token ids, KV and image embeddings."""
        found = await packed(self._memory, _key(request, agent_id))
        name = f'attachment; filename="{agent_id}.satchel"'
        headers = {"Content-Length": str(found.nbytes), "Content-Disposition": name, "Cache-Control": "no-store"}
        if request.method == "HEAD":
            found.file.close()
            return Response(headers=headers, media_type=BYTES)
        return StreamingResponse(found.pieces(), headers=headers, media_type=BYTES)

    async def unpack(self, request: Request, agent_id: str, replace: bool = False) -> Response:
        """Unpacks an agent from such a file. Nothing in it is used before the whole file was verified."""
        caller: Caller = request.state.caller
        answer = await unpacked(
            self._memory,
            _key(request, agent_id),
            partial(self._bodies.save, request),
            self._bodies.announced(request),
            replace=replace,
            trusted=caller.admin,
            limits=_disk_limits(request),
        )
        return JSONResponse(answer)

    async def forget(self, request: Request, agent_id: str) -> Response:
        """Erases an agent's memory."""
        if not await forget_agent(self._memory, _key(request, agent_id)):
            raise AgentNotFound(f"there is no agent {agent_id!r}", param="id")
        return JSONResponse({"id": agent_id, "object": "agent.deleted", "deleted": True})

    async def clear_cache(self, request: Request) -> Response:
        """Drops the cached KV of all replicas. Agents' memory stays. For administrators."""
        require_admin(request.state.caller)
        freed = await self._memory.store.clear()
        note(self._audit, request, "cache cleared", bytes=freed)
        return JSONResponse({"object": "cache.deleted", "deleted": True, "bytes": freed})

    async def cache_stats(self, request: Request) -> Response:
        """Shows the replicas' cached KV, and how many tokens it has saved. For administrators."""
        require_admin(request.state.caller)
        stats = [each for each in await self._generator.backend.stats() if each.answers]
        answer = {
            "object": "cache.stats",
            "hits": sum(each.prefix_hits_total for each in stats),
            "misses": sum(each.prefix_misses_total for each in stats),
            "tokens_saved": sum(each.cached_tokens_total for each in stats),
            "entry_count": sum(each.prefix_blocks for each in stats),
            "current_memory_bytes": sum(each.prefix_bytes for each in stats),
            "slots": {
                "running": sum(each.slots_running for each in stats),
                "kept": sum(each.slots_kept for each in stats),
                "free": sum(each.slots_free for each in stats),
            },
            "memory_bytes": sum(each.memory_bytes for each in stats),
            "memory_bytes_max": sum(each.memory_bytes_max for each in stats),
        }
        return JSONResponse(answer)

    @property
    def _memory(self) -> AgentMemory:
        if self._generator.memory is None:
            raise Unavailable("this endpoint keeps no agents' memory", retry_after_s=None)
        return self._generator.memory


def _key(request: Request, agent_id: str) -> str:
    """Returns the agent's key within the tenant.

    Raises:
        InvalidRequest: not an agent id, or not a tenant's name.
        NotAllowed: the tenant is not the caller's.
    """
    return agent_key(agent_id, tenant_of(request))


def _disk_limits(request: Request) -> dict[str, int | None]:
    """Returns the tenant's quota on a node's disk if the caller is that tenant; for another tenant, the stores use the
    quota of that tenant's last request."""
    caller: Caller = request.state.caller
    return caller.disk_limits if tenant_of(request) == caller.tenant else {}
