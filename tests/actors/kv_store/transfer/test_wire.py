"""What nodes say on a stream of blocks: it comes back as it was said, and nothing else is believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.kv_store.transfer import wire
from satchel.actors.kv_store.transfer.wire import CHAIN_MAX, FETCH_MAX, FetchRequest, FindRequest, Offered, pack
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.entries import (
    NOBODY,
    TAIL_TOKENS_MAX,
    EntryDigest,
    EntryLayout,
    EntryRecord,
    Part,
    pack_tokens,
    tail_id,
)
from satchel.cluster.errors import InvalidRecord

ONE, TWO, MODEL = (bytes([number]) * 32 for number in (1, 2, 3))
TOKENS = bytes(4 * 5)
WHAT = Offered(1000, 3, True)
PART = ["0.k", "U32", [2, 3]]


def fields(payload: bytes, kind: str) -> list[Any]:
    said, found = wire.unpack(payload)
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
def test_a_request_comes_as_it_was_made(request_: wire.Request):
    assert wire.read_request(wire.pack_request(request_)) == request_


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
        wire.read_request(payload)


def test_what_was_found_comes_as_it_is_and_answers_the_question():
    asked = FindRequest(MODEL, (ONE, TWO), TWO, TOKENS, 4)
    blocks, tails = [WHAT, None], [(5, WHAT._replace(snapshot=False)), (2, WHAT)]
    said = fields(wire.pack_found(blocks, tails), "found")
    assert wire.read_found(said, asked) == (blocks, tails)
    rows, ends = said
    row, end = rows[0], ends[0]
    for wrong in (
        [rows],
        [rows, None],
        [rows[:1], ends],
        [[*rows, None], ends],
        [rows, [end] * 5],
        [[row[:2], None], ends],
        [[["1", *row[1:]], None], ends],
        [[[-1, *row[1:]], None], ends],
        [[[row[0], 2**32 + 1, row[2]], None], ends],
        [[[*row[:2], 1], None], ends],
        [rows, [[0, *end[1:]]]],
        [rows, [[6, *end[1:]]]],
        [rows, [[b"", *end[1:]]]],
        [rows, [end[:3]]],
    ):
        with pytest.raises(InvalidRecord):
            wire.read_found(wrong, asked)
            pytest.fail(str(wrong)[:200])
    assert wire.read_found([rows, ends * 2], asked)[1] == tails * 2


def test_an_entry_comes_with_its_record_and_its_layout():
    parts, meta = (Part("0.k", "U32", (2, 3)), Part("v", "U8", ())), {"0.k": "bfloat16"}
    record = EntryRecord(ONE, TWO, False, bytes(4 * BLOCK_TOKENS), bytes(16), 3, True, 25, (b"o" * 16,))
    said = fields(wire.pack_entry(record, EntryLayout(parts, meta)), "entry")
    found, layout = wire.read_entry(said)
    assert (found, layout.parts, layout.meta, layout.nbytes) == (record, parts, meta, 25)
    assert found.owners == (NOBODY,), "whose it is there is not said"
    end = replace(record, id=tail_id(TWO, [7]), tail=True, tokens=pack_tokens([7]))
    assert wire.read_entry([end.facts(), said[1]])[0] == end
    facts, packed = said
    for wrong in (
        [],
        [facts],
        [facts, b"\xc1"],
        [facts, [[PART], {}]],
        [facts, pack([PART])],
        [facts, pack([PART], {})],
        [b"\xc1", packed],
        ["text", packed],
        [replace(record, tokens=b"").facts(), packed],
        [replace(record, tokens=bytes(3)).facts(), packed],
        [replace(record, nbytes=24).facts(), packed],
        [replace(end, id=ONE).facts(), packed],
        *([facts, pack(rows, meta)] for rows in BAD_PARTS),
        [facts, pack(parts, {"a": 1})],
    ):
        with pytest.raises(InvalidRecord):
            wire.read_entry(wrong)
            pytest.fail(str(wrong)[:200])
    for rows in BAD_PARTS:
        with pytest.raises(InvalidRecord):
            EntryLayout.unpacked(pack(rows, {}))
            pytest.fail(str(rows)[:200])


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
    assert wire.read_reason(["one\nline\x07"]) == "one line " and wire.read_reason(["x" * 500]) == "x" * 200
    for wrong in ([], [1], ["a", "b"]):
        with pytest.raises(InvalidRecord):
            wire.read_reason(wrong)


def test_a_digest_is_that_of_all_bytes_however_they_are_cut():
    data, digest_of = memoryview(bytes(range(13))), EntryDigest([Part("a", "U8", (6,)), Part("b", "U8", (7,))])
    for length in range(1, 14):
        digesting = digest_of.begun()
        for start in range(0, 13, length):
            digesting.update(data[start : start + length])
        assert digesting.digest() == digest_of(data) == digest_of(data[:6], data[6:])
