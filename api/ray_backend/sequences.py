"""Follows one sequence from replica to replica: places it, reads it, and places it again if its replica is lost.

A sequence may itself crash a replica's process. So it becomes a *suspect* if the last process that had it ended before
the sequence's first token there. A replica tests one suspect at a time, until the first token clears it. If that
process ends too, the suspect caused it and is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...actors.model_files.identity.model_identity import adapted_id
from ...actors.protocol.block_ids import block_ids, root_id
from ...actors.protocol.replica_messages import GenerateRequest, SequenceUpdate
from ...actors.protocol.router_messages import Decision, SequenceLeft
from ...actors.protocol.updates import merged
from ...cluster.environment import default_home
from ...cluster.errors import (
    ActorLost,
    ActorSilent,
    ComputesOtherwise,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    NoAnswer,
    NoReplica,
    PictureLost,
    ReplicaDied,
    ReplicaLeaves,
    ReplicaLost,
    SatchelError,
    SlowReader,
    Unavailable,
    from_wire,
)
from ...cluster.incidents import note_incident_aside
from ...cluster.telemetry.context import span
from ..requests.loading import Loading
from .connection import ReplicaConnection, unless_broken
from .routing import Routing
from .split import Prefill

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""After this many refusals a sequence is refused; after this many lost replicas without progress it fails."""

DEATHS_MAX = 2
"""A sequence is given up if this many successive replicas' processes ended before its first token there."""

AWAY = (NoReplica, Draining, ReplicaLost)
"""What a request gets whose model has just been unloaded, or is about to be."""

PROGRESS_TOKENS = 16
"""This many tokens at one replica reset the count of lost replicas."""


