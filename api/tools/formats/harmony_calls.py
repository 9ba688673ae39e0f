"""Calls of OpenAI's Harmony format, which GPT-OSS writes; see `harmony`. Computation only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ..grammar_rules import TEXT, GrammarRules, json_body, quoted, schema_of_arguments
from .call_format import CallFormat, CallMarks, ConstrainedCalls, Parsing
from .harmony import CALL_FORMS, FINAL, NEXT
from .harmony_splitter import HarmonySplitter


class HarmonyCalls(CallFormat):
    """Calls that are messages to tools. An answer has at most one. `HarmonySplitter` finds it."""

    @classmethod
    def read(cls, written: str, ids: Sequence[str]) -> None:
        """Returns None: the format is recognised by the template's markers (`is_harmony`), not by calls."""

    def constrain(self, rules: GrammarRules, calls: ConstrainedCalls, *, lead: bool, begins: bool) -> str:
        each: list[str] = []
        for index, tool in enumerate(calls.tools):
            schema = json_body(schema_of_arguments(tool.parameters), strict=tool.strict)
            arguments = rules.rule(f"arguments_{index}", schema)
            each += [
                f"{rules.written(head)} {quoted(tool.name)} {rules.written(middle)} {arguments}"
                for head, middle in CALL_FORMS
            ]
        call = rules.rule("call", " | ".join(each))
        said = rules.rule("said", TEXT)
        if not begins:
            # The prompt has already begun a message to the user.
            call = f"{said} {rules.written(NEXT)} {call}"
        return rules.rule("calls", f"{call} | {final(rules, said) if begins else said}" if lead else call)

    def parse(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> Parsing:
        return Parsing()

    def channels(
        self, tools: Sequence[Mapping[str, Any]], *, answering: bool, calls_max: int | None
    ) -> HarmonySplitter:
        return HarmonySplitter(tools, answering=answering, calls_max=calls_max)

    def write(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages as templates of this format take them: reasoning is in `thinking`, and a message has one
        call, with its result after it."""
        told: list[dict[str, Any]] = []
        moved: set[int] = set()
        for place, message in enumerate(messages):
            if place in moved:
                continue
            said = dict(message)
            if reasoning := said.pop("reasoning_content", None):
                said["thinking"] = reasoning
            calls = said.get("tool_calls") or ()
            if calls and said.get("thinking") and said.get("content"):
                # Templates refuse a call beside both of these.
                said["thinking"], said["content"] = f"{said['thinking']}\n\n{said['content']}", ""
            if len(calls) < 2:
                told.append(said)
                continue
            results = _results(messages, place)
            for index, call in enumerate(calls):
                rest = {"role": said["role"], "content": ""} if index else said
                told.append({**rest, "tool_calls": [call]})
                if (at := results.get(call.get("id"))) is not None:
                    moved.add(at)
                    told.append(dict(messages[at]))
        return told


def _results(messages: Sequence[Mapping[str, Any]], place: int) -> dict[str | None, int]:
    """Returns the places of the tool messages that follow a message, by their calls' ids."""
    following = takewhile(lambda at: messages[at]["role"] == "tool", range(place + 1, len(messages)))
    return {messages[at].get("tool_call_id"): at for at in following}


def final(rules: GrammarRules, symbol: str) -> str:
    """Returns a message to the user as a part of a rule, given the symbol of its content."""
    return f"{rules.written(FINAL)} {symbol}"
