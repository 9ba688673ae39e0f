"""Writes the grammars that constrain answers, in llguidance's Lark.

An answer is reasoning, if the model thinks first, and then one of: the form that the caller wants, tool calls in the
model's format, or free text in which calls may begin. Computation only; `model_files.grammars` compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from ....cluster.errors import InvalidRequest
from ...tools.formats import harmony
from ...tools.formats.call_format import CallFormat, ConstrainedCalls
from ...tools.formats.harmony_calls import final
from ...tools.grammar_rules import TEXT, GrammarRules, json_body, quoted
from ..templates.template import Template
from ..tokenizer import Tokenizer

_GBNF_RULES_MAX = 1000


class Thought(Enum):
    """Whether reasoning comes before the answer."""

    NONE = "the model does not think, or its prompt has a closed block"
    POSSIBLE = "the answer may begin with a block"
    OPEN = "the prompt has opened a block"


@dataclass(frozen=True)
class AnswerForm:
    """The form that an answer's content must have.

    Attributes:
        kind: the kind of `value`: a JSON schema, a regular expression, a list of strings, or a grammar in Lark or GBNF.
        where: its place in the request's body, for errors.
        strict: whether unsupported keywords of a schema are errors; else they are ignored.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    where: str
    strict: bool = False


@dataclass(frozen=True)
class Writing:
    """How a model writes what is not text: which tokens are `special` (a grammar names them by number), and the format
    of its `calls`."""

    tokenizer: Tokenizer
    template: Template
    special: Callable[[int], bool]
    calls: CallFormat


def answer_grammar(writing: Writing, thought: Thought, form: AnswerForm | None, calls: ConstrainedCalls | None) -> str:
    """Returns the grammar of an answer with this form or these calls. If both are given, the answer may be either,
    unless the calls are forced. The grammar may not compile.

    Raises:
        InvalidRequest: the model's call format is not known, or a form is malformed.
    """
    writer = _Writer(writing)
    bodies: list[str] = []
    grammars: list[dict[str, str]] = []
    begins = writing.template.is_harmony and thought is Thought.POSSIBLE
    if form is not None and not (calls is not None and calls.forced):
        symbol = writer.form(form, grammars)
        bodies.append(final(writer, symbol) if begins else symbol)
    if calls is not None:
        lead = form is None and not calls.forced
        bodies.append(writing.calls.constrain(writer, calls, lead=lead, begins=begins))
    lark = writer.lark(thought, bodies)
    if not grammars:
        return lark
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]}, ensure_ascii=False)


def form_grammar(form: AnswerForm) -> str:
    """Returns the grammar of one form alone, to find out whether it causes an error.

    Raises:
        InvalidRequest: it is malformed.
    """
    if form.kind == "grammar":
        return _lark(form)
    return f"start: form\nform: {_form_body(form)}\n"


def _form_body(form: AnswerForm) -> str:
    if form.kind == "json":
        return json_body(form.value, strict=form.strict)
    if form.kind == "choice":
        # One terminal, because llguidance supports fewer than 2,000 alternatives in a rule.
        return f"CHOICE\nCHOICE: {' | '.join(quoted(choice) for choice in form.value)}"
    from llguidance import regex_to_lark

    # Python's \d, \w and \s match Unicode, and so do llguidance's.
    return f"/{regex_to_lark(form.value, '')}/"


def _lark(form: AnswerForm) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    # llguidance's converter from GBNF takes quadratic time in the number of rules, and of successive empty lines.
    if form.value.count("::=") > _GBNF_RULES_MAX:
        raise InvalidRequest(f"{form.where}: GBNF of more than {_GBNF_RULES_MAX} rules", param=form.where)
    lines = "\n".join(line for line in form.value.splitlines() if line.strip())
    try:
        return any_to_lark(lines)
    except Exception as error:
        # llguidance's parser in Python may raise anything for a malformed grammar.
        reason = str(error) or type(error).__name__
        raise InvalidRequest(f"{form.where}: neither Lark nor GBNF: {reason[:300]}", param=form.where) from None


class _Writer(GrammarRules):
    """Writes the grammar of one answer."""

    def __init__(self, writing: Writing) -> None:
        super().__init__(writing.tokenizer, writing.special)
        self._template = writing.template

    def lark(self, thought: Thought, bodies: Sequence[str]) -> str:
        """Returns the grammar of reasoning followed by one of several bodies."""
        parts = [self._thought(thought), f"( {' | '.join(bodies)} )" if len(bodies) > 1 else bodies[0]]
        rules = [f"start: {' '.join(filter(None, parts))}", *self.rules]
        return "\n".join(rules) + "\n"

    def _thought(self, thought: Thought) -> str:
        if thought is Thought.NONE:
            return ""
        if self._template.is_harmony:
            parts = self.written(harmony.THOUGHT), self.rule("thought_text", TEXT), self.written(harmony.NEXT)
            return f"{self.rule('thought', ' '.join(parts))}?"
        inside = f"{self.until('thought', self._template.think_end)} /\\n{{0,2}}/"
        if thought is Thought.OPEN:
            return inside
        return f"{self.rule('thought', f'{self.written(self._template.think_start)} {inside}')}?"

    def form(self, form: AnswerForm, grammars: list[dict[str, str]]) -> str:
        """Returns a form's symbol. A caller's grammar has its own rules, so it is added to `grammars`."""
        if form.kind == "grammar":
            grammars.append({"name": "form", "lark_grammar": _lark(form)})
            return "@form"
        return self.rule("form", _form_body(form))
