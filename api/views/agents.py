"""Agents as clients see them, and operations on one: shared by the HTTP routes and the Python handles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...actors.protocol.block_ids import BLOCK_TOKENS
from ...actors.protocol.store_messages import AgentBranches, BranchKV, Head, Limits, read_parent
from ...cluster.errors import AgentNotFound, InvalidRequest, SatchelError, quoted
from ...cluster.keys import NAME
from ..agents.memory import AgentMemory
from ..agents.store import Store
from ..media.prompt import pictures_said
from ..requests.backend import Backend
from ..requests.requests import agent_key

PAGE_MAX = 100
_NODES_S = 2.0


def agent_id_of(key: str) -> str:
    """Returns the id in an agent's key, `tenant/id`."""
    return key.partition("/")[2]


async def agent_page(store: Store, backend: Backend, tenant: str, limit: int, after: str) -> dict[str, Any]:
    """Returns a page of the agents, as a list in OpenAI's form. `let_go` counts evicted agents.

    Args:
        tenant: whose agents, "" for those of all tenants: then each has its `tenant`, and `after` and `last_id` are
            `TENANT/ID`.

    Raises:
        InvalidRequest: `limit` is out of range, or `after` is not an agent id.
        Unavailable: the store does not answer.
    """
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"limit must be 1 to {PAGE_MAX}", param="limit")
    described = await store.agents(tenant, _begin(after, tenant), limit + 1)
    names = await _names(backend)
    shown = described[:limit]
    data = [_view(each, names) for each in shown]
    if not tenant:
        for view, each in zip(data, shown, strict=True):
            view["tenant"] = each.agent.partition("/")[0]
    ids = [agent_id_of(each.agent) if tenant else each.agent for each in shown]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": len(described) > limit,
        "let_go": await _let_go(backend),
    }


def _begin(after: str, tenant: str) -> str:
    """Returns the key after which a page begins."""
    if not after:
        return f"{tenant}/" if tenant else ""
    owner, _, agent = (tenant, "", after) if tenant else after.partition("/")
    return _key(agent, "after", owner) or after


async def _let_go(backend: Backend) -> int | None:
    """Returns how many agents were evicted since the stores started; None if the nodes cannot be read."""
    try:
        async with asyncio.timeout(_NODES_S):
            counts = [node.agents_let_go for node in await backend.nodes()]
    except (SatchelError, TimeoutError):
        return None
    return sum(count for count in counts if count is not None)


async def agent_info(store: Store, backend: Backend, key: str) -> dict[str, Any]:
    """Returns one agent.

    Returns:
        `program` (such as `codex`), `parent` (the id of the agent that it works for) and `parent_branch` (the branch
        that the parent was on when this agent began) if they are known, `tokens`, `blocks` (of KV that the tokens
        fill), `messages`, `turns` and `model` of its main branch, `bytes` and `branches` of all branches, `created` and
        `last_used` in Unix time, and `tier`: `hot` if a replica has blocks of it in memory, `warm` if the disk has
        blocks or tails of it, else `cold`. `pictures` are the images in the main branch's transcript, in the order of
        first use and each once: `hash` (of the RGB pixels, in hexadecimal), and `width` and `height` in pixels, as the
        model was shown it. Each frame of a video is a picture.

    Raises:
        AgentNotFound: the agent is unknown.
    """
    view = _view(await store.info(key), await _names(backend))
    view["pictures"] = await asyncio.to_thread(_pictures, await store.transcript(key))
    for branch in await store.blocks(key):
        if await store.held(branch):
            return {**view, "tier": "hot"}
    return {**view, "tier": "warm" if await store.disk_kept(key) else "cold"}


async def agent_transcripts(store: Store, key: str) -> list[bytes]:
    """Returns the transcripts of all branches of an agent, each as JSON in UTF-8; none if the agent is unknown.

    Raises:
        Unavailable: the store does not answer.
    """
    try:
        described = await store.info(key)
    except AgentNotFound:
        return []
    models = dict.fromkeys(head.files_id for head in described.branches)
    recalled = [await store.recall(key, files_id, {}) for files_id in models]
    contents = [branch.content for each in recalled for branch in each.branches]
    return [content.messages for content in contents if content is not None]


