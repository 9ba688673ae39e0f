"""The application over a store in this process, for tests of agents' memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.actors.protocol.router_messages import AgentPlace
from satchel.actors.protocol.store_messages import AskUnpack, BranchKV, Moved, Unpacked
from satchel.api.agents.memory import AgentMemory
from satchel.api.app import create_app
from satchel.api.pipeline.generation import Generator
from satchel.cluster.config.config import Config
from satchel.cluster.errors import AgentNotFound, InvalidRequest, Unavailable

from ..kv_store.lone_store import LoneStore


class LocalStore:
    """`agents.Store` over the actor's own class. Calls of `down` methods fail, calls of `stuck` ones never return.

    Attributes:
        asked: the same, called as the store's client is.
    """

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        self.actor = LoneStore(config, folder)
        self.asked: Any = self
        self.down: set[str] = set()
        self.stuck: set[str] = set()
        self.calls: list[str] = []
        self.released: list[tuple[bytes, bytes, list[bytes], bytes, list[bytes]]] = []
        self.released_of: set[str] = set()
        """Agents whose prepared KV is released."""
        self.in_memory = 0
        self.models: list[bytes] = []
        self.cleared = 0

    def __getattr__(self, method: str) -> Any:
        return partial(self.ask, method)

    async def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Returns the answer of the store's client to a call of this method."""
        self.calls.append(method)
        if method in self.down:
            raise Unavailable("the store does not answer")
        if method in self.stuck:
            await asyncio.Event().wait()
        return await getattr(self.actor.client, method)(*arguments, **named)

    async def where(self, agent: str) -> AgentPlace:
        await self.ask("info", agent)
        return AgentPlace(agent, "local", True, 1)

    async def places(self, agents: Sequence[str]) -> dict[str, AgentPlace]:
        found: dict[str, AgentPlace] = {}
        for agent in agents:
            with suppress(AgentNotFound):
                found[agent] = await self.where(agent)
        return found

    async def move(self, agent: str, node: str) -> Moved:
        raise InvalidRequest(f"there is no node {node!r}", param="to")

    async def unpack(self, agent: str, path: str, **how: Any) -> Unpacked:
        return await self.ask("unpack", AskUnpack(agent, path, self.models, **how))

    async def release(self, branch: BranchKV) -> int:
        kept = branch.kept
        self.released_of.add(kept.agent)
        self.released.append((branch.model, kept.root, kept.block_ids, kept.first, kept.embeddings))
        return 1000 * len(kept.block_ids)

    async def held(self, branch: BranchKV) -> int:
        return self.in_memory

    async def clear(self) -> int:
        self.cleared += 1
        return 7


class Remembering:
    """An endpoint with agents' memory, and shorthand for what clients do with it."""

    def __init__(self, backend: Any, config: Config, store: LocalStore | None = None, **access: Any) -> None:
        self.backend = backend
        self.store = store or LocalStore(config)
        self.memory = AgentMemory(self.store.asked)
        self.generator = Generator(backend, config, memory=self.memory)
        transport = httpx.ASGITransport(create_app(backend, config, generator=self.generator, **access))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def draw(self, text: str, *, end: str = "<|im_end|>", finish: str = "stop") -> list[int]:
        """Lets the model answer `text` with one token per character, as no tokenizer would encode it."""
        encode = self.backend.text.tokenizer.encode
        tokens = [token for character in text for token in encode(character)] + encode(end)
        self.backend.play(SequenceUpdate("row", tokens, finish=finish, cached_tokens=0))
        return tokens

    async def post(self, body: dict[str, Any], agent: str = "ann", **headers: str) -> httpx.Response:
        return await self.client.post(
            "/v1/chat/completions", json=body, headers={"X-Agent-ID": agent, **headers} if agent else headers
        )

    async def say(self, *messages: Any, agent: str = "ann", **fields: Any) -> str:
        """Runs a turn and returns the answer. Strings are alternating user and assistant messages."""
        response = await self.post({"messages": spoken(*messages), **fields}, agent)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    async def go_on(self, *messages: Any, agent: str = "ann", **fields: Any) -> str:
        return await self.say(*messages, agent=agent, agent_continue=True, **fields)

    @property
    def prompt(self) -> list[int]:
        return self.backend.requests[-1]["prompt"]

    def rendered(self, *messages: Any, text: Any = None) -> str:
        return (text or self.backend.text).template.render(spoken(*messages))

    async def transcript(self, agent: str = "ann") -> list[Any]:
        return json.loads(await self.store.transcript(f"default/{agent}"))

    async def branches(self, agent: str = "ann") -> list[dict[str, Any]]:
        response = await self.client.get(f"/v1/agents/{agent}")
        return response.json()["branches"] if response.status_code == 200 else []


def spoken(*messages: Any) -> list[Any]:
    roles = ("user", "assistant")
    return [
        {"role": roles[index % 2], "content": message} if isinstance(message, str) else message
        for index, message in enumerate(messages)
    ]
