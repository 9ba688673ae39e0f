"""What is left out of a request before the model gets it: tools that a provider's servers would run, unknown items,
blocks and parts, media that the model does not support. Leaving it out lets the conversation go on. The answer's header
`x-satchel-left-out` names it, also if the answer is streamed or an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .field_aliases import names_for_header

HEADER = "x-satchel-left-out"


class LeftOut:
    """The names of what is left out of one request, each once, in order. Names must be added before the answer's
    headers are sent; adding is safe in a worker thread."""

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
    """The messages of a body.

    Attributes:
        left_out: the types of what was left out of the messages.
        tools: definitions of tools that stand among the messages, each with its place.
    """

    def __init__(
        self, messages: Iterable[Any] = (), left_out: LeftOut | None = None, tools: Sequence[tuple[Any, str]] = ()
    ) -> None:
        super().__init__(messages)
        self.left_out = left_out or LeftOut()
        self.tools = list(tools)


def newest_said(roles: Sequence[Any]) -> int:
    """Returns the index of the user message to be answered, or of the assistant message to be continued; -1 if there is
    none. Only in this message unsupported content is an error; in older ones it is left out."""
    if roles and roles[-1] == "assistant":
        return len(roles) - 1
    for index in reversed(range(len(roles))):
        if roles[index] == "user":
            return index
        if roles[index] in ("assistant", "tool", "function"):
            return -1
    return -1
