"""Writes the grammars that bound answers, in llguidance's Lark.

An answer is reasoning, if the model thinks first, and then a form that the caller wants, or tool calls as the model
writes them, or free text in which calls may begin. Computation only; compiling is `model_files.grammars`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, Literal

from ....cluster.errors import InvalidRequest
from ...tools.formats import harmony
from ...tools.formats.call_format import ID, Format, JsonFormat, KeyedFormat, TaggedFormat
from ...tools.formats.json_calls import IN_JSON
from ...tools.lenient.schemas import named
from ...tools.schema_rules import TEXT, BoundTool, KeyedRules, json_body, quoted, schema_of_arguments
from ..templates.template import Template
from ..tokenizer import Tokenizer

_ANY_ID = "/[A-Za-z0-9]{1,9}/"
_GBNF_RULES_MAX = 1000


class Thought(Enum):
    """Whether reasoning comes before the answer."""

    NONE = "the model does not think, or its prompt has a closed block"
    POSSIBLE = "the answer may begin with a block"
    OPEN = "the prompt has opened a block"


@dataclass(frozen=True)
class AnswerForm:
    """What an answer's content must be.

    Attributes:
        kind: of `value`: a JSON schema, a regular expression, a list of strings, or a grammar in Lark or GBNF.
        where: its place in the request's body, for errors.
        strict: whether a schema's keywords that cannot be followed are errors; else they are ignored.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    where: str
    strict: bool = False


@dataclass(frozen=True)
class BoundCalls:
    """Which tools an answer may call: at least one if `forced`, else free text may stand before the calls or instead of
    them. With `parallel` there may be several calls. `chosen` says that the caller named these tools among others."""

    tools: Sequence[BoundTool]
    forced: bool
    parallel: bool = True
    chosen: bool = False


@dataclass(frozen=True)
class Writing:
    """How a model writes what is not text: which tokens are `special` (a grammar names them by number), and how its
    `calls` look, None if that is not known."""

    tokenizer: Tokenizer
    template: Template
    special: Callable[[int], bool]
    calls: Format | None


def answer_grammar(writing: Writing, thought: Thought, form: AnswerForm | None, calls: BoundCalls | None) -> str:
    """Returns the grammar of an answer with this form or these calls (with both either will do, unless the calls are
    forced). It may not compile.

    Raises:
        InvalidRequest: how the model writes tool calls is not known, or a form is not written rightly.
    """
    writer = _Writer(writing)
    bodies: list[str] = []
    grammars: list[dict[str, str]] = []
    in_harmony = writing.template.is_harmony
    begins = in_harmony and thought is Thought.POSSIBLE
    if form is not None and not (calls is not None and calls.forced):
        symbol = writer.form(form, grammars)
        bodies.append(writer.final(symbol) if begins else symbol)
    if calls is not None:
        lead = form is None and not calls.forced
        bodies.append(writer.harmony_calls(calls, begins, lead=lead) if in_harmony else writer.calls(calls, lead=lead))
    lark = writer.lark(thought, bodies)
    if not grammars:
        return lark
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]}, ensure_ascii=False)


def form_grammar(form: AnswerForm) -> str:
    """Returns the grammar of one form alone, to find out whether it is to blame for an error.

    Raises:
        InvalidRequest: it is not written rightly.
    """
    if form.kind == "grammar":
        return _lark(form)
    return f"start: form\nform: {_form_body(form)}\n"


def _form_body(form: AnswerForm) -> str:
    if form.kind == "json":
        return json_body(form.value, strict=form.strict)
    if form.kind == "choice":
        # One terminal: of a rule with so many alternatives llguidance follows fewer than 2,000.
        return f"CHOICE\nCHOICE: {' | '.join(quoted(choice) for choice in form.value)}"
    from llguidance import regex_to_lark

    # Python's \d, \w and \s know Unicode, and so do llguidance's.
    return f"/{regex_to_lark(form.value, '')}/"


