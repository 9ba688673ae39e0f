"""Reads a tool call while it is being written: its name, then its arguments piece by piece. Computation only."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .call_format import ID, CallFormat, TaggedFormat

_NAME_CHARACTERS_MAX = 128


class CallReader:
    """Follows the text of one call from its marker on.

    A call that is not written exactly as the model's template writes calls is `lost`: it is parsed as a whole at its
    end, as calls of other formats are.

    Args:
        lead, middle: what stands before and after the name.
        names: of the tools that may be called.

    Attributes:
        name: of the tool, "" as long as it and the begin of its arguments are not known.
        arguments: the arguments' text so far.
    """

    def __init__(self, lead: str, middle: str, names: Collection[str]) -> None:
        self._lead = lead
        self._middle = middle
        self._names = names
        self._buffer = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._over = False
        self.lost = False
        self.name = ""
        self.arguments = ""

    def add(self, text: str) -> str:
        """Takes more of the call's text, and returns what of it belongs to the arguments."""
        if self.lost or self._over:
            return ""
        if not self.name:
            self._buffer += text
            text = self._begin()
        taken = text[: self._end(text)]
        self.arguments += taken
        return taken

    def _begin(self) -> str:
        """Finds the name in the buffer. Returns the text from the arguments on, "" if it is not there yet."""
        buffer, lead = self._buffer, self._lead
        if not buffer.startswith(lead):
            self.lost = not lead.startswith(buffer)
            return ""
        at = buffer.find(self._middle, len(lead))
        begin = at + len(self._middle)
        if at < 0:
            self.lost = len(buffer) > len(lead) + _NAME_CHARACTERS_MAX + len(self._middle)
        elif begin < len(buffer):
            if buffer[len(lead) : at] in self._names and buffer[begin] == "{":
                self.name = buffer[len(lead) : at]
                return buffer[begin:]
            self.lost = True
        return ""

    def _end(self, text: str) -> int:
        """Returns how many of the characters belong to the arguments, which end with their last bracket."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._over = True
                    return index + 1
        return len(text)


def reader_of(
    known: CallFormat | TaggedFormat | None, start: str, end: str, names: Collection[str]
) -> Callable[[], CallReader] | None:
    """Returns what makes a reader for each call of an answer; None for a format whose calls are read as a whole:
    arguments that are no JSON, ids before them, or several calls between two markers.

    Args:
        start, end: the model's markers around a call.
    """
    if not isinstance(known, CallFormat) or not end:
        return None
    one_each = known.head.startswith(start) and start in known.between and end in known.between
    if not one_each or ID in known.head or ID in known.middle:
        return None
    lead, middle = known.head[len(start) :], known.middle
    return lambda: CallReader(lead, middle, names)
