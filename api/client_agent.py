"""One agent as a Python handle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from .agent_views import agent_info, forget_agent, fork_agent, release_agent
from .agents import AgentMemory
from .background import BackgroundLoop, Feed
from .generation import Generator
from .options import make_options
from .remembered import Remembered
from .requests import ChatRequest, agent_key
from .row_text import TextDelta
from .streams import Finished

T = TypeVar("T")


@dataclass(frozen=True)
class Injection:
    """What putting something into an agent's memory took: the tokens of its whole conversation now, how many of them
    were in memory already, and how many were computed."""

    tokens: int
    cached_tokens: int
    computed_tokens: int


class Agent:
    """One agent: each turn continues its transcript, which the cluster keeps: it outlives this handle and the server.

    Turns of one agent run one after the other, whoever asks. What runs on the cluster's loop are the coroutines whose
    names begin with an underscore.

    Attributes:
        remembered: of the turn or injection that ended last here, whether it is kept in the agent's memory, and why
            not; None before the first. An answer is returned even where nothing can be kept of it.
    """

    def __init__(
        self, generator: Generator, loop: BackgroundLoop, agent_id: str, model: str, system: str | None
    ) -> None:
        self.agent_id = agent_id
        self.remembered: Remembered | None = None
        self._generator = generator
        self._loop = loop
        self._key = agent_key(agent_id)
        self._model = model
        self._opening = [] if system is None else [{"role": "system", "content": system}]

    async def ask(self, text: str, **options: Any) -> str:
        """Say `text` and return the whole answer. Options as in `Cluster.generate`.

        Raises:
            AgentBusy: an earlier turn of this agent takes longer than `timeouts.turn_wait_s`.
        """
        return await self._wait(self._ask(text, options))

    def ask_sync(self, text: str, **options: Any) -> str:
        """`ask` for code without an event loop."""
        return self._run(self._ask(text, options))

    async def chat(self, text: str, **options: Any) -> AsyncIterator[str]:
        """Say `text` and yield the answer as it comes. A turn left early is not remembered."""
        feed = await self._wait(self._start_feed(text, options))
        try:
            while (piece := await self._wait(feed.next())) is not None:
                yield piece
        finally:
            await self._wait(feed.close())

    def chat_sync(self, text: str, **options: Any) -> Iterator[str]:
        """`chat` for code without an event loop."""
        feed = self._run(self._start_feed(text, options))
        try:
            while (piece := self._run(feed.next())) is not None:
                yield piece
        finally:
            self._run(feed.close())

    async def inject(self, messages: str | Sequence[Any]) -> Injection:
        """Put messages (a string is one of the user) into the agent's memory, without a reply. They are computed now,
        so that the next turn need not.

        Raises:
            AgentBusy: an earlier turn of this agent takes longer than `timeouts.turn_wait_s`.
        """
        return await self._wait(self._inject(messages))

    def inject_sync(self, messages: str | Sequence[Any]) -> Injection:
        """`inject` for code without an event loop."""
        return self._run(self._inject(messages))

    async def fork(self, as_id: str) -> Agent:
        """A new agent with a copy of this one's memory. KV is shared, not copied; under `share: agent` the new one
        computes its own at its first turn.

        Raises:
            AgentNotFound: nothing is known of this agent yet.
            AgentExists: there is an agent `as_id`.
        """
        await self._wait(fork_agent(self._memory.store, self._key, as_id))
        return self._other(as_id)

    def fork_sync(self, as_id: str) -> Agent:
        """`fork` for code without an event loop."""
        self._run(fork_agent(self._memory.store, self._key, as_id))
        return self._other(as_id)

    async def release(self) -> int:
        """Drop this agent's KV from the replicas' memory and keep what is on the disk. Returns the number of bytes.

        Raises:
            AgentNotFound: nothing is known of this agent.
        """
        return (await self._wait(release_agent(self._memory.store, self._key)))["bytes"]

    def release_sync(self) -> int:
        """`release` for code without an event loop."""
        return self._run(release_agent(self._memory.store, self._key))["bytes"]

    async def move(self, node: str) -> dict[str, Any]:
        """Make another node this agent's home; its memory goes there, and its next turns with it.

        Returns:
            `from`, `to`, `moved` (False where it was there already), `tokens`, `blocks`, `bytes` and `seconds`.

        Raises:
            InvalidRequest: there is no such node.
            AgentNotFound: nothing is known of this agent.
            AgentBusy: a turn of it is under way.
        """
        return await self._wait(self._memory.moves.move(self._key, node))

    def move_sync(self, node: str) -> dict[str, Any]:
        """`move` for code without an event loop."""
        return self._run(self._memory.moves.move(self._key, node))

    async def forget(self) -> bool:
        """Erase all that is known of this agent; a turn under way is not remembered. Returns whether there was any."""
        return await self._wait(forget_agent(self._memory, self._key))

    def forget_sync(self) -> bool:
        """`forget` for code without an event loop."""
        return self._run(forget_agent(self._memory, self._key))

    async def info(self) -> dict[str, Any]:
        """Tokens, blocks, bytes, messages, branches, pictures, model and last use (see `agent_views.agent_info`).

        Raises:
            AgentNotFound: nothing is known of this agent.
        """
        return await self._wait(agent_info(self._memory.store, self._generator.backend, self._key))

    def info_sync(self) -> dict[str, Any]:
        """`info` for code without an event loop."""
        return self._run(agent_info(self._memory.store, self._generator.backend, self._key))

    async def transcript(self) -> list[dict[str, Any]]:
        """What was said so far, as OpenAI messages; [] for an agent that nothing is known of."""
        return await self._wait(self._transcript())

    def transcript_sync(self) -> list[dict[str, Any]]:
        """`transcript` for code without an event loop."""
        return self._run(self._transcript())

    @property
    def _memory(self) -> AgentMemory:
        assert self._generator.memory is not None
        return self._generator.memory

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._loop.wait(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def _other(self, agent_id: str) -> Agent:
        other = Agent(self._generator, self._loop, agent_id, self._model, None)
        other._opening = self._opening
        return other

    def _request(self, messages: Sequence[Any], options: dict[str, Any]) -> ChatRequest:
        return ChatRequest(
            messages,
            model=self._model,
            agent=self.agent_id,
            options=make_options(**options),
            agent_continue=True,
            opening=self._opening,
        )

    async def _start_feed(self, text: str, options: dict[str, Any]) -> Feed:
        return Feed(self._turn(text, options), self._generator.config.endpoint.unread_tokens_max)

    async def _ask(self, text: str, options: dict[str, Any]) -> str:
        async with aclosing(self._turn(text, options)) as pieces:
            return "".join([piece async for piece in pieces])

    async def _turn(self, text: str, options: dict[str, Any]) -> AsyncGenerator[str, None]:
        stream = await self._generator.start_chat(self._request([{"role": "user", "content": text}], options))
        try:
            async with aclosing(aiter(stream)) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        yield event.text
                    elif isinstance(event, Finished):
                        self.remembered = stream.remembered
        finally:
            await stream.abort()

    async def _inject(self, messages: str | Sequence[Any]) -> Injection:
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        usage, self.remembered = await self._generator.inject(self._request(given, {}))
        return Injection(usage.prompt_tokens, usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens)

    async def _transcript(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(json.loads, await self._memory.store.call("transcript", self._key))
