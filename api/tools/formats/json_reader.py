"""Reads tool calls while they are being written: a name, then its arguments piece by piece. Computation only."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..lenient.values import LooseValue
from ..readers import Begun, Reader, Said
from .call_format import ID, Format, JsonFormat, KeyedFormat
from .keyed_reader import KeyedReader

_NAME_CHARACTERS_MAX = 128


class CallReader:
    """A reader of one call whose arguments are JSON, or almost: what it says is JSON.

    Args:
        lead, middle: what stands before and after the name.
        names: of the tools that may be called.
    """

    def __init__(self, lead: str, middle: str, names: Collection[str]) -> None:
        self._lead = lead
        self._middle = middle
        self._names = names
        self._buffer = ""
        self._value = LooseValue(words=True)
        self._begun = False
        self.lost = False

    @property
    def rest(self) -> str | None:
        if not self._begun:
            return ""
        return None if self._value.failed else self._value.rest

    def add(self, text: str) -> list[Said]:
        said: list[Said] = []
        if self.lost or self._value.over:
            return said
        if not self._begun:
            self._buffer += text
            name, text = self._begin()
            if not name:
                return said
            said.append(Begun(name))
        self._value.add(text)
        self.lost = self._value.failed
        if taken := self._value.fresh():
            said.append(taken)
        return said

    def _begin(self) -> tuple[str, str]:
        """Finds the name in the buffer. Returns it, and the text from the arguments on; "" if it is not there yet."""
        buffer, lead = self._buffer, self._lead
        if not buffer.startswith(lead):
            self.lost = not lead.startswith(buffer)
            return "", ""
        at = buffer.find(self._middle, len(lead))
        begin = at + len(self._middle)
        if at < 0:
            self.lost = len(buffer) > len(lead) + _NAME_CHARACTERS_MAX + len(self._middle)
        elif begin < len(buffer):
            if buffer[len(lead) : at] in self._names and buffer[begin] == "{":
                self._begun = True
                return buffer[len(lead) : at], buffer[begin:]
            self.lost = True
        return "", ""


def reader_of(known: Format | None, start: str, end: str, names: Collection[str]) -> Callable[[], Reader] | None:
    """Returns what makes a reader for each call of an answer; None for a format whose calls are read as a whole: ids
    before the arguments, or several calls of JSON between two markers. `tagged_reader` has those with tags.

    Args:
        start, end: the model's markers around a call.
    """
    if isinstance(known, KeyedFormat):
        return lambda: KeyedReader(known, start, names)
    if not isinstance(known, JsonFormat) or not end:
        return None
    one_each = known.head.startswith(start) and start in known.between and end in known.between
    if not one_each or ID in known.head or ID in known.middle:
        return None
    lead, middle = known.head[len(start) :], known.middle
    return lambda: CallReader(lead, middle, names)
