"""A store whose agents have homes, for tests of moves: `LocalStore` with fake places."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from satchel.actors.protocol.router_messages import AgentPlace
from satchel.actors.protocol.store_messages import Moved
from satchel.cluster.errors import AgentBusy, AgentNotFound, InvalidRequest

from .remembering import LocalStore


class HomesStore(LocalStore):
    """The places of `untold` agents are unknown; calls for `stuck_agents` never return; `busy` agents cannot move."""

    def __init__(self, *arguments: Any, nodes: tuple[str, ...] = ("mac0", "mac1")) -> None:
        super().__init__(*arguments)
        self.nodes = nodes
        self.homes: dict[str, str] = {}
        self.busy: set[str] = set()
        self.untold: set[str] = set()
        self.stuck_agents: set[str] = set()
        self.moves: list[tuple[str, str]] = []
        self.placings = 0
        self.going = asyncio.Event()
        """An event that moves wait for."""
        self.going.set()

    async def where(self, agent: str) -> AgentPlace:
        if agent in self.stuck_agents:
            await asyncio.Event().wait()
        await self.ask("info", agent)
        if agent in self.untold:
            raise AgentNotFound("nobody has told where it is")
        home = self.homes.get(agent, "mac0")
        return AgentPlace(agent, home, True, 1, [node for node in self.nodes[1:] if node != home])

    async def places(self, agents: Sequence[str]) -> dict[str, AgentPlace]:
        self.placings += 1
        return await super().places(agents)

    async def move(self, agent: str, node: str) -> Moved:
        await self.going.wait()
        self.moves.append((agent, node))
        if node not in self.nodes:
            raise InvalidRequest(f"there is no node {node!r}")
        if agent in self.busy:
            raise AgentBusy("the agent is busy")
        await self.ask("info", agent)
        if self.homes.get(agent, "mac0") == node:
            return Moved(node, 0, moved=False)
        self.homes[agent] = node
        return Moved(node, 1, 300, 1, 5000, 0.25)
