"""What all threads of one process of a group know: whether the group is whole, and if not, why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .....cluster.errors import SatchelError


class GroupBroken(BaseException):
    """A process of the group, or the way to it, has failed. Its processes may have done different things, so nothing is
    tried again: all of them end. Not an `Exception`, because code that handles exceptions and continues must not
    continue after this."""


class Wholeness:
    """Whether a group is whole; once broken it stays broken. Safe from any thread.

    Args:
        ends: called once, when it breaks, by the thread that broke it; must end all waits for other processes.
    """

    def __init__(self, ends: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._why, self._ends = "", ends

    @property
    def why(self) -> str:
        """Why it is broken; empty if it is whole."""
        return self._why

    def break_off(self, why: str) -> None:
        """Breaks the group. The first reason counts."""
        with self._lock:
            if self._why:
                return
            self._why = why
        self._ends()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context of something that all processes do. Whatever fails in it breaks the group.

        Raises:
            GroupBroken: it failed, or the group was broken before.
        """
        if self._why:
            raise GroupBroken(self._why)
        try:
            yield
        except BaseException as error:
            self.break_off(in_words(error))
            raise GroupBroken(self._why) from error


def in_words(error: BaseException) -> str:
    """Returns what happened, as the reason of a broken group."""
    return error.message if isinstance(error, SatchelError) else f"{type(error).__name__}: {error}"
