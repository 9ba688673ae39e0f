"""One agent as a Python handle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Unpack

from pydantic import JsonValue

from ..agents.memory import AgentMemory
from ..pipeline.generation import Generator
from ..pipeline.streams import Finished
from ..protocols.openai.messages import read_messages
from ..requests.history import Message
from ..requests.options import GenerationOptions, make_options
from ..requests.remembered import Remembered
from ..requests.requests import ChatRequest, agent_key
from ..requests.sent import without_kept
from ..text.answers.sequence_text import TextDelta
from ..views.agents import agent_info, forget_agent, fork_agent, release_agent
from .background import BackgroundLoop, Feed, blocking, on_loop


@dataclass(frozen=True)
class Injection:
    """The cost of an injection: the tokens of the agent's whole conversation, how many of them were cached, and how
    many were computed."""

    tokens: int
    cached_tokens: int
    computed_tokens: int


class Agent:
    """One agent. Each turn continues its transcript, which is kept on disk and outlives this handle and the server.

    Turns of one agent run one after the other, from all clients. Methods with `_sync` are for code without an event
    loop.

    Attributes:
        remembered: whether the last turn or injection of this handle is kept in the agent's memory, and if not, why;
            None before the first. An answer is returned even if it cannot be kept.
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
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    @on_loop
    async def ask(self, text: str, **options: Unpack[GenerationOptions]) -> str:
        """Sends `text` and returns the whole answer. Options as in `Cluster.generate`.

        Raises:
            AgentBusy: an earlier turn of this agent takes longer than `timeouts.turn_wait_s`.
        """
        async with aclosing(self._turn(text, options)) as pieces:
            return "".join([piece async for piece in pieces])

    ask_sync = blocking(ask)

    async def chat(self, text: str, **options: Unpack[GenerationOptions]) -> AsyncIterator[str]:
        """Sends `text` and yields the answer as it comes. If the iteration is left early, the turn is not kept."""
        feed = await self._loop.wait(self._start_feed(text, options))
        try:
            while (piece := await self._loop.wait(feed.next())) is not None:
                yield piece
        finally:
            await self._loop.wait(feed.close())

    def chat_sync(self, text: str, **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """`chat` for code without an event loop."""
        feed = self._loop.run(self._start_feed(text, options))
        try:
            while (piece := self._loop.run(feed.next())) is not None:
                yield piece
        finally:
            self._loop.run(feed.close())

    @on_loop
    async def inject(self, messages: str | Sequence[Mapping[str, object]]) -> Injection:
        """Puts messages into the agent's memory, without a reply; a string is a user message. Their KV is computed now,
        not in the next turn.

        Raises:
            AgentBusy: an earlier turn of this agent takes longer than `timeouts.turn_wait_s`.
        """
        given = _said(messages) if isinstance(messages, str) else await asyncio.to_thread(read_messages, messages)
        usage, self.remembered = await self._generator.inject(self._request(given, {}))
        return Injection(usage.prompt_tokens, usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens)

    inject_sync = blocking(inject)

    @on_loop
    async def fork(self, as_id: str) -> Agent:
        """Makes a new agent with a copy of this one's memory. KV is shared, not copied; with `share: agent` the new
        agent computes its own KV at its first turn.

        Raises:
            AgentNotFound: there is no such agent.
            AgentExists: there is already an agent `as_id`.
        """
        await fork_agent(self._memory.store, self._key, as_id)
        other = Agent(self._generator, self._loop, as_id, self._model, None)
        other._opening = self._opening
        return other

    fork_sync = blocking(fork)

    @on_loop
    async def release(self) -> int:
        """Drops this agent's KV from the replicas' memory; KV on disk stays. Returns the number of bytes.

        Raises:
            AgentNotFound: there is no such agent.
        """
        return (await release_agent(self._memory.store, self._key))["bytes"]

    release_sync = blocking(release)

    @on_loop
    async def move(self, node: str) -> dict[str, JsonValue]:
        """Moves this agent's primary to another node, where its next turns run.

        Returns:
            `from`, `to`, `moved` (False if it was already there), `tokens`, `blocks`, `bytes` and `seconds`.

        Raises:
            InvalidRequest: there is no such node.
            AgentNotFound: there is no such agent.
            AgentBusy: a turn of it is running.
        """
        return await self._memory.moves.move(self._key, node)

    move_sync = blocking(move)

    @on_loop
    async def forget(self) -> bool:
        """Erases this agent's memory; a running turn is not kept. Returns whether there was any memory."""
        return await forget_agent(self._memory, self._key)

    forget_sync = blocking(forget)

    @on_loop
    async def info(self) -> dict[str, JsonValue]:
        """Returns tokens, blocks, bytes, messages, branches, pictures, model and last use (`views.agents.agent_info`).

        Raises:
            AgentNotFound: there is no such agent.
        """
        return await agent_info(self._memory.store, self._generator.backend, self._key)

    info_sync = blocking(info)

    @on_loop
    async def transcript(self) -> list[dict[str, JsonValue]]:
        """Returns the conversation so far as OpenAI messages; [] for an unknown agent."""
        return without_kept(await asyncio.to_thread(json.loads, await self._memory.store.transcript(self._key)))

    transcript_sync = blocking(transcript)

    @property
    def _memory(self) -> AgentMemory:
        assert self._generator.memory is not None
        return self._generator.memory

    def _request(self, messages: Sequence[Message], options: GenerationOptions) -> ChatRequest:
        return ChatRequest(
            messages,
            model=self._model,
            agent=self.agent_id,
            options=make_options(**options),
            agent_continue=True,
            opening=self._opening,
        )

    async def _start_feed(self, text: str, options: GenerationOptions) -> Feed:
        return Feed(self._turn(text, options), self._generator.config.endpoint.unread_tokens_max)

    async def _turn(self, text: str, options: GenerationOptions) -> AsyncGenerator[str, None]:
        stream = await self._generator.start_chat(self._request(_said(text), options))
        try:
            async with aclosing(aiter(stream)) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        yield event.text
                    elif isinstance(event, Finished):
                        self.remembered = stream.remembered
        finally:
            await stream.abort()


def _said(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]
