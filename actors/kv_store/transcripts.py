"""Each agent's own conversation, as messages. Pure.

A turn is taken (`begin`) and given back (`commit` or `abandon`), one at a time for each agent, so that two askers of
one agent both find their words in its memory. A turn that is never given back ends with its lease.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass
class _Agent:
    messages: list[Message] = field(default_factory=list)
    epoch: int = 0
    turn: str | None = None
    turn_ends: float = 0.0
    nbytes: int = 0


class Transcripts:
    """Transcripts by agent key.

    Args:
        bytes_max: of all messages as JSON; beyond it the agents that were quiet longest are forgotten.
    """

    def __init__(self, bytes_max: int = 256 * 2**20) -> None:
        self._agents: OrderedDict[str, _Agent] = OrderedDict()
        self._bytes_max = bytes_max
        self.nbytes = 0

    def begin(self, agent: str, turn: str, now: float, lease_s: float) -> tuple[list[Message], int] | None:
        """The agent's messages and their epoch, and the turn is `turn`'s; None while another turn runs."""
        state = self._agents.setdefault(agent, _Agent())
        self._agents.move_to_end(agent)
        if state.turn is not None and state.turn != turn and now < state.turn_ends:
            return None
        state.turn, state.turn_ends = turn, now + lease_s
        return list(state.messages), state.epoch

    def renew(self, agent: str, turn: str, now: float, lease_s: float) -> bool:
        """Extend the turn's lease. False when the turn was lost."""
        state = self._agents.get(agent)
        if state is None or state.turn != turn:
            return False
        state.turn_ends = now + lease_s
        return True

    def commit(self, agent: str, turn: str, epoch: int, messages: list[Message]) -> bool:
        """Append `messages` and end the turn. False, and nothing changes, if the turn was lost or the epoch is old."""
        state = self._agents.get(agent)
        if state is None or state.turn != turn or state.epoch != epoch:
            return False
        state.messages.extend(messages)
        state.epoch += 1
        state.turn = None
        added = sum(len(json.dumps(message)) for message in messages)
        state.nbytes += added
        self.nbytes += added
        self._agents.move_to_end(agent)
        self._evict()
        return True

    def abandon(self, agent: str, turn: str) -> None:
        """End the turn without a word."""
        state = self._agents.get(agent)
        if state is not None and state.turn == turn:
            state.turn = None
            if not state.messages:
                del self._agents[agent]

    def messages(self, agent: str) -> list[Message]:
        state = self._agents.get(agent)
        return list(state.messages) if state else []

    def forget(self, agent: str) -> bool:
        """Erase the agent. A turn under way can no longer commit."""
        state = self._agents.pop(agent, None)
        self.nbytes -= state.nbytes if state else 0
        return state is not None

    def _evict(self) -> None:
        quiet = [agent for agent, state in self._agents.items() if state.turn is None] if self._over() else []
        for agent in quiet:
            if not self._over():
                return
            self.forget(agent)

    def _over(self) -> bool:
        return self.nbytes > self._bytes_max
