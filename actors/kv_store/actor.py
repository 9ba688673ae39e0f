"""The store actor of a cluster: agents' transcripts, in memory for now."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...cluster.config import Config
from ...cluster.errors import AgentBusy
from .transcripts import Message, Transcripts

LEASE_S = 60.0
"""How long a turn may go without a sign of life."""


class KVStoreActor:
    """Keeps what agents said and heard. Named `kv_store` in the cluster's namespace."""

    def __init__(self, config: Config) -> None:
        self._transcripts = Transcripts(config.transcripts_bytes_max)
        self._turn_wait_s = config.timeouts.turn_wait_s
        self._changed = asyncio.Condition()
        # Who waits for a turn. A caller that gives up cannot cancel its call here, but abandons the turn.
        self._waiting: set[str] = set()

    async def begin(self, agent: str, turn: str) -> dict[str, Any]:
        """Take the agent's turn, waiting for the one before it.

        Returns:
            `{"messages": [...], "epoch": n}`, or an error on the wire (`AgentBusy`) after `turn_wait_s`.
        """
        ends = time.monotonic() + self._turn_wait_s
        self._waiting.add(turn)
        try:
            async with self._changed:
                while turn in self._waiting:
                    now = time.monotonic()
                    taken = self._transcripts.begin(agent, turn, now, LEASE_S)
                    if taken is not None:
                        return {"messages": taken[0], "epoch": taken[1]}
                    if now >= ends:
                        break
                    try:
                        await asyncio.wait_for(self._changed.wait(), min(1.0, ends - now))
                    except TimeoutError:
                        continue
        finally:
            self._waiting.discard(turn)
        return AgentBusy(f"agent {agent} is still busy with another turn").to_wire()

    async def renew(self, agent: str, turn: str) -> bool:
        """A sign of life of a long turn. False when the turn was lost."""
        return self._transcripts.renew(agent, turn, time.monotonic(), LEASE_S)

    async def commit(self, agent: str, turn: str, epoch: int, messages: list[Message]) -> bool:
        """Append the turn's messages; False if the agent was forgotten or the turn lost meanwhile."""
        async with self._changed:
            committed = self._transcripts.commit(agent, turn, epoch, messages)
            self._changed.notify_all()
            return committed

    async def abandon(self, agent: str, turn: str) -> None:
        """End the turn without a word, or stop waiting for it."""
        self._waiting.discard(turn)
        async with self._changed:
            self._transcripts.abandon(agent, turn)
            self._changed.notify_all()

    async def messages(self, agent: str) -> list[Message]:
        """What the agent said and heard so far."""
        return self._transcripts.messages(agent)

    async def forget(self, agent: str) -> bool:
        """Erase the agent's transcript. Returns whether there was one."""
        async with self._changed:
            forgotten = self._transcripts.forget(agent)
            self._changed.notify_all()
            return forgotten
