"""Requests for vectors."""

from __future__ import annotations

from dataclasses import replace

from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.replica_messages import PooledTexts, PoolingRequest
from ..requests.backend import Vectors
from .resending import Resending


class RayPooling(Resending[PoolingRequest, PooledTexts]):
    """One request for vectors."""

    async def _ask_replica(self, client: ReplicaClient, left_s: float) -> PooledTexts:
        return await client.pool(replace(self._request, deadline_s=left_s))

    async def run(self) -> Vectors:
        """Raises as `Backend.pool`."""
        pooled, decision = await self.answered()
        return Vectors(pooled, decision.replica, decision.node, decision.why)