async def give_agent(memory: AgentMemory, key: str, tenant: str) -> dict[str, Any]:
    """Gives an agent to another tenant, under the same id: its transcripts and token ids. KV belongs to a tenant, so
    the agent's next turn computes it again.

    Raises:
        AgentNotFound, AgentExists: there is nothing to give, or the tenant has an agent of that id.
        AgentBusy: a turn of it runs, which would be lost.
        InvalidRequest: it already belongs to the tenant, or `tenant` is not a key's name.
        Unavailable: a store does not answer. The agent stays with its tenant, or both tenants have it.
    """
    owner, _, agent = key.partition("/")
    if NAME.fullmatch(tenant) is None:
        raise InvalidRequest(f"to: {quoted(tenant)} is no key's name", param="to")
    if tenant == owner:
        raise InvalidRequest(f"{agent!r} is already an agent of {tenant!r}", param="to")
    async with memory.held(key):
        branches = await memory.store.fork(key, agent_key(agent, tenant))
        await forget_agent(memory, key)
    return {"id": agent, "object": "agent.gift", "from": owner, "to": tenant, "branches": branches}


async def fork_agent(store: Store, key: str, target: Any, limits: Limits | None = None) -> dict[str, Any]:
    """Copies the agent to the new id `target` of the same tenant.

    Args:
        limits: the tenant's limit on a node's disk.

    Raises:
        AgentNotFound, AgentExists: there is nothing to copy, or the target exists.
        InvalidRequest: `target` is not an agent id, or the copy does not fit.
        QuotaExceeded: the tenant is over its limit.
    """
    if not isinstance(target, str) or not target:
        raise InvalidRequest("as must be the new agent's id", param="as")
    new = _key(target, "as", key.partition("/")[0])
    branches = await store.fork(key, new, limits)
    return {"id": target, "object": "agent.fork", "forked_from": agent_id_of(key), "branches": branches}


async def release_agent(store: Store, key: str) -> dict[str, Any]:
    """Drops the agent's KV and image embeddings from the replicas' memory; entries on the disk stay.

    Raises:
        AgentNotFound: the agent is unknown.
    """
    await store.info(key)
    released = await _release(store, key, await store.blocks(key))
    return {"id": agent_id_of(key), "object": "agent.release", "bytes": released}


async def forget_agent(memory: AgentMemory, key: str) -> bool:
    """Erases the agent with all its KV. Returns whether it existed."""
    store = memory.store
    blocks = await store.blocks(key)
    known = await store.forget(key)
    memory.lines.forget(key)
    memory.programs.forget(key)
    await _release(store, key, blocks)
    return known


async def _release(store: Store, key: str, branches: list[BranchKV]) -> int:
    kept = [replace(branch, kept=replace(branch.kept, agent=key)) for branch in branches]
    return sum([await store.release(branch) for branch in kept])


async def _names(backend: Backend) -> dict[bytes, str]:
    # Adapters have the files id of their model.
    return {model.info.files_id: model.info.name for model in await backend.models() if not model.info.parent}


def _view(described: AgentBranches, names: dict[bytes, str]) -> dict[str, Any]:
    branches = [_branch_view(head, names) for head in described.branches]
    shown = next((each for each in branches if each["branch"] == described.main), branches[0])
    parent, branch = read_parent(_latest(described.branches, lambda head: head.parent) or "")
    return {
        "id": agent_id_of(described.agent),
        "object": "agent",
        "program": _latest(described.branches, lambda head: head.program),
        "parent": parent or None,
        "parent_branch": branch,
        "model": shown["model"],
        "tokens": shown["tokens"],
        "blocks": shown["blocks"],
        "messages": shown["messages"],
        "turns": shown["turns"],
        "bytes": sum(head.nbytes for head in described.branches),
        "created": int(min(head.created for head in described.branches)),
        "last_used": int(max(head.used for head in described.branches)),
        "branches": branches,
    }


def _latest(branches: list[Head], value: Callable[[Head], str]) -> str | None:
    """Returns the value of the branch that was used last among those that have one."""
    return next((known for head in sorted(branches, key=lambda head: -head.epoch) if (known := value(head))), None)


def _branch_view(head: Head, names: dict[bytes, str]) -> dict[str, Any]:
    return {
        "branch": head.branch,
        "epoch": head.epoch,
        "model": names.get(head.files_id, head.files_id.hex()),
        "tokens": head.tokens,
        "blocks": head.tokens // BLOCK_TOKENS,
        "messages": head.messages,
        "turns": head.turns,
        "last_used": int(head.used),
    }


def _pictures(transcript: bytes) -> list[dict[str, Any]]:
    pictures = pictures_said(json.loads(transcript))
    return [{"hash": each.hash.hex(), "width": each.width, "height": each.height} for each in pictures]


def _key(agent: str, name: str, tenant: str) -> str:
    try:
        return agent_key(agent, tenant)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("agent_id", name, 1), param=name) from None
