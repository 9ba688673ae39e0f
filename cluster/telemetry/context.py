"""Which request this code works for: its id, and its span. Both travel with every call between actors. Pure.

A span is an interval of a trace, as in OpenTelemetry. Without traces every span is `NO_SPAN`, whose methods do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value | None]
"""Attributes by name; those that are None are left out."""


class Span:
    """A span that is not recorded, and what all spans can do.

    Attributes:
        parent: the span as the header `traceparent` of W3C Trace Context, for its children; "" if it is not recorded.
    """

    parent = ""

    def child(self, name: str, attributes: Attributes | None = None) -> Span:
        """Begins a span within this one, in this process."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Sets attributes. Does nothing once the span has ended, as do the other methods."""

    def add(self, name: str, number: int) -> None:
        """Adds to an attribute that counts."""

    def append(self, name: str, text: str) -> None:
        """Appends to an attribute that is a list."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Notes that something happened now."""

    def rename(self, name: str) -> None:
        """Gives the span another name."""

    def end(self, error: str = "") -> None:
        """Ends the span, as failed if there is an `error`."""


NO_SPAN = Span()


class Tracer(Protocol):
    """Makes this process's spans."""

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes | None) -> Span:
        """Begins a span that serves somebody else. `headers` may have a `traceparent`; without one the span is the
        first of a trace."""
        ...

    def close(self) -> None:
        """Sends what waits to be sent, within a second. Spans that end later are lost."""


class Tracing:
    """Whether and how this process makes spans."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None

    def use(self, tracer: Tracer | None) -> None:
        """Makes spans by `tracer` from now on; None makes none."""
        self._tracer = tracer

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes | None = None) -> Span:
        """As `Tracer.begin`."""
        return NO_SPAN if self._tracer is None else self._tracer.begin(name, headers, attributes)

    def close(self) -> None:
        """As `Tracer.close`."""
        if self._tracer is not None:
            self._tracer.close()


TRACING = Tracing()
"""Of this process: like Python's logging, it is the same for all of its code."""

_REQUEST: ContextVar[str] = ContextVar("satchel_request", default="")
_SPAN: ContextVar[Span] = ContextVar("satchel_span", default=NO_SPAN)


def request_id() -> str:
    """Returns the id of the request that this code works for, "" for none."""
    return _REQUEST.get()


def span() -> Span:
    """Returns the span of the request that this code works for."""
    return _SPAN.get()


@contextmanager
def working_for(request: str, within: Span = NO_SPAN) -> Iterator[None]:
    """Makes a request the one that the block works for."""
    before = _REQUEST.set(request), _SPAN.set(within)
    try:
        yield
    finally:
        _REQUEST.reset(before[0])
        _SPAN.reset(before[1])


def carried() -> list[str]:
    """Returns what travels with a call: the request's id and its span's `parent`; [] without a request."""
    request, parent = _REQUEST.get(), _SPAN.get().parent
    return [request, parent] if request or parent else []


@contextmanager
def answering(name: str, came: list[str]) -> Iterator[None]:
    """Makes the caller's request the one that the block works for, in a span of its own if the caller is traced.

    Args:
        name: of the span.
        came: what `carried` returned to the caller.
    """
    request, parent = came
    within = TRACING.begin(name, {"traceparent": parent}) if parent else NO_SPAN
    error = ""
    try:
        with working_for(request, within):
            yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        within.end(error)
