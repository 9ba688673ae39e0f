"""Follows a request from replica to replica. What a lost replica had of it is not needed: it is simply sent again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.router_messages import Decision, RouteRequest, SequenceLeft
from ...cluster.errors import ActorLost, ActorSilent, NoAnswer, ReplicaLost, Unavailable
from ..requests.loading import Loading
from .connection import unless_broken
from .routing import Routing
from .sequences import ATTEMPTS, AWAY, DEATHS_MAX, given_up

logger = logging.getLogger(__name__)


Answer = TypeVar("Answer")
Update = TypeVar("Update")


class Forgotten(Exception):
    """A replica that lives does not know the request any more."""


class Sent(Protocol):
    """What is sent: its id and model, how many tokens it computes, and how long it may take, in seconds."""

    @property
    def request_id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...


Asked = TypeVar("Asked", bound=Sent)


async def next_update(request_id: str, number: int, ask: Callable[[str, int], Awaitable[Update | None]]) -> Update:
    """Returns what there is of a request after update `number`, once there is something.

    Args:
        ask: asks a replica for it; None if there was nothing new for a while.

    Raises:
        Forgotten: the replica does not know the request any more.
    """
    while True:
        try:
            update = await ask(request_id, number)
        except ReplicaLost as error:
            raise Forgotten(error.message) from error
        if update is not None:
            return update


class Resending(Generic[Asked, Answer]):
    """One request.

    The request itself may crash a replica's process. So after one crash it is sent to a replica that tests no other
    suspect (`sequences.py`), and it is given up if that process crashes too.
    """

    def __init__(self, routing: Routing, request: Asked) -> None:
        self._routing = routing
        self._request = request
        self._ends = time.monotonic() + request.deadline_s
        self._refusals: dict[str, Unavailable] = {}
        self._lost: list[str] = []
        self._lost_at = float("-inf")
        self._losses = self._deaths = 0

    async def _ask_replica(self, client: ReplicaClient, left_s: float) -> Answer:
        """Returns a replica's answer.

        Args:
            left_s: until the request's deadline.

        Raises:
            Forgotten: it must be sent again.
            SatchelError: as the replica's method.
        """
        raise NotImplementedError

    async def answered(self) -> tuple[Answer, Decision]:
        """Returns the answer, and the decision that led to it.

        Raises:
            Unavailable: the queues are full, no replica lives, or the cluster is draining.
            SatchelError: it failed.
        """
        while True:
            try:
                decision = await self._route()
                try:
                    answer = await self._ask(decision)
                finally:
                    self._routing.release(SequenceLeft(decision.replica, self._request.request_id))
            except Unavailable as refusal:
                if isinstance(refusal, AWAY):
                    await self._load_again()
                # The lost replica may be the only one; then it restarts.
                waited_s = time.monotonic() - self._lost_at
                if self._losses > ATTEMPTS or waited_s > self._routing.config.timing.recovery_s:
                    raise
                await asyncio.sleep(self._routing.config.timing.retry_s)
                self._refusals.clear()
                continue
            if answer is not None:
                return answer, decision

    async def _load_again(self) -> None:
        """If the model comes and goes, waits until it is loaded; then its new replica has its time to answer."""
        was_unloaded = await self._routing.load_again(self._request.model, Loading())
        if was_unloaded:
            self._lost, self._losses, self._deaths = [], 0, 0
        if was_unloaded or (was_unloaded is not None and self._lost_at == float("-inf")):
            self._lost_at = time.monotonic()

    async def _route(self) -> Decision:
        """Returns where to ask next.

        Raises:
            Unavailable: there is no replica, or all have refused.
        """
        request = self._request
        message = RouteRequest(
            request_id=request.request_id,
            model=request.model,
            agent="",
            block_ids=[],
            prompt_tokens=request.tokens,
            exclude=[*self._refusals, *self._lost],
        )
        decision = await self._routing.decide(message)
        if decision.replica in self._refusals:
            self._routing.release(SequenceLeft(decision.replica, request.request_id))
            raise self._refusals[decision.replica]
        return decision

    async def _ask(self, decision: Decision) -> Answer | None:
        """Returns the replica's answer; None if another replica must be asked.

        Raises:
            SatchelError: it failed, or is given up.
        """
        link = self._routing.link(decision)
        suspected, asked = False, False
        try:
            if self._deaths:
                await unless_broken(link, link.probation.acquire())
                suspected = True
            if link.broken.is_set():
                raise ActorSilent(f"replica {decision.replica} is silent")
            asked = True
            left_s = max(0.001, self._ends - time.monotonic())
            return await unless_broken(link, self._ask_replica(link.client, left_s))
        except asyncio.CancelledError:
            self._routing.background(link.abort([self._request.request_id]))
            raise
        except Forgotten as error:
            logger.warning("replica %s does not know request %s any more", decision.replica, self._request.request_id)
            self._note_loss(decision, error)
            return None
        except NoAnswer as error:
            logger.warning("replica %s is lost: %s", decision.replica, type(error.__cause__ or error).__name__)
            self._routing.lose(decision.replica)
            self._note_loss(decision, error)
            if asked and link.heard and (link.died or isinstance(error, ActorLost)):
                await self._note_death(decision)
            return None
        except Unavailable as refusal:
            self._refusals[decision.replica] = refusal
            return None
        finally:
            if suspected:
                link.probation.release()

    def _note_loss(self, decision: Decision, error: Exception) -> None:
        """Notes that a replica has lost the request; the next one asked is another one, if there is one.

        Raises:
            ReplicaLost: that has happened too often.
        """
        self._lost, self._lost_at = [decision.replica], time.monotonic()
        self._losses += 1
        if self._losses > ATTEMPTS:
            raise ReplicaLost(f"replica {decision.replica} was lost") from error

    async def _note_death(self, decision: Decision) -> None:
        """Counts a replica's process that ended while it computed the request.

        Raises:
            GenerationFailed: it is given up.
        """
        if await self._routing.was_unloaded(self._request.model, decision.replica):
            return
        self._deaths += 1
        if self._deaths < DEATHS_MAX:
            return
        # If the whole node is gone, the request did not cause it.
        if decision.node and not await self._routing.node_lives(decision.node):
            self._deaths -= 1
            return
        raise given_up(self._request.request_id, self._request.model, decision.replica)
