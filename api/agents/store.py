"""The seam between agents' memory and who keeps it: `ray_store.py` implements it over Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Store(Protocol):
    """The store actor, and the replicas where they hold agents' KV."""

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The result of a method of `KVStoreActor`.

        Raises:
            SatchelError: what it answered, or that it does not answer.
        """
        ...

    async def where(self, agent: str) -> dict[str, Any]:
        """Where an agent's memory is: `{"home": node, "alive", "epoch", "copies": [nodes]}`.

        Raises:
            AgentNotFound: nothing is known of it.
        """
        ...

    async def places(self, agents: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As `where`, by agent, of those of which anything is known.

        Raises:
            Unavailable: nobody can tell now.
        """
        ...

    async def move(self, agent: str, node: str) -> dict[str, Any]:
        """Move an agent to another node: `{"node", "epoch", "tokens", "blocks", "bytes", "seconds"}`.

        Raises:
            AgentNotFound, AgentBusy, InvalidRequest, Unavailable: it cannot be moved there now.
        """
        ...

    async def release(
        self, model_id: bytes, root: bytes, block_ids: list[bytes], first: bytes, features: list[bytes]
    ) -> int:
        """Let the replicas of a model drop a branch's KV and its pictures' features from memory: an entry of what
        `blocks` answers. Returns how many bytes that were."""
        ...

    async def held(self, model_id: bytes, root: bytes, block_ids: list[bytes], first: bytes) -> int:
        """How many entries of a branch's KV the replicas of a model have in memory."""
        ...

    async def clear(self) -> int:
        """Let every replica drop what it keeps in memory for reuse. Returns how many bytes that were.

        Raises:
            Unavailable: a replica did not do so.
        """
        ...
