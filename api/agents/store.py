"""The interface between agents' memory and the stores that keep it; `ray_backend/store.py` implements it over Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ...actors.protocol.router_messages import AgentPlace
from ...actors.protocol.store_messages import (
    AgentBranches,
    Begun,
    BranchKV,
    Commit,
    CommitOutcome,
    Limits,
    Moved,
    Packed,
    Recalled,
    Unpacked,
)


class Store(Protocol):
    """The stores of all nodes as if they were one, and the replicas where they hold agents' KV.

    Raises:
        SatchelError: every method raises what a store raised, or that it does not answer. See `StoreClient`.
    """

    async def recall(
        self, agent: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Recalled: ...

    async def begin(
        self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Begun: ...

    async def renew(self, agent: str, turn: str) -> bool: ...

    async def commit(self, agent: str, commit: Commit, limits: Limits | None = None) -> CommitOutcome: ...

    async def abandon(self, agent: str, turn: str) -> None: ...

    async def transcript(self, agent: str) -> bytes: ...

    async def info(self, agent: str) -> AgentBranches: ...

    async def agents(self, tenant: str, after: str, limit: int) -> list[AgentBranches]: ...

    async def blocks(self, agent: str) -> list[BranchKV]: ...

    async def disk_kept(self, agent: str) -> int: ...

    async def fork(self, source: str, target: str, limits: Limits | None = None) -> int: ...

    async def forget(self, agent: str) -> bool: ...

    async def room(self, agent: str, nbytes: int, limits: Limits | None = None) -> str:
        """As `StoreClient.room`, at this machine's store."""
        ...

    async def pack(self, agent: str) -> Packed:
        """Packs an agent, wherever it is, into a file of this machine, which the caller removes.

        Raises:
            AgentNotFound: the agent is unknown.
            DiskFull, RequestTooLarge: the satchel would be too large.
        """
        ...

    async def unpack(
        self, agent: str, path: str, *, replace: bool, trusted: bool, limits: Limits | None = None
    ) -> Unpacked:
        """Unpacks an agent from a file of this machine; as `StoreClient.unpack`."""
        ...

    async def where(self, agent: str) -> AgentPlace:
        """Returns where an agent's memory is.

        Raises:
            AgentNotFound: the agent is unknown.
        """
        ...

    async def places(self, agents: Sequence[str]) -> dict[str, AgentPlace]:
        """As `where`, for several agents, by agent. Unknown agents are left out.

        Raises:
            Unavailable: the router does not answer.
        """
        ...

    async def move(self, agent: str, node: str) -> Moved:
        """Moves an agent to another node.

        Raises:
            AgentNotFound, AgentBusy, InvalidRequest, Unavailable: it cannot be moved there now.
        """
        ...

    async def release(self, branch: BranchKV) -> int:
        """Has the replicas of a model drop a branch's KV and image embeddings from memory. Returns the freed bytes."""
        ...

    async def held(self, branch: BranchKV) -> int:
        """Returns how many entries of a branch's KV the replicas of a model have in memory."""
        ...

    async def clear(self) -> int:
        """Drops all cached prefixes from the replicas' memory. Returns the freed bytes.

        Raises:
            Unavailable: a replica failed to.
        """
        ...