def _lark(form: AnswerForm) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    # Its converter from GBNF takes time by the square of the numbers of rules and of empty lines in a row.
    if form.value.count("::=") > _GBNF_RULES_MAX:
        raise InvalidRequest(f"{form.where}: GBNF of more than {_GBNF_RULES_MAX} rules", param=form.where)
    lines = "\n".join(line for line in form.value.splitlines() if line.strip())
    try:
        return any_to_lark(lines)
    except Exception as error:
        # It is llguidance's parser in Python, and raises whatever a grammar brings about.
        reason = str(error) or type(error).__name__
        raise InvalidRequest(f"{form.where}: neither Lark nor GBNF: {reason[:300]}", param=form.where) from None


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._tokenizer, self._template = writing.tokenizer, writing.template
        self._rules: list[str] = []

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def lark(self, thought: Thought, bodies: Sequence[str]) -> str:
        parts = [self._thought(thought), f"( {' | '.join(bodies)} )" if len(bodies) > 1 else bodies[0]]
        rules = [f"start: {' '.join(filter(None, parts))}", *self._rules]
        return "\n".join(rules) + "\n"

    # What a model writes beside its text.

    def _written(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """Returns text with markers in it: special tokens by their numbers, the rest as text, and any id for ids."""
        parts: list[str] = []
        for index, piece in enumerate(text.split(ID)):
            if index:
                parts.append(_ANY_ID)
            parts += self._marked(piece)
        return parts

    def _marked(self, text: str) -> list[str]:
        tokens = self._tokenizer.encode(text)
        parts: list[str] = []
        for special, run in groupby(tokens, self._writing.special):
            members = list(run)
            parts += [f"<[{token}]>" for token in members] if special else [quoted(self._tokenizer.decode(members))]
        if not any(part.startswith("<[") for part in parts):
            # Not decoded again: some decoders drop a space.
            return [quoted(text)] if text else []
        return parts

    def _until(self, name: str, marker: str) -> str:
        """Returns any text up to and with a marker."""
        first, *rest = self._parts(marker)
        if first.startswith("<["):
            return f"{self._rule(f'{name}_text', TEXT)} {' '.join([first, *rest])}"
        # Lazy: it ends with the first occurrence.
        return " ".join([self._rule(f"{name}_text[lazy]", f"{TEXT} {first}"), *rest])

    def _thought(self, thought: Thought) -> str:
        if thought is Thought.NONE:
            return ""
        if self._template.is_harmony:
            parts = self._written(harmony.THOUGHT), self._rule("thought_text", TEXT), self._written(harmony.NEXT)
            return f"{self._rule('thought', ' '.join(parts))}?"
        inside = f"{self._until('thought', self._template.think_end)} /\\n{{0,2}}/"
        if thought is Thought.OPEN:
            return inside
        return f"{self._rule('thought', f'{self._written(self._template.think_start)} {inside}')}?"

    # Forms.

    def form(self, form: AnswerForm, grammars: list[dict[str, str]]) -> str:
        """Returns a form's symbol. A caller's grammar has rules of its own, so it is added to `grammars`."""
        if form.kind == "grammar":
            grammars.append({"name": "form", "lark_grammar": _lark(form)})
            return "@form"
        return self._rule("form", _form_body(form))

    # Calls.

    def calls(self, calls: BoundCalls, *, lead: bool) -> str:
        """Returns the symbol of calls. With `lead` free text may stand before them, or instead of them."""
        known = self._writing.calls
        if known is None and calls.forced:
            known = IN_JSON.format
        if known is None:
            raise InvalidRequest(
                f"tool_choice: how the model {self._tokenizer.name!r} writes tool calls is not known, so calls can "
                "be forced, but not constrained while it may also answer with text",
                param="tool_choice",
            )
        if isinstance(known, JsonFormat):
            each = [self._call(index, tool, known) for index, tool in enumerate(calls.tools)]
            tail = self._written(known.tail)
        elif isinstance(known, KeyedFormat):
            rules = KeyedRules(known, self._rule, self._written, self._until)
            each = [rules.call(index, tool) for index, tool in enumerate(calls.tools)]
            tail = self._written(known.tail)
        else:
            each = [self._tagged(index, tool, known) for index, tool in enumerate(calls.tools)]
            tail = ""
        call = self._rule("call", " | ".join(each))
        between = self._written(known.between)
        more = f"({between} {call})*" if calls.parallel and between else ""
        if not lead:
            return self._rule("calls", f"{self._written(known.head)} {call} {more} {tail}")
        begun = self._rule("begun", f"{self._until('lead', known.head)} {call} {more} {tail}")
        return self._rule("calls", f"{begun} | {self._rule('said', TEXT)}")

    def _call(self, index: int, tool: BoundTool, known: JsonFormat) -> str:
        # Before a quotation mark the name is in a JSON string.
        name = quoted(tool.name)[1:-1] if known.head.endswith('"') else tool.name
        arguments = self._rule(
            f"arguments_{index}", json_body(schema_of_arguments(tool.parameters), strict=tool.strict)
        )
        return self._rule(f"call_{index}", f"{quoted(name)} {self._written(known.middle)} {arguments}")

    def final(self, symbol: str) -> str:
        """Returns a message to the user in the Harmony format."""
        return f"{self._written(harmony.FINAL)} {symbol}"

    def harmony_calls(self, calls: BoundCalls, begins: bool, *, lead: bool) -> str:
        """As `calls`, in the Harmony format, where an answer has one at most. If the answer does not begin with it, the
        prompt has begun a message to the user."""
        each: list[str] = []
        for index, tool in enumerate(calls.tools):
            schema = json_body(schema_of_arguments(tool.parameters), strict=tool.strict)
            arguments = self._rule(f"arguments_{index}", schema)
            each += [
                f"{self._written(head)} {quoted(tool.name)} {self._written(middle)} {arguments}"
                for head, middle in harmony.CALL_FORMS
            ]
        call = self._rule("call", " | ".join(each))
        said = self._rule("said", TEXT)
        if not begins:
            call = f"{said} {self._written(harmony.NEXT)} {call}"
        return self._rule("calls", f"{call} | {self.final(said) if begins else said}" if lead else call)

    def _tagged(self, index: int, tool: BoundTool, known: TaggedFormat) -> str:
        schema = schema_of_arguments(tool.parameters)
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            properties = {}
        before, after = self._written(known.before), self._written(known.after)
        parts = [quoted(tool.name), self._written(known.opening)]
        for place, (key, of_key) in enumerate(properties.items()):
            name = f"argument_{index}_{place}"
            value = self._value(name, of_key, schema, known.end, strict=tool.strict)
            rule = self._rule(name, f"{before} {quoted(key)} {after} {value}")
            needed = isinstance(required, Sequence) and key in required
            parts.append(rule if needed else f"{rule}?")
        if not properties:
            name = f"any_{index}"
            value = self._until(name, known.end)
            parts.append(self._rule(name, f"{before} /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {after} {value}") + "*")
        parts.append(self._written(known.closing))
        return self._rule(f"call_{index}", " ".join(filter(None, parts)))

    def _value(self, name: str, schema: Any, root: Mapping[str, Any], end: str, *, strict: bool) -> str:
        """Returns a tagged argument's value and end: strings as they are, other values as JSON."""
        target = named(schema, root)
        kind, choices = target.get("type"), target.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"( {' | '.join(map(quoted, choices))} ) {self._written(end)}"
        if isinstance(kind, str) and kind != "string":
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            value = self._rule(f"{name}_json", json_body({**shared, **schema}, strict=strict))
            return f"{value} {self._written(end)}"
        # Text, or what may be text: it has no quotation marks here, so it cannot be told from other values.
        return self._until(name, end)
