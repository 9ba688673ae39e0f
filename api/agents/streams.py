"""A running row whose answer an agent remembers: what is drawn is written down, and kept before the last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ...actors.protocol.messages import RowUpdate
from ..generation.backend import Generation
from ..generation.history import Message, answer_message
from ..generation.requests import Chat
from ..generation.streams import Event, Finished, TextStream
from ..text.model import TextModel
from ..text.pipeline import ReasoningDelta, ToolCall
from ..text.row_text import TextDelta
from .memory import Kept, Turn

_CONTEXT_TOKENS = 6

Keep = Callable[[list[int], Message], Awaitable[None]]


class RecordedGeneration:
    """A generation that writes down the tokens it passes on."""

    def __init__(self, generation: Generation) -> None:
        self.replica, self.node, self.why = generation.replica, generation.node, generation.why
        self.tokens: list[int] = []
        self._generation = generation

    @property
    def model_id(self) -> bytes:
        return self._generation.model_id

    @property
    def move_to(self) -> str:
        return self._generation.move_to

    def __aiter__(self) -> AsyncIterator[RowUpdate]:
        return self._recorded()

    async def _recorded(self) -> AsyncIterator[RowUpdate]:
        async for update in self._generation:
            self.tokens += update.tokens
            yield update

    async def abort(self) -> None:
        await self._generation.abort()


class TurnStream(TextStream):
    """The stream of an agent's turn. Its `Finished` comes once the answer is kept; left early, the turn is given back.

    Args:
        turn: is given back when the stream is left.
        keep: called with the answer's tokens and message; what it raises ends the stream.
        rest: as for `TextStream`.
    """

    def __init__(self, generation: Generation, *positional: Any, turn: Turn, keep: Keep, **rest: Any) -> None:
        self._recorded = RecordedGeneration(generation)
        super().__init__(self._recorded, *positional, **rest)
        self.remembered = turn.remembered
        self._turn = turn
        self._keep = keep
        self._reading = False

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        return self._remembered()

    async def _remembered(self) -> AsyncGenerator[Event, None]:
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        try:
            async with aclosing(super().__aiter__()) as events:
                self._reading = True
                async for event in events:
                    if isinstance(event, TextDelta):
                        text.append(event.text)
                    elif isinstance(event, ReasoningDelta):
                        reasoning.append(event.text)
                    elif isinstance(event, ToolCall):
                        calls.append(event)
                    elif isinstance(event, Finished):
                        message = answer_message("".join(text), "".join(reasoning), calls)
                        await self._keep(self._recorded.tokens, message)
                        self.remembered = self._turn.remembered
                        self._turn.move_after(self._recorded.move_to)
                    self._reading = False
                    yield event
                    self._reading = True
        finally:
            self._reading = False
            self._turn.leave()

    def begin_abort(self) -> asyncio.Task[None] | None:
        # A row that has said all aborts itself while it is read; anybody else's abort means that nobody reads on.
        if not self._reading:
            self._turn.leave()
        return super().begin_abort()


def keeping(turn: Turn, chat: Chat, text: TextModel, generation: Generation) -> Keep:
    """What keeps the answer of `chat` for `turn`'s agent, under the id of the model where `generation` ended."""

    async def keep(tokens: list[int], message: Message) -> None:
        spelled = await asyncio.to_thread(spell, text, list(text.plain(chat.prompt[-_CONTEXT_TOKENS:])), tokens)
        said = [*chat.messages, message]
        kept = Kept([*chat.prompt, *tokens], chat.text + spelled, said, chat.continuation, generation.model_id)
        await turn.commit(kept)

    return keep


def spell(text: TextModel, prompt: list[int], tokens: list[int]) -> str:
    """The text that `tokens` add behind `prompt`, special tokens spelled out."""
    context = prompt[-_CONTEXT_TOKENS:]
    before, whole = text.decode(context), text.decode([*context, *tokens])
    return whole[len(before) :] if whole.startswith(before) else text.decode(tokens)
