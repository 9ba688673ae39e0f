"""JSON parsed in pieces: the same values as at once, the same texts refused, and limits that are checked before
anything is allocated."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from satchel.api.requests.history import called_with
from satchel.api.text import json_slices
from satchel.api.text.json_slices import DEPTH_MAX, TooDeep, TooManyValues, check_values, outline, parse

MANY = 10**9
_TEXTS = st.text(st.sampled_from('a\\"{}[],: \n\u0000é漢😀'), max_size=40)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_TEXTS, inner, max_size=6),
    max_leaves=30,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "_SCAN_BYTES", 7)
    monkeypatch.setattr(json_slices, "_PIECE_BYTES", 24)
    monkeypatch.setattr(json_slices, "_PIECE_MARKS", 4)
    monkeypatch.setattr(json_slices, "_CUT_BYTES", 12)


def whole(data: bytes) -> tuple[bool, str]:
    try:
        return True, repr(from_json(data, allow_inf_nan=False))
    except ValueError:
        return False, ""


def in_pieces(data: bytes) -> tuple[bool, str]:
    try:
        return True, repr(parse(data, MANY)[0])
    except ValueError:
        return False, ""


@settings(deadline=None, max_examples=60)
@given(_VALUES, st.booleans(), st.sampled_from([None, 1, 40]))
def test_pieces_say_what_the_whole_says(value: Any, ascii_only: bool, indent: int | None) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert in_pieces(data) == whole(data)


@settings(deadline=None, max_examples=60)
@given(_VALUES, st.booleans(), st.integers(0, 2**32))
def test_what_is_damaged_is_refused_in_pieces_too(value: Any, ascii_only: bool, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(json.dumps(value, ensure_ascii=ascii_only).encode())
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.choice([0, 1])] = bytes([chance.choice(b'{}[],:"\\ u0d81x')])
    assert in_pieces(bytes(data)) == whole(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b'["' + b"\\" * 400 + b'"]',
        b'["' + b"\\u0000" * 90 + b'"]',
        b'["' + b"\\ud83d\\ude00" * 40 + b'"]',
        b'["' + "a😀é".encode() * 30 + b'"]',
        b"[" + b" " * 300 + b"]",
        b"{" + b" " * 300 + b"}",
        b" " * 100 + b'{"a":' + b" " * 100 + b"1}" + b" " * 100,
        b'{"' + b"k" * 100 + b'":1}',
        b'{"a":1,"b":2,"a":[' + b"3," * 50 + b"3]}",
        b"[1,2,3,4,5,6,,7,8,9]",
        b"[1,2,3,4,5,6,7,8,9,]",
        b"[,1,2,3,4,5,6,7,8,9]",
        b'{"a":1,"b":2,"c":3,"d":4,}',
        b'{"a":1,"b":2,"c",[1,2,3,4,5]}',
        b'{[1,2,3,4,5]:1,"b":2,"c":3}',
        b"[1,2,3,4,5,6,7,8,9}",
        b"[[1,2,3,4,5,6,7,8,9]x,1]",
        b'["aaaaaaaaaaaaaaaaaaaaaaaaa" "bbbbbbbbbbbbbbbbbbb"]',
        b"[" + b"9" * 5000 + b"]",
        b"[1,2,3,4,5,6,7,8,NaN]",
        b'["aaaaaaaaaaaaaaaaaaaaaaaaaaa\\ud800aaaaaaaaaaaaaaaa"]',
        b'["' + b"a" * 50 + b"\xff" + b"a" * 50 + b'"]',
        b"[[1,2,3,4,5,6,7,8]",
        b'["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa]',
        b"]1,2,3,4,5,6,7[",
        b"",
        b"   ",
    ],
)
def test_hard_texts(data: bytes) -> None:
    assert in_pieces(data) == whole(data)


def test_a_value_more_than_allowed_is_too_many() -> None:
    data = json.dumps({"a": [1, 2, {"b": None}], "c": "[[[,,,"}).encode()
    values = outline(data, MANY).values
    assert values == 3 + 3 + 3  # openings, colons, commas; none of those in the string
    assert parse(data, values)[1] == values
    with pytest.raises(TooManyValues):
        parse(data, values - 1)


def test_too_many_are_noticed_before_the_rest_is_read() -> None:
    # The text behind them is not even JSON.
    with pytest.raises(TooManyValues):
        outline(b"[" * 8 + b"]" * 9, 5)


def test_depth_has_a_limit() -> None:
    assert parse(b"[" * DEPTH_MAX + b"]" * DEPTH_MAX, MANY)[1] == DEPTH_MAX
    with pytest.raises(TooDeep):
        parse(b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1), MANY)


def test_texts_within_a_text_are_counted_together() -> None:
    check_values(['{"a":1}', "[1,2]"], 4)
    check_values(['"' + "," * 100 + '"', "no JSON at all"], 0)
    with pytest.raises(TooManyValues):
        check_values(['{"a":1}', "[1,2]"], 3)
    with pytest.raises(TooManyValues):
        check_values(["[" * 300 + "]" * 300], 299)


def test_a_long_text_keeps_its_characters() -> None:
    text = "".join(random.Random(3).choices('ab\\"\n\u0000é漢😀\u2028', k=3000))
    for ascii_only in (True, False):
        assert parse(json.dumps([text], ensure_ascii=ascii_only).encode(), MANY)[0] == [text]


def test_a_calls_arguments_are_parsed_up_to_a_size() -> None:
    assert called_with('{"a": [1, 2]}') == {"a": [1, 2]}
    assert called_with("no JSON") == "no JSON"
    text = json.dumps({"a": [0] * 30_000})
    assert called_with(text) == text
