"""The formats in which models write tool calls, told from two known calls as a template writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ID = "\ue000"
"""Stands for a call's id in the pieces of a format."""

NAMES = ("first_known", "second_known")
SHOWN_BY_NAME = f'{{"{NAMES[0]}": {{'
ARGUMENTS = ({"key_one": "value one", "key_two": "value two"}, {"key_three": "value three"})
"""The known calls."""


@dataclass(frozen=True)
class JsonFormat:
    """Calls whose arguments are JSON::

        head name middle arguments (between name middle arguments)* tail

    `head` begins with the model's marker. An `ID` in a piece stands for a call's id. `between` is empty if there is one
    call at most.
    """

    head: str
    middle: str
    between: str
    tail: str


@dataclass(frozen=True)
class TaggedFormat:
    """Calls whose arguments are text between tags::

        head name opening (before key after value end)* closing (between name …)*

    Attributes:
        between: from the end of one call's `closing` to the next one's name.
    """

    head: str
    opening: str
    before: str
    after: str
    end: str
    closing: str
    between: str


@dataclass(frozen=True)
class KeyedFormat:
    """Calls whose arguments have keys, but are no JSON, such as Python's and Gemma's::

        head name opening [key assign value (comma key assign value)*] closing (between name …)* tail

    Attributes:
        quote: around a text, which nothing escapes if it is more than one character.
    """

    head: str
    opening: str
    assign: str
    comma: str
    quote: str
    closing: str
    between: str
    tail: str

    @property
    def pythonic(self) -> bool:
        """Whether values are Python's."""
        return self.opening.endswith("(")

    @property
    def listed(self) -> bool:
        """Whether several calls are in one list."""
        return self.between.strip() == ","


Format = JsonFormat | TaggedFormat | KeyedFormat

PYTHONIC = KeyedFormat("[", "(", "=", ", ", '"', ")", ", ", "]")
_KEYED = re.compile(r"(?P<assign>\s*[=:]\s*)(?P<quote>\S*)", re.DOTALL)
_PAIRS = {"(": ")", "{": "}"}


def with_calls(messages: Sequence[Mapping[str, Any]], known: KeyedFormat) -> list[dict[str, Any]]:
    """Returns messages with their calls in their contents, as Python's."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        calls, content = message.get("tool_calls") or (), message.get("content") or ""
        if calls and isinstance(content, str):
            written = (_pythonic(call["function"], known) for call in calls)
            message = {**message, "content": f"{content}{known.head}{known.between.join(written)}{known.tail}"}
        shown.append(dict(message))
    return shown


def _pythonic(function: Mapping[str, Any], known: KeyedFormat) -> str:
    given = function["arguments"]
    pairs = given.items() if isinstance(given, Mapping) else ()
    written = (f"{key}{known.assign}{_value(value)}" for key, value in pairs)
    return f"{function['name']}{known.opening}{known.comma.join(written)}{known.closing}"


def _value(value: Any) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def json_format(written: str, ids: tuple[str, ...]) -> JsonFormat | None:
    """Returns the format of the one or two known calls that are `written`; None if their arguments are not JSON."""
    spans: list[tuple[int, int]] = []
    ends: list[int] = []
    for name, arguments, _ in zip(NAMES, ARGUMENTS, ids, strict=False):
        at = written.find(name, ends[-1] if ends else 0)
        begin = written.find("{", at + len(name))
        try:
            value, end = json.JSONDecoder().raw_decode(written, begin)
        except ValueError:
            return None
        if at < 0 or value != arguments:
            return None
        spans.append((at, begin))
        ends.append(end)
    middles = [written[at + len(name) : begin] for name, (at, begin) in zip(NAMES, spans, strict=False)]
    between = written[ends[0] : spans[1][0]] if len(ids) > 1 else ""
    pieces = [written[: spans[0][0]], middles[0], middles[-1], between, written[ends[-1] :]]
    for index, id in enumerate(ids):
        # In Kimi's ids a number follows the name.
        pieces = [piece.replace(id, ID).replace(f":{index}<", f":{ID}<") for piece in pieces]
    head, middle, second, between, tail = pieces
    return JsonFormat(head, middle, between, tail) if middle == second else None


def tagged_format(written: str) -> TaggedFormat | None:
    """Returns the format of the two known calls that are `written` with tags; None if they are not."""
    (first, second), (one, two) = NAMES, ARGUMENTS
    words = [first, *(word for pair in one.items() for word in pair), second, *next(iter(two.items()))]
    if (pieces := _between(written, words)) is None:
        return None
    head, opened, after, inside, again, passage, _, _, tail = pieces
    # `opened` is opening + before, `inside` is end + before, `tail` is end + closing, `passage` is tail + between.
    before = opened[len(opened) - common_length(opened[::-1], inside[::-1]) :]
    end = inside[: len(inside) - len(before)]
    if after != again or not end or not before or not tail.startswith(end) or not passage.startswith(tail):
        return None
    opening = opened[: len(opened) - len(before)]
    return TaggedFormat(head, opening, before, after, end, tail[len(end) :], passage[len(tail) :])


def _between(written: str, words: Iterable[str]) -> list[str] | None:
    """Returns what is before, between and after words that follow each other in a text; None if they do not."""
    pieces: list[str] = []
    for word in words:
        before, found, written = written.partition(word)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, written]


def keyed_format(written: str) -> KeyedFormat | None:
    """Returns the format of the one or two known calls that are `written` with keys; None if they are not."""
    count = 1 + (NAMES[1] in written)
    words: list[str] = []
    for name, given in zip(NAMES[:count], ARGUMENTS, strict=False):
        words += [name, *(word for pair in given.items() for word in pair)]
    if (pieces := _between(written, words)) is None:
        return None
    head, opening, assigned, comma, again = pieces[:5]
    tail, keyed = pieces[-1], _KEYED.fullmatch(assigned)
    if keyed is None or again != assigned or opening[-1:] not in _PAIRS or not head.strip():
        return None
    quote, passage = keyed["quote"], pieces[5] if count > 1 else tail
    closing = f"{quote}{_PAIRS[opening[-1]]}"
    alike = count == 1 or pieces[6:-1] == [opening, assigned]
    comma_said = comma.removeprefix(quote)
    if not (alike and comma.startswith(quote) and comma_said.strip() == ","):
        return None
    if not tail.startswith(closing) or not passage.startswith(closing):
        return None
    return KeyedFormat(
        head,
        opening,
        keyed["assign"],
        comma_said,
        # Without quotation marks a text would be anything.
        quote or '"',
        closing.removeprefix(quote),
        passage[len(closing) :] if count > 1 else "",
        tail[len(closing) :],
    )


def common_length(one: str, other: str) -> int:
    """Returns the length of the beginning that two texts share."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
