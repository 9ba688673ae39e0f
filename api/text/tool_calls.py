"""Finds tool calls between their markers in a model's text, and parses them. Computation only."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

from .model import longest_held
from .pipeline import Piece, Skipped, ToolCall

Parse = Callable[[str], list[tuple[str, str]]]
"""Turns the text between the markers into (name, arguments as JSON text) pairs. Raises ValueError if malformed."""


def call_parser(parse: Callable[[str, Any], Any], tools: list[dict[str, Any]]) -> Parse:
    """Returns a `Parse` (which raises ValueError) that runs mlx-lm's `parse` for a model's format and checks its
    result."""

    def parse_calls(text: str) -> list[tuple[str, str]]:
        try:
            parsed = parse(text, tools)
        except Exception as error:
            # Parsers run json, ast and regular expressions on the model's text and may raise anything.
            raise ValueError(f"malformed tool call: {error}") from error
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not calls:
            raise ValueError("no tool call between the markers")
        return [_checked(call) for call in calls]

    return parse_calls


def _checked(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("a tool call without a name")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("a tool call whose arguments are no object")
    try:
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"tool arguments that JSON cannot hold: {error}") from error


class ToolCallSplitter:
    """A stage of a `Pipeline` that splits an answer into text and tool calls, regardless of how the text is chunked.

    Text that is not a well-formed call passes unchanged, markers included. White space next to a call is dropped, so it
    is held back until the following text is known.

    Args:
        start: the marker before a call.
        end: the marker after it; "" if a call lasts until the answer ends.
        parse: see `Parse`.
        calls_max: after so many calls the answer is over; None for no limit.
    """

    def __init__(self, start: str, end: str, parse: Parse, calls_max: int | None = None) -> None:
        self._start = start
        self._end = end
        self._parse = parse
        self._calls_max = calls_max
        self._buffer = ""
        self._space = ""
        self._searched = 0
        self._after_call = False
        self._count = 0
        self.inside = False
        """Whether the text so far ends inside a call."""

    @property
    def full(self) -> bool:
        """Whether there were `calls_max` calls. No more text comes out then."""
        return self._calls_max is not None and self._count >= self._calls_max

    def add(self, text: str) -> list[Piece]:
        self._buffer += text
        out: list[Piece] = []
        while not self.full and self._step(out):
            pass
        return out

    def flush(self) -> list[Piece]:
        """Returns the held pieces at the end of the answer. An unfinished call becomes text."""
        out: list[Piece] = []
        if self.full:
            return out
        if self.inside and not self._end:
            self._close(self._buffer, "", out)
        elif self.inside:
            self._text(self._start + self._buffer, out)
        else:
            self._text(self._buffer, out)
        self._buffer = ""
        if self._space:
            out.append(Skipped(self._space) if self._after_call else self._space)
        self._space = ""
        return out

    def _step(self, out: list[Piece]) -> bool:
        """Consumes text up to the next marker. Returns False if more text is needed."""
        marker = self._end if self.inside else self._start
        at = self._buffer.find(marker, self._searched) if marker else -1
        if at < 0:
            if self.inside:
                self._searched = max(0, len(self._buffer) - len(marker) + 1)
            else:
                cut = len(self._buffer) - longest_held(self._buffer, (marker,))
                self._text(self._buffer[:cut], out)
                self._buffer = self._buffer[cut:]
            return False
        before, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
        self._searched = 0
        if self.inside:
            self._close(before, self._end, out)
        else:
            self._text(before, out)
            self.inside = True
        return True

    def _close(self, body: str, end: str, out: list[Piece]) -> None:
        self.inside = False
        try:
            calls = self._parse(body)
        except ValueError:
            self._text(self._start + body + end, out)
            return
        out.append(Skipped(self._space + self._start + body + end))
        for name, arguments in calls[: None if self._calls_max is None else self._calls_max - self._count]:
            out.append(ToolCall(self._count, f"call_{secrets.token_hex(12)}", name, arguments))
            self._count += 1
        self._space = ""
        self._after_call = True

    def _text(self, text: str, out: list[Piece]) -> None:
        solid = text.rstrip()
        if not solid:
            self._space += text
            return
        whole = self._space + solid
        if self._after_call:
            shown = whole.lstrip()
            if len(shown) < len(whole):
                out.append(Skipped(whole[: len(whole) - len(shown)]))
            whole = shown
        self._space = text[len(solid) :]
        self._after_call = False
        out.append(whole)
