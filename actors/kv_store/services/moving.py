"""Moves an agent to another node, between two of its turns."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from ....cluster.errors import SatchelError, Unavailable
from ...protocol.store_messages import Fetched, Moved
from ..agents.roles import Memory
from ..replication.copies import Secondaries
from ..replication.peers import Peers
from ..replication.succession import Succession
from .node_memory import NodeMemory
from .turns import Turns

logger = logging.getLogger(__name__)


class Moving:
    """
    Args:
        node: this node's name.
        changed: called with an agent whose primary may be another node now.

    Attributes:
        moves, moved_bytes: how many agents moved to other nodes, and the bytes of their KV.
    """

    def __init__(
        self,
        node: str,
        memory: NodeMemory,
        turns: Turns,
        copies: Secondaries,
        succession: Succession,
        peers: Peers,
        *,
        changed: Callable[[str], object],
    ) -> None:
        self._timing = memory.timing
        self._node, self._work, self._roles, self._turns = node, memory.work, memory.roles, turns
        self._copies, self._succession, self._peers = copies, succession, peers
        self._changed = changed
        self.moves = self.moved_bytes = 0

    async def move(self, agent: str, to: str, *, at_once: bool = False) -> Moved:
        """Moves the agent to another node.

        Args:
            at_once: do not wait for the end of its turn. The turn is then committed on the other node, as after the
                loss of this one.

        Raises:
            AgentNotFound, AgentBusy, AgentElsewhere: it cannot be moved from here.
            Unavailable: that node is not present now.
        """
        started = time.monotonic()

        def memory() -> Memory:
            self._roles.check(agent)
            return self._roles.memory(agent)

        epoch = (await self._work.in_order(memory)).epoch
        if to == self._node:
            return Moved(to, epoch, moved=False)
        if to not in await self._peers.others():
            raise Unavailable(f"node {to!r} does not answer yet, or is not there", retry_after_s=self._timing.peers_s)
        # What can be copied during its turns is copied first, so that turns are held only for a moment.
        await self._copies.send(agent, to, self._timing.answer_s)
        before = await self._fetched(agent, to, self._timing.fetch_s)
        turn = f"move-{uuid.uuid4().hex}"
        if not at_once:
            await self._turns.begin(agent, turn, b"", {})
        try:
            sent = await self._copies.send(agent, to, self._timing.answer_s)
            then = await self._fetched(agent, to, self._timing.hold_s) if before is not None else None
            # From here on the other node may be the primary, whatever its answer. Unless this node steps down, it asks.
            self._succession.doubt(agent)
            above = await self._peers.client(to).promote_here(agent, sent.epoch)
            # Turns without a lock may have been committed meanwhile: their branches are handed over.
            await self._succession.step_down(agent, to, above, sent)
        finally:
            if not at_once:
                await self._turns.abandon(agent, turn)
            self._changed(agent)
        before = before or Fetched()
        then = then or replace(before, blocks=0, nbytes=0)
        nbytes = before.nbytes + then.nbytes
        self.moves += 1
        self.moved_bytes += nbytes
        seconds = time.monotonic() - started
        return Moved(to, above, then.tokens, before.blocks + then.blocks, nbytes, seconds)

    async def _fetched(self, agent: str, to: str, within_s: float) -> Fetched | None:
        """Has another node pull the agent's KV. Returns None if it cannot: then the KV is computed again there."""
        try:
            return await self._peers.client(to).fetch(agent, self._node, within_s)
        except SatchelError as error:
            logger.warning("node %s does not get the KV of agent %s: %s", to, agent, error.message)
            return None
