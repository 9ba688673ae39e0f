"""The schemas in a JSON schema, and what of one can be followed. Computation only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")

_DEPTH_MAX = 64


def parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the schemas in a schema, with their places in it."""
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
    """Returns a schema without what cannot be followed: patterns with look-around and the like, schemas elsewhere, and
    keywords that are null, as many programs write those that are not set. All else stays as it is.

    Args:
        follows: whether a schema of one keyword can be followed.
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
            # Of items, in older versions.
            return [self.schema(part, depth + 1) for part in schema if part is not None]
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if value is None and not (key == "const" and _may_be_null(schema)):
                continue
            if key == "type" and isinstance(value, list):
                # In YAML the name of this type is read as none.
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
        """Whether a keyword is right, but cannot be followed here."""
        if key == "$ref":
            return isinstance(value, str) and "://" in value and not self._local
        return key == "pattern" and isinstance(value, str) and not self._follows({key: value})


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds is None or "null" in (kinds if isinstance(kinds, list) else [kinds])
