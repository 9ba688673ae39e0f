"""The store over Ray: the store actor asked by name, and every replica that may hold an agent's KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from ...actors.protocol import registry
from ...actors.protocol.calls import Call
from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.messages import AgentPlace, KeptKV, ModelInfo
from ...actors.start import find_replicas
from ...cluster.errors import (
    AgentElsewhere,
    AgentExists,
    AgentNotFound,
    InvalidRequest,
    NoAnswer,
    SatchelError,
    Unavailable,
    quoted,
)
from ...cluster.timing import Timing
from .homes import AgentHomes

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOVES_MAX = 4
"""How often an agent is looked for again that is not where it was believed to be."""


class RayStore:
    """`agents.Store` over the actors of a running cluster. Make it on the event loop that uses it."""

    def __init__(self, homes: AgentHomes, timing: Timing) -> None:
        self._homes, self._timing = homes, timing

    async def call(self, method: str, agent: str, *arguments: Any, **named: Any) -> Any:
        if method == "agents":
            return await self._list(agent, *arguments)
        if method == "fork" and await self._homes.where(arguments[0]) is not None:
            raise AgentExists(f"there is an agent {arguments[0].partition('/')[2]!r} already", param="as")
        if method == "blocks":
            # The same words may have been computed by replicas of several ids.
            infos = [info for _, info in await self._infos()]
            arguments = ([[info.files_id, info.model_id] for info in infos],)
        refusal: SatchelError | None = None
        for _ in range(MOVES_MAX):
            node = await self._homes.locate(agent)
            try:
                answer = await self._homes.ask(node, method, agent, *arguments, **named)
                if method == "fork":
                    # The copy begins where its original is, which the router hears of a moment later.
                    self._homes.note(arguments[0], node)
                return answer
            except Unavailable as error:
                refusal = error
                self._homes.forget(agent)
                if isinstance(error, AgentElsewhere):
                    # Until the router hears of the new home.
                    await asyncio.sleep(self._timing.report_s)
                elif node in await self._homes.alive():
                    # It restarts; whoever can wait asks again.
                    break
        assert refusal is not None
        raise refusal

    async def _list(self, tenant: str, after: str, limit: int) -> list[dict[str, Any]]:
        """Agents of all nodes in the order of their keys, each as its home has it."""
        nodes = await self._homes.alive()
        pages = await asyncio.gather(*(self._homes.ask(node, "agents", tenant, after, limit) for node in nodes))
        merged: dict[str, dict[str, Any]] = {}
        for each in (each for page in pages for each in page):
            known = merged.get(each["agent"])
            if known is None or each["place"] > known["place"]:
                merged[each["agent"]] = each
        return [merged[key] for key in sorted(merged)][:limit]

    async def where(self, agent: str) -> dict[str, Any]:
        """`{"home", "alive", "epoch", "copies"}`.

        Raises:
            AgentNotFound: nothing is known of it.
        """
        place = await self._homes.where(agent)
        if place is None:
            raise AgentNotFound(f"there is no agent {agent.partition('/')[2]!r}", param="id")
        return _view(place)

    async def places(self, agents: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {agent: _view(place) for agent, place in (await self._homes.places(agents)).items()}

    async def move(self, agent: str, node: str) -> dict[str, Any]:
        """Move the agent to another node: `{"node", "tokens", "blocks", "bytes", "seconds"}`.

        Raises:
            AgentNotFound, AgentBusy, InvalidRequest, Unavailable: it cannot be moved there now.
        """
        if node not in await self._homes.nodes():
            raise InvalidRequest(f"there is no node {quoted(node)}", param="to")
        await self.call("info", agent)
        moved = await self.call("move", agent, node)
        await self._homes.moved(agent, node, moved["epoch"])
        return moved

    async def release(
        self, model_id: bytes, root: bytes, block_ids: list[bytes], first: bytes, features: list[bytes]
    ) -> int:
        kept = KeptKV(root, block_ids, first, features)
        return sum(await _answers([holder.release(kept) for holder in await self._holders(model_id)]))

    async def held(self, model_id: bytes, root: bytes, block_ids: list[bytes], first: bytes) -> int:
        kept = KeptKV(root, block_ids, first)
        return max(await _answers([holder.held(kept) for holder in await self._holders(model_id)]), default=0)

    async def clear(self) -> int:
        replicas = await self._replicas()
        answers = await asyncio.gather(*(_answer(replica.clear_cache()) for replica in replicas.values()))
        if silent := [name for name, answer in zip(replicas, answers, strict=True) if answer is None]:
            raise Unavailable(f"these replicas did not clear their memory: {', '.join(silent)}")
        return sum(answer or 0 for answer in answers)

    async def _holders(self, model_id: bytes) -> list[ReplicaClient]:
        return [replica for replica, info in await self._infos() if info.model_id == model_id]

    async def _infos(self) -> list[tuple[ReplicaClient, ModelInfo]]:
        """The replicas that have loaded their model and answer, and what they say of it."""
        replicas = await self._replicas()
        infos = await asyncio.gather(*(_answer(replica.info()) for replica in replicas.values()))
        return [(replica, info) for replica, info in zip(replicas.values(), infos, strict=True) if info is not None]

    async def _replicas(self) -> dict[str, ReplicaClient]:
        def find() -> dict[str, ReplicaClient]:
            return find_replicas(registry.entries(), self._timing)

        return await asyncio.to_thread(find)


async def _answers(calls: Sequence[Call[T]]) -> list[T]:
    """What those answer that do."""
    answers = await asyncio.gather(*map(_answer, calls))
    return [answer for answer in answers if answer is not None]


async def _answer(call: Call[T]) -> T | None:
    """What a replica answers; None where it does not."""
    try:
        return await call
    except NoAnswer as error:
        logger.warning("%s: %s", error.message, type(error.__cause__ or error).__name__)
        return None


def _view(place: AgentPlace) -> dict[str, Any]:
    return {"home": place.home, "alive": place.alive, "epoch": place.epoch, "copies": place.copies}
