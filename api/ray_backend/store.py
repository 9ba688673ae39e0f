"""The agents' store over Ray: calls to the nodes' stores, and to the replicas that may hold an agent's KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...actors.model_files.identity.model_identity import ModelIdentity, adapted_id
from ...actors.model_files.identity.model_parts import ModelPart, identity_of, ids_of_all
from ...actors.protocol import registry
from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.replica_messages import ModelInfo, StageInfo
from ...actors.protocol.router_messages import AgentPlace
from ...actors.protocol.store_client import StoreClient
from ...actors.protocol.store_messages import (
    AgentBranches,
    AskUnpack,
    Begun,
    BranchKV,
    Limits,
    Moved,
    Packed,
    Unpacked,
)
from ...actors.rpc.client import Call
from ...actors.rpc.spec import Method
from ...actors.start import find_replicas
from ...cluster.config.timing import Timing
from ...cluster.detached import DetachedTasks
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
from .locator import AgentLocator, Question

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

WRITTEN_S = 2.0
"""How long packing an agent waits for KV that is being written."""

MOVES_MAX = 4
"""How often an agent is located again if it is not on the expected node."""


def _at_primary(declared: Method[P, T]) -> Callable[Concatenate[RayStore, P], CoroutineType[Any, Any, T]]:
    """Returns the method of `RayStore` that asks the store of the agent's primary; the first argument is the agent."""

    async def ask(self: RayStore, *args: P.args, **kwargs: P.kwargs) -> T:
        agent: Any = args[0] if args else kwargs["agent"]
        return await self._ask_primary(agent, lambda store: declared.call(store, *args, **kwargs))

    return ask


