"""A call to an actor: made by name, bounded in time, with one convention for what goes wrong.

What an actor says is its answer as bytes (`codec.encode`), or an error as data in the same bytes. Whoever called
gets the answer, or that very error raised again. Where no answer comes it is `NoAnswer` or one of its kinds:
`ActorLost`, `ActorAway`, `ActorSilent`, `OtherVersion`. No error of Ray's leaves this file, but as a cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from ...cluster.errors import ActorAway, ActorLost, ActorSilent, NoAnswer, OtherVersion
from .handles import actor_handle

T = TypeVar("T")


class ActorRef:
    """An actor that is called by its name. Its handle is looked up at the first call, and after one without answer.

    Args:
        silent: what is said where no answer comes, such as "the router does not answer now".
        handle: where it is known already.
        on_no_answer: called where no answer came.
    """

    def __init__(
        self,
        name: str,
        silent: str,
        *,
        handle: Any = None,
        retry_after_s: float = 1.0,
        on_no_answer: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self._silent, self._retry_after_s = silent, retry_after_s
        self._handle, self._on_no_answer = handle, on_no_answer

    def call(
        self, send: Callable[[Any], Any], read: Callable[[Any], T], timeout_s: float, *, large: bool = False
    ) -> Call[T]:
        """A call that waits to be made.

        Args:
            send: begins it at the handle that it is given; the answer's reference.
            read: the answer as it is to be given. Raises the error that the actor says, `ValueError` or `TypeError` for
                what another version says.
            large: whether sending takes so long that no event loop should do it.
        """
        return Call(self, send, read, timeout_s, large=large)

    def find(self) -> Any:
        """The handle. Waits for the control store where it is not known: in a thread.

        Raises:
            ValueError: there is no such actor.
        """
        handle = self._handle
        if handle is None:
            handle = self._handle = actor_handle(self.name)
        return handle

    async def find_aside(self) -> Any:
        """As `find`, for an event loop."""
        return self._handle if self._handle is not None else await asyncio.to_thread(self.find)

    def unanswered(self, error: Exception) -> NoAnswer:
        """What a caller is told instead of what Ray or the clock has raised. Looks the handle up anew next time, but
        after silence: who is slow is still there."""
        found = no_answer(error, self._silent, self._retry_after_s)
        if not isinstance(found, ActorSilent):
            self._handle = None
        if self._on_no_answer is not None:
            self._on_no_answer()
        return found


def no_answer(error: Exception, silent: str, retry_after_s: float = 1.0) -> NoAnswer:
    """What one of `UNANSWERED` means."""
    return _kind(error)(silent, retry_after_s=retry_after_s)


def _kind(error: Exception) -> type[NoAnswer]:
    if isinstance(error, RayTaskError):
        # The method failed, with whatever error: Ray makes it an instance of that error's class, too.
        return NoAnswer
    if isinstance(error, TimeoutError):
        return ActorSilent
    if isinstance(error, ActorUnavailableError):
        return ActorAway
    return ActorLost if isinstance(error, RayActorError) else NoAnswer


UNANSWERED = (RayError, ValueError, AttributeError, TimeoutError)
"""What Ray raises where no answer comes, and Python: no such actor, no such method, in time."""


class Call(Generic[T]):
    """A call that is made when it is awaited, or in a thread by `wait`; each time anew.

    Raises:
        SatchelError: what the actor says.
        NoAnswer: it says nothing, within the time.
    """

    def __init__(
        self,
        actor: ActorRef,
        send: Callable[[Any], Any],
        read: Callable[[Any], T],
        timeout_s: float,
        *,
        large: bool = False,
    ) -> None:
        self._actor, self._send, self._read, self._timeout_s, self._large = actor, send, read, timeout_s, large

    def within(self, timeout_s: float) -> Call[T]:
        """The same call, with this much time for the answer."""
        return Call(self._actor, self._send, self._read, timeout_s, large=self._large)

    def __await__(self) -> Generator[Any, None, T]:
        return self._ask().__await__()

    async def _ask(self) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                handle = await self._actor.find_aside()
                sent: Awaitable[Any] = (
                    await asyncio.to_thread(self._send, handle) if self._large else self._send(handle)
                )
                answer = await sent
        except UNANSWERED as error:
            raise self._actor.unanswered(error) from error
        return self._said(answer)

    def wait(self) -> T:
        """The answer, for a thread that is no event loop's."""
        try:
            answer = ray.get(self._send(self._actor.find()), timeout=self._timeout_s)
        except UNANSWERED as error:
            raise self._actor.unanswered(error) from error
        return self._said(answer)

    def _said(self, answer: Any) -> T:
        try:
            return self._read(answer)
        except (TypeError, ValueError) as error:
            raise OtherVersion(f"{self._actor.name} is another version of Satchel: {error}") from error
