"""Reads one JSON value as models write it, and writes it as JSON. Computation only.

Besides JSON it accepts Python's literals and single quotes, a trailing comma, raw control characters in strings, one
level of `{{…}}`, and at most two missing or surplus brackets.
"""

from __future__ import annotations

import json
import re
import sys
from enum import Enum
from typing import Any

BRACKETS_MAX = 2
"""The most brackets that may be missing or surplus."""

DEPTH_MAX = 64

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._")
_CLOSING = {"{": "}", "[": "]"}
_CODES = {"x": 2, "u": 4, "U": 8}
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACE = frozenset(" \t\r\n")


class _State(Enum):
    VALUE = "a value"
    FIRST_ITEM = "a value, or the end of the list"
    FIRST_KEY = "a key, or the end of the object"
    KEY = "a key"
    COLON = "what is between a key and its value"
    NEXT = "a comma, or the end of what is open"
    STRING = "the rest of a string"
    WORD = "the rest of a number or a word"
    SECOND_END = "the second bracket of `}}`"
    OVER = "nothing: the value is complete"


_MAY_END = (_State.NEXT, _State.WORD, _State.SECOND_END)


class LooseValue:
    """Follows a value character by character.

    Args:
        words: whether a word that is not a JSON or Python value is read as text.

    Attributes:
        written: the value so far as JSON. A comma is written only when the next element begins.
        failed: whether it is not a value, whatever follows.
        keys: the keys so far, each with its depth; the outermost object's depth is 1.
        texts: the depth, key and value of each complete string that is the value of a key.
    """

    def __init__(self, *, words: bool = False) -> None:
        self._words = words
        self._state = _State.VALUE
        self._parts: list[str] = []
        self._told = 0
        self._open: list[str] = []
        self._doubled: list[int] = []
        self._held = ""
        self._quote = ""
        self._escape = ""
        self._token: list[str] = []
        self._is_key = False
        self._repaired = 0
        self._key = ""
        self.failed = False
        self.keys: list[tuple[int, str]] = []
        self.texts: list[tuple[int, str, str]] = []

    @property
    def written(self) -> str:
        return "".join(self._parts)

    def fresh(self) -> str:
        """Returns what was written since the last call of this."""
        new, self._told = self._parts[self._told :], len(self._parts)
        return "".join(new)

    @property
    def over(self) -> bool:
        """Whether the value is complete."""
        return not self._open and self._state in (_State.OVER, _State.SECOND_END)

    @property
    def rest(self) -> str | None:
        """The text that completes `written` to JSON if the value ends here; None if that is impossible, or too many
        brackets are missing."""
        last = "".join(self._token) if self._state is _State.WORD else ""
        said = self._word(last) if last else ""
        if self.over:
            return ""
        if said is None or self._state not in _MAY_END:
            return None
        if len(self._open) + self._repaired > BRACKETS_MAX:
            return None
        return said + "".join(map(_CLOSING.__getitem__, reversed(self._open)))

    def add(self, text: str, at: int = 0) -> int:
        """Takes `text` from `at` on. Returns the index where the value ends or fails; else the text's length."""
        for index in range(at, len(text)):
            if self.failed or self._state is _State.OVER:
                return index
            if not self._take(text[index]):
                return index
        return len(text)

    def _take(self, character: str) -> bool:
        """Takes a character. Returns False if it is not part of the value."""
        state = self._state
        if state is _State.STRING:
            return self._in_string(character)
        if state is _State.WORD:
            if character in _WORD_CHARACTERS or (self._words and character not in ",]}\n\"'{["):
                self._token.append(character)
                return True
            if not self._end_word():
                return False
            if self._state is _State.OVER:
                return False
            return self._take(character)
        if state is _State.SECOND_END:
            self._doubled.remove(len(self._open) + 1)
            self._after()
            return character == "}" or (bool(self._open) and self._take(character))
        if character in _SPACE:
            self._held += character
            return True
        if state is _State.NEXT:
            return self._after_value(character)
        if state is _State.COLON:
            if character != ":":
                return self._fail()
            self._say(":")
            self._state = _State.VALUE
            return True
        if state in (_State.FIRST_KEY, _State.KEY):
            return self._begin_key(character)
        return self._begin_value(character)

    def _fail(self) -> bool:
        self.failed = True
        return False

    def _say(self, text: str) -> None:
        self._parts += [self._held, text]
        self._held = ""

    def _begin_key(self, character: str) -> bool:
        if character in "\"'":
            self._say('"')
            self._quote, self._token, self._is_key, self._state = character, [], True, _State.STRING
            return True
        if character == "}":
            return self._close(character)
        if character == "{" and self._state is _State.FIRST_KEY and len(self._open) not in self._doubled:
            self._doubled.append(len(self._open))
            return True
        return self._fail()

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            if len(self._open) >= DEPTH_MAX:
                return self._fail()
            self._say(character)
            self._open.append(character)
            self._state = _State.FIRST_KEY if character == "{" else _State.FIRST_ITEM
            return True
        if character in "\"'":
            self._say('"')
            self._quote, self._token, self._is_key, self._state = character, [], False, _State.STRING
            return True
        if character == "]" and self._open and self._open[-1] == "[":
            return self._close(character)
        if character in _WORD_CHARACTERS or (self._words and character not in ",]}:"):
            self._say("")
            self._token, self._state = [character], _State.WORD
            return True
        return self._fail()

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._held = f",{self._held}" if self._open else self._held
            self._state = _State.KEY if self._open and self._open[-1] == "{" else _State.VALUE
            return True
        return self._close(character) if character in "}]" else self._fail()

    def _close(self, character: str) -> bool:
        if self._state in (_State.KEY, _State.VALUE):
            # A trailing comma.
            self._held = self._held.replace(",", "", 1)
        if _CLOSING[self._open[-1]] != character:
            self._repaired += 1
            if self._repaired > BRACKETS_MAX:
                return self._fail()
            if not any(_CLOSING[opened] == character for opened in self._open):
                # A surplus bracket.
                self._state = _State.NEXT
                return True
            self._end(_CLOSING[self._open[-1]])
            self._state = _State.NEXT
            return self._close(character)
        self._end(character)
        if len(self._open) + 1 in self._doubled:
            self._state = _State.SECOND_END
        else:
            self._after()
        return True

    def _end(self, character: str) -> None:
        self._say(character)
        self._open.pop()

    def _in_string(self, character: str) -> bool:
        if self._escape:
            return self._escaped(character)
        if character == "\\":
            self._escape = character
        elif character == self._quote:
            self._end_string()
        elif character == '"':
            self._char('\\"')
        elif character < " ":
            self._char(json.dumps(character)[1:-1])
        else:
            self._char(character)
        return True

    def _char(self, written: str) -> None:
        self._parts.append(written)
        self._token.append(written)

    def _escaped(self, character: str) -> bool:
        """Takes a character after a backslash."""
        size = _CODES.get(self._escape[1:2], 0)
        if size and character not in _HEX:
            begun, self._escape = self._escape, ""
            self._char("\\\\" + begun[1:])
            return self._in_string(character)
        self._escape += character
        letter, code = self._escape[1], self._escape[2:]
        size = _CODES.get(letter, 0)
        if len(code) < size:
            return True
        self._escape = ""
        if size == _CODES["U"]:
            self._char(json.dumps(chr(min(int(code, 16), sys.maxunicode)), ensure_ascii=False)[1:-1])
        elif size:
            self._char(f"\\u{code:0>4}")
        elif letter in _ESCAPED:
            self._char(f"\\{letter}")
        elif letter == "'":
            self._char("'")
        elif letter < " ":
            self._char(json.dumps(letter)[1:-1])
        else:
            self._char("\\\\" + letter)
        return True

    def _end_string(self) -> None:
        self._parts.append('"')
        text = "".join(self._token)
        if "\\" in text:
            text = json.loads(f'"{text}"')
        depth = len(self._open)
        if self._is_key:
            self._key = text
            self.keys.append((depth, text))
            self._state = _State.COLON
            return
        if self._open and self._open[-1] == "{":
            self.texts.append((depth, self._key, text))
        self._after()

    def _after(self) -> None:
        self._state = _State.NEXT if self._open else _State.OVER

    def _end_word(self) -> bool:
        said = self._word("".join(self._token))
        if said is None:
            return self._fail()
        self._say(said)
        self._after()
        return True

    def _word(self, word: str) -> str | None:
        word = word.strip()
        if word in _WORDS:
            return _WORDS[word]
        if _NUMBER.fullmatch(word):
            return word
        return json.dumps(word, ensure_ascii=False) if self._words else None


def loads(text: str) -> Any:
    """Parses a text that is one value.

    Raises:
        ValueError: it is not.
    """
    value = LooseValue()
    end = value.add(text)
    if not value.failed and not text[end:].strip() and (rest := value.rest) is not None:
        try:
            return json.loads(value.written + rest)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
    raise ValueError("no value")
