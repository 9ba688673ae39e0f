"""What a request has and its model is not told of: tools that a provider's servers would run, items, blocks and parts
that nobody knows here, what a model cannot see. It is left out, so that no conversation ends by it, and named in the
header `x-satchel-left-out` of the answer, also of a streamed one and of an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .field_aliases import names_for_header

HEADER = "x-satchel-left-out"


class LeftOut:
    """The names of what is left out of one request, each once, in order. Whoever leaves something out adds its name
    before the answer's headers are sent; adding is safe in a worker thread."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = dict.fromkeys(names)

    def add(self, *names: str) -> None:
        self._names.update(dict.fromkeys(names))

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def header(self) -> str:
        """The header's value; "" for no header."""
        return names_for_header(self.names)


class MessageList(list[Any]):
    """The messages of a body, with what came with them.

    Attributes:
        left_out: the types of what the messages are without.
        tools: definitions of tools that stand among the messages, each with its place.
    """

    def __init__(
        self, messages: Iterable[Any] = (), left_out: LeftOut | None = None, tools: Sequence[tuple[Any, str]] = ()
    ) -> None:
        super().__init__(messages)
        self.left_out = left_out or LeftOut()
        self.tools = list(tools)


def newest_said(roles: Sequence[Any]) -> int:
    """Returns the index of the user's message that is to be answered, or of the assistant's that is to be continued, -1
    if there is none: of all others it is too late to say that something in them is not understood."""
    if roles and roles[-1] == "assistant":
        return len(roles) - 1
    for index in reversed(range(len(roles))):
        if roles[index] == "user":
            return index
        if roles[index] in ("assistant", "tool", "function"):
            return -1
    return -1
