"""Reads the KV of admitted sequences back from disk before they begin.

A sequence's KV is read back when it is admitted, not when it arrives. So the KV counts as a running sequence's, and
queued sequences hold none.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue

from ....cluster.errors import Unavailable
from ....cluster.telemetry.context import NO_SPAN, Span, working_for
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import request_of
from ..kv.caches import PooledBlock, Records
from .disk_reading import Adopt
from .disk_tier import DiskTier, Prompt
from .sequence_memory import Restored, Sequence

logger = logging.getLogger(__name__)

READS_MAX = 2
"""How many prompts are read back at a time. Each may be as large as the context, and more would only share the disk."""

READ_WAIT_S_MIN = 5.0
"""An admitted sequence waits at least this long for its KV; if twice the time of computing it is longer, that long."""

TRIES_S = (0.5, 1.0, 1.0)
"""Pauses after which a store that fails at once, because it is restarting, is asked again."""

AT_ONCE_S = 1.0

PAUSE_S = 10.0
"""A store that hangs is not asked for this long: otherwise sequences would wait for it one after the other."""


class NotWaiting(Exception):
    """The sequence does not wait for its KV any more."""


@dataclass(frozen=True)
class Reading:
    """A sequence whose KV is being read back since `since` (seconds, monotonic clock). It waits `wait_s` seconds.
    Calls to the store belong to `span`."""

    prompt: Prompt
    hot_tokens: int
    since: float
    wait_s: float
    span: Span = NO_SPAN


Deliver = Callable[[Reading, Restored | None], None]


class Restores:
    """The sequences that wait for their KV, and the threads that read it. Methods are for the engine's thread.

    Args:
        disk: None if nothing is read back.
        deliver: called on a reader's thread with what was read, or None.
        adopt: called on a reader's thread with blocks as they are read, so that little of a long prompt is held twice.
        wait_s_max: how long a sequence waits at most, including the wait for a reader; then its prompt is computed. The
            store keeps the files no longer than that: `timing.block_lease_s`.
    """

    def __init__(self, disk: DiskTier | None, deliver: Deliver, adopt: Adopt, wait_s_max: float) -> None:
        self.wait_s_max = wait_s_max
        self._disk = disk
        self._deliver = deliver
        self._adopt = adopt
        self._reading: dict[str, Reading] = {}
        # Start times of the readers that are busy.
        self._working: dict[int, float] = {}
        self._paused_until = 0.0
        self._jobs: SimpleQueue[Reading | None] = SimpleQueue()
        for number in range(READS_MAX if disk is not None else 0):
            arguments = self._jobs, weakref.WeakMethod(self._read_and_deliver), number
            threading.Thread(target=_read_forever, args=arguments, name=f"reader-{number}", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def __len__(self) -> int:
        return len(self._reading)

    def asks(self, sequence: Sequence, hot: int, *, plain: bool) -> bool:
        """Whether the disk may have KV of a sequence beyond the `hot` tokens that memory has.

        Args:
            plain: whether every prefix of a kept entry can be reused.
        """
        request, tokens = sequence.request, len(sequence.tokens)
        if self._disk is None or not (request.agent or sequence.ids) or hot >= tokens - 1:
            return False
        if not request.reusable or self._hangs():
            return False
        # If all that the agent remembers is hot, or if there is no agent, only few tokens are new: asking the disk
        # would take longer than computing them.
        remembered = request.remembered_tokens if request.agent else hot
        return not (plain and 0 < remembered <= hot and tokens - hot < BLOCK_TOKENS)

    def _hangs(self) -> bool:
        """Whether the disk hangs, so that reading would only delay sequences."""
        now, working = time.monotonic(), list(self._working.values())
        return now < self._paused_until or (
            len(working) == READS_MAX and all(now - since > self.wait_s_max for since in working)
        )

    def begin(self, sequence: Sequence, hot: int, tokens_per_s: float, *, may_compute: bool = False) -> None:
        """Queues a sequence to be read back.

        Args:
            hot: how many of its first tokens memory has.
            tokens_per_s: the prefill rate; 0 if unknown.
            may_compute: whether it is computed if that is faster: it delays nobody, and needs nothing but tokens.
        """
        request = sequence.request
        # Copies, because the sequence may leave, and its tokens may change.
        ids, tokens = list(sequence.ids), list(sequence.tokens)
        faster = tokens_per_s if may_compute else 0.0
        prompt = replace(Prompt.of(request), ids=ids, tokens=tokens, tokens_per_s=faster)
        compute_s = (len(prompt.tokens) - hot) / tokens_per_s if tokens_per_s else self.wait_s_max
        wait_s = max(READ_WAIT_S_MIN, 2 * compute_s)
        reading = Reading(prompt, hot, time.monotonic(), wait_s, sequence.span.phase)
        self._reading[request.request_id] = reading
        self._jobs.put(reading)

    def end(self, reading: Reading) -> bool:
        """Ends a reading. Returns False if the sequence no longer waits for it."""
        if self._reading.get(reading.prompt.request_id) is not reading:
            return False
        del self._reading[reading.prompt.request_id]
        return True

    def leave(self, request_id: str) -> None:
        """Forgets a sequence that was preempted or ended; unknown ids are ignored."""
        self._reading.pop(request_id, None)

    def overdue(self) -> list[str]:
        """Removes and returns the sequences that have waited too long."""
        if not self._reading:
            return []
        now = time.monotonic()
        late = {
            name: wait_s
            for name, reading in self._reading.items()
            if now - reading.since > (wait_s := min(reading.wait_s, self.wait_s_max))
        }
        for name, wait_s in late.items():
            logger.warning("request %s: nothing is read back within %.1f s", name, wait_s)
            del self._reading[name]
        return list(late)

    def _read_and_deliver(self, reading: Reading, number: int) -> None:
        restored = None
        self._working[number] = time.monotonic()
        try:
            with working_for(request_of(reading.prompt.request_id), reading.span):
                restored = self._read(reading)
        except Exception:
            # The thread must survive any error, and the sequence is computed instead.
            logger.exception("request %s: nothing is read back", reading.prompt.request_id)
        del self._working[number]
        self._deliver(reading, restored)

    def _waits(self, reading: Reading) -> bool:
        """Whether the sequence has not left, and has not waited too long."""
        return self._reading.get(reading.prompt.request_id) is reading

    def _read(self, reading: Reading) -> Restored | None:
        assert self._disk is not None

        def adopt(records: Records) -> Future[list[PooledBlock]]:
            if not self._waits(reading):
                raise NotWaiting
            return self._adopt(records)

        for pause_s in (*TRIES_S, 0.0):
            if not self._waits(reading) or time.monotonic() < self._paused_until:
                return None
            began = time.monotonic()
            try:
                return self._disk.load(reading.prompt, reading.hot_tokens, adopt)
            except NotWaiting:
                return None
            except Unavailable as error:
                logger.warning("request %s: nothing is read back yet: %s", reading.prompt.request_id, error.message)
                if time.monotonic() - began > AT_ONCE_S:
                    break
            time.sleep(pause_s)
        self._paused_until = time.monotonic() + PAUSE_S
        return None


def _read_forever(
    jobs: SimpleQueue[Reading | None], read: weakref.WeakMethod[Callable[[Reading, int], None]], number: int
) -> None:
    """Runs until nobody has the restores any more: then None comes."""
    while (reading := jobs.get()) is not None and (now := read()) is not None:
        now(reading, number)
        # Otherwise they would stay alive until the next one.
        del reading, now
