"""Segment files: what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest

from satchel.actors.kv_store.disk import segments
from satchel.actors.kv_store.disk.io import DiskIO
from satchel.actors.kv_store.disk.segment_reader import EntryReader, StoredEntry, parts_of, read_entries
from satchel.actors.kv_store.disk.segments import SegmentWriter, grouped, read_key
from satchel.actors.protocol.entries import (
    ENTRIES_MAX,
    Entry,
    EntryDigest,
    EntryLayout,
    EntryRecord,
    Location,
    Part,
    SegmentRecord,
    mac,
    owner_tag,
    pack_tokens,
    signature,
    tail_id,
)
from satchel.cluster.errors import DiskError, DiskFull, InvalidRecord
from tests.worlds.kv_store.kv_files import (
    KEY,
    MODEL,
    ROOT,
    Failing,
    Filling,
    NoSync,
    arrays,
    chain,
    file_of,
    places,
    random_parts,
    same,
    write_file,
)


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_random_signatures_come_back_byte_for_byte(tmp_path):
    for seed in range(40):
        rng = random.Random(seed)
        shape = random_parts(rng)
        entries = []
        for number in range(rng.randint(1, ENTRIES_MAX)):
            bits = np.random.default_rng([seed, number])
            parts = {}
            for name, dtype, lengths in shape:
                size = int(np.prod(lengths, dtype=int)) * dtype.itemsize
                parts[name] = np.frombuffer(bits.bytes(size), dtype=dtype).reshape(lengths)
            entries.append(Entry.of_tail(ROOT, [seed, number], parts))
        record = write_file(tmp_path, entries, meta={"0.k": "bfloat16"})
        assert file_of(tmp_path, record).stat().st_size == record.nbytes
        locations = places(SegmentRecord.from_wire(msgpack.unpackb(msgpack.packb(record.to_wire()))))
        wanted = rng.sample(range(len(entries)), rng.randint(1, len(entries)))
        read = read_entries(tmp_path, KEY, [Location.from_wire(locations[slot].to_wire()) for slot in wanted])
        for slot, stored in zip(wanted, read, strict=True):
            assert isinstance(stored, StoredEntry), f"seed {seed}: {stored}"
            assert same(stored.parts, entries[slot].parts), f"seed {seed}"
            assert stored.layout.meta == {"0.k": "bfloat16"}


def test_arrays_that_lie_otherwise_in_memory_are_stored_in_order(tmp_path):
    wide = np.arange(48, dtype=np.uint32).reshape(4, 12)
    entry = Entry.of_tail(ROOT, [1], {"t": wide.T, "s": wide[::2, ::3]})
    (stored,) = read_entries(tmp_path, KEY, places(write_file(tmp_path, [entry])))
    assert isinstance(stored, StoredEntry) and same(stored.parts, entry.parts)


def test_an_entry_is_one_record_and_neighbours_follow_each_other(tmp_path):
    entries = chain(5)
    path = file_of(tmp_path, write_file(tmp_path, entries))
    records = [b"".join(array.tobytes() for array in entry.parts.values()) for entry in entries]
    assert path.read_bytes().startswith(b"".join(records))
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_neighbours_are_read_together_up_to_a_limit_and_their_memory_is_used_again(tmp_path):
    entries, others = chain(16), chain(3, first=90)
    size = sum(array.nbytes for array in entries[0].parts.values())
    locations = [*places(write_file(tmp_path, entries))[1:], *places(write_file(tmp_path, others))]
    wanted = [*locations[:13], locations[14], locations[16], locations[15]]
    reader, seen = EntryReader(tmp_path, KEY, wanted, threads=1, run_bytes_max=5 * size + 1), []
    for run in reader.runs():
        seen.append(run.indexes)
        for index, data in zip(run.indexes, run.data, strict=True):
            (entry,) = [entry for entry in (*entries, *others) if entry.id == wanted[index].id]
            assert same(parts_of(data, run.layout.parts), entry.parts)
        reader.give_back(run)
    assert seen == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12], [13], [14], [15]] and not reader.failures
    kept = [run.data for run in EntryReader(tmp_path, KEY, wanted, run_bytes_max=1).runs()]
    assert len({data.ctypes.data for data in kept}) == len(kept) == 16
    reader, memory = EntryReader(tmp_path, KEY, wanted, threads=1, run_bytes_max=1), set()
    for run in reader.runs():
        memory.add(run.data.ctypes.data)
        reader.give_back(run)
    assert len(memory) <= 3


def test_a_reader_that_is_left_early_leaves_nothing_open(tmp_path):
    entries = chain(7)
    locations = [places(write_file(tmp_path, [entry]))[0] for entry in entries]
    gc.collect()
    before = open_files()
    for _ in EntryReader(tmp_path, KEY, locations).runs():
        break
    gc.collect()
    assert open_files() == before and not any(thread.name.startswith("read_") for thread in threading.enumerate())


def bad_entries() -> Iterator[tuple[str, list[Entry]]]:
    good, other = chain(2)
    parts = good.parts
    yield "none", []
    yield "seventeen", chain(17)
    yield "twice", [good, good]
    yield "different shapes", [good, Entry(other.id, other.parent, other.tokens, arrays(1, length=4))]
    yield "different names", [good, Entry(other.id, other.parent, other.tokens, arrays(1, layers=1))]
    yield "no parts", [Entry(good.id, good.parent, good.tokens, {})]
    yield "a dtype", [Entry(good.id, good.parent, good.tokens, {"a": np.zeros(3)})]
    yield "another byte order", [Entry(good.id, good.parent, good.tokens, {"a": np.zeros(3, dtype=">u4")})]
    yield "a name", [Entry(good.id, good.parent, good.tokens, {"a\n": np.zeros(3, dtype="u1")})]
    yield "a name with a surrogate", [Entry(good.id, good.parent, good.tokens, {"\ud800": np.zeros(3, dtype="u1")})]
    yield "a short block", [Entry(good.id, good.parent, [1] * 255, parts)]
    yield "a long block", [Entry(good.id, good.parent, [1] * 257, parts)]
    yield "an empty tail", [Entry.of_tail(ROOT, [], parts)]
    yield "an endless tail", [Entry.of_tail(ROOT, [1] * 100_000, parts)]
    yield "a tail of another id", [Entry(good.id, ROOT, [1], parts, tail=True)]
    yield "a short id", [Entry(b"x", good.parent, good.tokens, parts)]
    yield "a short parent", [Entry(good.id, b"", good.tokens, parts)]
    yield "negative tokens", [Entry(good.id, good.parent, [-1] * 256, parts)]
    yield "large tokens", [Entry(good.id, good.parent, [2**32] * 256, parts)]
    yield "text for tokens", [Entry(good.id, good.parent, ["a"] * 256, parts)]  # type: ignore[list-item]
    yield "a negative window", [Entry(good.id, good.parent, good.tokens, parts, window_from=-1)]
    yield "no owners", [Entry(good.id, good.parent, good.tokens, parts, owners=())]


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path):
    for name, entries in bad_entries():
        with pytest.raises(InvalidRecord):
            write_file(tmp_path, entries)
            pytest.fail(name)
    for session in ("", "a/b", "..", "a.b", "x" * 65):
        with pytest.raises(InvalidRecord):
            write_file(tmp_path, chain(1), session=session)
    with pytest.raises(InvalidRecord):
        write_file(tmp_path, chain(1), model=b"short")
    with pytest.raises(InvalidRecord):
        write_file(tmp_path, chain(1), meta={"a": "x" * 100_000})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskError)]
)
def test_a_disk_that_fails_at_any_step_of_writing_leaves_nothing(tmp_path, number, kind):
    counted = Failing(-1, OSError)
    (tmp_path / "counted").mkdir()
    write_file(tmp_path / "counted", chain(2), io=counted)
    assert counted.steps == [
        "folder",
        "sync folder",
        "folder",
        "sync folder",
        "create",
        "write",
        "write",
        "write",
        "sync",
        "rename",
        "sync folder",
    ]
    for at in range(len(counted.steps)):
        root = tmp_path / str(at)
        root.mkdir()
        with pytest.raises(kind):
            write_file(root, chain(2), io=Failing(at, lambda: OSError(number, os.strerror(number))))
        assert not [path for path in root.rglob("*") if path.is_file()], f"step {at}"


def test_a_disk_that_fills_in_the_middle_of_a_record_leaves_nothing_and_serves_on(tmp_path):
    """In the first record, at a record's end, in a later one, and in the footer."""
    entries = chain(3)
    whole = write_file(tmp_path, entries)
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    size, kept = whole.entries[0].nbytes, path.read_bytes()
    for room in (0, 1, size // 2, size, size + 7, 3 * size - 1, 3 * size, 3 * size + 50, whole.nbytes - 1):
        device = Filling(room)
        with pytest.raises(DiskFull):
            write_file(tmp_path, entries, io=device)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [path], f"{room} bytes"
        device.free_bytes = whole.nbytes
        again = write_file(tmp_path, entries, io=device)
        read = read_entries(tmp_path, KEY, places(again))
        assert all(isinstance(stored, StoredEntry) for stored in read), f"{room} bytes"
        file_of(tmp_path, again).unlink()
    assert path.read_bytes() == kept


def test_a_writer_goes_on_after_an_entry_whose_writing_failed(tmp_path):
    """What came of it is no part of the next entry."""
    entries, layout = chain(3), EntryLayout(signature(chain(1)[0].parts), {})
    flat = [b"".join(array.tobytes() for array in entry.parts.values()) for entry in entries]
    device = Filling(2 * layout.nbytes - 9)
    with SegmentWriter(tmp_path, KEY, MODEL, layout, session="s", epoch=1, now_s=2.5, io=device) as writer:
        for number in (0, 1, 2):
            entry = entries[number]
            try:
                writer.write(flat[number])
            except DiskFull:
                assert number == 1
                device.free_bytes = 10**6
                writer.drop()
                continue
            facts = {"window_from": 0, "snapshot": False, "nbytes": layout.nbytes, "tail": False}
            digest = layout.digest_of(flat[number])
            record = EntryRecord(
                id=entry.id, parent=entry.parent, tokens=pack_tokens(entry.tokens), digest=digest, **facts
            )
            writer.keep(record)
            with pytest.raises(InvalidRecord):
                writer.keep(record)
        written = writer.finish()
    read = read_entries(tmp_path, KEY, places(written))
    assert [stored.data.tobytes() for stored in read if isinstance(stored, StoredEntry)] == [flat[0], flat[2]]
    assert file_of(tmp_path, written).stat().st_size == written.nbytes


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real = os.writev

    def short(descriptor: int, buffers: list[memoryview]) -> int:
        return real(descriptor, [buffers[0][: 1 + len(buffers[0]) // 2]])

    monkeypatch.setattr(os, "writev", short)
    entries = chain(3)
    read = read_entries(tmp_path, KEY, places(write_file(tmp_path, entries, io=DiskIO())))
    assert all(
        isinstance(stored, StoredEntry) and same(stored.parts, entry.parts)
        for stored, entry in zip(read, entries, strict=True)
    )


def test_records_from_other_processes_are_believed_only_if_they_can_be_right(tmp_path):
    wire = write_file(tmp_path, chain(2)).to_wire()
    rng = random.Random(11)
    junk = [None, True, -1, 2**70, 1.5, "x", b"x", [], {}, bytes(32), "a" * 1000, [[b"", b""]]]
    for _ in range(400):
        changed = dict(wire)
        for name in rng.sample(list(wire), rng.randint(1, 3)):
            changed[name] = rng.choice(junk)
        if rng.random() < 0.2:
            del changed[rng.choice(list(changed))]
        if rng.random() < 0.3:
            facts = bytearray(wire["entries"][0][0])
            facts[rng.randrange(len(facts))] ^= 1 << rng.randrange(8)
            changed["entries"] = [[bytes(facts), wire["entries"][0][1]]]
        try:
            SegmentRecord.from_wire(changed)
        except InvalidRecord:
            continue
    for other in (None, [], "x", {}, {**wire, "more": 1}):
        with pytest.raises(InvalidRecord):
            SegmentRecord.from_wire(other)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", [None, b"x", 1, "x" * 257]),
        ("nbytes", [-1, 2**62, True, 1.0, "1", None]),
        ("model", [b"short", bytes(33), "x" * 32, None]),
        ("epoch", [-1, 2**62, True, 1.0, "1", None]),
        ("written_s", [None, "now", True]),
        ("meta", [None, [], {"a": 1}, {1: "a"}, {"a": "\ud800"}]),
        ("entries", [None, {}, [], [None], [[b"", b""]]]),
    ],
)
def test_no_field_of_a_record_is_believed_that_cannot_be_right(tmp_path, field, values):
    wire = write_file(tmp_path, chain(2)).to_wire()
    assert SegmentRecord.from_wire(wire).to_wire() == wire
    for value in values:
        with pytest.raises(InvalidRecord):
            SegmentRecord.from_wire({**wire, field: value})
            pytest.fail(f"{field}: {value!r}")


def test_a_mac_and_a_digest_cover_every_field_and_where_it_ends():
    """Else bytes of one field could pass for those of the next, or an array for one of another type or shape."""
    spelled = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"abd",)]
    assert len({mac(KEY, *fields) for fields in spelled}) == len(spelled)
    parts = [
        (Part("a", "U32", (2, 3)),),
        (Part("b", "U32", (2, 3)),),
        (Part("a", "F32", (2, 3)),),
        (Part("a", "U32", (3, 2)),),
        (Part("a", "U32", (6,)),),
        (Part("aU32", "U8", (2, 3)),),
    ]
    assert len({EntryDigest(described)(bytes(16)) for described in parts}) == len(parts)
    assert EntryDigest(parts[0])(bytes(16)) != EntryDigest(parts[0])(b"x" * 16)


