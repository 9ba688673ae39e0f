"""Which tool a model means, and which arguments the tool accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from satchel.api.tools.lenient.declared import DeclaredTools

TEXT = {"type": "string"}
WEATHER = {
    "type": "object",
    "properties": {
        "city": TEXT,
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": TEXT},
        "any": {"anyOf": [TEXT, {"type": "null"}]},
        "shape": {"$ref": "#/$defs/shape"},
    },
    "required": ["city"],
    "$defs": {"shape": {"type": "object", "required": ["w"], "properties": {"w": {"type": "number"}}}},
}
DECLARED = DeclaredTools(
    [{"function": {"name": "weather", "parameters": WEATHER}}, {"function": {"name": "ring_2", "parameters": None}}]
)


@pytest.mark.parametrize(
    "written",
    [
        *("weather", " weather ", "functions.weather", "functions_weather", "functionsweather0", "functions.weather:0"),
        *(
            "weather:3",
            "tools.weather",
            "default_api.weather",
            "default_api:weather",
            "my.name-space.weather",
            "ns::weather",
        ),
    ],
)
def test_a_name_is_found(written: str):
    assert DECLARED.name(written) == "weather"


@pytest.mark.parametrize(
    "written", ["", "Weather", "weathers", "weatherjson", "weather2", "xweather", "wether", "n" * 999]
)
def test_nothing_else_is_a_name(written: str):
    assert DECLARED.name(written) is None


def test_numbers_of_a_name_are_its_own():
    assert DECLARED.name("ring_2") == "ring_2" and DECLARED.name("ring_2:1") == "ring_2"
    assert DECLARED.name("weatherjson", with_json=True) == "weather"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"city": "Köln", "days": "3", "hourly": "True"}, {"city": "Köln", "days": 3, "hourly": True}),
        ('{"city": "Köln"}', {"city": "Köln"}),
        ({"city": "07", "places": '["a"]'}, {"city": "07", "places": ["a"]}),
        ({"city": "x", "other": [1]}, {"city": "x", "other": [1]}),
        ({"city": "x", "any": None, "shape": {"w": 1}}, {"city": "x", "any": None, "shape": {"w": 1}}),
        ({"city": "x", "days": 3.0}, {"city": "x", "days": 3.0}),
    ],
)
def test_arguments_that_are_taken(given: Any, taken: dict[str, Any]):
    assert DECLARED.call("weather", given) == ("weather", json.dumps(taken, ensure_ascii=False))


@pytest.mark.parametrize(
    "given",
    [
        *(None, "", {}, [], "Köln", {"city": 3}, {"city": "x", "days": "three"}, {"city": "x", "days": True}),
        *({"city": "x", "unit": "kelvin"}, {"city": "x", "places": ["a", 1]}, {"city": "x", "shape": {}}),
    ],
)
def test_arguments_that_are_not(given: Any):
    assert DECLARED.call("weather", given) is None


@pytest.mark.parametrize("given", [None, "", {}])
def test_nothing_is_no_argument_where_none_is_required(given: Any):
    assert DECLARED.call("ring_2", given) == ("ring_2", "{}")
