"""The schemas inside a JSON schema, and which of their parts are supported in grammars. Computation only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")

_DEPTH_MAX = 64


def parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the schemas inside a schema, with their places in it."""
    if not isinstance(schema, Mapping):
        return
    for key in NAMED:
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            yield f"{key}.{name}", part
    for key in LISTED:
        listed = schema.get(key)
        for index, part in enumerate(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else ():
            yield f"{key}[{index}]", part
    for key in SINGLE:
        if key in schema:
            yield key, schema[key]


def followable(schema: Any, follows: Callable[[Mapping[str, Any]], bool]) -> Any:
    """Returns a schema without its unsupported parts: patterns with look-around and the like, references to other
    documents, and keywords that are null, which many programs write for unset ones. Everything else stays as it is.

    Args:
        follows: returns whether a schema with one keyword is supported.
    """
    return _Followed(follows, local=isinstance(schema, Mapping) and "$id" in schema).schema(schema, 0)


class _Followed:
    """Args:
    local: whether schemas with an address may be parts of this one.
    """

    def __init__(self, follows: Callable[[Mapping[str, Any]], bool], *, local: bool) -> None:
        self._follows = follows
        self._local = local

    def schema(self, schema: Any, depth: int) -> Any:
        if isinstance(schema, list):
            # The schemas of items, in older versions.
            return [self.schema(part, depth + 1) for part in schema if part is not None]
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if value is None and not (key == "const" and _may_be_null(schema)):
                continue
            if key == "type" and isinstance(value, list):
                # YAML reads the name of this type as null.
                kept[key] = ["null" if kind is None else kind for kind in value]
            elif key in NAMED and isinstance(value, Mapping):
                named = {name: self.schema({} if part is None else part, depth + 1) for name, part in value.items()}
                kept |= self._patterns(named) if key == "patternProperties" else {key: named}
            elif key in LISTED or key in SINGLE:
                kept[key] = self.schema(value, depth + 1)
            elif not self._lost(key, value):
                kept[key] = value
        return kept

    def _patterns(self, named: Mapping[str, Any]) -> dict[str, Any]:
        key = "patternProperties"
        each = {pattern: part for pattern, part in named.items() if self._follows({key: {pattern: True}})}
        return {key: each} if self._follows({key: dict.fromkeys(each, True)}) else {}

    def _lost(self, key: str, value: Any) -> bool:
        """Returns whether a keyword is valid but not supported here."""
        if key == "$ref":
            return isinstance(value, str) and "://" in value and not self._local
        return key == "pattern" and isinstance(value, str) and not self._follows({key: value})


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds is None or "null" in (kinds if isinstance(kinds, list) else [kinds])
