"""A rough check of values against JSON schemas: types and enumerations only. Computation only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REFERENCES_MAX = 8
_DEPTH_MAX = 16

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def named(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that a `$ref` into `root` names, or the schema itself; {} if that is not a schema."""
    for _ in range(_REFERENCES_MAX):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Returns whether a value has the type, and is one of the values, that a schema allows. Other keywords, and
    unsupported schemas, allow anything."""
    if depth > _DEPTH_MAX or not isinstance(schema, Mapping):
        return schema is not False
    schema = named(schema, root) if "$ref" in schema else schema
    for key in ("anyOf", "oneOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not any(fits(value, part, root, depth + 1) for part in parts):
            return False
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    choices = schema.get("enum")
    if isinstance(choices, list) and not any(type(value) is type(one) and value == one for one in choices):
        return False
    if isinstance(value, dict):
        required, properties = schema.get("required"), schema.get("properties")
        if isinstance(required, list) and not all(key in value for key in required):
            return False
        if isinstance(properties, Mapping):
            return all(fits(value[key], part, root, depth + 1) for key, part in properties.items() if key in value)
    if isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        return all(fits(each, items, root, depth + 1) for each in value)
    return True


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean" or kind not in _TYPES
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind]) if kind in _TYPES else True