class RayStore:
    """`agents.Store` over the actors of a running cluster. Make it on the event loop that uses it."""

    def __init__(self, locator: AgentLocator, timing: Timing) -> None:
        self._locator, self._timing = locator, timing
        self._background = DetachedTasks()

    recall = _at_primary(StoreClient.recall)
    renew = _at_primary(StoreClient.renew)
    commit = _at_primary(StoreClient.commit)
    abandon = _at_primary(StoreClient.abandon)
    transcript = _at_primary(StoreClient.transcript)
    info = _at_primary(StoreClient.info)
    disk_kept = _at_primary(StoreClient.disk_kept)
    forget = _at_primary(StoreClient.forget)

    async def begin(
        self, agent: str, turn: str, files_id: bytes, known: Mapping[int, int], limits: Limits | None = None
    ) -> Begun:
        def end_late(node: str) -> None:
            # The message may still be on its way and arrive later; then nothing would end the turn that it begins. This
            # one follows it on the same connection.
            self._in_background(node, lambda store: store.abandon(agent, turn))

        def ask(store: StoreClient) -> Call[Begun]:
            return store.begin(agent, turn, files_id, known, limits)

        return (await self._locate_and_ask(agent, ask, unanswered=end_late))[0]

    async def blocks(self, agent: str) -> list[BranchKV]:
        # Replicas with different model ids may have computed the same tokens.
        replicas = [(info.files_id, model) for _, info in await self._infos() for model in computed_by(info)]
        return await self._ask_primary(agent, lambda store: store.blocks(agent, replicas))

    async def fork(self, source: str, target: str, limits: Limits | None = None) -> int:
        if await self._locator.where(target) is not None:
            raise AgentExists(f"there is an agent {target.partition('/')[2]!r} already", param="as")
        branches, node = await self._locate_and_ask(source, lambda store: store.fork(source, target, limits))
        # The fork starts on its source's node; the router hears of it a moment later.
        self._locator.note(target, node)
        return branches

    async def room(self, agent: str, nbytes: int, limits: Limits | None = None) -> str:
        return await self._locator.ask(self._locator.head, lambda store: store.room(agent, nbytes, limits))

    async def pack(self, agent: str) -> Packed:
        head = self._locator.head
        _, primary = await self._locate_and_ask(agent, lambda store: store.info(agent))
        if primary == head:
            return await self._pack(agent)
        await self._locator.ask(head, lambda store: store.borrow(agent, primary))
        try:
            await self._ask_primary(agent, lambda store: store.send_secondary(agent, head))
            return await self._pack(agent)
        finally:
            # Also if the caller was cancelled: the head must not keep a copy that it only borrowed.
            self._in_background(head, lambda store: store.give_back(agent))

    async def _pack(self, agent: str) -> Packed:
        """Packs an agent, whose transcripts must be at the head, with the KV that any node has."""
        head = self._locator.head
        await self._written()
        # A replica of any node may have computed KV for it.
        fetch_s = self._timing.fetch_s
        for node in [node for node in await self._locator.alive() if node != head]:
            try:
                await self._locator.ask(head, lambda store, node=node: store.fetch(agent, node, fetch_s))
            except SatchelError as error:
                logger.warning("of agent %s no KV is packed that only %s has: %s", agent, node, error.message)
        infos = [info for _, info in await self._infos()]
        # Models that were divided in another way have left KV of other parts.
        found = await asyncio.to_thread(lambda: [usable_by(info) for info in infos])
        replicas = [
            (info.files_id, model) for info, models in zip(infos, found, strict=True) for model in sorted(models)
        ]
        return await self._locator.ask(head, lambda store: store.pack(agent, replicas))

    async def unpack(
        self, agent: str, path: str, *, replace: bool, trusted: bool, limits: Limits | None = None
    ) -> Unpacked:
        head = self._locator.head
        if (place := await self._locator.where(agent)) is not None:
            if not replace:
                raise AgentExists(f"there is an agent {agent.partition('/')[2]!r} already", param="replace")
            if place.home != head:
                # The agent that is replaced must be on the node that replaces it.
                await self.move(agent, head)
        infos = [info for _, info in await self._infos()]
        found = await asyncio.to_thread(lambda: [usable_by(info) for info in infos])
        models = sorted(set[bytes]().union(*found))
        asked = AskUnpack(agent, path, models, replace, trusted, dict(limits or {}))
        came = await self._locator.ask(head, lambda store: store.unpack(asked))
        self._locator.note(agent, head)
        return came

    async def _written(self) -> None:
        """Waits until the replicas have written the KV that they have computed, at most as long as that usually
        takes."""
        replicas = [replica for replica, _ in await self._infos()]
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_S):
                unwritten = True
                while unwritten:
                    # The KV of sequences that have just ended goes to the writer in the next step.
                    await asyncio.sleep(0.05)
                    answers = await _answers([replica.stats() for replica in replicas])
                    unwritten = any(stats.unwritten_bytes for stats in answers)

    async def _ask_primary(self, agent: str, question: Question[T]) -> T:
        return (await self._locate_and_ask(agent, question))[0]

    def _in_background(self, node: str, question: Question[T]) -> None:
        """Tells a node's store something, and ignores whether it answers."""

        async def tell() -> None:
            with suppress(SatchelError):
                await self._locator.ask(node, question, self._timing.answer_s)

        self._background.begin(tell())

    async def _locate_and_ask(
        self, agent: str, question: Question[T], unanswered: Callable[[str], None] = lambda node: None
    ) -> tuple[T, str]:
        """Returns the answer of the agent's primary, and its node. Calls `unanswered` with each node that gave none."""
        refusal: SatchelError | None = None
        for _ in range(MOVES_MAX):
            node = await self._locator.locate(agent)
            try:
                return await self._locator.ask(node, question), node
            except Unavailable as error:
                refusal = error
                self._locator.forget(agent)
                if isinstance(error, AgentElsewhere):
                    # Wait until the router has learned of the new primary.
                    await asyncio.sleep(self._timing.report_s)
                    continue
                unanswered(node)
                if node in await self._locator.alive():
                    # The store is restarting; a caller that can wait asks again.
                    break
        assert refusal is not None
        raise refusal

    async def agents(self, tenant: str, after: str, limit: int) -> list[AgentBranches]:
        """Returns agents of all nodes in the order of their keys, each as its primary has it. `tenant` "" means all
        tenants."""
        nodes = await self._locator.alive()
        pages = await asyncio.gather(
            *(self._locator.ask(node, lambda store: store.agents(tenant, after, limit)) for node in nodes)
        )
        merged: dict[str, AgentBranches] = {}
        for each in (each for page in pages for each in page):
            known = merged.get(each.agent)
            if known is None or (each.epoch, each.is_primary) > (known.epoch, known.is_primary):
                merged[each.agent] = each
        return [merged[key] for key in sorted(merged)][:limit]

    async def where(self, agent: str) -> AgentPlace:
        place = await self._locator.where(agent)
        if place is None:
            raise AgentNotFound(f"there is no agent {agent.partition('/')[2]!r}", param="id")
        return place

    async def places(self, agents: Sequence[str]) -> dict[str, AgentPlace]:
        return await self._locator.places(agents)

    async def move(self, agent: str, node: str) -> Moved:
        if node not in await self._locator.nodes():
            raise InvalidRequest(f"there is no node {quoted(node)}", param="to")
        await self.info(agent)
        moved = await self._ask_primary(agent, lambda store: store.move(agent, node))
        await self._locator.moved(agent, node, moved.epoch)
        return moved

    async def release(self, branch: BranchKV) -> int:
        return sum(await _answers([holder.release(branch.kept) for holder in await self._holders(branch.model)]))

    async def held(self, branch: BranchKV) -> int:
        kept = replace(branch.kept, embeddings=[])
        return max(await _answers([holder.held(kept) for holder in await self._holders(branch.model)]), default=0)

    async def clear(self) -> int:
        placed = await self._placed()
        answers = await asyncio.gather(*(_answer(replica.clear_cache()) for replica, _ in placed.values()))
        if silent := [name for name, answer in zip(placed, answers, strict=True) if answer is None]:
            raise Unavailable(f"these replicas did not clear their memory: {', '.join(silent)}")
        return sum(answer or 0 for answer in answers)

    async def _holders(self, model_id: bytes) -> list[ReplicaClient]:
        return [replica for replica, info in await self._infos() if model_id in computed_by(info)]

    async def _infos(self) -> list[tuple[ReplicaClient, ModelInfo]]:
        """Returns the replicas that answer and have loaded their model, with its description."""
        replicas, alive = await asyncio.gather(self._placed(), self._locator.alive())

        async def ask(replica: ReplicaClient, node: str) -> tuple[ReplicaClient, ModelInfo | None]:
            info = replica.info()
            # That node is probably lost, and a deletion asks more than once.
            return replica, await _answer(info if node in alive else info.within(self._timing.ask_s))

        answers = await asyncio.gather(*(ask(*each) for each in replicas.values()))
        return [(replica, info) for replica, info in answers if info is not None]

    async def _placed(self) -> dict[str, tuple[ReplicaClient, str]]:
        """Returns the replicas and their nodes, by the replicas' ids."""

        def find() -> dict[str, tuple[ReplicaClient, str]]:
            entries = registry.entries()
            nodes = {name: node for entry in entries for name, node in entry.replicas.items()}
            return {name: (found, nodes[name]) for name, found in find_replicas(entries, self._timing).items()}

        return await asyncio.to_thread(find)


