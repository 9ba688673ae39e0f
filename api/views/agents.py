"""Agents as clients see them, and what can be done with one: shared by the HTTP routes and the Python handles."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ...actors.kv_store.disk.quotas import Limits
from ...actors.protocol.block_ids import BLOCK_TOKENS
from ...cluster.errors import InvalidRequest, SatchelError
from ..agents.memory import AgentMemory
from ..agents.store import Store
from ..generation.backend import Backend
from ..generation.requests import agent_key
from ..media.prompt import pictures_said

PAGE_MAX = 100
_NODES_S = 2.0


def agent_id_of(key: str) -> str:
    """The id in an agent's key, which has the tenant before it."""
    return key.partition("/")[2]


async def agent_page(store: Store, backend: Backend, tenant: str, limit: int, after: str) -> dict[str, Any]:
    """A page of the agents, in OpenAI's form of a list. `let_go` counts those that had to make room for others.

    Raises:
        InvalidRequest: `limit` is out of range, or `after` is no agent id.
    """
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"limit must be 1 to {PAGE_MAX}", param="limit")
    found = await store.call("agents", tenant, _key(after, "after", tenant) if after else f"{tenant}/", limit + 1)
    names = await _names(backend)
    data = [_view(each, names) for each in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
        "let_go": await _let_go(backend),
    }


async def _let_go(backend: Backend) -> int | None:
    """How many agents had to make room for others since the stores were started; None where nobody tells."""
    try:
        async with asyncio.timeout(_NODES_S):
            told = [node.agents_let_go for node in await backend.nodes()]
    except (SatchelError, TimeoutError):
        return None
    return sum(count for count in told if count is not None)


async def agent_info(store: Store, backend: Backend, key: str) -> dict[str, Any]:
    """One agent.

    Returns:
        `tokens`, `blocks` (of KV that the tokens fill), `messages`, `turns` and `model` of its main branch, `bytes` and
        `branches` of all, `created` and `last_used` in Unix time, and `tier`: `hot` where a replica has blocks of it
        in memory, `warm` where the disk has blocks or open tails of it, else `cold`. `pictures` are those that the
        main branch's transcript names, in the order of first use and each once: `hash` (of the RGB pixels, in
        hexadecimal), `width` and `height` in pixels, as the model was shown it. Of a video each frame is one.

    Raises:
        AgentNotFound: nothing is known of it.
    """
    view = _view(await store.call("info", key), await _names(backend))
    view["pictures"] = await asyncio.to_thread(_pictures, await store.call("transcript", key))
    for *stand, _ in await store.call("blocks", key):
        if await store.held(*stand):
            return {**view, "tier": "hot"}
    return {**view, "tier": "warm" if await store.call("disk_kept", key) else "cold"}


async def fork_agent(store: Store, key: str, target: Any, limits: Limits | None = None) -> dict[str, Any]:
    """Copy the agent to the new id `target` of the same tenant.

    Args:
        limits: what the tenant may have on a node's disk.

    Raises:
        AgentNotFound, AgentExists, InvalidRequest, QuotaExceeded: there is nothing to copy, or no place for it.
    """
    if not isinstance(target, str) or not target:
        raise InvalidRequest("as must be the new agent's id", param="as")
    new = _key(target, "as", key.partition("/")[0])
    branches = await store.call("fork", key, new, limits)
    return {"id": target, "object": "agent.fork", "forked_from": agent_id_of(key), "branches": branches}


async def release_agent(store: Store, key: str) -> dict[str, Any]:
    """Drop the agent's KV and its pictures' features from the replicas' memory; what is on the disk stays.

    Raises:
        AgentNotFound: nothing is known of it.
    """
    await store.call("info", key)
    released = await _release(store, await store.call("blocks", key))
    return {"id": agent_id_of(key), "object": "agent.release", "bytes": released}


async def forget_agent(memory: AgentMemory, key: str) -> bool:
    """Erase all that is known of the agent. Returns whether there was anything."""
    store = memory.store
    blocks = await store.call("blocks", key)
    known = await store.call("forget", key)
    memory.lines.forget(key)
    await _release(store, blocks)
    return known


async def _release(store: Store, blocks: list[Any]) -> int:
    return sum([await store.release(*stand) for stand in blocks])


async def _names(backend: Backend) -> dict[bytes, str]:
    return {model.words_id: model.name for model in await backend.models()}


def _view(described: dict[str, Any], names: dict[bytes, str]) -> dict[str, Any]:
    branches = [_branch_view(branch, names) for branch in described["branches"]]
    shown = next((each for each in branches if each["branch"] == described["main"]), branches[0])
    return {
        "id": agent_id_of(described["agent"]),
        "object": "agent",
        "model": shown["model"],
        "tokens": shown["tokens"],
        "blocks": shown["blocks"],
        "messages": shown["messages"],
        "turns": shown["turns"],
        "bytes": sum(branch["nbytes"] for branch in described["branches"]),
        "created": int(min(branch["created"] for branch in described["branches"])),
        "last_used": int(max(branch["used"] for branch in described["branches"])),
        "branches": branches,
    }


def _branch_view(branch: dict[str, Any], names: dict[bytes, str]) -> dict[str, Any]:
    return {
        "branch": branch["branch"],
        "epoch": branch["epoch"],
        "model": names.get(words := branch["files"] or branch["model"], words.hex()),
        "tokens": branch["tokens"],
        "blocks": branch["tokens"] // BLOCK_TOKENS,
        "messages": branch["messages"],
        "turns": branch["turns"],
        "last_used": int(branch["used"]),
    }


def _pictures(transcript: bytes) -> list[dict[str, Any]]:
    said = pictures_said(json.loads(transcript))
    return [{"hash": each.hash.hex(), "width": each.width, "height": each.height} for each in said]


def _key(agent: str, name: str, tenant: str) -> str:
    try:
        return agent_key(agent, tenant)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("agent_id", name, 1), param=name) from None
