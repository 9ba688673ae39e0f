"""What an agent remembers of an answer: its tokens, their text and its message, kept before the last event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...cluster.errors import InvalidRequest
from ..requests.backend import Generation
from ..requests.conversation import with_arguments
from ..requests.history import Message
from ..requests.remembered import Remembered
from ..requests.requests import Chat
from ..text.templates.template import Template
from ..text.tokenizer import Tokenizer
from .memory import CommittedTurn, Turn

_CONTEXT_TOKENS = 6

OnKept = Callable[[Chat, Message, Generation], None]
"""Takes a conversation, its answer, and the sequence that generated it."""


class TurnKeeper:
    """Commits the answer of a chat as an agent's turn. Implements `streams.AnswerKeeper`.

    Args:
        chat: the conversation that the turn answers.
        on_kept: called once the turn is committed.
    """

    def __init__(self, turn: Turn, chat: Chat, on_kept: OnKept | None = None) -> None:
        self._turn = turn
        self._chat = chat
        self._on_kept = on_kept

    @property
    def remembered(self) -> Remembered:
        return self._turn.remembered

    async def keep(self, tokens: list[int], message: Message, generation: Generation) -> None:
        """Commits the turn under the model id of the replica where the sequence ended; the agent's memory may then move
        to that replica's node."""
        chat, text, prefill = self._chat, self._chat.text_model, self._chat.request.prefill
        context = list(text.plain(chat.prompt[-_CONTEXT_TOKENS:]))
        spelled = await asyncio.to_thread(spell, text.tokenizer, context, tokens)
        if prefill and isinstance(content := message["content"], str):
            message["content"] = prefill + content
        if written := await asyncio.to_thread(written_otherwise, text.template, spelled, message):
            message["written"] = written
        said = [*chat.messages, message]
        kept = CommittedTurn([*chat.prompt, *tokens], chat.text + spelled, said, chat.continuation, generation.model_id)
        await self._turn.commit(kept)
        self._turn.move_after(generation.move_to)
        if self._on_kept is not None and not self.remembered.unkept:
            self._on_kept(chat, message, generation)

    def leave(self) -> None:
        self._turn.leave()


def written_otherwise(template: Template, spelled: str, message: Message) -> str:
    """Returns an answer with calls as the model wrote it, without its reasoning; "" if the template writes it in the
    same way."""
    if not message.get("tool_calls") or template.is_harmony:
        return ""
    for end in template.bare.turn_ends:
        spelled = spelled.partition(end)[0]
    if template.has_thinking:
        spelled = spelled.rpartition(template.think_end)[2].lstrip("\n")
    asked: Message = {"role": "user", "content": "?"}
    plain: Message = {"role": "assistant", "content": "Something said."}
    try:
        shown = template.render(with_arguments([asked, plain]), None, {}, generation_prompt=False)
        said = template.render(with_arguments([asked, message]), None, {}, generation_prompt=False)
    except InvalidRequest:
        return spelled
    begin = shown.rfind(str(plain["content"]))
    return "" if said.startswith(shown[:begin]) and said[begin:].startswith(spelled) else spelled


def spell(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Returns the text that `tokens` add after `prompt`, special tokens spelled out."""
    context = prompt[-_CONTEXT_TOKENS:]
    before, whole = tokenizer.decode(context), tokenizer.decode([*context, *tokens])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)
