"""The actor's side of a call: decodes the arguments, calls the method, and encodes the answer or the error."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...cluster.errors import NoAnswer, OtherVersion, SatchelError, Unavailable
from ...cluster.telemetry.context import answering
from .codec import encode, encode_error
from .spec import Method

P = ParamSpec("P")
R = TypeVar("R")

SWITCH_S = 0.0005
"""Python's thread switch interval in an actor whose other threads compute. A call to it switches threads several times;
with the default of 5 ms it takes ten times as long while they do. So does what passes between stages."""

Shell = Callable[[Any, bytes], Coroutine[Any, Any, bytes]]
"""A method of an actor as Ray calls it."""


def answers(declared: Method[P, R]) -> Callable[[Callable[Concatenate[Any, P], Awaitable[R]]], Shell]:
    """Returns a decorator for an actor's method that implements the declaration: the decorated method takes and returns
    bytes.

    A `SatchelError` that the method raises travels as data, and is raised again in the caller. A request of another
    version is answered with an error; the caller sees from its version that the versions differ.
    """

    def make(does: Callable[Concatenate[Any, P], Awaitable[R]]) -> Shell:
        actor, _, _ = does.__qualname__.rpartition(".")
        return shell(declared, lambda self: partial(does, self), module=does.__module__, actor=actor)

    return make


def shell(
    declared: Method[P, R], find: Callable[[Any], Callable[P, Awaitable[R] | R]], *, module: str, actor: str
) -> Shell:
    """As `answers`, for a method of a part of an actor.

    Args:
        find: gets the actor, and returns the part's method.
        module, actor: names of the actor's module and class, where Ray's processes find the method.
    """

    span_name = f"{actor.rpartition('.')[2].removesuffix('Actor')}.{declared.name}"

    async def answer(self: Any, data: bytes) -> bytes:
        try:
            values, context = declared.received(data)
        except (TypeError, ValueError) as error:
            return encode_error(OtherVersion(str(error)))
        except SatchelError as error:
            return encode_error(error)
        try:
            # Most calls are made for no request.
            with answering(span_name, context) if context else nullcontext():
                answer = declared.do(find(self), values)
                return encode(await answer if inspect.isawaitable(answer) else answer)
        except NoAnswer as error:
            # A third process did not answer; the caller must not take this actor for lost.
            return encode_error(Unavailable(error.message, retry_after_s=error.retry_after_s))
        except SatchelError as error:
            return encode_error(error)

    answer.__name__, answer.__doc__ = declared.name, declared.__doc__
    answer.__module__, answer.__qualname__ = module, f"{actor}.{declared.name}"
    return answer
