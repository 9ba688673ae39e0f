"""A connection to one replica: frames are read there, and each sequence gets its updates.

A connection is a *consumer* at the replica: it asks for one frame after the other, each with the new tokens of all its
sequences. Sequences of a consumer whose lease ran out are removed. Frames are numbered, so they may come over a socket,
where they are asked for ahead, or through Ray, each as it is possible.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from cachetools import FIFOCache

from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.replica_messages import GenerateRequest, MediaSpan, SequenceUpdate
from ...actors.rpc.local import NearActor
from ...cluster.config.timing import Timing
from ...cluster.detached import detached
from ...cluster.errors import ActorLost, ActorSilent, NoAnswer, ReplicaDied, ReplicaLost, SatchelError

logger = logging.getLogger(__name__)

T = TypeVar("T")

SENT_MAX = 4096

LATE_S = 0.5
"""If a timeout fires this many seconds late, this process itself stood still."""


class ReplicaConnection:
    """A connection to one replica: its client, the sequences running there, and the task that reads its frames.

    Args:
        node: the replica's node, "" if unknown.
        broke: called once the connection is broken, with whether the replica seems lost. The sequences get their error
            after that.

    Attributes:
        sequences: for each sequence a function that takes its updates or its error.
    """

    def __init__(
        self, replica: str, node: str, timing: Timing, broke: Callable[[ReplicaConnection, bool], None]
    ) -> None:
        self.replica = replica
        self.node = node
        self.frame_silence_s = timing.frame_silence_s
        self.client = ReplicaClient(replica, timing, kind=NearActor)
        # A new id each time, so that a new connection does not read what a broken one left at a living replica.
        self.consumer = f"consumer-{uuid.uuid4().hex}"
        self.sequences: dict[str, Callable[[SequenceUpdate | SatchelError], None]] = {}
        self.broken = asyncio.Event()
        self.heard = False
        """Whether it has answered."""
        self.died = False
        """Whether its process has ended, according to Ray."""
        self.probation = asyncio.Lock()
        """Held by the one suspect sequence (`sequences.py`) that is tested there."""
        self.sent = SentPictures()
        self._broke = broke
        self._reading = detached(self._read())

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self.client.abort(request_ids)
        except NoAnswer:
            logger.debug("replica %s was lost before the abort", self.replica)

    async def _read(self) -> None:
        reason, number, lost = "it forgot this consumer", 0, False
        try:
            while True:
                asked = time.monotonic()
                frame = await self._next_frame(number)
                if frame is None:
                    break
                self.heard = True
                number += 1
                for update in frame:
                    self._deal(update)
        except Exception as error:
            # Any error breaks the connection, because sequences must not wait if nothing reads their frames. If the
            # timeout itself came late, this process stood still, for example on a Mac that slept, so the replica may be
            # fine.
            reason = type(error.__cause__ or error).__name__
            late_s = time.monotonic() - asked - self.frame_silence_s
            lost = not isinstance(error, ActorSilent) or late_s < LATE_S
            self.died = isinstance(error, ActorLost)
        finally:
            self.client.actor.close()
        self._break(reason, lost)

    async def _next_frame(self, number: int) -> list[SequenceUpdate] | None:
        """Raises as the client does. If its connection breaks, Ray is asked for the same frame."""
        try:
            return await self.client.next_frame(self.consumer, number)
        except NoAnswer as error:
            if not _is_cut_off(error):
                raise
        return await self.client.next_frame(self.consumer, number)

    def _deal(self, update: SequenceUpdate) -> None:
        take = self.sequences.get(update.request_id)
        if take is None:
            return
        if update.finish is not None:
            del self.sequences[update.request_id]
        take(update)

    def _break(self, reason: str, lost: bool) -> None:
        """Aborts all sequences at the replica, and has each fail over."""
        logger.warning(
            "the link to replica %s broke (%s); %d sequences fail over", self.replica, reason, len(self.sequences)
        )
        self._broke(self, lost)
        sequences, self.sequences = self.sequences, {}
        self.broken.set()
        kind = ReplicaDied if self.died else ReplicaLost
        for take in sequences.values():
            take(kind(f"replica {self.replica} was lost"))

    def close(self) -> None:
        """Stops reading."""
        self._reading.cancel()
        self.client.actor.close()


async def unless_broken(link: ReplicaConnection, call: Awaitable[T]) -> T:
    """Returns the answer to a call.

    Raises:
        SatchelError: what the replica raised, or `NoAnswer`. A broken connection ends the wait too, because a call to a
            lost machine fails only after a long time.
    """
    answer = asyncio.ensure_future(call)
    broken = asyncio.ensure_future(link.broken.wait())
    try:
        await asyncio.wait({answer, broken}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ActorSilent(f"replica {link.replica} is silent")
        if _is_cut_off(answer.exception()):
            # Ray is being asked for a frame, and knows whether the process has ended.
            await asyncio.wait({broken}, timeout=link.frame_silence_s)
        return answer.result()
    finally:
        answer.cancel()
        broken.cancel()


def _is_cut_off(error: BaseException | None) -> bool:
    """Returns whether a call without Ray ended with its connection."""
    return isinstance(error, NoAnswer) and isinstance(error.__cause__, ConnectionError)


class SentPictures:
    """The latest `SENT_MAX` pictures whose pixels were sent to one replica."""

    def __init__(self) -> None:
        self._sent: FIFOCache[tuple[bytes, bytes], None] = FIFOCache(SENT_MAX)

    def without(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request without the pixels that have been sent; the same object if it has none of those."""
        if not any(self._knows(request, one) for one in request.media):
            return request
        return replace(
            request, media=[replace(one, pixels=[]) if self._knows(request, one) else one for one in request.media]
        )

    def note(self, request: GenerateRequest) -> None:
        """Records that the replica has received all of the request's pictures."""
        for one in request.media:
            if one.pixels:
                self._sent[request.root_id, one.key] = None

    def forget(self, request: GenerateRequest) -> None:
        """Forgets the request's pictures, some of which the replica lacks."""
        for one in request.media:
            self._sent.pop((request.root_id, one.key), None)

    def _knows(self, request: GenerateRequest, one: MediaSpan) -> bool:
        return bool(one.pixels) and (request.root_id, one.key) in self._sent
