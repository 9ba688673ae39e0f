"""What other threads want of the engine's: commands, taken in order between two steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...cluster.errors import SatchelError
from ..messages import GenerateRequest
from .memory import Restored
from .restores import Reading
from .vision import Features


@dataclass(frozen=True)
class Submit:
    """Queue a request. `reply` gets None once it is accepted, or why not; the disk has about its first `known` tokens,
    and `features` were read back for its pictures."""

    request: GenerateRequest
    reply: Callable[[SatchelError | None], None]
    known: int = 0
    features: dict[int, Features] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadBack:
    """What a row was waiting for; None for nothing."""

    reading: Reading
    restored: Restored | None


@dataclass(frozen=True)
class Abort:
    """Take requests out; unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Run `action` on the engine's thread, where all state is consistent."""

    action: Callable[[], None]


Command = Submit | ReadBack | Abort | Call


class Inbox:
    """Commands for one reader. Without a limit of its own: requests are refused when they are taken, by the scheduler's
    queue, so all that may wait here is what arrives during one step."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def wake(self) -> None:
        """Let `wait` return."""
        self._queue.put(None)

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def take(self) -> Iterator[Command]:
        """All that is there now."""
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                yield command

    def wait(self, timeout_s: float) -> Command | None:
        """The next command; None after `timeout_s` without one, or after `wake`."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
