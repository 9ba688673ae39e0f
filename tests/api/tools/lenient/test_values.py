"""One JSON value as models write it: what is repaired, and what is not a value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satchel.api.tools.lenient.values import LooseValue, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 2]), ascii=st.booleans())
def test_json_is_what_it_is(value: Any, indent: int | None, ascii: bool):
    written = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert loads(written) == value
    # Written again it is the same text, except where JSON allows several forms.
    loose = LooseValue()
    assert loose.add(written) == len(written)
    assert json.loads(loose.written + (loose.rest or "")) == value


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_pythons_literals_are_read_too(value: Any):
    assert loads(repr(value)) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ("{'a': 'it\\'s \"x\"', 'b': True, 'c': None}", {"a": 'it\'s "x"', "b": True, "c": None}),
        ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
        ('{"a": "\\d \\x41 \\u12"}', {"a": "\\d A \\u12"}),
        ('{{"a": {{"b": 1}}, "c": 2}}', {"a": {"b": 1}, "c": 2}),
        ('{"a": {"b": 1}', {"a": {"b": 1}}),
        ('[{"a": 1}}, {"b": 2}]', [{"a": 1}, {"b": 2}]),
        ('{"a": [1, 2}', {"a": [1, 2]}),
    ],
)
def test_what_is_mended(written: str, value: Any):
    assert loads(written) == value


@pytest.mark.parametrize(
    "written",
    [
        "",
        "{",
        '{"a": {"b": [1',
        '{"a"}',
        '{"a" 1}',
        '{"a": tru}',
        '{"a": nothing}',
        "{,}",
        '{"a": 1,,}',
        '{"a": "x',
        "1 2",
        "+1",
        "[1 2]",
    ],
)
def test_what_is_no_value(written: str):
    with pytest.raises(ValueError, match="no value"):
        loads(written)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=3), data=st.data())
def test_a_part_is_closed_only_where_brackets_alone_are_missing(value: Any, data: st.DataObject):
    """No end of a string, no value and no key is made up."""
    written = json.dumps(value, ensure_ascii=False)
    part = written[: data.draw(st.integers(1, len(written)))]
    loose = LooseValue(words=True)
    loose.add(part)
    if loose.rest is None:
        with pytest.raises(ValueError):
            json.loads(loose.written)
    else:
        assert isinstance(json.loads(loose.written + loose.rest), dict)


def test_more_comes_out_as_it_is_known():
    loose = LooseValue()
    said: list[str] = []
    for character in '{"a": "x\n", }':
        loose.add(character)
        said.append(loose.fresh())
    assert "".join(said) == '{"a": "x\\n" }' and said[8] == "\\n"
    assert loose.over and not loose.failed
