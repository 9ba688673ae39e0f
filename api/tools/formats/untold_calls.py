"""Calls whose format cannot be recognised by a model's template. Computation only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....cluster.errors import InvalidRequest
from ..grammar_rules import GrammarRules
from .call_format import CallFormat, CallMarks, ConstrainedCalls, Parsing
from .json_calls import IN_JSON, IN_JSON_START


@dataclass(frozen=True)
class UntoldCalls(CallFormat):
    """Calls as mlx-lm's parser for the model reads them, if there is one. Forced calls are JSON.

    Attributes:
        shown: the template's text for the known calls, "" if it shows none.
    """

    shown: str = ""
    constrains = False

    @classmethod
    def read(cls, written: str, ids: Sequence[str]) -> UntoldCalls:
        return cls(written)

    @property
    def parts(self) -> str:
        return self.shown

    def constrain(self, rules: GrammarRules, calls: ConstrainedCalls, *, lead: bool, begins: bool) -> str:
        if calls.forced:
            return IN_JSON.constrain(rules, calls, lead=lead, begins=begins)
        raise InvalidRequest(
            f"tool_choice: how the model {rules.tokenizer.name!r} writes tool calls is not known, so calls can "
            "be forced, but not constrained while it may also answer with text",
            param="tool_choice",
        )

    def parse(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> Parsing:
        if forced:
            return Parsing(marks.start, marks.end, bare=IN_JSON_START)
        return Parsing(marks.start, marks.end, marks.parser)
