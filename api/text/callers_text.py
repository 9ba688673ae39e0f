"""Guards what a caller says before the template renders it: messages, tools, variables. A lone surrogate is put into
each marker (control token's text) in them, so that it stays text (`control_tokens.py`).

Everything that a caller says is text, with two exceptions in assistants' messages, which the model wrote. First, a
closed block of reasoning at the beginning of a message keeps its markers as tokens, because clients without support for
reasoning send it in this way. Second, if this endpoint or the agent's memory knows that the model wrote a marker of an
answer as a token, it is that token again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import numpy as np

from .control_tokens import BREAK, ControlTokens, breaks_of, refuse_breaks, unbroken, with_breaks
from .spelling import IndexedLine, StoredBranch
from .tokenizer import Tokenizer

_PLACES_TRIED = 16
"""At how many places of an agent's memory a text is compared."""


@dataclass(frozen=True)
class AnswerLearner:
    """Remembers one answer, if its content has the text of control tokens.

    Args:
        scope: the callers who get the answer.
        prefill: the beginning of the answer, which was in the prompt.
        special_tokens: whether special tokens become text.
    """

    tokenizer: Tokenizer
    scope: str
    prefill: str
    special_tokens: bool

    def wants(self, content: str) -> bool:
        """Returns whether the content has a control token's text, written as text or as a token."""
        return BREAK in self.tokenizer.controls.guarded(content)

    def learn(self, tokens: Sequence[int], content: str) -> None:
        """Remembers which of the content's markers are control tokens in `tokens`, and which are text."""
        tokenizer = self.tokenizer
        hidden = tokenizer.end_tokens if self.special_tokens else tokenizer.hidden_tokens - tokenizer.call_tokens
        written = self._guarded([token for token in tokens if token not in hidden])
        # Reasoning comes before the content, and may quote it.
        at = unbroken(written).rfind(content)
        if at >= 0:
            breaks = [place - at for place in breaks_of(written) if at <= place <= at + len(content)]
            beginning = CallersText(tokenizer).beginning(self.prefill)
            tokenizer.controls.given.learn(self.scope, beginning + with_breaks(content, breaks))

    def _guarded(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, with a break in each marker that was not written as a control token."""
        controls, shown = self.tokenizer.controls, self.tokenizer.detokenizer()
        written = [(token in controls.ids, shown.add(token)) for token in tokens]
        written.append((False, shown.flush()))
        runs = ((own, "".join(piece for _, piece in run)) for own, run in groupby(written, lambda each: each[0]))
        return "".join(piece if own else controls.guarded(piece) for own, piece in runs)


@dataclass(frozen=True)
class CallersText:
    """Guards the texts of one request: markers in them stay text (see above).

    Args:
        scope: the callers who got the answers that the request may send back.
        lines: the lines of the agent's memory.
        as_tokens: whether markers may become control tokens, so that nothing is guarded.
    """

    tokenizer: Tokenizer
    scope: str = ""
    lines: Sequence[StoredBranch] = ()
    as_tokens: bool = False

    @property
    def _controls(self) -> ControlTokens:
        return self.tokenizer.controls

    def text(self, text: str) -> str:
        """Returns a text with its markers broken.

        Raises:
            InvalidRequest: it has an unpaired surrogate.
        """
        return refuse_breaks(text) if self.as_tokens else self._controls.guarded(text)

    def value(self, value: Any) -> Any:
        """Returns a JSON value with the markers in all its texts and keys broken.

        Raises:
            InvalidRequest: a text has an unpaired surrogate.
        """
        return value if self.as_tokens else self._controls.guarded_value(value)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages as templates take them, with their markers broken, except the two exceptions above.

        Raises:
            InvalidRequest: a text has an unpaired surrogate.
        """
        if self.as_tokens:
            return [dict(message) for message in messages]
        return [
            {
                key: value
                if key == "role"
                else self._said(value)
                if key == "content" and message["role"] == "assistant"
                else self.value(value)
                for key, value in message.items()
            }
            for message in messages
        ]

    def beginning(self, text: str) -> str:
        """Returns the beginning of an answer with its markers broken. It may be inside a block of reasoning.

        Raises:
            InvalidRequest: it has an unpaired surrogate.
        """
        return self._assistant(text, opens=True)

    def _said(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._assistant(content)
        if not isinstance(content, list):
            return self.value(content)
        return [
            {**self.value(part), "text": self._assistant(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else self.value(part)
            for part in content
        ]

    def _assistant(self, text: str, *, opens: bool = False) -> str:
        guarded = self.text(text)
        if guarded is text or BREAK not in guarded:
            return guarded
        if (given := self._controls.given.guarded(self.scope, text)) is not None:
            return given
        own, behind = self._thought(text, opens=opens)
        places = set(breaks_of(guarded)) - self._remembered(text) - own
        if behind and (given := self._controls.given.guarded(self.scope, text[behind:])) is not None:
            places = {place for place in places if place < behind} | {behind + place for place in breaks_of(given)}
        return with_breaks(text, sorted(places))

    def _thought(self, text: str, *, opens: bool) -> tuple[set[int], int]:
        """Returns the breaks in the markers of the block of reasoning with which a text begins, and where the block
        ends; 0 if there is none."""
        start, end = self.tokenizer.markers.think_start, self.tokenizer.markers.think_end
        begin = len(text) - len(text.lstrip())
        if not start or not text.startswith(start, begin):
            return set(), 0
        closed = text.find(end, begin + len(start))
        if closed < 0:
            return _inside(begin, start) if opens else set(), 0
        return _inside(begin, start) | _inside(closed, end), closed + len(end)

    def _remembered(self, text: str) -> set[int]:
        """Returns the breaks in those markers of calls and reasoning that the agent's memory has as tokens in the same
        text."""
        said = text.strip()
        data, begin = said.encode("utf-8", "surrogatepass"), text.find(said)
        found: set[int] = set()
        if not data:
            return found
        for line, starts, ends in self._own_marks:
            for at in islice(_places_of(data, line.data), _PLACES_TRIED):
                byte, character = 0, begin
                for index in range(bisect_left(starts, at), bisect_right(ends, at + len(data))):
                    start = starts[index] - at
                    character += len(data[byte:start].decode("utf-8", "surrogatepass"))
                    byte = start
                    found |= _inside(character, line.data[starts[index] : ends[index]].decode())
        return found

    @cached_property
    def _own_marks(self) -> list[tuple[IndexedLine, list[int], list[int]]]:
        """Returns the lines that have markers of calls and reasoning as tokens, with the bytes at which these begin and
        end."""
        own = list(self.tokenizer.call_tokens | self.tokenizer.think_tokens)
        marked: list[tuple[IndexedLine, list[int], list[int]]] = []
        for line in self.lines:
            if isinstance(line, IndexedLine):
                tokens = np.asarray(line.tokens, np.int64)[line.added]
                starts, ends = line.controls[np.isin(tokens, own)].T.tolist()
                marked += [(line, starts, ends)] if starts else []
        return marked


def _places_of(part: bytes, data: bytes) -> Iterator[int]:
    """Returns the bytes at which `part` begins in `data`."""
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + len(part))


def _inside(at: int, mark: str) -> set[int]:
    return set(range(at + 1, at + len(mark)))
