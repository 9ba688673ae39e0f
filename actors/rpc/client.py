"""A call to an actor: made by name, bounded in time, with one convention for errors.

An actor answers with bytes: a value (`codec.encode`), or an error as data, which is raised again in the caller. If no
answer comes, the caller gets `NoAnswer` or a subclass: `ActorLost`, `ActorAway`, `ActorSilent`, `OtherVersion`. Ray's
errors leave this file only as causes.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Generator
from functools import cache
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RaySystemError, RayTaskError

from ...cluster.connection import NAMESPACE
from ...cluster.errors import ActorAway, ActorLost, ActorSilent, NoAnswer, OtherVersion

T = TypeVar("T")


def actor_handle(name: str) -> Any:
    """Returns the handle of a running actor.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)


@cache
def actor_class(kind: type) -> Any:
    """Returns what starts actors of a class. Ray keeps what it knows of it for ever, here, in its control store and in
    every process that calls such an actor, so it is made once."""
    return ray.remote(kind)


def this_machine() -> str:
    """Returns the id of Ray's node to which this process belongs."""
    return ray.get_runtime_context().get_node_id()


def is_restarted() -> bool:
    """Returns whether this process of an actor follows on an earlier one."""
    with warnings.catch_warnings():
        # Ray's own code reads one of its deprecated properties here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


UNANSWERED = (RayError, ValueError, AttributeError, TimeoutError)
"""What Ray and Python raise if no answer comes: any error of Ray, no such actor, no such method, a timeout."""


class ActorRef:
    """An actor that is called by its name. Its handle is looked up at the first call, and after one without answer.

    Args:
        silent: the message of errors if no answer comes, such as "the router does not answer now".
        handle: the actor's, if known.
        on_no_answer: called if no answer comes.
    """

    unanswered_by: tuple[type[Exception], ...] = UNANSWERED

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
        self._handle, self.on_no_answer = handle, on_no_answer

    def call(
        self, send: Callable[[Any], Any], read: Callable[[Any], T], timeout_s: float, *, large: bool = False
    ) -> Call[T]:
        """Returns a call that has not been made yet.

        Args:
            send: begins the call on the handle, and returns the answer's reference.
            read: decodes the answer. Raises the actor's error, or `ValueError` or `TypeError` for another version's
                bytes.
            large: whether sending takes too long for an event loop.
        """
        return Call(self, send, read, timeout_s, large=large)

    def find(self) -> Any:
        """Returns what a thread makes calls on. Raises as `find_handle`."""
        return self.find_handle()

    async def find_aside(self) -> Any:
        """As `find`, for an event loop."""
        return self._handle if self._handle is not None else await asyncio.to_thread(self.find_handle)

    def find_handle(self) -> Any:
        """Returns Ray's handle. Call it in a thread: if unknown, the control store is asked.

        Raises:
            ValueError: there is no such actor.
        """
        handle = self._handle
        if handle is None:
            handle = self._handle = actor_handle(self.name)
        return handle

    def look_up_again(self) -> None:
        """Drops the handle: the next call through Ray looks the actor up."""
        self._handle = None

    def close(self) -> None:
        """Gives up what it keeps open, if anything."""

    def answer(self, sent: Any, timeout_s: float) -> Any:
        """Waits in a thread for the answer to a call."""
        # Not `ray.get`: in every thread of an asynchronous actor it warns that it blocks the event loop.
        return sent.future().result(timeout_s)

    def unanswered(self, error: Exception) -> NoAnswer:
        """Returns the error to raise instead of Ray's or a timeout. Drops the handle, except after a timeout: a slow
        actor is still there."""
        translated = _kind(error)(self._silent, retry_after_s=self._retry_after_s)
        if not isinstance(translated, ActorSilent):
            self._handle = None
        if self.on_no_answer is not None:
            self.on_no_answer()
        return translated


def _kind(error: Exception) -> type[NoAnswer]:
    if isinstance(error, RayTaskError):
        # The method failed. This comes first, because Ray makes it an instance of the method's error class, too.
        return NoAnswer
    if isinstance(error, TimeoutError):
        return ActorSilent
    if isinstance(error, ActorUnavailableError):
        return ActorAway
    return ActorLost if isinstance(error, RayActorError) else NoAnswer


class Call(Generic[T]):
    """A call that is made when it is awaited, or in a thread by `wait`; again each time.

    Raises:
        SatchelError: the actor's error.
        NoAnswer: no answer came in time.
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
        """Returns the same call with another time limit for the answer."""
        return Call(self._actor, self._send, self._read, timeout_s, large=self._large)

    def __await__(self) -> Generator[Any, None, T]:
        return self._ask().__await__()

    async def _ask(self) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                handle = await self._actor.find_aside()
                sent: Awaitable[Any] = (
                    await asyncio.to_thread(self._begin, handle) if self._large else self._begin(handle)
                )
                answer = await sent
        except self._actor.unanswered_by as error:
            raise self._actor.unanswered(error) from error
        return self._decoded(answer)

    def wait(self) -> T:
        """Makes the call and returns the answer. For threads without an event loop."""
        try:
            answer = self._actor.answer(self._begin(self._actor.find()), self._timeout_s)
        except self._actor.unanswered_by as error:
            raise self._actor.unanswered(error) from error
        return self._decoded(answer)

    def _begin(self, handle: Any) -> Any:
        try:
            return self._send(handle)
        except Exception as error:
            # For an actor of a cluster that has ended Ray raises an exception of no kind.
            if type(error) is Exception:
                raise RaySystemError(str(error)) from error
            raise

    def _decoded(self, answer: Any) -> T:
        try:
            return self._read(answer)
        except (TypeError, ValueError) as error:
            raise OtherVersion(f"{self._actor.name} is another version of Satchel: {error}") from error