class RayGeneration:
    """One sequence, followed from replica to replica. Implements `backend.Generation`.

    Every submission is a new *placement*; updates of earlier ones are ignored. Unread tokens are bounded: past
    `endpoint.unread_tokens_max` the sequence is aborted and the iteration ends with `SlowReader`.

    Args:
        beside: a replica that has just taken a request with the same prompt, "" for none.
        scope: who may reuse its blocks.
        loading: learns how far the model is loaded, if it was unloaded.
    """

    def __init__(
        self,
        routing: Routing,
        request: GenerateRequest,
        beside: str = "",
        scope: str = "",
        loading: Loading | None = None,
    ) -> None:
        self.replica = ""
        self.node = ""
        self.why = ""
        self.move_to = ""
        self._routing = routing
        self._request = request
        self._beside = beside
        self._scope = scope
        self._loading = loading or Loading()
        self._span = span()
        self._started = time.monotonic()
        self._updates: asyncio.Queue[tuple[int, SequenceUpdate | SatchelError]] = asyncio.Queue()
        self._behind: tuple[int, SequenceUpdate | SatchelError] | None = None
        self._unread = 0
        self._tokens: list[int] = []
        self._placement = 0
        self._placed_at = 0.0
        self._cached_tokens: int | None = None
        self._disk_tokens: int | None = None
        self._first_token_s: float | None = None
        self._losses = 0
        self._deaths = 0
        self._probation: asyncio.Lock | None = None
        self._probation_s = 0.0
        self._link: ReplicaConnection | None = None
        self._prefill: Prefill | None = None
        self._lacks_pixels = False
        self._over = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def model_id(self) -> bytes:
        return self._request.model_id

    def put(self, placement: int, update: SequenceUpdate | SatchelError) -> None:
        """Queues an update of the sequence's placement."""
        if isinstance(update, SequenceUpdate):
            if placement == self._placement:
                self._measure(update)
            if placement == self._placement and self._prefill is not None:
                self._prefill.end()
            if placement == self._placement and (update.tokens or update.finish is not None):
                self._end_probation()
            unread_max = self._routing.config.endpoint.unread_tokens_max
            # This update itself does not count: a stalled event loop gets many tokens at once, but is not a slow
            # reader.
            if self._unread > unread_max and update.finish is None:
                self._give_up(unread_max)
                return
            self._unread += len(update.tokens)
            if update.finish is not None:
                self._release()
        self._updates.put_nowait((placement, update))

    def _measure(self, update: SequenceUpdate) -> None:
        """Notes the actual values of what the router estimated."""
        if update.cached_tokens is not None:
            computed = self._prefill.cached_tokens if self._prefill is not None else None
            self._cached_tokens = update.cached_tokens if computed is None else min(update.cached_tokens, computed)
            self._disk_tokens = min(update.disk_tokens, self._cached_tokens)
        if update.tokens and self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._placed_at

    def _release(self) -> None:
        """Tells the router that the sequence has ended at its replica, with the actual values there."""
        left = SequenceLeft(self.replica, self.request_id, self._cached_tokens, self._first_token_s, self._disk_tokens)
        self._routing.release(left)

    def _give_up(self, unread_max: int) -> None:
        """Drops the unread tokens of a reader that is too slow, and aborts the sequence."""
        while not self._updates.empty():
            self._updates.get_nowait()
        self._unread, self._behind = 0, None
        error = SlowReader(f"more than {unread_max} tokens of the answer waited to be read")
        self._updates.put_nowait((self._placement, error))
        if (leaving := self._leave()) is not None:
            self._routing.background(leaving)

    async def start(self, exclude: Sequence[str] = ()) -> None:
        """Finds a replica that accepts the sequence. If its model has been unloaded, waits until it is loaded again.

        Args:
            exclude: replicas to try last.

        Raises:
            SatchelError: the last refusal, if none accepts it; or why the model cannot be loaded.
        """
        began, timing = time.monotonic(), self._routing.config.timing
        while True:
            asked = time.monotonic()
            try:
                return await self._find_replica(exclude)
            except AWAY:
                was_unloaded = await self._load_again()
                if was_unloaded is None or (not was_unloaded and time.monotonic() - began > timing.recovery_s):
                    raise
            await asyncio.sleep(timing.retry_s)
            now = time.monotonic()
            if was_unloaded:
                began, exclude, self._deaths = now, (), 0
            left_s = max(0.1, self._request.deadline_s - (now - asked))
            self._request, self._started = replace(self._request, deadline_s=left_s), now

    async def _load_again(self) -> bool | None:
        """As `Routing.load_again`, within the sequence's deadline."""
        within_s = self._request.deadline_s
        try:
            async with asyncio.timeout(within_s):
                return await self._routing.load_again(self._request.model, self._loading)
        except TimeoutError:
            raise DeadlineExceeded(f"the model was not loaded again within {within_s:.0f} s") from None

    async def _find_replica(self, exclude: Sequence[str]) -> None:
        """Raises as `start`, at once."""
        tried = list(exclude)
        refusal: SatchelError | None = None
        for _ in range(ATTEMPTS):
            ids = self._routing.model_ids(self._request)
            others = [await self._called(other) for other in ids if other != self.model_id]
            decision = await self._routing.route(self._request, tried, self._beside, others)
            if refusal is not None and decision.replica in tried:
                self._routing.release(SequenceLeft(decision.replica, self.request_id))
                break
            refusal = await self._offer(decision)
            if refusal is None:
                return
            if not isinstance(refusal, Unavailable):
                break
            tried.append(decision.replica)
        assert refusal is not None
        raise refusal

    async def _offer(self, decision: Decision) -> SatchelError | None:
        """Returns None if the replica accepted the sequence, else why not."""
        self.replica, self.node, self.why = decision.replica, decision.node, decision.why
        self.move_to, self._prefill = decision.move_to, None
        self._placement += 1
        self._placed_at, self._cached_tokens, self._first_token_s = time.monotonic(), None, None
        self._disk_tokens = None
        try:
            self._request = await self._called(decision.model_id)
            link = self._routing.link(decision)
            if self._deaths:
                await self._begin_probation(link)
            self._link = link
            link.sequences[self.request_id] = partial(self.put, self._placement)
            pulled = decision.cached_tokens if decision.pull_from else 0
            request = replace(self._request, consumer=link.consumer, pull_from=decision.pull_from, pull_tokens=pulled)
            if decision.prefill_on:
                refusal = await self._submit_split(link, request, decision)
            else:
                refusal = await self._submit(link, request)
            if isinstance(refusal, ComputesOtherwise):
                # The router has not heard of it yet.
                refusal = await self._submit_anew(link, request, refusal)
        except asyncio.CancelledError:
            await asyncio.shield(self.abort())
            raise
        except NoAnswer as error:
            reason = type(error.__cause__ or error).__name__
            logger.warning("replica %s is lost: %s", decision.replica, reason)
            link = self._link
            self._unlink()
            self._routing.lose(decision.replica)
            # A replica that died before the call may never have received the sequence.
            if link is not None and link.heard and (link.died or isinstance(error, ActorLost)):
                await self._note_death()
            if self._deaths >= DEATHS_MAX:
                return self._crash_error()
            return ReplicaLost(f"replica {decision.replica} was lost")
        if refusal is None:
            return None
        self._unlink()
        self._routing.release(SequenceLeft(decision.replica, self.request_id))
        return refusal

    async def _called(self, model_id: bytes) -> GenerateRequest:
        """Returns the request with the block ids for that model id; b"" keeps the present one."""
        if model_id in (b"", self.model_id):
            return self._request
        return await called(self._request, model_id, self._scope)

    async def _submit(self, link: ReplicaConnection, request: GenerateRequest) -> SatchelError | None:
        """Submits the sequence, if possible without pictures that were sent before. Returns None if accepted, else why
        not.

        Raises:
            NoAnswer: the replica is lost.
        """
        refusal: SatchelError | None = None
        for sent in (link.sent.without(request), request):
            self._lacks_pixels = sent is not request
            refusal = None
            try:
                await unless_broken(link, link.client.submit(sent))
            except NoAnswer:
                raise
            except SatchelError as refused:
                refusal = refused
            if not (self._lacks_pixels and isinstance(refusal, PictureLost)):
                break
            link.sent.forget(request)
        if refusal is None:
            link.sent.note(request)
        return refusal

    async def _submit_anew(
        self, link: ReplicaConnection, request: GenerateRequest, refusal: SatchelError
    ) -> SatchelError | None:
        """Submits a refused sequence with the block ids for the model id that its replica has now. Returns and raises
        as `_submit`."""
        info = await unless_broken(link, self._routing.info(link.replica))
        if info is None or (model_id := adapted_id(info.model_id, request.adapter)) == request.model_id:
            return refusal
        self._request, self._prefill = await self._called(model_id), None
        now = self._request
        named = replace(request, model_id=now.model_id, block_ids=now.block_ids, root_id=now.root_id)
        return await self._submit(link, replace(named, pull_from="", pull_tokens=0, pull_wait_s=0.0))

    async def _submit_split(
        self, link: ReplicaConnection, request: GenerateRequest, decision: Decision
    ) -> SatchelError | None:
        """As `_submit`, and starts the prefill of the prompt on another node; it ends with the sequence's first
        update."""
        prefill = self._prefill = Prefill(self._routing, decision, request)
        prefill.begin(link)
        tokens = len(request.prompt) - 1
        return await self._submit(link, replace(request, pull_tokens=tokens, pull_wait_s=decision.wait_s))

    def _unlink(self) -> bool:
        """Detaches the sequence from its connection. Returns whether it was running there."""
        self._end_probation()
        if self._prefill is not None:
            self._prefill.end()
        link, self._link = self._link, None
        return link is not None and link.sequences.pop(self.request_id, None) is not None

    async def _begin_probation(self, link: ReplicaConnection) -> None:
        """Waits until no other suspect is tested at the replica.

        Raises:
            NoAnswer: the replica is lost.
        """
        began = time.monotonic()
        probation = link.probation
        try:
            await unless_broken(link, probation.acquire())
        finally:
            self._probation_s += time.monotonic() - began
        if link.broken.is_set():
            # The suspect before this one was lost with the replica, at the same moment.
            probation.release()
            raise ActorSilent(f"replica {link.replica} is silent")
        self._probation = probation

    def _end_probation(self) -> None:
        """Lets the next suspect be tested at the replica."""
        probation, self._probation = self._probation, None
        if probation is not None:
            probation.release()

    async def _note_death(self) -> None:
        """Counts a replica's process that ended before the sequence's first token there."""
        if await self._routing.was_unloaded(self._request.model, self.replica):
            return
        self._deaths += 1
        # If the whole node is gone, the sequence did not cause it.
        if self._deaths == DEATHS_MAX and self.node and not await self._routing.node_lives(self.node):
            self._deaths -= 1

    def _crash_error(self) -> GenerationFailed:
        return given_up(self.request_id, self._request.model, self.replica)

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[SequenceUpdate]:
        """Yields the sequence's updates from the replica that has it: the first of the four generators that an answer
        passes."""
        try:
            while not self._over:
                placement, update = await self._next_update()
                if isinstance(update, SequenceUpdate):
                    self._unread -= len(update.tokens)
                if placement != self._placement:
                    continue
                if isinstance(update, SlowReader):
                    raise update
                if isinstance(update, SatchelError):
                    await self._go_on(update)
                    continue
                lost = self._picture_lost(update) or self._refused_late(update)
                if lost is not None and not update.tokens:
                    await self._go_on(lost)
                    continue
                if lost is not None:
                    # A replica that leaves may end the sequence in one frame with its latest tokens.
                    update = replace(update, finish=None, error=None)
                self._tokens.extend(update.tokens)
                prefill, self._prefill = self._prefill, None
                if prefill is not None and update.cached_tokens is not None and prefill.cached_tokens is not None:
                    # Tokens that another node prefilled for this sequence do not count as cached.
                    update = replace(update, cached_tokens=min(update.cached_tokens, prefill.cached_tokens))
                if self._request.generated:
                    # After a failover the client keeps the first replica's count.
                    update = replace(update, cached_tokens=None)
                self._over = update.finish is not None
                yield update
                if lost is not None:
                    await self._go_on(lost)
        finally:
            await self.abort()

    async def _next_update(self) -> tuple[int, SequenceUpdate | SatchelError]:
        """Returns the next update, together with those behind it: if the replica is faster than this process, an event
        has several tokens."""
        placement, update = self._behind or await self._updates.get()
        self._behind = None
        while isinstance(update, SequenceUpdate) and update.finish is None and not self._updates.empty():
            behind = self._updates.get_nowait()
            if behind[0] != placement or not isinstance(behind[1], SequenceUpdate):
                self._behind = behind
                break
            update = merged(update, behind[1])
        return placement, update

    def _picture_lost(self, update: SequenceUpdate) -> SatchelError | None:
        """Returns the error if a sequence ended only because its replica lacks a picture that was not sent again."""
        if update.error is None or not self._lacks_pixels or self._link is None:
            return None
        error = from_wire(update.error)
        if not isinstance(error, PictureLost):
            return None
        self._link.sent.forget(self._request)
        return error

    def _refused_late(self, update: SequenceUpdate) -> SatchelError | None:
        """Returns the error of a sequence that its replica accepted and then refused, if another replica may take it.
        Its replica's node leaves, however many tokens there are; or it had waited for another node's prefill, or for
        the self-test."""
        if update.error is None:
            return None
        error = from_wire(update.error)
        tried_again = Unavailable if self._prefill is not None else (ComputesOtherwise, ReplicaLeaves)
        return error if isinstance(error, tried_again) else None

    async def _go_on(self, loss: SatchelError) -> None:
        """Fails over: submits the sequence again, with its tokens so far in the prompt. After a lost replica it goes to
        another one, or to the same one restarted.

        Sampling noise is a function of seed and position, so the text continues as if nothing had happened.

        Raises:
            SatchelError: the sequence is given up, or no replica accepts it.
        """
        self._unlink()
        done = len(self._tokens)
        # It was refused after it had waited for another node's prefill, or lost meanwhile: it is not split again.
        split = self._prefill is not None
        if not isinstance(loss, ReplicaLeaves):
            self._losses = 1 if done >= PROGRESS_TOKENS else self._losses + 1
        if done:
            self._deaths = 0
        elif isinstance(loss, ReplicaDied):
            await self._note_death()
            if self._deaths >= DEATHS_MAX:
                raise self._crash_error()
        first = self._request
        left = first.sampling.max_tokens - done
        if self._losses > ATTEMPTS or left <= 0 < done:
            raise loss
        prompt = first.prompt + self._tokens
        now = time.monotonic()
        self._request = replace(
            first,
            prompt=prompt,
            block_ids=await asyncio.to_thread(block_ids, first.root_id, prompt),
            sampling=replace(first.sampling, max_tokens=left),
            generated=first.generated + done,
            # The other choices have other tokens by now, so the prompts differ.
            choices=1,
            deadline_s=max(0.1, first.deadline_s - (now - self._started)),
        )
        self._tokens, self._started, self._beside, self._probation_s = [], now, "", 0.0
        before = self.replica
        avoided = [before] if isinstance(loss, ReplicaLost) or split else []
        while True:
            try:
                await self.start(avoided)
                why = {"satchel.from": before, "satchel.replica": self.replica, "error.type": type(loss).__name__}
                self._span.event("failover", {**why, "satchel.generated_tokens": done})
                self._routing.failovers += isinstance(loss, ReplicaLost)
                return
            except Unavailable:
                within_s = await self._routing.recovery_s(first.model)
                if time.monotonic() - now - self._probation_s > within_s:
                    raise
            await asyncio.sleep(self._routing.config.timing.retry_s)

    async def abort(self) -> None:
        """Removes the sequence from its replica. Does nothing if it has ended."""
        self._over = True
        if (leaving := self._leave()) is not None:
            await leaving

    def _leave(self) -> Coroutine[Any, Any, None] | None:
        """Detaches the sequence and returns the call that aborts it, None if no replica has it."""
        link = self._link
        if not self._unlink() or link is None:
            return None
        self._release()
        return link.abort([self.request_id])


def given_up(request_id: str, model: str, replica: str) -> GenerationFailed:
    """Records an incident, as the request may have crashed replicas, and returns the request's error.

    Args:
        request_id: the caller's id followed by a random part.
        replica: the last one that crashed.
    """
    reason = f"{DEATHS_MAX} replicas crashed one after the other when they began to compute"
    text = f"{reason} request {request_id.rpartition('/')[0]} for {model} ({replica} last)"
    note_incident_aside(default_home(), "given_up", text)
    return GenerationFailed(f"{reason} this request: it is not retried")


async def called(request: GenerateRequest, model_id: bytes, scope: str) -> GenerateRequest:
    """Returns the request with the block ids for that model id.

    Args:
        scope: who may reuse the blocks.
    """
    root = root_id(model_id, scope)
    ids = await asyncio.to_thread(block_ids, root, request.prompt)
    return replace(request, model_id=model_id, scope=scope, root_id=root, block_ids=ids)
