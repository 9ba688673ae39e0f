"""How a model writes tool calls, read from what its chat template makes of two calls.

mlx-lm's parsers read calls; nothing in it writes them. A template does, for the calls of earlier turns, in the form
that the model was trained on. Two calls with known names and arguments tell what stands before, between and after
these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....cluster.errors import InvalidRequest
from .lenient.bodies import CallBodies
from .lenient.declared import DeclaredTools
from .pipeline import ToolCall
from .tool_calls import ToolCallSplitter, call_parser

if TYPE_CHECKING:
    from ..model import TextModel

ID = "\ue000"
"""Stands for a call's id in the pieces of a format."""

_ASKED = {"role": "user", "content": "?"}
_SAID = "Something said."
_NAMES = ("first_known", "second_known")
SHOWN_BY_NAME = f'{{"{_NAMES[0]}": {{'
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


Format = CallFormat | TaggedFormat | KeyedFormat

_PYTHONIC = KeyedFormat("[", "(", "=", ", ", '"', ")", ", ", "]")
_MARK = re.compile(r"<[|｜]?[/A-Za-z_][^<>\s=\"']{0,40}>|\[/?[A-Z_]{3,20}\]|<\|[^|<>\s]{1,40}\|>|<[a-z_]{1,40}\|>")
_NO_MARK = ("arg_key", "arg_value", "parameter", "escape", "function=", '"')
_KEYED = re.compile(r"(?P<assign>\s*[=:]\s*)(?P<quote>\S*)", re.DOTALL)
_PAIRS = {"(": ")", "{": "}"}


def read_format(text: TextModel) -> Format | None:
    """Returns how the model writes calls; None if its template does not tell, or its parser would not read them so.
    Takes milliseconds."""
    if not text.has_tool_calls or text.tool_parser is None:
        return None
    if text.template_calls is not None:
        return text.template_calls.format
    start = text.tool_call_start
    for ids in _IDS:
        try:
            rendered = _rendered(text, ids)
        except InvalidRequest:
            continue
        begin = rendered.rfind(start, 0, rendered.find(_NAMES[0]))
        if begin < 0:
            continue
        written = _turn(text, rendered[begin:])
        if (keyed := keyed_format(written)) is not None:
            return keyed
        if not _is_read(text, written):
            continue
        found = format_of(written, ids) or _with_tags(written)
        if found is not None:
            return found
    return None


def unshown_format(text: TextModel) -> KeyedFormat | None:
    """Returns how a model writes calls whose template leaves those of earlier turns out, while its markers say what it
    was trained to: lists of Python's calls (LFM2). None for all others."""
    if text.tool_parser is None or not text.tool_parser.__module__.endswith(".pythonic"):
        return None
    try:
        if _NAMES[0] in _rendered(text, _IDS[0]):
            return None
    except InvalidRequest:
        return None
    head, tail = f"{text.tool_call_start}{_PYTHONIC.head}", f"{_PYTHONIC.tail}{text.tool_call_end}"
    return replace(_PYTHONIC, head=head, tail=tail)


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


def _rendered(text: TextModel, ids: tuple[str, ...]) -> str:
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in zip(ids, _NAMES, _ARGUMENTS, strict=False)
    ]
    said = [_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    return text.render(said, None, {}, generation_prompt=False)


def rendered_calls(text: TextModel, count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What the template writes for one or two calls where an answer begins, with their ids."""
    for ids in _IDS:
        try:
            rendered, prompt = _rendered(text, ids[:count]), text.render([_ASKED], None, {})
        except InvalidRequest:
            continue
        begin = _answer_begin(text, rendered, prompt)
        if begin is not None and _NAMES[0] in (written := _turn(text, rendered[begin:])):
            yield written, ids[:count]


def _answer_begin(text: TextModel, rendered: str, prompt: str) -> int | None:
    """Returns where the assistant's message begins in a conversation; None if it is not found. A prompt may have more
    than that, as `<think>`."""
    try:
        plain = text.render([_ASKED, {"role": "assistant", "content": _SAID}], None, {}, generation_prompt=False)
    except InvalidRequest:
        plain = ""
    if (begin := plain.rfind(_SAID)) > 0 and rendered.startswith(plain[:begin]):
        return begin
    if rendered.startswith(prompt):
        return len(prompt)
    shared = common_length(prompt, rendered)
    begin = max(prompt.rfind(end, 0, shared) for end in "\n>") + 1
    return begin if prompt[begin:].strip() and begin > prompt.rfind(_ASKED["content"]) else None


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
    return calls == list(zip(_NAMES, _ARGUMENTS, strict=True)) or read_otherwise(text, written)


def read_otherwise(text: TextModel, written: str) -> bool:
    """Whether both calls are found in it as in other forms than the model's parser reads."""
    declared = DeclaredTools({"function": {"name": name}} for name in _NAMES)
    reading = CallBodies(declared, marks_in(text, written)).read(written, final=True)
    calls = [(name, json.loads(arguments)) for name, arguments in reading.calls]
    return calls == list(zip(_NAMES, _ARGUMENTS, strict=True))


def marks_in(text: TextModel, written: str) -> tuple[str, ...]:
    """Returns the marks around calls that are `written`: special tokens, tags, words in brackets."""
    hidden = text.hidden_tokens - text.end_tokens
    special = [text.decode([token]) for token in text.encode(written) if token in hidden] if written else []
    found = dict.fromkeys(mark.strip() for mark in (*special, *_MARK.findall(written)))
    return tuple(mark for mark in found if mark and not any(part in mark for part in _NO_MARK))


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
    if (pieces := _between(written, words)) is None:
        return None
    head, opened, after, inside, again, passage, _, _, tail = pieces
    # `opened` is opening + before, `inside` is end + before, `tail` is end + closing, `passage` is tail + between.
    before = _common_end(opened, inside)
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
    count = 1 + (_NAMES[1] in written)
    words = [word for name, given in zip(_NAMES[:count], _ARGUMENTS, strict=False) for word in (name, *_flat(given))]
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


def _flat(pairs: dict[str, str]) -> list[str]:
    return [word for pair in pairs.items() for word in pair]


def common_length(one: str, other: str) -> int:
    """Returns the length of the beginning that two texts share."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def _common_end(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]
