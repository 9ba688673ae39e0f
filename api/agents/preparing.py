"""Has prompts prefilled that agents will probably send next, while their replica has nothing else to do.

After a turn the next prompt is known up to where the results of tools or a user's message begin. Mostly it continues
the turn, and memory has all of it. But a program may rewrite its history (`programs.py`), and a template may drop the
reasoning of earlier turns: then everything behind the first change is new, and prefilled ahead.

Nothing here delays a request: turns are looked at after their last event, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import cast

from ...actors.protocol.block_ids import BLOCK_TOKENS
from ...actors.protocol.replica_messages import GenerateRequest, KVSelection, Sampling
from ...actors.protocol.store_messages import BranchKV
from ...cluster.config.config import Config
from ...cluster.errors import SatchelError
from ..requests.backend import Backend, Generation
from ..requests.history import Message
from ..requests.requests import Chat, prepare_chat, tokens_before
from ..requests.sent import without_kept
from .memory import AgentMemory, KnownLine, past_of
from .programs import coming_after, program_of

_log = logging.getLogger(__name__)

TURNS_MAX = 64
"""How many agents' turns wait; of the oldest ones nothing is learned."""

_UNKNOWN = "Kakorrhaphiophobia."
"""Stands for what is not known of the next prompt."""


@dataclass(frozen=True)
class _Turn:
    chat: Chat
    answer: Message
    replica: str
    model_id: bytes


class Preparations:
    """Looks at agents' turns after their end. For one event loop.

    Args:
        memory: of the agents; `memory.programs` learns from the turns.
    """

    def __init__(self, backend: Backend, config: Config, memory: AgentMemory) -> None:
        self._backend = backend
        self._memory = memory
        self._enabled = config.scheduling.prepare_while_idle
        self._date_s = config.date_days * 86_400.0
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._working: asyncio.Task[None] | None = None

    def turn_ended(self, chat: Chat, answer: Message, generation: Generation) -> None:
        """Notes a turn that is committed. Does not wait."""
        if not self._enabled or chat.media or chat.truncated_messages:
            return
        agent = chat.request.agent_key
        self._turns.pop(agent, None)
        self._turns[agent] = _Turn(chat, answer, generation.replica, generation.model_id)
        if len(self._turns) > TURNS_MAX:
            self._turns.popitem(last=False)
        if self._working is None or self._working.done():
            self._working = self._memory.background(self._work())

    async def _work(self) -> None:
        while self._turns:
            _, turn = self._turns.popitem(last=False)
            try:
                await self._prepare(turn)
            except SatchelError as error:
                # It would only save time.
                _log.debug("agent %s: nothing is prepared: %s", turn.chat.request.agent, error.message)
            except Exception:
                _log.exception("agent %s: nothing is prepared", turn.chat.request.agent)

    async def _prepare(self, turn: _Turn) -> None:
        request, model = turn.chat.request, turn.chat.model
        made = await asyncio.to_thread(self._made, turn)
        if not self._lines(turn):
            # It was forgotten meanwhile, perhaps before `programs` noted the turn.
            self._memory.programs.forget(request.agent_key)
            return
        if made is None:
            return
        prompt, known = made
        sequence = GenerateRequest(
            request_id=f"prepared/{secrets.token_hex(8)}",
            consumer="",
            model=model.info.replicas_of,
            adapter=model.info.adapter,
            agent=request.agent_key,
            prompt=prompt,
            block_ids=[],
            root_id=b"",
            sampling=Sampling(temperature=0.0, max_tokens=0),
            remembered_tokens=known,
            tenant=request.caller.tenant,
            memory_bytes_max=request.caller.limits.memory_bytes_max,
            disk_bytes_max=request.caller.limits.disk_bytes_max,
        )
        await self._backend.prepare(turn.replica, turn.model_id, sequence)
        if not self._lines(turn):
            # It was forgotten while the prompt was on its way.
            prepared = KVSelection(b"", [], b"", agent=request.agent_key)
            await self._memory.store.release(BranchKV(turn.model_id, prepared))

    def _lines(self, turn: _Turn) -> list[KnownLine]:
        """Returns what the agent's memory has."""
        chat = turn.chat
        return [*self._memory.lines.get((chat.request.agent_key, chat.model.info.files_id)).values()]

    def _made(self, turn: _Turn) -> tuple[list[int], int] | None:
        """Returns the known tokens of the next prompt, and how many of them memory has; None if it has about all."""
        chat, answer = turn.chat, turn.answer
        request, text, said = chat.request, chat.text_model, [*chat.messages, turn.answer]
        lines = self._lines(turn)
        if not lines:
            # It was forgotten meanwhile.
            return None
        key = program_of(request.program, request.caller.tenant, request.tools, chat.messages)
        predicted = self._memory.programs.turn(key, request.agent_key, chat.messages, answer)
        habits = text.template.habits(request.template_kwargs)
        drops = habits.drops_steps if answer.get("tool_calls") else habits.drops_thinking
        if predicted is None and not drops:
            return None
        coming = coming_after(said, _UNKNOWN)
        # Only the first of several results has the mark.
        coming[1:] = coming_after(said)[1:]
        messages = cast(list[Message], without_kept([*(predicted or said), *coming]))
        asked = replace(request, messages=messages, agent_continue=False, form=None, prefill="")
        following = prepare_chat(text, chat.model, asked, past_of(lines, self._date_s))
        _, mark, rest = following.text.rpartition(_UNKNOWN)
        tokens = tokens_before(text, following.prompt, mark + rest) if mark else 0
        known = following.remembered_tokens
        if tokens // BLOCK_TOKENS <= known // BLOCK_TOKENS:
            return None
        return following.prompt[:tokens], known
