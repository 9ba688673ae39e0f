"""The prefill side of a split request: another node prefills the prompt, and the decoding replica pulls its KV.

The decoding replica waits only as long as KV may still come. This side tells it when no more will come: the prefilling
replica refused, failed, was lost, or finished long ago. The decoding replica computes what has not come, so nothing
here can fail the request.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from ...actors.protocol.block_ids import BLOCK_TOKENS
from ...actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from ...actors.protocol.router_messages import Decision, SequenceLeft, prefill_sequence
from ...cluster.errors import NoAnswer, SatchelError
from .connection import ReplicaConnection
from .routing import Routing

logger = logging.getLogger(__name__)


class Prefill:
    """The prefill of a prompt for a sequence on another replica, from `begin` to `end`.

    Args:
        decision: names both replicas.
        request: the sequence, as the decoding replica gets it.

    Attributes:
        cached_tokens: how many of the prompt's tokens need not be computed there; None before it begins.
    """

    def __init__(self, routing: Routing, decision: Decision, request: GenerateRequest) -> None:
        self.cached_tokens: int | None = None
        self._routing = routing
        self._replica = decision.prefill_on
        self._id, self._sequence = prefill_sequence(request.request_id), request.request_id
        self._link = routing.link(replace(decision, replica=decision.prefill_on, node=decision.pull_from))
        prompt = request.prompt[:-1]
        self._request = replace(
            request,
            request_id=self._id,
            consumer=self._link.consumer,
            prompt=prompt,
            block_ids=request.block_ids[: len(prompt) // BLOCK_TOKENS],
            sampling=Sampling(max_tokens=0),
            pull_from="",
            pull_tokens=0,
            hands_on=True,
        )
        self._ended = asyncio.Event()
        self._complete = False
        self._running: asyncio.Task[None] | None = None

    def begin(self, decoding: ReplicaConnection) -> None:
        """Starts the prefill, and tells the decoding replica once no more KV comes."""
        self._link.sequences[self._id] = self.put
        self._running = asyncio.ensure_future(self._run(decoding))

    def put(self, update: SequenceUpdate | SatchelError) -> None:
        """Takes updates of the prefill, as `RayGeneration.put`."""
        if isinstance(update, SequenceUpdate):
            if update.cached_tokens is not None:
                self.cached_tokens = update.cached_tokens
            self._complete = update.finish == "length"
            if update.finish is None:
                return
            self._routing.release(SequenceLeft(self._replica, self._id))
        self._ended.set()

    async def _run(self, decoding: ReplicaConnection) -> None:
        timing = self._routing.config.timing
        try:
            await self._link.client.submit(self._request).within(timing.answer_s)
            await self._ended.wait()
        except SatchelError as error:
            logger.warning("replica %s does not prefill for another: %s", self._replica, error.message)
            if isinstance(error, NoAnswer):
                self._routing.lose(self._replica)
        if self._complete:
            # The last sealed blocks are still on their way.
            await asyncio.sleep(timing.pull_s)
        while True:
            # Repeated, because the decoding replica may not have the sequence yet.
            with suppress(NoAnswer):
                await decoding.client.go_on([self._sequence])
            await asyncio.sleep(timing.retry_s)

    def end(self) -> None:
        """Ends the wait for KV, because the sequence goes on or is over. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        running.cancel()
        if self._link.sequences.pop(self._id, None) is not None:
            self._routing.release(SequenceLeft(self._replica, self._id))
            self._routing.background(self._link.abort([self._id]))
