"""Reads calls whose arguments have keys but are not JSON, such as Python's and Gemma's, and returns JSON. Computation
only.

::

    [name(key="text", other=[1, 2], more=True), second(key=None)]
    call:name{key:<escape>text<escape>,other:[1,2],more:true}

Text comes out as it comes in, except where the following text matters: at a delimiter, an escape, a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from ..answer_pieces import longest_held
from ..lenient.values import BRACKETS_MAX
from ..readers import Begun, Ended, StepReader
from .keyed_layout import KeyedLayout

_KEY_CHARACTERS_MAX = 256
_HELD_CHARACTERS_MAX = 4096
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_BARE_ENDS = re.compile(r"[,\]})]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_KEY_ENDS = re.compile(r"[:=]")


class KeyedReader(StepReader):
    """A reader of consecutive calls; see `readers.Reader`.

    Args:
        start: the marker before the calls, which is not part of the text.
        names: the names of the tools that may be called.
    """

    def __init__(self, known: KeyedLayout, start: str, names: Collection[str]) -> None:
        super().__init__(self._read_lead)
        self._known = known
        self._lead = known.head.removeprefix(start)
        self._begins = {f"{name}{known.opening}": name for name in names}
        self._quotes = tuple(dict.fromkeys(filter(None, (known.quote, '"', "'"))))
        self._open: list[str] = []
        self._quote = ""
        self._first = True

    def _read_lead(self) -> bool:
        if not self._buffer.startswith(self._lead):
            self.lost = not self._lead.startswith(self._buffer)
            return False
        self._take(len(self._lead))
        self._step = self._read_name
        return True

    def _read_name(self) -> bool:
        buffer = self._buffer = self._buffer.lstrip()
        for begin, name in self._begins.items():
            if buffer.startswith(begin):
                self._take(len(begin))
                self._say(Begun(name), "{")
                self._open, self._first, self._step = [self._known.closing], True, self._read_key
                self.rest = None
                return True
        self.lost = not any(begin.startswith(buffer) for begin in self._begins)
        return False

    def _read_key(self) -> bool:
        """Takes a key and the text between it and its value; or the end of a call or object."""
        if not self._ready():
            return False
        if self._buffer.startswith(self._open[-1]):
            return self._close()
        for quote in self._quotes:
            if self._buffer.startswith(quote):
                at = self._buffer.find(quote, len(quote))
                if at >= 0 and len(self._buffer) > at + len(quote):
                    rest = self._buffer[at + len(quote) :].lstrip()
                    return self._key(self._buffer[len(quote) : at], rest) if rest else False
                return self._wait()
            if quote.startswith(self._buffer):
                return False
        found = _KEY_ENDS.search(self._buffer)
        if found is None:
            return self._wait()
        return self._key(self._buffer[: found.start()].strip(), self._buffer[found.start() :])

    def _key(self, key: str, rest: str) -> bool:
        if not key or rest[0] not in ":=" or len(key) > _KEY_CHARACTERS_MAX:
            self.lost = True
            return False
        self._buffer = rest[1:]
        self._say(f"{'' if self._first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        """Takes a value, or the beginning of a longer one."""
        if not self._ready():
            return False
        buffer = self._buffer
        for quote in self._quotes:
            if buffer.startswith(quote):
                self._take(len(quote))
                self._say('"')
                self._quote = quote
                self._step = self._read_escaped if len(quote) == 1 else self._read_raw
                return True
            if quote.startswith(buffer):
                return False
        if buffer[0] in "{[":
            self._take(1)
            self._say(buffer[0])
            self._open.append("}" if buffer[0] == "{" else "]")
            self._first, self._step = True, self._read_key if buffer[0] == "{" else self._read_item
            return True
        found = _BARE_ENDS.search(buffer)
        if found is None:
            return self._wait()
        word = buffer[: found.start()]
        self._take(len(word))
        self._say(_bare(word))
        return self._go_on()

    def _read_item(self) -> bool:
        if not self._ready():
            return False
        if self._buffer.startswith("]"):
            return self._close()
        if not self._first:
            self._say(", ")
        self._step = self._read_value
        return True

    def _read_raw(self) -> bool:
        """Takes text without escapes up to its delimiter."""
        at = self._buffer.find(self._quote)
        text = self._buffer[: at if at >= 0 else len(self._buffer) - longest_held(self._buffer, (self._quote,))]
        self._take(len(text))
        self._say(_inside(text))
        if at < 0:
            return False
        self._take(len(self._quote))
        self._say('"')
        return self._go_on()

    def _read_escaped(self) -> bool:
        """Takes a Python string, which is almost a JSON string."""
        text: list[str] = []
        at, buffer = 0, self._buffer
        while at < len(buffer) and buffer[at] != self._quote:
            if buffer[at] != "\\":
                text.append(_inside(buffer[at]))
                at += 1
                continue
            letter = buffer[at + 1 : at + 2]
            size = 2 + _CODES.get(letter, 0)
            if not letter or len(buffer) < at + size:
                break
            text.append(_unescaped(letter, buffer[at + 2 : at + size]))
            at += size
        self._say("".join(text))
        ends = at < len(buffer) and buffer[at] == self._quote
        self._take(at + ends)
        if not ends:
            return False
        self._say('"')
        return self._go_on()

    def _go_on(self) -> bool:
        self._first, self._step = False, self._read_comma
        if len(self._open) <= BRACKETS_MAX:
            self.rest = "".join("]" if closed == "]" else "}" for closed in reversed(self._open))
        return True

    def _read_comma(self) -> bool:
        if not self._ready():
            return False
        if self._buffer.startswith(self._open[-1]):
            return self._close()
        if self._buffer[0] != ",":
            self.lost = True
            return False
        self._take(1)
        self.rest, self._step = None, self._read_item if self._open[-1] == "]" else self._read_key
        return True

    def _close(self) -> bool:
        closed = self._open.pop()
        self._take(len(closed))
        if self._open:
            self._say(closed)
            return self._go_on()
        self._say("}", Ended())
        self.rest, self._step = "", self._read_next
        return True

    def _read_next(self) -> bool:
        """Takes the text between two calls. The text after the last call is ignored."""
        if not self._ready():
            return False
        if self._known.listed and self._buffer.startswith(","):
            self._take(1)
            self._step = self._read_name
            return True
        self._buffer = ""
        return False

    def _ready(self) -> bool:
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _wait(self) -> bool:
        self.lost = len(self._buffer) > _HELD_CHARACTERS_MAX
        return False


def _inside(text: str) -> str:
    """Returns text escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescaped(letter: str, code: str) -> str:
    """Returns the meaning of a Python or JSON escape, escaped for the inside of a JSON string."""
    if letter not in _CODES:
        return _inside(_ESCAPES.get(letter, letter if letter in "\\\"'/" else f"\\{letter}"))
    try:
        # Surrogate pairs stay escapes.
        return f"\\u{int(code, 16):04x}" if letter != "U" else _inside(chr(int(code, 16)))
    except (ValueError, OverflowError):
        return _inside(f"\\{letter}{code}")


def _bare(word: str) -> str:
    """Returns a value without quotation marks as JSON; if it is not a value, as a text."""
    word = word.strip()
    if word in _WORDS:
        return _WORDS[word]
    return (
        word if word in ("true", "false", "null") or _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)
    )
