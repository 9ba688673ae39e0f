"""What makes an actor's method of a plain one: bytes come, bytes go, and errors are data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from ...cluster.errors import NoAnswer, OtherVersion, SatchelError, Unavailable
from .codec import decode, encode, encode_error

Self = TypeVar("Self")
Request = TypeVar("Request")


def answers(
    request: type[Request],
) -> Callable[[Callable[[Self, Request], Awaitable[Any]]], Callable[[Self, bytes], Coroutine[Any, Any, bytes]]]:
    """A method that takes a `request` and returns a message or None becomes one that takes and returns bytes. A
    `SatchelError` that it raises travels as data, and is raised again by `decode` where it comes to.

    A request of another version is answered with an error, which whoever asked finds to be of another version, too.
    """

    def make(
        method: Callable[[Self, Request], Awaitable[Any]],
    ) -> Callable[[Self, bytes], Coroutine[Any, Any, bytes]]:
        @wraps(method)
        async def answer(self: Self, data: bytes) -> bytes:
            try:
                asked = decode(request, data)
            except (TypeError, ValueError) as error:
                return encode_error(OtherVersion(str(error)))
            except SatchelError as error:
                return encode_error(error)
            try:
                return encode(await method(self, asked))
            except NoAnswer as error:
                # Of somebody else; whoever asked is not to take this actor for lost.
                return encode_error(Unavailable(error.message, retry_after_s=error.retry_after_s))
            except SatchelError as error:
                return encode_error(error)

        return answer

    return make
