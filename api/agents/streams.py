"""What an agent remembers of an answer: its tokens, their text and its message, kept before the last event."""

from __future__ import annotations

import asyncio

from ..generation.backend import Generation
from ..generation.history import Message
from ..generation.remembered import Remembered
from ..generation.requests import Chat
from ..text.model import TextModel
from .memory import CommittedTurn, Turn

_CONTEXT_TOKENS = 6


class TurnKeeper:
    """Keeps the answer of a chat as an agent's turn. Implements `streams.AnswerKeeper`.

    Args:
        chat: what the turn answers.
        text: of the model, which spells the answer's tokens.
    """

    def __init__(self, turn: Turn, chat: Chat, text: TextModel) -> None:
        self._turn = turn
        self._chat = chat
        self._text = text

    @property
    def remembered(self) -> Remembered:
        return self._turn.remembered

    async def keep(self, tokens: list[int], message: Message, generation: Generation) -> None:
        """Commit the turn under the id of the model where the row ended; its agent may follow the row there."""
        chat, text = self._chat, self._text
        spelled = await asyncio.to_thread(spell, text, list(text.plain(chat.prompt[-_CONTEXT_TOKENS:])), tokens)
        if chat.prefill and isinstance(content := message["content"], str):
            message["content"] = chat.prefill + content
        said = [*chat.messages, message]
        kept = CommittedTurn([*chat.prompt, *tokens], chat.text + spelled, said, chat.continuation, generation.model_id)
        await self._turn.commit(kept)
        self._turn.move_after(generation.move_to)

    def leave(self) -> None:
        self._turn.leave()


def spell(text: TextModel, prompt: list[int], tokens: list[int]) -> str:
    """Returns the text that `tokens` add after `prompt`, special tokens spelled out."""
    context = prompt[-_CONTEXT_TOKENS:]
    before, whole = text.decode(context), text.decode([*context, *tokens])
    return whole[len(before) :] if whole.startswith(before) else text.decode(tokens)
