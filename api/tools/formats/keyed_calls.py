"""Calls whose arguments have keys but are not JSON, such as Python's and Gemma's. Computation only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..call_splitter import first_of
from ..grammar_rules import GrammarRules
from ..readers import Begun, Ended
from .call_format import CallMarks, ConstrainedTool, Parser, Parsing, WrittenFormat, names_of
from .keyed_layout import KeyedLayout
from .keyed_reader import KeyedReader
from .keyed_rules import KeyedRules


@dataclass(frozen=True)
class KeyedCalls(KeyedLayout, WrittenFormat):
    """The call format of a model with such a layout."""

    parses = True

    def found_alone(self, written: str, end: str) -> CallMarks:
        return CallMarks(self.head, end, self.parser(self.head))

    def _constrain_each(self, rules: GrammarRules, tools: Sequence[ConstrainedTool]) -> list[str]:
        keyed = KeyedRules(self, rules)
        return [keyed.call(index, tool) for index, tool in enumerate(tools)]

    def parse(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> Parsing:
        if marks.parser is None:
            return Parsing(marks.start, marks.end)
        parser = first_of(self.parser(marks.start), marks.parser)
        return Parsing(marks.start, marks.end, parser, partial(KeyedReader, self, marks.start, names_of(tools)))

    def parser(self, start: str) -> Parser:
        """Returns a parser like mlx-lm's, for the text behind the marker `start`."""

        def parse(text: str, tools: Any = None) -> list[dict[str, Any]]:
            """Returns the calls in a text, each with its `name` and its `arguments`.

            Raises:
                ValueError: it has no call, or a malformed one.
            """
            reader = KeyedReader(self, start, names_of(tools or ()))
            calls: list[tuple[str, list[str]]] = []
            ended = 0
            for said in reader.add(text):
                if isinstance(said, Begun):
                    calls.append((said.name, []))
                elif isinstance(said, Ended):
                    ended += 1
                else:
                    calls[-1][1].append(said)
            if reader.lost or not calls or ended < len(calls):
                raise ValueError("no calls as the model's template writes them")
            return [{"name": name, "arguments": json.loads("".join(arguments))} for name, arguments in calls]

        return parse

    def write(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with their calls as Python in their contents."""
        shown: list[dict[str, Any]] = []
        for message in messages:
            calls, content = message.get("tool_calls") or (), message.get("content") or ""
            if calls and isinstance(content, str):
                written = self.between.join(self._written(call["function"]) for call in calls)
                message = {**message, "content": f"{content}{self.head}{written}{self.tail}"}
            shown.append(dict(message))
        return shown

    def _written(self, function: Mapping[str, Any]) -> str:
        given = function["arguments"]
        pairs = given.items() if isinstance(given, Mapping) else ()
        written = (f"{key}{self.assign}{_value(value)}" for key, value in pairs)
        return f"{function['name']}{self.opening}{self.comma.join(written)}{self.closing}"


PYTHONIC = KeyedCalls("[", "(", "=", ", ", '"', ")", ", ", "]")
"""Python's calls, in a list."""


def _value(value: Any) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
