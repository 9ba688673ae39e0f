"""The store over Ray: the store actor asked by name, and every replica that may hold an agent's KV."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from ray.exceptions import RayError

from ..actors import registry
from ..actors.handles import KV_STORE, actor_handle
from ..actors.start import find_replicas
from ..cluster.errors import Unavailable, from_wire

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a replica may take to drop what it holds."""


class RayStore:
    """`agents.Store` over the actors of a running cluster. Make it on the event loop that uses it."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(actor_handle, KV_STORE)
            ask = partial(getattr(self._actor, method).remote, *arguments, **named)
            # What a turn leaves may be a megabyte to write down.
            answer = await (await asyncio.to_thread(ask) if method == "commit" else ask())
        except (RayError, ValueError) as error:
            self._actor = None
            raise Unavailable("the store of agents' memory does not answer now", retry_after_s=2.0) from error
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]

    async def release(self, model_id: bytes, block_ids: list[bytes]) -> int:
        return sum(await self._ask_holders(model_id, "release", block_ids))

    async def held(self, model_id: bytes, block_ids: list[bytes]) -> int:
        return max(await self._ask_holders(model_id, "held", block_ids), default=0)

    async def clear(self) -> int:
        replicas = await self._replicas()
        answers = await asyncio.gather(*(self._ask(handle, "clear_cache") for handle in replicas.values()))
        if silent := [name for name, answer in zip(replicas, answers, strict=True) if answer is None]:
            raise Unavailable(f"these replicas did not clear their memory: {', '.join(silent)}")
        return sum(answers)

    async def _ask_holders(self, model_id: bytes, method: str, block_ids: list[bytes]) -> list[int]:
        """What the replicas of the model answer, those that do."""
        replicas = await self._replicas()
        infos = await asyncio.gather(*(self._ask(handle, "info") for handle in replicas.values()))
        found = zip(replicas.values(), infos, strict=True)
        holders = [handle for handle, info in found if info is not None and info["model_id"] == model_id]
        answers = await asyncio.gather(*(self._ask(handle, method, block_ids) for handle in holders))
        return [answer for answer in answers if answer is not None]

    async def _replicas(self) -> dict[str, Any]:
        def find() -> dict[str, Any]:
            return find_replicas([entry.model for entry in registry.entries()])

        return await asyncio.to_thread(find)

    async def _ask(self, handle: Any, method: str, *arguments: Any) -> Any:
        """What the replica answers; None where it does not in time, or has no such method."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await getattr(handle, method).remote(*arguments)
        except (RayError, TimeoutError, AttributeError) as error:
            logger.warning("a replica did not answer %s: %s", method, type(error).__name__)
            return None