def test_entries_are_grouped_by_signature_in_order():
    entries = [*chain(20), *chain(2, first=30, state=True), *chain(1, first=40)]
    groups = list(grouped(entries))
    assert [len(group) for group in groups] == [16, 4, 2, 1]
    assert [entry.id for group in groups for entry in group] == [entry.id for entry in entries]


def test_no_owners_name_is_in_a_file(tmp_path):
    record = write_file(tmp_path, chain(1, owners=("default/alice", "", "default/alice")))
    assert b"alice" not in file_of(tmp_path, record).read_bytes()
    assert record.entries[0].owners == (owner_tag(KEY, "default/alice"), bytes(16))
    assert owner_tag(KEY, "default/alice") != owner_tag(b"k" * 32, "default/alice")


def test_a_tails_id_tells_parents_and_tokens_apart():
    ids = {tail_id(parent, tokens) for parent in (ROOT, MODEL) for tokens in ([1], [2], [1, 2], [2, 1], [0, 1])}
    assert len(ids) == 10


def test_all_who_need_the_key_first_agree_on_it(tmp_path):
    found: list[bytes] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(10)
        found.append(read_key(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(DiskError, match="5 bytes"):
        read_key(tmp_path)


def test_a_segment_appears_under_its_name_only_when_it_is_durable(tmp_path):
    names: list[tuple[str, str]] = []

    class Told(NoSync):
        def step(self, what: str, path: Path) -> None:
            names.append((what, path.suffix))

    write_file(tmp_path, chain(1), io=Told())
    assert names[-5:] == [
        ("write", ".tmp"),
        ("write", ".tmp"),
        ("sync", ".tmp"),
        ("rename", segments.FINISHED),
        ("sync folder", ""),
    ]
