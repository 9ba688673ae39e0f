"""Rows that have a place and whose KV is read back from the disk before they begin.

A row is read back when it is admitted, not when it comes: so what is read back counts as a running row's KV, and rows
that wait hold none, however many they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from ..kv_store.blocks import BLOCK_TOKENS
from .disk_tier import DiskTier, Prompt
from .memory import Restored, Sequence

logger = logging.getLogger(__name__)

READS_MAX = 2
"""How many prompts are read back at a time. Each may be as large as the context, and more would only share the disk."""

READ_WAIT_S = 30.0
"""How long an admitted row waits for its KV, its turn to read included; its prompt is computed then."""


@dataclass(frozen=True)
class Reading:
    """A row that is being read back since `since` (seconds, of the monotonic clock)."""

    prompt: Prompt
    hot_tokens: int
    since: float


Deliver = Callable[[Reading, Restored | None], None]


class Restores:
    """For the engine's thread.

    Args:
        disk: None where nothing is read back.
        deliver: called on a reader's thread with what was read, or None.
    """

    def __init__(self, disk: DiskTier | None, deliver: Deliver) -> None:
        self._disk = disk
        self._deliver = deliver
        self._reading: dict[str, Reading] = {}
        self._jobs: SimpleQueue[Reading] = SimpleQueue()
        for number in range(READS_MAX if disk is not None else 0):
            threading.Thread(target=self._read_forever, name=f"reader-{number}", daemon=True).start()

    def __len__(self) -> int:
        return len(self._reading)

    def asks(self, sequence: Sequence, hot: int, *, plain: bool) -> bool:
        """Whether the disk may have more of a row than the `hot` tokens that memory has.

        Args:
            plain: whether every beginning of what memory keeps can be reused.
        """
        request, tokens = sequence.request, len(sequence.tokens)
        if self._disk is None or not (request.agent or sequence.ids) or hot >= tokens - 1:
            return False
        # All that the agent has had is in memory. Asking for what little is new would take longer than computing it.
        return not (plain and 0 < request.remembered_tokens <= hot and tokens - hot < BLOCK_TOKENS)

    def begin(self, sequence: Sequence, hot: int) -> None:
        """Read a row back."""
        request = sequence.request
        # A copy, as the row may leave and its tokens go on elsewhere.
        prompt = Prompt(request.request_id, request.agent, request.root_id, list(sequence.ids), list(sequence.tokens))
        reading = Reading(prompt, hot, time.monotonic())
        self._reading[request.request_id] = reading
        self._jobs.put(reading)

    def end(self, reading: Reading) -> bool:
        """Something was read. False where nobody waits for it any more."""
        if self._reading.get(reading.prompt.request_id) is not reading:
            return False
        del self._reading[reading.prompt.request_id]
        return True

    def leave(self, request_id: str) -> None:
        """The row has lost its place; one that is not here is ignored."""
        self._reading.pop(request_id, None)

    def overdue(self) -> list[str]:
        """Rows that have waited too long; they wait no more."""
        if not self._reading:
            return []
        now = time.monotonic()
        late = [name for name, reading in self._reading.items() if now - reading.since > READ_WAIT_S]
        for name in late:
            logger.warning("request %s: nothing is read back within %g s", name, READ_WAIT_S)
            del self._reading[name]
        return late

    def _read_forever(self) -> None:
        assert self._disk is not None
        while True:
            reading = self._jobs.get()
            restored = None
            try:
                # Who has waited too long, or left, needs no reading.
                if self._reading.get(reading.prompt.request_id) is reading:
                    restored = self._disk.load(reading.prompt, reading.hot_tokens)
            except Exception:
                # Whatever it is: this thread must live, and the row be computed.
                logger.exception("request %s: nothing is read back", reading.prompt.request_id)
            self._deliver(reading, restored)
            # Else what was read would be held until the next.
            del reading, restored
