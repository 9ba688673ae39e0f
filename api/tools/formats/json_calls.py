"""Tool calls of models for which mlx-lm has no parser, read in the form in which their own chat template writes them.
Computation only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...text.templates.bare_template import BareTemplate
from ..shown_calls import shown_calls
from .call_format import ID, JsonFormat, KeyedFormat, json_format, keyed_format
from .keyed_reader import keyed_parser

_JSON_BEGINS = re.compile(r"[\[{]")
_FIRST_KEY = re.compile(r'[\[{\s]*"\w+"', re.ASCII)
_BETWEEN = re.compile(r"[\s,;]*")
_NAME_KEY = re.compile(r'"(\w+)"\s*:\s*"$', re.ASCII)
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class TemplateCalls:
    """How a model writes calls, and how they are found in its answers.

    Attributes:
        start: begins a call; it lasts until the answer ends.
        lead: what of `start` belongs to the JSON of the calls; None if only their arguments are JSON.
    """

    format: JsonFormat
    start: str
    lead: str | None

    def parse(self, body: str, tools: Any = None) -> list[dict[str, Any]]:
        """Returns the calls in what follows `start`, each with its `name` and its `arguments`.

        Raises:
            ValueError: there is none, or one of a tool that is not among the `tools`.
        """
        found = list(self._written(body) if self.lead is None else self._in_json(self.lead + body))
        names = {tool["function"]["name"] for tool in tools or ()}
        for call in found:
            if names and call["name"] not in names:
                raise ValueError(f"there is no tool {call['name']!r}")
        return found

    def _written(self, body: str) -> Iterator[dict[str, Any]]:
        known, at = self.format, 0
        while True:
            name, found, rest = body[at:].partition(known.middle)
            if not found:
                raise ValueError("a call without arguments")
            arguments, end = json.JSONDecoder().raw_decode(rest)
            yield {"name": name, "arguments": arguments}
            at = len(body) - len(rest) + end
            if not (known.between and body.startswith(known.between, at)):
                return
            at += len(known.between)

    def _in_json(self, text: str) -> Iterator[dict[str, Any]]:
        key, at = _NAME_KEY.search(self.format.head), 0
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


@dataclass(frozen=True)
class KeyedCalls:
    """As `TemplateCalls`, for calls whose arguments have keys but are no JSON."""

    format: KeyedFormat
    start: str

    def parse(self, body: str, tools: Any = None) -> list[dict[str, Any]]:
        """Returns the calls in what follows `start`.

        Raises:
            ValueError: there is none, or one of a tool that is not among the `tools`.
        """
        return keyed_parser(self.format, self.start)(body, tools)


IN_JSON = TemplateCalls(JsonFormat('{"name": "', '", "arguments": ', "", "}"), '{"name"', '{"name"')
"""How a model writes a call that it must make, if nothing is known of how it writes calls."""


def find_calls(template: BareTemplate, end: str) -> TemplateCalls | KeyedCalls | None:
    """Returns how a model writes calls; None if its template shows no calls that could be told from text. Takes
    milliseconds.

    Args:
        end: the model's marker after calls, "" for none.
    """
    for count in (2, 1):
        for written, ids in shown_calls(template, end, count):
            if (keyed := keyed_format(written)) is not None:
                return KeyedCalls(keyed, keyed.head)
            known = json_format(written, ids)
            if known is not None and ID not in (known.head + known.middle) and (found := _found(known, written)):
                return found
    return None


def _found(known: JsonFormat, written: str) -> TemplateCalls | None:
    begins = _JSON_BEGINS.search(known.head)
    if begins is not None:
        marker, rest = known.head[: begins.start()], written[begins.start() :]
        first = _FIRST_KEY.match(rest)
        lead = "" if marker.strip() else first[0] if first is not None else ""
        found = TemplateCalls(known, marker.lstrip() or lead, lead)
    else:
        found = TemplateCalls(known, known.head, None)
    if not found.start.strip() or found.start.strip().isalnum():
        return None
    try:
        calls = found.parse(written[written.index(found.start) + len(found.start) :])
    except ValueError:
        return None
    return found if calls else None
