"""What is a form, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.batches.upload import Upload
from satchel.api.http.forms import FIELD_BYTES_MAX, PARTS_MAX, parse_form, value_of
from satchel.cluster.errors import InvalidRequest, UnsupportedMediaType

FILE = b'content-disposition: form-data; name="image[]"; filename="a.png"\r\ncontent-type: image/png\r\n\r\n'
FIELD = b'content-disposition: form-data; name="prompt"\r\n\r\n'


def form(*parts: bytes, boundary: bytes = b"b", end: bytes = b"--\r\n") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + end


def test_texts_and_files_are_told_apart_and_keep_their_order():
    parts = FIELD + "größer".encode(), FILE + b"\x00\r\n--c\xff", FILE + b"second"
    made = parse_form("multipart/form-data; boundary=b", form(*parts))
    assert made.fields == {"prompt": "größer"} and made.files == {"image[]": [b"\x00\r\n--c\xff", b"second"]}


def test_a_part_whose_file_name_is_encoded_is_a_file_too():
    head = b"content-disposition: form-data; name=\"image\"; filename*=UTF-8''gr%C3%B6n.png\r\n\r\n"
    made = parse_form("multipart/form-data; boundary=b", form(head + b"\x89\xff"))
    assert made.files == {"image": [b"\x89\xff"]} and not made.fields


@pytest.mark.parametrize(
    ("kind", "values", "others"),
    [
        (int, {"7": 7, "-12": -12}, ["1_0", " 7", "1.0", "\u0663", "9" * 5000, "true"]),
        (float, {"0.5": 0.5, "2": 2.0, ".5": 0.5, "1e-2": 0.01}, ["nan", "inf", "1_0.0", "0x1", "", "."]),
        (bool, {"true": True, "True": True, "0": False}, ["yes", "2"]),
        (str, {"7": "7", "true": "true"}, []),
    ],
)
def test_a_text_stands_for_a_value_as_it_is_usually_written(kind: type, values: dict[str, Any], others: list[str]):
    """Anything else stays a text, which no field of that kind takes."""
    assert {text: value_of(text, kind) for text in values} == values
    assert [value_of(text, kind) for text in others] == others


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=b", ""])
def test_what_is_no_form_is_a_415(kind: str):
    with pytest.raises(UnsupportedMediaType):
        parse_form(kind, form(FIELD + b"x"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no form at all",
        form(FIELD + b"cut off")[:-6],
        form(FIELD + b"cut off", end=b""),
        form(FIELD + b"\xff"),
        form(*[FIELD + b"x"] * (PARTS_MAX + 1)),
        form(FIELD + b"x" * (FIELD_BYTES_MAX + 1)),
    ],
    ids=["empty", "words", "cut", "without an end", "no UTF-8", "many parts", "long text"],
)
def test_a_malformed_form_is_a_400(data: bytes):
    with pytest.raises(InvalidRequest):
        parse_form("multipart/form-data; boundary=b", data)


@pytest.mark.parametrize("boundary", ["b" * 300, "é"])
def test_so_is_one_with_a_boundary_that_no_client_writes(boundary: str):
    with pytest.raises(InvalidRequest):
        parse_form(f"multipart/form-data; boundary={boundary}", form(FIELD + b"x", boundary=boundary.encode()))


def test_so_is_such_an_upload():
    with pytest.raises(InvalidRequest):
        Upload(f"multipart/form-data; boundary={'b' * 300}", lambda piece: None, 1000)
