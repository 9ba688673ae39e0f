"""Lone surrogates: replaced in models' texts, and reported in bodies."""

from __future__ import annotations

import json

import pytest

from satchel.api.requests.history import called_with
from satchel.api.text.lone_surrogates import not_characters, with_whole_characters


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'"\ud83d"', "\ufffd"),
        (r'"\udE00"', "\ufffd"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd😀"),
        (r'"\ud83d\ude00\ude00"', "😀\ufffd"),
        (r'"a\ud83d\n\u00e4"', "a\ufffd\nä"),
        (r'"\\ud83d"', r"\ud83d"),
        (r'"\\\ud83d"', "\\\ufffd"),
        (r'"\ud7ff\ue000"', "\ud7ff\ue000"),
        ('"\\ud83d\\', '"\\ufffd\\'),
    ],
)
def test_only_halves_that_stand_alone_are_replaced(written: str, read: str):
    whole = with_whole_characters(written)
    assert (json.loads(whole) if whole.endswith('"') else whole) == read


def test_arguments_that_a_model_wrote_with_half_a_character_are_read():
    assert called_with(r'{"city": "K\ud83dln"}') == {"city": "K\ufffdln"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (rb'{"a": "b\uD83D"}', r"half of a surrogate pair, \uD83D at byte 8"),
        (rb'{"\ude00": 1}', r"half of a surrogate pair, \ude00 at byte 2"),
        (b'{"a": "\xed\xa0\xbd"}', "half of a surrogate pair at byte 7"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (rb'{"a": "\ud83d\ude00 \\ud83d ' + "😀".encode() + b'"', ""),
    ],
)
def test_what_is_wrong_with_a_body_is_said(data: bytes, said: str):
    assert said in not_characters(data) and bool(said) == bool(not_characters(data))
