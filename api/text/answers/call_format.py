"""How a model writes tool calls, read from what its chat template makes of two calls.

mlx-lm's parsers read calls; nothing in it writes them. A template does, for the calls of earlier turns, in the form
that the model was trained on. Two calls with known names and arguments tell what stands before, between and after
these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....cluster.errors import InvalidRequest
from .pipeline import ToolCall
from .tool_calls import ToolCallSplitter, call_parser

if TYPE_CHECKING:
    from ..model import TextModel

ID = "\ue000"
"""Stands for a call's id in the pieces of a format."""

_ASKED = {"role": "user", "content": "?"}
_NAMES = ("first_known", "second_known")
_ARGUMENTS = ({"key_one": "value one", "key_two": "value two"}, {"key_three": "value three"})
# Mistral's templates take ids of nine letters and digits only. Kimi's have the name in the id.
_IDS = (("firstId01", "secondI02"), ("functions.first_known:0", "functions.second_known:1"))


@dataclass(frozen=True)
class CallFormat:
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


def read_format(text: TextModel) -> CallFormat | TaggedFormat | None:
    """Returns how the model writes calls; None if its template does not tell, or its parser would not read them so.
    Takes milliseconds."""
    if not text.has_tool_calls or text.tool_parser is None:
        return None
    if text.template_calls is not None:
        return text.template_calls.format
    for ids in _IDS:
        try:
            rendered = _rendered(text, ids)
        except InvalidRequest:
            continue
        start = rendered.rfind(text.tool_call_start, 0, rendered.find(_NAMES[0]))
        if start < 0:
            continue
        written = _turn(text, rendered[start:])
        if not _is_read(text, written):
            continue
        found = format_of(written, ids) or _with_tags(written)
        if found is not None:
            return found
    return None


def _rendered(text: TextModel, ids: tuple[str, ...]) -> str:
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in zip(ids, _NAMES, _ARGUMENTS, strict=False)
    ]
    return text.render([_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}], generation_prompt=False)


def rendered_calls(text: TextModel, count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What the template writes for one or two calls behind its generation prompt, with their ids."""
    for ids in _IDS:
        try:
            rendered, prompt = _rendered(text, ids[:count]), text.render([_ASKED])
        except InvalidRequest:
            continue
        if rendered.startswith(prompt):
            yield _turn(text, rendered[len(prompt) :]), ids[:count]


def _turn(text: TextModel, written: str) -> str:
    """Cuts what follows the calls: after the end marker, or at the end of the turn."""
    if text.tool_call_end:
        return written[: written.rfind(text.tool_call_end) + len(text.tool_call_end)]
    ends = [at for token in text.end_tokens if (end := text.decode([token])) and (at := written.find(end)) >= 0]
    return written[: min(ends, default=len(written))].rstrip()


def _is_read(text: TextModel, written: str) -> bool:
    """Whether the model's parser finds both calls in it."""
    assert text.tool_parser is not None
    splitter = ToolCallSplitter(text.tool_call_start, text.tool_call_end, call_parser(text.tool_parser, []))
    pieces = [*splitter.add(written), *splitter.flush()]
    calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]
    return calls == list(zip(_NAMES, _ARGUMENTS, strict=True))


def format_of(written: str, ids: tuple[str, ...]) -> CallFormat | None:
    """Returns the format of the one or two known calls that are `written`; None if their arguments are not JSON."""
    spans: list[tuple[int, int]] = []
    ends: list[int] = []
    for name, arguments, _ in zip(_NAMES, _ARGUMENTS, ids, strict=False):
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
    middles = [written[at + len(name) : begin] for name, (at, begin) in zip(_NAMES, spans, strict=False)]
    between = written[ends[0] : spans[1][0]] if len(ids) > 1 else ""
    pieces = [written[: spans[0][0]], middles[0], middles[-1], between, written[ends[-1] :]]
    for index, id in enumerate(ids):
        # In Kimi's ids a number follows the name.
        pieces = [piece.replace(id, ID).replace(f":{index}<", f":{ID}<") for piece in pieces]
    head, middle, second, between, tail = pieces
    return CallFormat(head, middle, between, tail) if middle == second else None


def _with_tags(written: str) -> TaggedFormat | None:
    (first, second), (one, two) = _NAMES, _ARGUMENTS
    words = [first, *(word for pair in one.items() for word in pair), second, *next(iter(two.items()))]
    pieces: list[str] = []
    at = 0
    for word in words:
        found = written.find(word, at)
        if found < 0:
            return None
        pieces.append(written[at:found])
        at = found + len(word)
    head, opened, after, inside, again, passage, _, _ = pieces
    tail = written[at:]
    # `opened` is opening + before, `inside` is end + before, `tail` is end + closing, `passage` is tail + between.
    before = _common_end(opened, inside)
    end = inside[: len(inside) - len(before)]
    if after != again or not end or not before or not tail.startswith(end) or not passage.startswith(tail):
        return None
    opening = opened[: len(opened) - len(before)]
    return TaggedFormat(head, opening, before, after, end, tail[len(end) :], passage[len(tail) :])


def _common_end(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]
