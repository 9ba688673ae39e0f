"""What a caller says in a conversation, guarded before the template renders it: messages, tools, variables.

All of it is text, whoever says it, with two exceptions among an assistant's words, which are the model's own. A closed
block of reasoning at the beginning of a message is one: clients that know of no reasoning send it so. And where this
endpoint or the agent's memory knows that the model wrote a mark of an answer as a token, it is that token again.
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
"""In how many places of an agent's memory a text is looked at."""


@dataclass(frozen=True)
class AnswerLearner:
    """Remembers one answer, if its content shows control tokens.

    Args:
        scope: to whom it is given.
        prefill: its beginning, which was in the prompt.
        special_tokens: whether special tokens become text.
    """

    tokenizer: Tokenizer
    scope: str
    prefill: str
    special_tokens: bool

    def wants(self, content: str) -> bool:
        """Returns whether the content names a control token, be it in text or as a token."""
        return BREAK in self.tokenizer.controls.guarded(content)

    def learn(self, tokens: Sequence[int], content: str) -> None:
        """Remembers which of the control tokens that the content names are among `tokens`."""
        tokenizer = self.tokenizer
        hidden = tokenizer.end_tokens if self.special_tokens else tokenizer.hidden_tokens - tokenizer.call_tokens
        written = self._guarded([token for token in tokens if token not in hidden])
        # Reasoning is before the content, and may quote it.
        at = unbroken(written).rfind(content)
        if at >= 0:
            breaks = [place - at for place in breaks_of(written) if at <= place <= at + len(content)]
            beginning = CallersText(tokenizer).beginning(self.prefill)
            tokenizer.controls.given.learn(self.scope, beginning + with_breaks(content, breaks))

    def _guarded(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens with the marks broken that they do not write as tokens."""
        controls, shown = self.tokenizer.controls, self.tokenizer.detokenizer()
        written = [(token in controls.ids, shown.add(token)) for token in tokens]
        written.append((False, shown.flush()))
        runs = ((own, "".join(piece for _, piece in run)) for own, run in groupby(written, lambda each: each[0]))
        return "".join(piece if own else controls.guarded(piece) for own, piece in runs)


@dataclass(frozen=True)
class CallersText:
    """Guards what one request says.

    Args:
        scope: to whom answers were given that it may send back.
        lines: what the agent's memory holds.
        as_tokens: whether marks may be control tokens after all, so that nothing is guarded.
    """

    tokenizer: Tokenizer
    scope: str = ""
    lines: Sequence[StoredBranch] = ()
    as_tokens: bool = False

    @property
    def _controls(self) -> ControlTokens:
        return self.tokenizer.controls

    def text(self, text: str) -> str:
        """Returns a text guarded.

        Raises:
            InvalidRequest: it has an unpaired surrogate.
        """
        return refuse_breaks(text) if self.as_tokens else self._controls.guarded(text)

    def value(self, value: Any) -> Any:
        """Returns a value of JSON with all its texts and keys guarded.

        Raises:
            InvalidRequest: a text has an unpaired surrogate.
        """
        return value if self.as_tokens else self._controls.guarded_value(value)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages as templates take them, guarded.

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
        """Returns the beginning of an answer, guarded. It may be inside a block of reasoning.

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
        """Returns the breaks in the marks of the block of reasoning that a text begins with, and where that ends; 0 if
        it does not."""
        start, end = self.tokenizer.markers.think_start, self.tokenizer.markers.think_end
        begin = len(text) - len(text.lstrip())
        if not start or not text.startswith(start, begin):
            return set(), 0
        closed = text.find(end, begin + len(start))
        if closed < 0:
            return _inside(begin, start) if opens else set(), 0
        return _inside(begin, start) | _inside(closed, end), closed + len(end)

    def _remembered(self, text: str) -> set[int]:
        """Returns the breaks in those marks of calls and reasoning that the agent's memory has as tokens in the same
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
        """The lines that have marks of calls and reasoning as tokens, with the bytes at which these begin and end."""
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
