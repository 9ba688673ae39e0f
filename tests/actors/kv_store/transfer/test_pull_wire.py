"""One connection of a pull, byte by byte: what a source with the key says is taken only where it answers a question."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from satchel.actors.kv_store.transfer.machine import block_messages as messages
from satchel.actors.kv_store.transfer.machine.block_messages import Coming, Described, Run, Signature
from satchel.actors.kv_store.transfer.machine.link_auth import (
    PREAMBLE_BYTES,
    SEAL_BYTES,
    Acceptor,
    FrameSeal,
    Initiator,
    records,
)
from satchel.actors.kv_store.transfer.machine.pull_terms import Chunk, Connected, EntryOutcome, Renewed
from satchel.actors.kv_store.transfer.machine.pull_wire import PullWire, Wanted
from satchel.actors.protocol.entries import EntryDigest, Part, flat_bytes, pack_tokens, part_digest, tail_id
from satchel.cluster.errors import InvalidRecord, LinkError, LinkGarbage
from tests.worlds.block_nodes import CLUSTER_KEY
from tests.worlds.kv_files import MODEL, ROOT, chain

BLOCKS = chain(2)
IDS = tuple(block.id for block in BLOCKS)
REST = [7, 8, 9]
PARTS = tuple(Part(name, "U32" if "codes" in name else "U16", array.shape) for name, array in BLOCKS[0].parts.items())
SIGNATURE = Signature(PARTS, {"0.k.codes": "said"})


def described(number: int) -> Described:
    digests = [part_digest(flat_bytes(array)) for array in BLOCKS[number].parts.values()]
    nbytes = sum(array.nbytes for array in BLOCKS[number].parts.values())
    return Described(IDS[number], EntryDigest(PARTS)(digests), nbytes, 0, False)


class Source:
    """The other side, which may say anything; the wire is here too."""

    def __init__(self, rest: list[int] = REST) -> None:
        wanted = Wanted(MODEL, ROOT, IDS, None, rest)
        self.wire = PullWire(1, Initiator(CLUSTER_KEY, "mac1", "mac0", b"1" * 32), wanted, lambda *found: found)  # type: ignore[arg-type]
        acceptor = Acceptor(CLUSTER_KEY, "mac0", b"2" * 32)
        self.feed(acceptor.challenge(self.sent()[PREAMBLE_BYTES:]))
        acceptor.finish(self.sent()[PREAMBLE_BYTES:])
        self._out: FrameSeal = acceptor.frames()[0]
        assert self.events() == [Connected(1)]

    def sent(self) -> bytes:
        said = b"".join(self.wire.outbox)
        self.wire.outbox.clear()
        return said

    def feed(self, raw: bytes) -> None:
        while raw:
            count = min(len(raw), len(self.wire.target))
            self.wire.target[:count] = np.frombuffer(raw[:count], np.uint8).data
            self.wire.filled(count)
            raw = raw[count:]

    def say(self, payload: bytes, raw: bytes = b"") -> None:
        sealed = self._out.seal(payload)
        parts = b"".join(self._out.seal(record) for record in records([memoryview(raw)]))
        self.feed(len(sealed).to_bytes(4, "big") + sealed + parts)

    def events(self) -> list[Any]:
        taken, self.wire.events = self.wire.events, []
        return taken

    def fetching(self, *numbers: int) -> Source:
        """It has found both blocks, and is asked for some."""
        self.wire.find()
        self.say(messages.pack_found(30.0, [described(0), described(1)], []))
        assert self.events() == [(30.0, [described(0), described(1)], [])]
        self.wire.fetch(tuple(IDS[number] for number in numbers))
        return self

    def send(self, *numbers: int, rows: list[int] | None = None) -> None:
        """The parts of those blocks, run after run."""
        places = list(range(len(numbers))) if rows is None else rows
        for part in PARTS:
            raw = b"".join(flat_bytes(BLOCKS[number].parts[part.name]).tobytes() for number in numbers)
            self.say(messages.pack_parts([Run(part.name, places)]), raw)


def coming(number: int, tokens: bytes | None = None) -> Coming:
    return Coming(0, pack_tokens(BLOCKS[number].tokens) if tokens is None else tokens, "")


def test_what_was_asked_for_comes_whole():
    source = Source().fetching(0, 1)
    source.say(messages.pack_batch([SIGNATURE], [coming(0), coming(1)]))
    source.send(0, 1)
    assert source.events() == [] and not source.wire.received
    source.say(messages.pack_end([]))
    assert source.events() == [Chunk(1, IDS[0], EntryOutcome.GOOD), Chunk(1, IDS[1], EntryOutcome.GOOD)]
    for block in BLOCKS:
        received = source.wire.received[block.id]
        assert all(np.array_equal(array, received.parts[name]) for name, array in block.parts.items())
        assert received.meta == SIGNATURE.meta and received.tokens == pack_tokens(block.tokens)
    source.say(messages.pack("renewed", 12.5))
    assert source.events() == [Renewed(1, 12.5)]


def test_no_byte_of_a_part_is_taken_that_was_changed_or_exchanged_on_the_way():
    """Whatever its digest is: that is of no key, and bytes with the same one can be made."""

    def source() -> Source:
        found = Source().fetching(0)
        found.say(messages.pack_batch([SIGNATURE], [coming(0)]))
        found.say(messages.pack_parts([Run(PARTS[0].name, [0])]))
        return found

    data = flat_bytes(BLOCKS[0].parts[PARTS[0].name]).tobytes()
    sealed = source()._out.seal(data)
    assert data not in sealed
    forged = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(0, len(sealed), 7)]
    forged += [data + bytes(SEAL_BYTES), sealed[16:] + sealed[:16]]
    for raw in forged:
        with pytest.raises(LinkGarbage):
            source().feed(raw)
    exchanged = source()
    exchanged._out.seal(data)
    with pytest.raises(LinkGarbage):
        exchanged.feed(exchanged._out.seal(data))


@pytest.mark.parametrize("sent", [True, False])
def test_what_the_source_says_has_failed_is_gone_whatever_came_of_it(sent: bool):
    source = Source().fetching(0, 1)
    source.say(messages.pack_batch([SIGNATURE], [coming(0), coming(1)]))
    if sent:
        source.send(0, 1)
    else:
        source.send(1, rows=[1])
    source.say(messages.pack_end([(0, "damaged here")]))
    assert source.events() == [Chunk(1, IDS[0], EntryOutcome.GONE, "damaged here"), Chunk(1, IDS[1], EntryOutcome.GOOD)]
    assert list(source.wire.received) == [IDS[1]]


def test_what_does_not_come_is_gone_and_what_came_in_part_or_changed_is_bad():
    source = Source().fetching(0, 1)
    source.say(messages.pack_batch([SIGNATURE], [Coming(-1, b"", "evicted"), coming(1)]))
    source.say(messages.pack_parts([Run(PARTS[0].name, [1])]), bytes(PARTS[0].nbytes))
    source.say(messages.pack_end([]))
    assert [event.outcome for event in source.events()] == [EntryOutcome.GONE, EntryOutcome.BAD]
    source.wire.fetch((IDS[1],))
    source.say(messages.pack_batch([SIGNATURE], [coming(1)]))
    source.send(0)
    source.say(messages.pack_end([]))
    assert [event.outcome for event in source.events()] == [EntryOutcome.BAD], "of another block"
    source.wire.fetch((IDS[1],))
    source.say(messages.pack_batch([SIGNATURE], [coming(1, pack_tokens([1, 2]))]))
    source.send(1)
    source.say(messages.pack_end([]))
    assert [event.outcome for event in source.events()] == [EntryOutcome.GONE], "of other tokens"
    assert not source.wire.received


def test_a_tail_is_of_the_tokens_that_are_wanted_and_named_by_them():
    for tokens, entry_id, right in (
        (REST[:2], None, True),
        (REST, None, True),
        ([7, 9], None, False),
        ([*REST, 1], None, False),
        (REST[:2], bytes(32), False),
        (REST[:2], b"\xff" * 32, False),
        (REST[:2], tail_id(ROOT, REST[:2]), False),
    ):
        source = Source()
        what = Described(entry_id or tail_id(IDS[1], tokens), bytes(16), 100, 0, False)
        payload = messages.pack_found(30.0, [None, None], [(pack_tokens(tokens), what)])
        if right:
            source.say(payload)
            assert source.events() == [(30.0, [None, None], [what])]
        else:
            with pytest.raises(InvalidRecord):
                source.say(payload)


@pytest.mark.parametrize(
    "payload",
    [
        messages.pack_batch([SIGNATURE], [coming(0)]),
        messages.pack_parts([Run("0.k.codes", [0])]),
        messages.pack_end([]),
        messages.pack("a"),
        messages.pack("zebra"),
        messages.pack("error", "no more"),
    ],
)
def test_nothing_is_heard_that_was_not_asked_for(payload: bytes):
    with pytest.raises(LinkError):
        Source().say(payload)
    source = Source().fetching(0)
    source.say(messages.pack_batch([SIGNATURE], [coming(0)]))
    if payload not in (messages.pack_end([]), messages.pack_parts([Run("0.k.codes", [0])])):
        with pytest.raises(LinkGarbage):
            source.say(payload)


def test_what_the_source_says_of_itself_is_heard_while_something_is_fetched():
    for payload, reason in ((messages.pack("error", "no more"), "no more"), (messages.pack("zebra"), "zebra")):
        with pytest.raises(LinkError, match=reason):
            Source().fetching(0).say(payload)


def test_sizes_are_those_that_were_announced():
    source = Source().fetching(0)
    smaller = Signature(PARTS[:1], {})
    with pytest.raises(InvalidRecord, match="another size"):
        source.say(messages.pack_batch([smaller], [coming(0)]))
    for length in (0, messages.ANSWER_BYTES_MAX + SEAL_BYTES + 1):
        with pytest.raises(LinkGarbage, match="a frame of"):
            Source().feed(length.to_bytes(4, "big") + bytes(16))
