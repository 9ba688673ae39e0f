"""Calls whose arguments are text between tags, as Qwen3-Coder and GLM write them, read as JSON. Computation only.

::

    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>

An argument that is text according to the tool's schema comes out as it comes in. Other arguments come out when they are
complete, as the model's parser reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..answer_pieces import longest_held
from ..grammar_rules import GrammarRules, json_body, quoted, schema_of_arguments
from ..lenient.schemas import named
from ..readers import Begun, StepReader
from .call_format import (
    ARGUMENTS,
    NAMES,
    CallMarks,
    ConstrainedTool,
    Parser,
    Parsing,
    WrittenFormat,
    common_length,
    pieces_around,
)

_KEY_CHARACTERS_MAX = 256
_CLOSING_TAG = re.compile(r"</[^<>]+>$")
_OPENING_TAG = re.compile(r"<[^<>]*>?$")
_KEY = re.compile(r"[^\s<>\"']+")

_KEPT = ['a <b> &amp; "c" \\n\t{1}', "3", "", "true"]
"""Texts that a parser must leave as they are."""


@dataclass(frozen=True)
class _Habits:
    """What a parser does with a text: whether it strips white space, and whether it reads `null`, in any case of
    letters, as None."""

    strips: bool
    nulls: bool


@dataclass(frozen=True)
class TaggedCalls(WrittenFormat):
    """Calls whose arguments are text between tags::

        head name opening (before key after value end)* closing (between name …)*

    Attributes:
        between: the text from the end of one call's `closing` to the next one's name.
    """

    head: str
    opening: str
    before: str
    after: str
    end: str
    closing: str
    between: str
    tail = ""

    @classmethod
    def read(cls, written: str, ids: Sequence[str]) -> TaggedCalls | None:
        (first, second), (one, two) = NAMES, ARGUMENTS
        words = [first, *(word for pair in one.items() for word in pair), second, *next(iter(two.items()))]
        if (pieces := pieces_around(written, words)) is None:
            return None
        head, opened, after, inside, again, passage, _, _, tail = pieces
        # `opened` is opening + before, `inside` is end + before, `tail` is end + closing, `passage` is tail + between.
        before = opened[len(opened) - common_length(opened[::-1], inside[::-1]) :]
        end = inside[: len(inside) - len(before)]
        if after != again or not end or not before or not tail.startswith(end) or not passage.startswith(tail):
            return None
        opening = opened[: len(opened) - len(before)]
        return cls(head, opening, before, after, end, tail[len(end) :], passage[len(tail) :])

    def _constrain_each(self, rules: GrammarRules, tools: Sequence[ConstrainedTool]) -> list[str]:
        return [self._bind_call(rules, index, tool) for index, tool in enumerate(tools)]

    def _bind_call(self, rules: GrammarRules, index: int, tool: ConstrainedTool) -> str:
        schema = schema_of_arguments(tool.parameters)
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            properties = {}
        before, after = rules.written(self.before), rules.written(self.after)
        parts = [quoted(tool.name), rules.written(self.opening)]
        for place, (key, of_key) in enumerate(properties.items()):
            name = f"argument_{index}_{place}"
            value = _constrained_value(rules, name, of_key, schema, self.end, strict=tool.strict)
            rule = rules.rule(name, f"{before} {quoted(key)} {after} {value}")
            needed = isinstance(required, Sequence) and key in required
            parts.append(rule if needed else f"{rule}?")
        if not properties:
            name = f"any_{index}"
            value = rules.until(name, self.end)
            parts.append(rules.rule(name, f"{before} /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {after} {value}") + "*")
        parts.append(rules.written(self.closing))
        return rules.rule(f"call_{index}", " ".join(filter(None, parts)))

    def parse(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> Parsing:
        reader = None if marks.parser is None else self._reader(marks.start, marks.end, marks.parser, tools)
        return Parsing(marks.start, marks.end, marks.parser, reader)

    def _reader(
        self, start: str, end: str, parser: Parser, tools: Sequence[Mapping[str, Any]]
    ) -> Callable[[], TaggedReader] | None:
        """Returns what makes a reader for each call of an answer. None if calls are read as a whole, because several
        are between two markers, or the parser changes text."""
        if not (end and self.head.startswith(start) and self.closing.endswith(end) and start in self.between):
            return None
        lead, closing = self.head.removeprefix(start), self.closing.removesuffix(end)
        properties = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}

        def parse(name: str, key: str, value: str, tools: Any) -> Any:
            pieces = (lead, name, self.opening, self.before, key, self.after, value, self.end, closing)
            return parser("".join(pieces), tools)["arguments"][key]

        habits = _habits_of(parse)
        if habits is None:
            return None
        return partial(TaggedReader, self, start, end, properties, partial(parse, tools=tools), habits)


class TaggedReader(StepReader):
    """A reader of one call; see `readers.Reader`. It returns the call's arguments as JSON, without the last bracket.

    Args:
        start, end: the model's markers around a call, which are not part of the text.
        properties: the schemas of each tool's arguments, by its name.
        parse_value: parses the value of a tool's argument. Raises what the model's parser raises.
    """

    def __init__(
        self,
        known: TaggedCalls,
        start: str,
        end: str,
        properties: Mapping[str, Mapping[str, Any]],
        parse_value: Callable[[str, str, str], Any],
        habits: _Habits,
    ) -> None:
        super().__init__(self._read_begin)
        # A bare name may be the beginning of a longer name, or of a call with arguments.
        self.rest = None
        self._known = known
        self._lead = known.head.removeprefix(start)
        self._closing = known.closing.removesuffix(end).strip()
        # A value whose own end is missing ends at the call's end, or at the next key.
        others = (_CLOSING_TAG.search(self._closing), _OPENING_TAG.search(known.before))
        self._others = tuple(f"\n{found[0]}" for found in others if found is not None)
        self._begins = {f"{name}{known.opening}{known.before}": name for name in properties}
        self._properties = properties
        self._parse_value = parse_value
        self._habits = habits
        self._searched = 0
        self._name = ""
        self._keys: list[str] = []

    def _read_begin(self) -> bool:
        """Takes everything up to the first argument's key. A call without arguments is not emitted as begun."""
        for begin, name in self._begins.items():
            if self._buffer.startswith(f"{self._lead}{begin}"):
                self._take(len(self._lead) + len(begin))
                self._name, self._step = name, self._read_key
                self._say(Begun(name), "{")
                return True
        self.lost = not any(f"{self._lead}{begin}".startswith(self._buffer) for begin in self._begins)
        return False

    def _read_key(self) -> bool:
        key, after, rest = self._buffer.partition(self._known.after)
        if not after:
            self.lost = len(key) > _KEY_CHARACTERS_MAX
            return False
        if key in self._keys or not _KEY.fullmatch(key):
            self.lost = True
            return False
        self._keys.append(key)
        self._buffer, self._searched = rest, 0
        schema = self._properties[self._name].get(key)
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        self._step = self._begin_text if is_text else self._read_value
        return True

    def _read_value(self) -> bool:
        """Takes a whole value."""
        at, _ = self._up_to_end(self._searched)
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(self._known.end))
            return False
        try:
            value = self._parse_value(self._name, self._keys[-1], self._buffer[:at])
            said = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except Exception:
            # Parsers run json, ast and regular expressions on the model's text and may raise anything.
            self.lost = True
            return False
        self._say(f"{self._lead_of_value}{said}")
        return self._end_value(at)

    def _begin_text(self) -> bool:
        """Waits until it is known whether a value is text."""
        at, text = self._up_to_end()
        begun = text.lstrip() if self._habits.strips else text
        if at < 0 and (not begun or (self._habits.nulls and "null".startswith(begun.lower()))):
            return False
        if self._habits.nulls and begun.lower() == "null":
            self._step = self._read_value
            return True
        self._take(len(text) - len(begun))
        self._say(f'{self._lead_of_value}"')
        self._step = self._read_text
        return self._read_text()

    def _read_text(self) -> bool:
        at, text = self._up_to_end()
        if self._habits.strips:
            text = text.rstrip()
        self._say(json.dumps(text, ensure_ascii=False)[1:-1])
        if at < 0:
            self._take(len(text))
            return False
        self._say('"')
        return self._end_value(at)

    def _read_next(self) -> bool:
        """Takes the text before the next key. The end of the call is ignored."""
        before = self._known.before
        if self._buffer.startswith(before):
            self._take(len(before))
            self.rest, self._step = None, self._read_key
            return True
        closing = self._closing
        if closing and self._buffer.lstrip().startswith(closing):
            self._say("}")
            self.rest, self.lost = "", True
            return False
        closes = bool(closing) and closing.startswith(self._buffer.lstrip())
        self.lost = not (before.startswith(self._buffer) or closes)
        return False

    @property
    def _lead_of_value(self) -> str:
        return f"{', ' if len(self._keys) > 1 else ''}{json.dumps(self._keys[-1], ensure_ascii=False)}: "

    def _up_to_end(self, searched: int = 0) -> tuple[int, str]:
        """Returns where the value ends, -1 if that is not known yet, and its text so far. If the value does not end as
        in the template, the call is read as a whole.

        Args:
            searched: how many characters were already searched.
        """
        end, buffer = self._known.end, self._buffer
        tag = end.lstrip() or end
        found = buffer.find(tag, searched)
        others = [
            place for other in self._others if (place := buffer.find(other, 0, found if found >= 0 else None)) >= 0
        ]
        if others:
            # The value's end is missing, or the value itself contains a call.
            self.lost = True
            return -1, buffer[: min(others)]
        if found < 0:
            return -1, buffer[: len(buffer) - longest_held(buffer, (end, tag, *self._others))]
        at = found + len(tag) - len(end)
        if at < 0 or not buffer.startswith(end, at):
            self.lost = True
            return -1, buffer[:found]
        return at, buffer[:at]

    def _end_value(self, at: int) -> bool:
        self._take(at + len(self._known.end))
        self.rest, self._step = "}", self._read_next
        return True


def _constrained_value(
    rules: GrammarRules, name: str, schema: Any, root: Mapping[str, Any], end: str, *, strict: bool
) -> str:
    """Returns a tagged argument's value and end: strings as they are, other values as JSON."""
    target = named(schema, root)
    kind, choices = target.get("type"), target.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"( {' | '.join(map(quoted, choices))} ) {rules.written(end)}"
    if isinstance(kind, str) and kind != "string":
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = rules.rule(f"{name}_json", json_body({**shared, **schema}, strict=strict))
        return f"{value} {rules.written(end)}"
    # A value that is or may be text: without quotation marks it cannot be told apart from other values.
    return rules.until(name, end)


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _habits_of(parse: Callable[[str, str, str, Any], Any]) -> _Habits | None:
    """Returns what a parser does with an argument that is text; None if it changes the text in another way."""
    schema = {"type": "object", "properties": {"key": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "name", "parameters": schema}}]
    try:
        spaced, null, *same = (parse("name", "key", text, tools) for text in (" x\n ", "Null", *_KEPT))
    except Exception:
        return None
    if spaced not in (" x\n ", "x") or null not in (None, "Null") or same != _KEPT:
        return None
    return _Habits(strips=spaced == "x", nulls=null is None)
