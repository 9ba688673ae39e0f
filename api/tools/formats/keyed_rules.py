"""JSON schemas as rules of a grammar for arguments that have keys but are not JSON. Computation only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....cluster.errors import InvalidRequest
from ..grammar_rules import GrammarRules, json_body, quoted, schema_of_arguments
from ..lenient.schemas import named
from .call_format import ConstrainedTool
from .keyed_layout import KeyedLayout

_DEPTH_MAX = 64
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_SHARED = ("$defs", "definitions")
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id")
_FOLLOWED = {
    *("type", "enum", "const", "anyOf", "oneOf", "$ref", "$schema", *_SHARED, *_ANNOTATIONS),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class KeyedRules:
    """Writes the grammar rules of calls in a format with keys."""

    def __init__(self, known: KeyedLayout, rules: GrammarRules) -> None:
        self._known = known
        self._rules = rules
        self._root: Mapping[str, Any] = {}
        self._where = ""
        self._strict = False
        self._named: dict[str, str] = {}
        self._any = ""
        self._count = 0

    def call(self, index: int, tool: ConstrainedTool) -> str:
        """Returns the symbol of a call of a tool.

        Raises:
            InvalidRequest: `strict` is set and a keyword of the schema is not supported in this format.
        """
        self._root, self._where, self._strict = schema_of_arguments(tool.parameters), tool.where, tool.strict
        self._named = {}
        known = self._known
        pairs = self._pairs(self._root, known.assign, known.comma, 0)
        body = f"{quoted(tool.name)} {self._rules.written(known.opening)} {pairs} {self._rules.written(known.closing)}"
        return self._rules.rule(f"call_{index}", body)

    def _new(self, body: str) -> str:
        self._count += 1
        return self._rules.rule(f"value_{self._count}", body)

    def _pairs(self, schema: Mapping[str, Any], assign: str, comma: str, depth: int) -> str:
        """Returns the symbol of an object's keys and values, in their order, without brackets."""
        properties, required = schema.get("properties"), schema.get("required")
        separator = self._rules.written(comma)
        if not isinstance(properties, Mapping) or not properties:
            more = schema.get("additionalProperties")
            if more is False:
                return self._new('""')
            pair = f"{_ANY_KEY} {self._rules.written(assign)} {self._value(more if more is not None else {}, depth)}"
            one = self._new(pair)
            return self._new(f'{one} ({separator} {one})* | ""')
        needed = set(required) if isinstance(required, Sequence) and not isinstance(required, str) else set()
        pairs = [
            (self._new(f"{quoted(key)} {self._rules.written(assign)} {self._value(of_key, depth)}"), key in needed)
            for key, of_key in properties.items()
        ]
        rest, begins = "", list[str]()
        for pair, must in reversed(pairs):
            # This pair may come first, with what may follow it, if all pairs before it may be missing.
            if must:
                begins = []
            begins.insert(0, f"{pair} {rest}")
            rest = self._new(f"{separator} {pair} {rest}" if must else f"({separator} {pair})? {rest}")
        if not any(must for _, must in pairs):
            begins.append('""')
        return self._new(" | ".join(begins))

    def _value(self, schema: Any, depth: int) -> str:
        """Returns a value as a part of a rule."""
        if schema is True or schema == {} or not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return self._anything()
        if self._strict and (unknown := set(schema) - _FOLLOWED):
            message = f"{self._where}: {min(unknown)!r} is not supported in the form of this model's tool calls"
            raise InvalidRequest(message, param=self._where)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._named:
                # Registered before its body is written, because the body may refer to it.
                self._count += 1
                symbol = self._named[reference] = f"value_{self._count}"
                self._rules.rule(symbol, self._value(named(schema, self._root), depth + 1))
            return self._named[reference]
        for key in ("enum", "anyOf", "oneOf", "type"):
            given = schema.get(key)
            if key == "enum" and "const" in schema:
                given = [schema["const"]]
            if not isinstance(given, list) or not given:
                continue
            if key == "enum":
                each = map(self._literal, given)
            elif key == "type":
                each = (self._value({**schema, "type": kind}, depth + 1) for kind in given)
            else:
                each = (self._value(part, depth + 1) for part in given)
            return f"( {' | '.join(each)} )"
        return self._typed(schema, schema.get("type"), depth)

    def _typed(self, schema: Mapping[str, Any], kind: Any, depth: int) -> str:
        pythonic = self._known.pythonic
        if pythonic and kind in ("boolean", "null"):
            return '( "True" | "False" )' if kind == "boolean" else '"None"'
        if kind in ("integer", "number", "boolean", "null") or (pythonic and kind in ("string", "object", "array")):
            shared = {key: self._root[key] for key in _SHARED if key in self._root}
            return self._new(json_body({**shared, **schema}, strict=self._strict))
        if kind == "string":
            return self._text(schema)
        if kind == "object":
            return f'"{{" {self._pairs(schema, self._known.assign, self._known.comma, depth + 1)} "}}"'
        if kind == "array":
            return self._list(schema, depth)
        return self._anything()

    def _text(self, schema: Mapping[str, Any]) -> str:
        quote = self._known.quote
        opened, least, most = self._rules.written(quote), schema.get("minLength", 0), schema.get("maxLength")
        bounded = isinstance(least, int) and (most is None or isinstance(most, int)) and (least or most is not None)
        if bounded and opened.startswith("<["):
            text = self._new(f"/(.|\\n){{{least},{'' if most is None else most}}}/")
            return f"{opened} {text} {opened}"
        self._count += 1
        return f"{opened} {self._rules.until(f'text_{self._count}', quote)}"

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        item, separator = (
            self._new(self._value(schema.get("items", {}), depth + 1)),
            self._rules.written(self._known.comma),
        )
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        least = least if isinstance(least, int) and least > 0 else 0
        if not isinstance(most, int):
            more = f"({separator} {item})" + (f"{{{least - 1},}}" if least > 1 else "*")
        elif most > 0:
            more = f"({separator} {item}){{{max(0, least - 1)},{max(0, most - 1)}}}"
        else:
            return '"[" "]"'
        filled = f"{item} {more}"
        return f'"[" {filled} "]"' if least else f'"[" ({filled})? "]"'

    def _anything(self) -> str:
        """Returns the symbol of any value."""
        if self._any:
            return self._any
        self._any = "anything"
        if self._known.pythonic:
            return self._rules.rule(self._any, f'"True" | "False" | "None" | {self._new(json_body({}, strict=False))}')
        comma = self._rules.written(self._known.comma)
        pair = self._new(f"{_ANY_KEY} {self._rules.written(self._known.assign)} {self._any}")
        scalar = self._new(json_body({"type": ["number", "boolean", "null"]}, strict=False))
        parts = (
            self._text({}),
            scalar,
            f'"{{" ({pair} ({comma} {pair})*)? "}}"',
            f'"[" ({self._any} ({comma} {self._any})*)? "]"',
        )
        return self._rules.rule(self._any, " | ".join(parts))

    def _literal(self, value: Any) -> str:
        """Returns a constant as a part of a rule."""
        known = self._known
        if isinstance(value, str) and not known.pythonic:
            quote = self._rules.written(known.quote)
            return f"{quote} {quoted(value)} {quote}" if value else f"{quote} {quote}"
        if known.pythonic and (value is None or isinstance(value, bool)):
            return quoted(str(value))
        if isinstance(value, Mapping) and not known.pythonic:
            pairs = [
                f"{quoted(key)} {self._rules.written(known.assign)} {self._literal(of)}" for key, of in value.items()
            ]
            return f'( "{{" {f" {self._rules.written(known.comma)} ".join(pairs)} "}}" )'
        if isinstance(value, list) and not known.pythonic:
            items = map(self._literal, value)
            return f'( "[" {f" {self._rules.written(known.comma)} ".join(items)} "]" )'
        return quoted(json.dumps(value, ensure_ascii=False))
