"""What nodes say on a stream of blocks: it comes back as it was said, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.actors.kv_store.transfer.machine import block_messages as messages
from satchel.actors.kv_store.transfer.machine.block_messages import (
    CHAIN_MAX,
    FETCH_MAX,
    RUNS_MAX,
    TAILS_MAX,
    Coming,
    Described,
    FetchRequest,
    FindRequest,
    RenewRequest,
    Run,
    Signature,
    pack,
)
from satchel.actors.protocol.entries import TAIL_TOKENS_MAX, Part
from satchel.cluster.errors import InvalidRecord

ONE, TWO, MODEL = (bytes([number]) * 32 for number in (1, 2, 3))
TOKENS = bytes(4 * 5)
WHAT = Described(ONE, bytes(16), 1000, 3, True)
PART = ["0.k", "U32", [2, 3]]


def fields(payload: bytes, kind: str) -> list[Any]:
    said, found = messages.read_answer(payload)
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
        RenewRequest(),
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
        pack("renew", 1),
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
    said = fields(messages.pack_found(30.0, blocks, tails), "found")
    assert messages.read_found(said, [ONE, TWO]) == (30.0, blocks, tails)
    lease_s, rows, ends = said
    row, end = rows[0], ends[0]
    for wrong in (
        [lease_s, rows],
        [lease_s, rows, None],
        [lease_s, rows[:1], ends],
        [lease_s, rows, ends * (TAILS_MAX + 1)],
        [-1, rows, ends],
        [3601, rows, ends],
        [True, rows, ends],
        [lease_s, [row[:3], None], ends],
        [lease_s, [[b"short", *row[1:]], None], ends],
        [lease_s, [[row[0], -1, *row[2:]], None], ends],
        [lease_s, [[*row[:2], 2**32 + 1, row[3]], None], ends],
        [lease_s, [[*row[:3], 1], None], ends],
        [lease_s, rows, [[b"", *end[1:]]]],
        [lease_s, rows, [[bytes(4 * TAIL_TOKENS_MAX + 4), *end[1:]]]],
    ):
        with pytest.raises(InvalidRecord):
            messages.read_found(wrong, [ONE, TWO])
            pytest.fail(str(wrong)[:200])
    assert messages.read_found([0, rows, ends * TAILS_MAX], [ONE, TWO])[0] == 0.0
    assert messages.read_renewed([3600]) == 3600.0
    for wrong in ([], [1, 2], [3600.1], ["1"]):
        with pytest.raises(InvalidRecord):
            messages.read_renewed(wrong)


def test_of_a_batch_each_entry_comes_or_says_why_not():
    signatures = [Signature((Part("0.k", "U32", (2, 3)),), {"0.k": "bfloat16"}), Signature((Part("v", "U8", ()),), {})]
    entries = [Coming(1, TOKENS, ""), Coming(-1, b"", "gone"), Coming(0, TOKENS, "")]
    said = fields(messages.pack_batch(signatures, entries), "batch")
    assert messages.read_batch(said, 3) == (signatures, entries)
    kinds, rows = said
    for wrong in (
        [kinds],
        [kinds, rows[:2]],
        [kinds * 2, rows],
        [kinds, [[2, TOKENS, ""], *rows[1:]]],
        [kinds, [[-2, TOKENS, ""], *rows[1:]]],
        [kinds, [[True, TOKENS, ""], *rows[1:]]],
        [kinds, [[0, b"", ""], *rows[1:]]],
        [kinds, [[0, TOKENS], *rows[1:]]],
        [kinds, [[-1, b"", 7], *rows[1:]]],
        [[[[], {}]], rows],
        [[[[PART, PART], {}]], [[0, TOKENS, ""]] * 3],
        [[[[["0.k", "F64", [2]]], {}]], [[0, TOKENS, ""]] * 3],
        [[[[["", "U32", [2]]], {}]], [[0, TOKENS, ""]] * 3],
        [[[[["x" * 257, "U32", [2]]], {}]], [[0, TOKENS, ""]] * 3],
        [[[[["é", "U32", [2]]], {}]], [[0, TOKENS, ""]] * 3],
        [[[[["k", "U32", [1] * 9]], {}]], [[0, TOKENS, ""]] * 3],
        [[[[["k", "U32", [-1]]], {}]], [[0, TOKENS, ""]] * 3],
        [[[[PART], {"a": 1}]], [[0, TOKENS, ""]] * 3],
    ):
        with pytest.raises(InvalidRecord):
            messages.read_batch(wrong, 3)
            pytest.fail(str(wrong)[:200])
    assert messages.read_batch([[[[PART], {}]], [[0, TOKENS, ""]]], 1)[1] == [Coming(0, TOKENS, "")]


def test_runs_and_ends_are_of_the_entries_that_were_asked_for():
    runs = [Run("0.k", [0, 2]), Run("v", [1])]
    said = fields(messages.pack_parts(runs), "parts")
    assert messages.read_parts(said, 3) == runs
    for wrong in (
        [],
        [[]],
        [[["k", [0]]] * (RUNS_MAX + 1)],
        [[["k", []]]],
        [[["k", [0, 0]]]],
        [[["k", [3]]]],
        [[["k", [-1]]]],
        [[[1, [0]]]],
        [[["k"]]],
    ):
        with pytest.raises(InvalidRecord):
            messages.read_parts(wrong, 3)
            pytest.fail(str(wrong)[:200])
    assert len(messages.read_parts([[["k", [0]]] * RUNS_MAX], 1)) == RUNS_MAX
    failures = [(0, "damaged"), (2, "x" * 500 + "\n")]
    said = fields(messages.pack_end(failures), "end")
    assert messages.read_end(said, 3) == {0: "damaged", 2: "x" * 200}
    for wrong in ([], [[[3, ""]]], [[[0, 1]]], [[[0, ""]] * 4], [[[0]]]):
        with pytest.raises(InvalidRecord):
            messages.read_end(wrong, 3)
    assert messages.read_error(["one\nline\x07"]) == "one line " and messages.read_error([]) == ""
