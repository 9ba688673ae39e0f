"""The rules of one grammar, in llguidance's Lark, with a model's markers in them. Computation only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from .model_text import Encoder

ID = "\ue000"
"""Stands for a call's id in a format's text."""

TEXT = r"/(.|\n)*/"

_ANY_ID = "/[A-Za-z0-9]{1,9}/"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}

_LAYOUT: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON in one line, as `json.dumps` and most models write it. White space is fixed, because a model that samples freely
may repeat line breaks and spaces up to its limit. Tokens without a choice also need no computation."""


class GrammarRules:
    """Collects the rules of a grammar.

    Args:
        tokenizer: the model's.
        special: returns whether a grammar must name a token by its number.
    """

    def __init__(self, tokenizer: Encoder, special: Callable[[int], bool]) -> None:
        self.tokenizer = tokenizer
        self._special = special
        self.rules: list[str] = []

    def rule(self, name: str, body: str) -> str:
        """Adds a rule, and returns its symbol."""
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def written(self, text: str) -> str:
        """Returns text with markers as a part of a rule: special tokens by their numbers, the rest as text, and any id
        for `ID`."""
        return " ".join(self._parts(text))

    def until(self, name: str, marker: str) -> str:
        """Returns any text up to and including a marker as a part of a rule; `name` is the name of the rule for it."""
        first, *rest = self._parts(marker)
        if first.startswith("<["):
            return f"{self.rule(f'{name}_text', TEXT)} {' '.join([first, *rest])}"
        # Lazy: it ends at the first occurrence.
        return " ".join([self.rule(f"{name}_text[lazy]", f"{TEXT} {first}"), *rest])

    def _parts(self, text: str) -> list[str]:
        parts: list[str] = []
        for index, piece in enumerate(text.split(ID)):
            if index:
                parts.append(_ANY_ID)
            parts += self._marked(piece)
        return parts

    def _marked(self, text: str) -> list[str]:
        tokens = self.tokenizer.encode(text)
        parts: list[str] = []
        for special, run in groupby(tokens, self._special):
            members = list(run)
            parts += [f"<[{token}]>" for token in members] if special else [quoted(self.tokenizer.decode(members))]
        if not any(part.startswith("<[") for part in parts):
            # The text itself, not the decoded tokens, because some decoders drop a space.
            return [quoted(text)] if text else []
        return parts


def quoted(text: str) -> str:
    """Returns text as a terminal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def json_body(schema: Any, *, strict: bool) -> str:
    """Returns a schema as a rule's body. Without `strict`, unknown keywords and overlapping `oneOf` are not errors."""
    options = {**_LAYOUT}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    written = {**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(written, ensure_ascii=False)}"


def schema_of_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of arguments, which are always an object."""
    if not schema:
        return _ANY_OBJECT
    return {**schema} if schema.get("type") == "object" else {**schema, "type": "object"}
