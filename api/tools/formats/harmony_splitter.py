"""Splits answers in OpenAI's Harmony format into reasoning, content and calls. Computation only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from ..answer_pieces import (
    CallArguments,
    CallBegun,
    Piece,
    ReasoningDelta,
    Skipped,
    ToolCall,
    longest_held,
    new_call_id,
)
from ..lenient.declared import DeclaredTools
from .harmony import CALL, CHANNEL, END, MESSAGE, START
from .harmony_arguments import HarmonyArguments

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)", re.ASCII)
_HEADER_CHARACTERS_MAX = 512


class _Kind(Enum):
    HEADER = "what stands before a message"
    THOUGHT = "a message on the channel of reasoning"
    CONTENT = "a message to the user"
    CALL = "a message to a tool"


class HarmonySplitter:
    """A stage of a `Pipeline` that splits an answer into reasoning, content and tool calls, regardless of how the text
    is chunked. Calls come out in pieces. An answer without headers is content.

    Args:
        tools: the tools that may be called, as chat templates take them; a message to any other recipient is content.
        answering: whether the prompt has begun a message to the user.
        calls_max: after this many calls the answer is over; None for no limit.

    Attributes:
        cut: whether the answer was cut: by a limit, a stop string or a stop token; to be set before `flush`.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] = (), *, answering: bool = False, calls_max: int | None = None
    ) -> None:
        self._declared = DeclaredTools(tools)
        self.cut = False
        self._calls_max = calls_max
        self._kind = _Kind.CONTENT if answering else _Kind.HEADER
        self._buffer = ""
        self._call: CallBegun | None = None
        self._told = False
        self._arguments = HarmonyArguments(self._declared, "")
        self._count = 0
        self._over = False

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._kind is _Kind.THOUGHT

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends inside a call."""
        return self._call is not None

    @property
    def full(self) -> bool:
        """Whether the answer is over: a call has ended, or there were `calls_max`. Then no more text comes out."""
        return self._over or (self._calls_max is not None and self._count >= self._calls_max and self._call is None)

    def add(self, text: str) -> list[Piece]:
        self._buffer += text
        out: list[Piece] = []
        while self._buffer and not self.full and self._step(out):
            pass
        return out

    def flush(self) -> list[Piece]:
        """Returns the held pieces at the end of the answer."""
        out: list[Piece] = []
        if self._kind is _Kind.HEADER:
            if self._buffer:
                begun = self._buffer.startswith((START, CHANNEL)) or self._count
                out.append(Skipped(self._buffer) if begun else self._buffer)
        elif not self.full:
            self._say(self._buffer, out)
            # A call's last token ends the answer, and may not appear as text.
            self._close(out, closed=False)
        self._buffer = ""
        return out

    def _step(self, out: list[Piece]) -> bool:
        """Consumes text up to the next marker. Returns False if more text is needed."""
        if self._kind is _Kind.HEADER:
            return self._header(out)
        found = [(at, marker) for marker in (END, CALL, START, CHANNEL) if (at := self._buffer.find(marker)) >= 0]
        if not found:
            cut = len(self._buffer) - longest_held(self._buffer, (END, CALL, START, CHANNEL))
            self._say(self._buffer[:cut], out)
            self._buffer = self._buffer[cut:]
            return False
        at, marker = min(found)
        self._say(self._buffer[:at], out)
        self._buffer = self._buffer[at:]
        self._close(out)
        self._kind = _Kind.HEADER
        if marker in (END, CALL):
            self._skip(len(marker), out)
        # Even if the model's files do not list it among the tokens that end an answer.
        self._over = marker == CALL
        return True

    def _header(self, out: list[Piece]) -> bool:
        at = self._buffer.find(MESSAGE)
        begun = self._buffer.lstrip()
        possible = (START, CHANNEL, MESSAGE, "to=")
        if not any(begun.startswith(first) or first.startswith(begun) for first in possible):
            self._kind = _Kind.CONTENT
            return True
        if at < 0:
            if len(self._buffer) > _HEADER_CHARACTERS_MAX:
                self._skip(len(self._buffer), out)
                self._kind = _Kind.CONTENT
            return False
        header = self._buffer[:at]
        self._skip(at + len(MESSAGE), out)
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].strip()
        name = None if recipient is None else self._declared.name(recipient[1].rstrip("."), with_json=True)
        if name is not None:
            self._kind, self._arguments = _Kind.CALL, HarmonyArguments(self._declared, name)
            self._call, self._told = CallBegun(self._count, new_call_id(), name), False
            self._count += 1
        else:
            self._kind = _Kind.THOUGHT if channel.startswith("analysis") else _Kind.CONTENT
        return True

    def _say(self, text: str, out: list[Piece]) -> None:
        if not text:
            return
        if self._kind is _Kind.THOUGHT:
            out.append(ReasoningDelta(text))
        elif self._call is not None:
            out.append(Skipped(text))
            self._tell(self._call, self._arguments.add(text), out)
        else:
            out.append(text)

    def _close(self, out: list[Piece], *, closed: bool = True) -> None:
        if (call := self._call) is not None:
            cut = self.cut and not closed
            self._tell(call, self._arguments.end(cut=cut), out)
            if self._told:
                out.append(ToolCall(call.index, call.id, call.name, self._arguments.whole, begun=True, cut=cut))
            self._call = None

    def _tell(self, call: CallBegun, arguments: str, out: list[Piece]) -> None:
        """Emits more of a call's arguments, if there are any. The call begins with its first argument text, because a
        call without any would look like one that needs no arguments."""
        if arguments:
            if not self._told:
                out.append(call)
            out.append(CallArguments(call.index, arguments))
            self._told = True

    def _skip(self, length: int, out: list[Piece]) -> None:
        out.append(Skipped(self._buffer[:length]))
        self._buffer = self._buffer[length:]
