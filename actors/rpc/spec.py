"""A method of an actor, declared once: its arguments, answer, time limit and errors.

    class RouterClient(Client):
        @method(answer_s)
        def alive(self, model: str) -> list[str]:
            "Returns the names of the model's replicas that reported lately."
            ...

An instance of the class calls the actor: `await router.alive("m")`. The class itself has the declaration:
`RouterClient.alive`, from which the actor makes its own side (`shell.answers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints, overload

from ...cluster.config.timing import Timing
from ...cluster.telemetry.context import carried
from .client import ActorRef, Call
from .codec import encode_call, reader, unpack, unpack_call

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Limit = Callable[..., float]
"""Gets the cluster's timing and a call's arguments in the order of the declaration, and returns how long the answer may
take, in seconds."""


def answer_s(timing: Timing, *_: Any) -> float:
    """The time limit of most methods."""
    return timing.answer_s


class Client:
    """An actor, for every process that calls it. Its methods return a `Call` each.

    Args:
        timing: of the cluster.
    """

    def __init__(self, actor: ActorRef, timing: Timing) -> None:
        self.actor, self.timing = actor, timing


def method(
    limit: Limit = answer_s, *, large: bool = False
) -> Callable[[Callable[Concatenate[Any, P], R]], Method[P, R]]:
    """Returns a decorator that declares a method of an actor, in a class of a `Client`.

    Args:
        large: whether encoding the arguments may take too long for an event loop.
    """
    return lambda declared: Method(declared, limit, large)


class Method(Generic[P, R]):
    """A method of an actor, by its name."""

    def __init__(self, declared: Callable[Concatenate[Any, P], R], limit: Limit, large: bool) -> None:
        self.name, self.__doc__ = declared.__name__, declared.__doc__
        self._declared, self._limit, self._large = declared, limit, large
        _, *parameters = inspect.signature(declared).parameters.values()
        self._defaults = [(each.name, each.default) for each in parameters]
        self._named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        self._by_position = len(parameters) - len(self._named)

    @overload
    def __get__(self, client: None, owner: type) -> Method[P, R]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, Call[R]]: ...
    def __get__(self, client: Client | None, owner: type) -> Method[P, R] | Callable[P, Call[R]]:
        return self if client is None else partial(self.call, client)

    def call(self, client: Client, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        values = self._values(*args, **kwargs)

        def send(handle: Any) -> Any:
            return getattr(handle, self.name).remote(encode_call(values, carried()))

        return client.actor.call(send, self.answered, self._limit(client.timing, *values), large=self._large)

    def _values(self, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """Returns the arguments in the order of the declaration, with defaults."""
        values: list[Any] = [*args]
        for name, default in self._defaults[len(args) :]:
            values.append(kwargs.pop(name, default))
        if kwargs or len(args) > self._by_position or inspect.Parameter.empty in values:
            raise TypeError(f"{self.name} takes {', '.join(name for name, _ in self._defaults) or 'nothing'}")
        return values

    def asked(self, data: bytes) -> list[Any]:
        """Returns the arguments of a call, in the order of the declaration. Raises as `received`."""
        return self.received(data)[0]

    def received(self, data: bytes) -> tuple[list[Any], list[str]]:
        """Returns the arguments of a call, as `asked`, and what `carried` returned to its caller.

        Raises:
            ValueError, TypeError: another version's.
            SatchelError: a damaged KV entry is among them.
        """
        (values, context), readers = unpack_call(data), self._readers[:-1]
        if not isinstance(values, list) or len(values) != len(readers):
            raise ValueError(f"{self.name} takes {len(readers)} arguments")
        return [read(value) for read, value in zip(readers, values, strict=False)], context

    def answered(self, data: bytes) -> R:
        """Returns the answer to a call.

        Raises:
            ValueError, TypeError: another version's.
            SatchelError: what the method raised.
        """
        return self._readers[-1](unpack(data))

    def do(self, how: Callable[..., T], values: list[Any]) -> T:
        """Calls `how` with arguments in the order of the declaration."""
        named = dict(zip(self._named, values[self._by_position :], strict=True))
        return how(*values[: self._by_position], **named)

    @cached_property
    def _readers(self) -> list[Callable[[Any], Any]]:
        """Of the arguments, and of the answer."""
        hints = get_type_hints(self._declared)
        return [reader(hints[name]) for name in (*(name for name, _ in self._defaults), "return")]
