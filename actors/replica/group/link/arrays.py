"""Arrays that pass between two stages, on threads of their own: computing waits neither for the network nor for
encryption, nor for an array that the device still computes.

Both sides have a queue of a limited size, so a stage that is faster than its neighbour waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .....cluster.errors import LinkError, SatchelError
from .broken import in_words

QUEUE_BYTES_MAX = 64 * 2**20
"""So many bytes may wait on each side; a single array may be larger."""

AT_ONCE_BYTES = 2**16
"""An array of at most so many bytes is sent by the thread that has it, if none waits: a socket's buffer takes it, and
another thread would only cost time."""

FAIL_S = 0.5
"""How long the message that a process failed may wait for arrays before it."""


class Plain(NamedTuple):
    """An array as it passes: the name of its dtype, its shape, and its bytes, `(nbytes,) uint8`."""

    dtype: str
    shape: Sequence[int]
    data: np.ndarray


class Launched(NamedTuple):
    """An array that the device still computes.

    Attributes:
        nbytes: how many bytes it has.
        wait: waits for it, on any thread.
    """

    nbytes: int
    wait: Callable[[], Plain]


class Outgoing:
    """Sends arrays in order. One thread puts them in.

    Args:
        send: sends one; raises `LinkError`.
        failed: called with the reason if the device fails at an array, by the thread that sends: whoever puts arrays in
            may have nothing more to send.
    """

    def __init__(self, send: Callable[[Plain], None], failed: Callable[[str], object] = lambda why: None) -> None:
        self._send, self._failed = send, failed
        self._changed = threading.Condition()
        self._waiting: deque[Launched] = deque()
        # With the array that is being sent.
        self._bytes = 0
        self._error: SatchelError | None = None
        self._ends = False
        self._thread: threading.Thread | None = None

    def put(self, array: Plain) -> None:
        """Has an array sent; waits while too many bytes wait.

        Raises:
            LinkError: an array could not be sent.
        """
        size = len(array.data)
        if not self._queued(Launched(size, lambda: array), at_once=size <= AT_ONCE_BYTES):
            # The thread has nothing to send, and only this one gives it something.
            self._send(array)

    def put_launched(self, array: Launched) -> None:
        """As `put`, for an array that the device still computes."""
        self._queued(array, at_once=False)

    def _queued(self, array: Launched, *, at_once: bool) -> bool:
        """Puts an array in the queue, unless it may be sent `at_once` and none waits. Returns whether it did."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._bytes or self._bytes + array.nbytes <= QUEUE_BYTES_MAX or self._over
            )
            if self._over:
                raise LinkError("the connection is closed") if self._error is None else self._error
            if at_once and not self._bytes:
                return False
            self._bytes += array.nbytes
            self._waiting.append(array)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="arrays to the next stage", daemon=True)
                self._thread.start()
            return True

    def flush(self, wait_s: float | None) -> bool:
        """Waits until all arrays are sent, or none can be any more. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes or self._over, wait_s) and not self._over

    def end(self) -> None:
        """Ends the thread. What it sends must have ended."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @property
    def _over(self) -> bool:
        return self._ends or self._error is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if self._ends:
                    return
                array = self._waiting.popleft()
            error = None
            try:
                self._send(self._waited(array))
            except Exception as raised:
                error = _of(raised)
            with self._changed:
                self._bytes -= array.nbytes
                self._error = error
                self._changed.notify_all()
            if error is not None:
                return

    def _waited(self, array: Launched) -> Plain:
        try:
            return array.wait()
        except Exception as error:
            self._failed(in_words(error))
            raise


Give = Callable[[Plain | None], object]
"""Is given an array that was awaited, or None if none comes any more."""


class Incoming:
    """Receives arrays before they are asked for. One thread takes them out.

    Args:
        receive: waits for the next one; raises `SatchelError` if none comes any more.
    """

    def __init__(self, receive: Callable[[], Plain]) -> None:
        self._receive = receive
        self._changed = threading.Condition()
        self._came: deque[Plain] = deque()
        # Those who are given the next arrays; what has come is older.
        self._awaited: deque[Give] = deque()
        self._bytes = 0
        self._error: SatchelError | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="arrays of the stage before", daemon=True)
        self._thread.start()

    def take(self) -> Plain:
        """Waits for the next array.

        Raises:
            SatchelError: why none comes any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._came or self._error is not None)
            if not self._came:
                assert self._error is not None
                raise self._error
            array = self._came.popleft()
            self._bytes -= len(array.data)
            self._changed.notify_all()
            return array

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait."""
        with self._changed:
            return bool(self._came)

    def give_next(self, give: Give) -> None:
        """Has the next array given away once it comes, by the thread that receives.

        Raises:
            SatchelError: why none comes any more.
        """
        with self._changed:
            if not self._came:
                if self._error is not None:
                    raise self._error
                self._awaited.append(give)
                return
        give(self.take())

    def end(self) -> None:
        """Ends the thread. Its connection must have been shut."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._received(self._receive())
            except Exception as raised:
                self._give_up(_of(raised))
                return
            with self._changed:
                self._changed.wait_for(lambda: self._bytes <= QUEUE_BYTES_MAX or self._ends)
                if self._ends:
                    break
        self._give_up(LinkError("the connection is closed"))

    def _received(self, array: Plain) -> None:
        with self._changed:
            give = self._awaited.popleft() if self._awaited else None
            if give is None:
                self._came.append(array)
                self._bytes += len(array.data)
                self._changed.notify_all()
        if give is not None:
            give(array)

    def _give_up(self, error: SatchelError) -> None:
        with self._changed:
            self._error = error
            awaited, self._awaited = self._awaited, deque()
            self._changed.notify_all()
        for give in awaited:
            give(None)


def _of(error: Exception) -> SatchelError:
    return error if isinstance(error, SatchelError) else LinkError(f"an array cannot pass: {in_words(error)}")
