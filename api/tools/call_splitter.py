"""Finds tool calls between their markers in a model's text, and parses them. Computation only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .answer_pieces import CallArguments, CallBegun, Piece, Skipped, ToolCall, longest_held, new_call_id
from .lenient.fences import FenceLines, inside_value
from .readers import Begun, Ended, Reader

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


def first_of(one: Callable[[str, Any], Any], other: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Returns a parser that runs `other` if `one` finds no calls."""

    def parse(text: str, tools: Any) -> Any:
        try:
            return one(text, tools)
        except ValueError:
            return other(text, tools)

    return parse


def _checked(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("a tool call without a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("a tool call whose arguments are no object")
    try:
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"tool arguments that JSON cannot hold: {error}") from error


def _same(one: str, other: str) -> bool:
    """Returns whether two texts are the same JSON."""
    try:
        return json.loads(one) == json.loads(other)
    except (ValueError, RecursionError):
        return False


class ToolCallSplitter:
    """A stage of a `Pipeline` that splits an answer into text and tool calls, regardless of how the text is chunked.

    Text that is not a well-formed call passes unchanged, markers included. White space next to a call is dropped, so it
    is held back until the following text is known. With a `reader` a call comes out in pieces as soon as its name is
    known. Then it stays a call whatever follows; if the model does not end its arguments, they have no end. Text that
    begins as a call without an end marker, but is not a call, comes out as text at once.

    Args:
        start: the marker before a call.
        end: the marker after it; "" if a call lasts until the answer ends.
        parse: see `Parse`.
        calls_max: after this many calls the answer is over; None for no limit.
        reader: makes a reader for each call; None if calls are read as a whole.
        whole_calls: returns the complete calls in text that was cut.
        forced: whether the answer must call a tool. Then the rest of a call that was cut does not become text.

    Attributes:
        cut: whether the answer was cut: by a limit, a stop string or a stop token; to be set before `flush`.
    """

    def __init__(
        self,
        start: str,
        end: str,
        parse: Parse,
        calls_max: int | None = None,
        reader: Callable[[], Reader] | None = None,
        *,
        whole_calls: Callable[[str], list[tuple[str, str]]] = lambda text: [],
        forced: bool = False,
    ) -> None:
        self._start = start
        self._end = end
        self._parse = parse
        self._calls_max = calls_max
        self._make_reader = reader
        self._whole_calls = whole_calls
        self._forced = forced
        self._fences = FenceLines()
        self._names: list[str] = []
        self.cut = False
        self._reader: Reader | None = None
        self._begun: CallBegun | None = None
        self._arguments: list[str] = []
        self._is_call = False
        self._told = 0
        self._buffer = ""
        self._space = ""
        self._searched = 0
        self._after_call = False
        self._count = 0
        self.inside = False
        """Whether the text so far ends inside a call."""

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends inside a call. After a complete call without an end marker it does not."""
        return self.inside and (bool(self._end) or self._reader is None or self._begun is not None)

    @property
    def full(self) -> bool:
        """Whether there were `calls_max` calls. Then no more text comes out."""
        enough = self._calls_max is not None and self._count >= self._calls_max
        return enough and self._begun is None and (self._is_call or not self.inside)

    def add(self, text: str) -> list[Piece]:
        self._buffer += text
        out: list[Piece] = []
        while not self.full and self._step(out):
            pass
        return out

    def flush(self) -> list[Piece]:
        """Returns the held pieces at the end of the answer. An unfinished call becomes text, unless only its end is
        missing."""
        out: list[Piece] = []
        while self.inside and not self.full:
            self._close_open(out)
            while not self.full and self._step(out):
                pass
        if self.full:
            return out
        if self._forced and self.cut and self._buffer and self._start.startswith(self._buffer):
            self._skip_all(self._buffer, out)
        else:
            self._text(self._buffer, out)
        self._buffer = ""
        if self._space:
            out.append(Skipped(self._space) if self._after_call else self._space)
        self._space = ""
        return out

    def _close_open(self, out: list[Piece]) -> None:
        """Ends a call whose end marker is missing at the end of the answer."""
        body, rest = self._buffer, ""
        if self._reader is not None:
            self._read(len(body), self._reader, out)
        # The model itself ended the answer within a value, or before the first argument.
        broken = self._reader is not None and self._reader.rest is None and (self._is_call or not self._reader.lost)
        if self._is_call and (self.cut or broken):
            self._skip_rest(body, out)
            self._end_begun(None, out, cut=self.cut)
            self.inside = self._is_call = False
        elif self._is_call or not (self.cut or broken):
            # If none is left, the end marker may be inside a string that has no end.
            at = body.find(self._end) if self._end and not self._is_call else -1
            if at >= 0:
                body, rest = body[:at], body[at + len(self._end) :]
            self._close(body, self._end if at >= 0 else "", out)
        else:
            self.inside = False
            if calls := self._whole_calls(body):
                self._tell(calls, body, out)
            elif self.cut and (self._forced or self._count):
                self._skip_all(self._start + body, out)
            else:
                self._text(self._start + body, out)
        self._buffer, self._searched = rest, 0

    def _skip_all(self, text: str, out: list[Piece]) -> None:
        out.append(Skipped(self._space + text))
        self._space = ""

    def _find(self) -> int:
        """Returns the index of the next marker in the buffer, -1 if there is none."""
        if not self.inside:
            at = self._buffer.find(self._start)
            # A call in a code fence may only be an example.
            while at >= 0 and self._fences.open_after(self._buffer[:at]):
                at = self._buffer.find(self._start, at + 1)
            return at
        at = self._buffer.find(self._end, self._searched) if self._end else -1
        while at >= 0 and inside_value(self._buffer[:at]):
            at = self._buffer.find(self._end, at + 1)
        return at

    def _step(self, out: list[Piece]) -> bool:
        """Consumes text up to the next marker. Returns False if more text is needed."""
        marker = self._end if self.inside else self._start
        at = self._find()
        if self.inside and self._reader is not None:
            held = longest_held(self._buffer, (marker,)) if at < 0 and marker else 0
            self._read(at if at >= 0 else len(self._buffer) - held, self._reader, out)
        if at < 0:
            if self.inside and not self._end and self._reader is not None and self._reader.lost and not self._is_call:
                self.inside, self._reader, self._searched = False, None, 0
                self._text(self._start, out)
                return True
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
            self.inside, self._told, self._names = True, 0, []
            self._reader = None if self._make_reader is None else self._make_reader()
        return True

    def _read(self, end: int, reader: Reader, out: list[Piece]) -> None:
        """Emits what is known so far of unfinished calls, whose text the buffer has up to `end`."""
        new = self._buffer[self._told : end]
        said = reader.add(new)
        if self._is_call:
            if new:
                out.append(Skipped(new))
        elif said:
            self._is_call = True
            out.append(Skipped(self._space + self._start + self._buffer[:end]))
            self._space = ""
        self._told = max(self._told, end)
        for each in said:
            if isinstance(each, Begun):
                if self.full:
                    return
                self._begun, self._arguments = CallBegun(self._count, new_call_id(), each.name), []
                self._count += 1
                self._names.append(each.name)
                out.append(self._begun)
            elif isinstance(each, Ended):
                self._end_begun(None, out)
            elif self._begun is not None:
                self._arguments.append(each)
                out.append(CallArguments(self._begun.index, each))

    def _skip_rest(self, text: str, out: list[Piece]) -> None:
        if len(text) > self._told:
            out.append(Skipped(text[self._told :]))

    def _end_begun(self, arguments: str | None, out: list[Piece], *, cut: bool = False) -> None:
        """Emits the last call that came in pieces, if it has not ended. `arguments` None means those that came."""
        if (begun := self._begun) is not None:
            written = "".join(self._arguments) if arguments is None else arguments
            out.append(ToolCall(begun.index, begun.id, begun.name, written, begun=True, cut=cut))
        self._begun, self._after_call = None, True

    def _close(self, body: str, end: str, out: list[Piece]) -> None:
        self.inside = False
        try:
            calls = self._parse(body)
        except ValueError:
            calls = []
        if self._is_call:
            self._is_call = False
            self._skip_rest(body + end, out)
            self._complete(calls, out)
            return
        if not calls:
            self._text(self._start + body + end, out)
            return
        self._tell(calls, body + end, out)

    def _tell(self, calls: list[tuple[str, str]], written: str, out: list[Piece]) -> None:
        """Emits complete calls that did not come in pieces."""
        out.append(Skipped(self._space + self._start + written))
        self._add_calls(calls, out)
        self._space = ""
        self._after_call = True

    def _add_calls(self, calls: list[tuple[str, str]], out: list[Piece]) -> None:
        for name, arguments in calls[: None if self._calls_max is None else self._calls_max - self._count]:
            out.append(ToolCall(self._count, new_call_id(), name, arguments))
            self._count += 1

    def _complete(self, calls: list[tuple[str, str]], out: list[Piece]) -> None:
        """Ends the last call that came in pieces, with the rest of its arguments; `calls` is what the parser found."""
        begun, written, whole = self._begun, "".join(self._arguments), None
        count = len(self._names)
        told = self._names == [name for name, _ in calls[:count]]
        if begun is None or self._reader is None:
            self._add_calls(calls[count:] if told else [], out)
            return
        if told:
            whole = calls[count - 1][1]
        rest = self._reader.rest
        if whole is not None and whole.startswith(written):
            rest = whole[len(written) :]
        elif rest is None:
            whole = written
        elif whole is None or not _same(whole, written + rest):
            # Pieces that were sent cannot be taken back.
            whole = written + rest
        if rest:
            out.append(CallArguments(begun.index, rest))
        self._end_begun(whole, out)
        self._add_calls(calls[count:] if told else [], out)

    def _text(self, text: str, out: list[Piece]) -> None:
        self._fences.add(text)
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
