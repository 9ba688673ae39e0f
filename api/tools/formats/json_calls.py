"""Calls whose arguments are JSON: single, in lists, between tags. Computation only."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..grammar_rules import ID, GrammarRules, json_body, quoted, schema_of_arguments
from ..lenient.values import LooseValue
from ..readers import Begun, Said
from .call_format import ARGUMENTS, NAMES, CallMarks, ConstrainedTool, Parser, Parsing, WrittenFormat, names_of

_JSON_BEGINS = re.compile(r"[\[{]")
_FIRST_KEY = re.compile(r'[\[{\s]*"\w+"', re.ASCII)
_BETWEEN = re.compile(r"[\s,;]*")
_NAME_KEY = re.compile(r'"(\w+)"\s*:\s*"$', re.ASCII)
_ARGUMENTS = ("arguments", "parameters")
_NAME_CHARACTERS_MAX = 128


@dataclass(frozen=True)
class JsonCalls(WrittenFormat):
    """Calls whose arguments are JSON::

        head name middle arguments (between name middle arguments)* tail

    `head` begins with the model's marker. An `ID` in a piece stands for a call's id. `between` is empty if there is at
    most one call.
    """

    head: str
    middle: str
    between: str
    tail: str

    @classmethod
    def read(cls, written: str, ids: Sequence[str]) -> JsonCalls | None:
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
            # Kimi's ids are a name followed by a number.
            pieces = [piece.replace(id, ID).replace(f":{index}<", f":{ID}<") for piece in pieces]
        head, middle, second, between, tail = pieces
        return cls(head, middle, between, tail) if middle == second else None

    def found_alone(self, written: str, end: str) -> CallMarks | None:
        if ID in self.head + self.middle:
            return None
        begins = _JSON_BEGINS.search(self.head)
        start, lead = self.head, None
        if begins is not None:
            marker, rest = self.head[: begins.start()], written[begins.start() :]
            first = _FIRST_KEY.match(rest)
            lead = "" if marker.strip() else first[0] if first is not None else ""
            start = marker.lstrip() or lead
        if not start.strip() or start.strip().isalnum():
            return None
        parser = self._parser(lead)
        try:
            calls = parser(written[written.index(start) + len(start) :], None)
        except ValueError:
            return None
        return CallMarks(start, end, parser) if calls else None

    def _constrain_each(self, rules: GrammarRules, tools: Sequence[ConstrainedTool]) -> list[str]:
        return [self._bind_call(rules, index, tool) for index, tool in enumerate(tools)]

    def _bind_call(self, rules: GrammarRules, index: int, tool: ConstrainedTool) -> str:
        # If a quotation mark follows, the name is in a JSON string.
        name = quoted(tool.name)[1:-1] if self.head.endswith('"') else tool.name
        schema = json_body(schema_of_arguments(tool.parameters), strict=tool.strict)
        arguments = rules.rule(f"arguments_{index}", schema)
        return rules.rule(f"call_{index}", f"{quoted(name)} {rules.written(self.middle)} {arguments}")

    def parse(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> Parsing:
        start, end = marks.start, marks.end
        one_each = bool(end) and self.head.startswith(start) and start in self.between and end in self.between
        # If ids come before the arguments, or several calls are between two markers, calls are read as a whole.
        if marks.parser is None or not one_each or ID in self.head or ID in self.middle:
            return Parsing(start, end, marks.parser)
        reader = partial(JsonReader, self.head[len(start) :], self.middle, names_of(tools))
        return Parsing(start, end, marks.parser, reader)

    def example(self, name: str, arguments: str) -> str | None:
        written = f"{self.head}{name}{self.middle}{arguments}{self.tail}"
        return None if ID in self.head + self.middle + self.tail else written

    def _parser(self, lead: str | None) -> Parser:
        """Returns a parser for the text after the beginning of calls.

        Args:
            lead: the part of that beginning that belongs to the JSON of the calls; None if only their arguments are
                JSON.
        """

        def parse(body: str, tools: Any = None) -> list[dict[str, Any]]:
            """Returns the calls, each with its `name` and its `arguments`.

            Raises:
                ValueError: there is no call, or one of a tool that is not among `tools`.
            """
            found = list(self._written(body) if lead is None else self._in_json(lead + body))
            names = names_of(tools or ())
            for call in found:
                if names and call["name"] not in names:
                    raise ValueError(f"there is no tool {call['name']!r}")
            return found

        return parse

    def _written(self, body: str) -> Iterator[dict[str, Any]]:
        at = 0
        while True:
            name, found, rest = body[at:].partition(self.middle)
            if not found:
                raise ValueError("a call without arguments")
            arguments, end = json.JSONDecoder().raw_decode(rest)
            yield {"name": name, "arguments": arguments}
            at = len(body) - len(rest) + end
            if not (self.between and body.startswith(self.between, at)):
                return
            at += len(self.between)

    def _in_json(self, text: str) -> Iterator[dict[str, Any]]:
        key, at = _NAME_KEY.search(self.head), 0
        named = "name" if key is None else key[1]
        while at < len(text) and text[at] in "[{":
            value, at = json.JSONDecoder().raw_decode(text, at)
            for call in value if isinstance(value, list) else [value]:
                given = next((key for key in _ARGUMENTS if key in call), None) if isinstance(call, dict) else None
                if given is None or not isinstance(call.get(named), str):
                    raise ValueError("no call")
                yield {"name": call[named], "arguments": call[given]}
            separated = _BETWEEN.match(text, at)
            at = at if separated is None else separated.end()


IN_JSON, IN_JSON_START = JsonCalls('{"name": "', '", "arguments": ', "", "}"), '{"name"'
"""The format of forced calls if the model's own format is not known, and how such a call begins."""


class JsonReader:
    """A `readers.Reader` of one call whose arguments are JSON or almost JSON; it returns JSON.

    Args:
        lead, middle: the texts before and after the name.
        names: the names of the tools that may be called.
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
        """Finds the name in the buffer. Returns the name ("" if it is not complete yet), and the text from the
        arguments on."""
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