def computed_by(info: ModelInfo) -> list[bytes]:
    """Returns the model ids of a replica, without and with each of its adapters. If it is divided, each of its
    processes has a part, and a model id of its own."""
    if not info.stages:
        return [adapted_id(info.model_id, adapter) for adapter in (b"", *(each.digest for each in info.adapters))]
    identity, count = ModelIdentity(info.files, info.computing), info.stages[-1].stop
    return [identity_of(identity, part, count).model_id for part in _parts_of(info.stages)]


def _parts_of(stages: Sequence[StageInfo]) -> list[ModelPart]:
    """Returns the parts of a divided model's processes. Those with the same layers have shares of them."""
    if len({(stage.start, stage.stop) for stage in stages}) == len(stages):
        return [ModelPart(stage.start, stage.stop) for stage in stages]
    return [ModelPart(stage.start, stage.stop, share, len(stages)) for share, stage in enumerate(stages)]


def usable_by(info: ModelInfo) -> set[bytes]:
    """Returns the model ids whose KV a replica can use, also that of other parts than a process has. Models with
    recurrent layers cannot use that of other shares, which is among them nevertheless."""
    identity = ModelIdentity(info.files, info.computing)
    return {*computed_by(info), *(ids_of_all(identity, info.joins) if info.joins else ())}


async def _answers(calls: Sequence[Call[T]]) -> list[T]:
    """Returns the answers of the replicas that answer."""
    answers = await asyncio.gather(*map(_answer, calls))
    return [answer for answer in answers if answer is not None]


async def _answer(call: Call[T]) -> T | None:
    """Returns a replica's answer; None if it gives none."""
    try:
        return await call
    except NoAnswer as error:
        logger.warning("%s: %s", error.message, type(error.__cause__ or error).__name__)
        return None
