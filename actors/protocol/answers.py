"""Turns a method on messages into an actor's method on bytes, with errors as data."""

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
    """Returns a decorator for methods that take a `request` and return a message or None: the result takes and returns
    bytes. A `SatchelError` that the method raises travels as data; the caller's `decode` raises it again.

    A request of another version is answered with an error, whose version the caller in turn finds to be another one.
    """

    def make(
        method: Callable[[Self, Request], Awaitable[Any]],
    ) -> Callable[[Self, bytes], Coroutine[Any, Any, bytes]]:
        @wraps(method)
        async def answer(self: Self, data: bytes) -> bytes:
            try:
                message = decode(request, data)
            except (TypeError, ValueError) as error:
                return encode_error(OtherVersion(str(error)))
            except SatchelError as error:
                return encode_error(error)
            try:
                return encode(await method(self, message))
            except NoAnswer as error:
                # A third process did not answer; the caller must not take this actor for lost.
                return encode_error(Unavailable(error.message, retry_after_s=error.retry_after_s))
            except SatchelError as error:
                return encode_error(error)

        return answer

    return make
