"""What nodes say on a stream of blocks: it comes back as it was said, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.actors.kv_store.transfer import messages
from satchel.actors.kv_store.transfer.messages import (
    CHAIN_MAX,
    FETCH_MAX,
    TAILS_MAX,
    Described,
    FetchRequest,
    FindRequest,
    pack,
)
from satchel.actors.protocol.entries import TAIL_TOKENS_MAX, EntryDigest, Part, part_digest
from satchel.cluster.errors import InvalidRecord

ONE, TWO, MODEL = (bytes([number]) * 32 for number in (1, 2, 3))
TOKENS = bytes(4 * 5)
WHAT = Described(ONE, bytes(16), 1000, 3, True)
PART = ["0.k", "U32", [2, 3]]


def fields(payload: bytes, kind: str) -> list[Any]:
    said, found = messages.unpack(payload)
    assert said == kind
    return found


@pytest.mark.parametrize(
    "request_",
    [
        FindRequest(MODEL, (ONE, TWO), TWO, TOKENS, 4),
        FindRequest(MODEL, (), MODEL, b"", 0),
        FindRequest(MODEL, (ONE,) * CHAIN_MAX, ONE, bytes(4 * TAIL_TOKENS_MAX), 8),
        FetchRequest(MODEL, (ONE,)),
        FetchRequest(MODEL, tuple(bytes([number]) * 32 for number in range(FETCH_MAX))),
    ],
)
def test_a_request_comes_as_it_was_made(request_: messages.Request):
    assert messages.read_request(messages.pack_request(request_)) == request_


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack(),
        pack(1),
        pack("other"),
        pack("renew"),
        pack("find", MODEL, ONE, TWO, TOKENS),
        pack("find", MODEL[1:], ONE, TWO, TOKENS, 4),
        pack("find", MODEL, ONE + b"x", TWO, TOKENS, 4),
        pack("find", MODEL, ONE * (CHAIN_MAX + 1), TWO, TOKENS, 4),
        pack("find", MODEL, ONE, b"", TOKENS, 4),
        pack("find", MODEL, ONE, TWO, TOKENS[1:], 4),
        pack("find", MODEL, ONE, TWO, bytes(4 * TAIL_TOKENS_MAX + 4), 4),
        pack("find", MODEL, ONE, TWO, "tokens", 4),
        pack("find", MODEL, ONE, TWO, TOKENS, 9),
        pack("find", MODEL, ONE, TWO, TOKENS, -1),
        pack("find", MODEL, ONE, TWO, TOKENS, True),
        pack("fetch", MODEL),
        pack("fetch", MODEL, b""),
        pack("fetch", MODEL, ONE + ONE),
        pack("fetch", MODEL, b"".join(bytes([number]) * 32 for number in range(FETCH_MAX + 1))),
    ],
)
def test_no_other_request_is_believed(payload: bytes):
    with pytest.raises(InvalidRecord):
        messages.read_request(payload)


def test_what_was_found_comes_as_it_is_and_answers_the_question():
    blocks, tails = [WHAT, None], [(TOKENS, WHAT._replace(id=TWO, snapshot=False))]
    said = fields(messages.pack_found(blocks, tails), "found")
    assert messages.read_found(said, [ONE, TWO]) == (blocks, tails)
    rows, ends = said
    row, end = rows[0], ends[0]
    for wrong in (
        [rows],
        [rows, None],
        [rows[:1], ends],
        [rows, ends * (TAILS_MAX + 1)],
        [[row[:3], None], ends],
        [[[b"short", *row[1:]], None], ends],
        [[[row[0], -1, *row[2:]], None], ends],
        [[[*row[:2], 2**32 + 1, row[3]], None], ends],
        [[[*row[:3], 1], None], ends],
        [rows, [[b"", *end[1:]]]],
        [rows, [end[:5]]],
        [rows, [[bytes(4 * TAIL_TOKENS_MAX + 4), *end[1:]]]],
    ):
        with pytest.raises(InvalidRecord):
            messages.read_found(wrong, [ONE, TWO])
            pytest.fail(str(wrong)[:200])
    assert messages.read_found([rows, ends * TAILS_MAX], [ONE, TWO])[1] == tails * TAILS_MAX


def test_an_entry_comes_with_its_tokens_and_its_layout():
    parts, meta = (Part("0.k", "U32", (2, 3)), Part("v", "U8", ())), {"0.k": "bfloat16"}
    said = fields(messages.pack_entry(TOKENS, messages.Layout(parts, meta)), "entry")
    tokens, layout = messages.read_entry(said)
    assert (tokens, layout.parts, layout.meta, layout.nbytes) == (TOKENS, parts, meta, 25)
    for wrong in (
        [],
        [TOKENS],
        [TOKENS, b"\xc1"],
        [TOKENS, [[PART], {}]],
        [TOKENS, pack([PART])],
        [b"", pack([PART], {})],
        [TOKENS[1:], pack([PART], {})],
        *([TOKENS, pack(rows, {})] for rows in BAD_PARTS),
        [TOKENS, pack([PART], {"a": 1})],
    ):
        with pytest.raises(InvalidRecord):
            messages.read_entry(wrong)
            pytest.fail(str(wrong)[:200])


BAD_PARTS: list[Any] = [
    [],
    None,
    [PART, PART],
    [PART[:2]],
    [["0.k", "F64", [2]]],
    [["", "U32", [2]]],
    [["k\n", "U32", [2]]],
    [["x" * 257, "U32", [2]]],
    [["é", "U32", [2]]],
    [["k", "U32", [1] * 9]],
    [["k", "U32", [-1]]],
    [["k", "U32", [True]]],
]


def test_reasons_are_one_short_line():
    assert messages.read_reason(["one\nline\x07"]) == "one line " and messages.read_reason(["x" * 500]) == "x" * 200
    for wrong in ([], [1], ["a", "b"]):
        with pytest.raises(InvalidRecord):
            messages.read_reason(wrong)


def test_a_digest_is_that_of_the_parts_however_their_bytes_are_cut():
    """Also of empty parts, at the beginning, in between and at the end."""
    sizes = (0, 5, 0, 0, 7, 1, 0)
    parts = [Part(str(number), "U8", (size,)) for number, size in enumerate(sizes)]
    data, layout = memoryview(bytes(range(13))), messages.Layout(parts, {})
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    whole = EntryDigest(parts)([part_digest(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)])
    for length in range(1, 14):
        digesting = messages.Digesting(layout)
        for start in range(0, 13, length):
            digesting.update(data[start : start + length])
        assert digesting.digest() == whole
    empty = messages.Layout(parts[:1], {})
    assert messages.Digesting(empty).digest() == EntryDigest(parts[:1])([part_digest(data[:0])])
