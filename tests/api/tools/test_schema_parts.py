"""Unsupported parts of a JSON schema are ignored without `strict`, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.actors.model_files.text.grammar_compiler import follows_schema
from satchel.api.tools.schema_parts import followable

TEXT = {"type": "string"}
AHEAD = r"^(?!x)a+$"


@pytest.mark.parametrize("pattern", [AHEAD, r"(?<=a)b", r"(a)\1", r"\bfoo\b", r"^a|b$c", r"(?P<n>x)(?P=n)", r"[a-z"])
def test_a_pattern_that_cannot_be_followed_is_ignored(pattern: str):
    assert not follows_schema({"pattern": pattern})
    assert followable({**TEXT, "pattern": pattern, "minLength": 2}, follows_schema) == {**TEXT, "minLength": 2}


@pytest.mark.parametrize("pattern", [r"^a|b$", r"^\d{3}$", r"^[^\s@]+@[^\s@]+$", r"\p{L}+", "", "(?:a|b)*?"])
def test_any_other_pattern_stays(pattern: str):
    assert followable({**TEXT, "pattern": pattern}, follows_schema) == {**TEXT, "pattern": pattern}


def test_everywhere_in_a_schema_and_nowhere_else():
    lost, kept = {**TEXT, "pattern": AHEAD}, TEXT

    def schema(part: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"pattern": part, "all": {"allOf": [part, {"minLength": 1}]}, "$ref": {"$ref": "#/$defs/x"}},
            "$defs": {"x": {"anyOf": [part, {"type": "array", "items": part, "prefixItems": [part]}]}},
            "additionalProperties": part,
            "required": ["pattern"],
            "default": {"pattern": AHEAD, "properties": None},
            "examples": [{"pattern": AHEAD}],
            "enum": [{"pattern": AHEAD, "minLength": None}, None],
        }

    assert followable(schema(lost), follows_schema) == schema(kept)
    assert followable(True, follows_schema) is True


def test_keywords_that_are_null_are_as_good_as_missing():
    keywords = (
        *("type", "enum", "const", "pattern", "minLength", "maxLength", "format", "properties", "required", "items"),
        *("additionalProperties", "minItems", "maxItems", "anyOf", "oneOf", "allOf", "$ref", "$defs", "minimum"),
        *("multipleOf", "patternProperties", "prefixItems", "title", "default", "not"),
    )
    for schema in ({"type": "integer", "maximum": 3}, {"properties": {"a": TEXT}, "type": "object"}):
        for keyword in keywords:
            if keyword not in schema:
                assert followable({**schema, keyword: None}, follows_schema) == schema, keyword
    assert followable({"properties": {"a": None}}, follows_schema) == {"properties": {"a": {}}}
    assert followable({"anyOf": [TEXT, None]}, follows_schema) == {"anyOf": [TEXT]}


def test_null_is_a_value_too():
    for schema in ({"const": None}, {"type": ["string", "null"], "const": None}, {"enum": [None, "a"]}):
        assert followable(schema, follows_schema) == schema
    assert followable({"type": ["string", None]}, follows_schema) == {"type": ["string", "null"]}


def test_keys_by_patterns():
    schema = {"type": "object", "patternProperties": {"^x": TEXT, "^(?!y)": TEXT}}
    assert followable(schema, follows_schema) == {"type": "object", "patternProperties": {"^x": TEXT}}
    both = {"^x": TEXT, "^xy": {"type": "integer"}}
    assert followable({"patternProperties": both}, follows_schema) == {}, "which one counts cannot be told"


def test_schemas_elsewhere_are_not_fetched():
    elsewhere = {"$ref": "https://example.com/x.json", "minLength": 3}
    assert followable(elsewhere, follows_schema) == {"minLength": 3}
    here = {"$id": "https://example.com/x", "$ref": "https://example.com/x#/$defs/a", "$defs": {"a": TEXT}}
    assert followable(here, follows_schema) == here and follows_schema(here)
    missing = {"$ref": "#/$defs/none"}
    assert followable(missing, follows_schema) == missing, "a mistake, which is told"
