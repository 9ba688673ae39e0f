"""Damaged, foreign and swapped segment files: a clean failure, never a wrong array."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.disk import segment_reader
from satchel.actors.kv_store.disk.segment_reader import EntryReader, read_entries
from satchel.actors.kv_store.disk.segments import model_folder
from satchel.actors.protocol.entries import Failure, Location
from satchel.cluster.errors import DiskError, InvalidRecord
from tests.worlds.kv_store.kv_files import KEY, OTHER_MODEL, chain, file_of, places, same, tail, write_file


def data_of(raw: bytes) -> int:
    """The bytes before the footer."""
    return len(raw) - 40 - int.from_bytes(raw[-8:], "little")


def test_no_flipped_byte_of_a_footer_passes(tmp_path):
    """Every byte, in turn: each entry is a clean failure, and no array comes out."""
    entries = [tail([7], 1), tail([8], 2)]
    record = write_file(tmp_path, entries)
    locations, path = places(record), file_of(tmp_path, record)
    good = path.read_bytes()
    for at in range(data_of(good), len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        read = read_entries(tmp_path, KEY, locations)
        assert all(isinstance(stored, Failure) and not stored.missing for stored in read), f"byte {at}"


def test_a_flipped_byte_of_the_data_costs_its_own_entry_only(tmp_path):
    entries = chain(4)
    record = write_file(tmp_path, entries)
    locations, path = places(record), file_of(tmp_path, record)
    good = path.read_bytes()
    end = data_of(good)
    rng = random.Random(5)
    for at in [0, end - 1, *rng.sample(range(end), 60)]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        read = read_entries(tmp_path, KEY, locations)
        failed = [slot for slot, stored in enumerate(read) if isinstance(stored, Failure)]
        assert len(failed) == 1, f"byte {at}"
        for stored, entry in zip(read, entries, strict=True):
            assert isinstance(stored, Failure) or same(stored.parts, entry.parts), f"byte {at}"


def test_a_file_cut_off_anywhere_or_longer_than_it_was_is_a_failure(tmp_path):
    record = write_file(tmp_path, chain(2))
    path = file_of(tmp_path, record)
    good = path.read_bytes()
    cuts = {*range(120), *range(0, len(good), 37), len(good) - 1}
    for data in [*(good[:cut] for cut in sorted(cuts)), good + b"\0", b"\xff" * 64, bytes(64)]:
        path.write_bytes(data)
        read = read_entries(tmp_path, KEY, places(record))
        assert all(isinstance(stored, Failure) for stored in read), f"{len(data)} bytes"


def test_a_file_cut_off_while_it_is_read_is_a_failure_of_what_it_lacks(tmp_path, monkeypatch):
    entries = chain(2)
    record = write_file(tmp_path, entries)
    footer = segment_reader.read_footer

    def late(path: Path, key: bytes) -> Any:
        found = footer(path, key)
        os.truncate(path, 2 * found.layout.nbytes - 1)
        return found

    monkeypatch.setattr(segment_reader, "read_footer", late)
    reader = EntryReader(tmp_path, KEY, places(record))
    assert not [run for run in reader.runs() if 1 in run.indexes] and 1 in reader.failures


def test_what_another_home_model_or_name_wrote_is_never_returned(tmp_path):
    """Shapes, tokens and arrays may be equal: only the identity differs."""
    entries = chain(2)
    record = write_file(tmp_path, entries)
    data = file_of(tmp_path, record).read_bytes()
    assert all(isinstance(stored, Failure) for stored in read_entries(tmp_path, b"k" * 32, places(record))), "key"
    moved = model_folder(tmp_path, OTHER_MODEL) / record.name
    moved.parent.mkdir()
    moved.write_bytes(data)
    elsewhere = [Location(**{**location.to_wire(), "model": OTHER_MODEL}) for location in places(record)]
    assert all(isinstance(stored, Failure) for stored in read_entries(tmp_path, KEY, elsewhere)), "model"
    renamed = file_of(tmp_path, record).with_name("s." + "0" * 32 + ".kv")
    renamed.write_bytes(data)
    elsewhere = [Location(**{**location.to_wire(), "name": renamed.name}) for location in places(record)]
    assert all(isinstance(stored, Failure) for stored in read_entries(tmp_path, KEY, elsewhere)), "name"


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 1},
        {"slot": -1},
        {"slot": 2},
        {"id": bytes(32)},
        {"digest": bytes(16)},
        {"parent": bytes(32)},
        {"tokens": b"1" * 1024},
        {"tail": True},
    ],
    ids=lambda change: "".join(change),
)
def test_a_location_must_fit_what_the_file_holds(tmp_path, change):
    first = places(write_file(tmp_path, chain(2)))[0]
    (stored,) = read_entries(tmp_path, KEY, [Location(**{**first.to_wire(), **change})])
    assert isinstance(stored, Failure)


@pytest.mark.parametrize("name", ["../../key", "/etc/passwd", "s.kv", "", "s." + "0" * 32 + ".tmp"])
def test_a_location_never_leads_out_of_its_folder(tmp_path, name):
    first = places(write_file(tmp_path, chain(1)))[0]
    with pytest.raises(InvalidRecord):
        read_entries(tmp_path, KEY, [Location(**{**first.to_wire(), "name": name})])


def test_missing_files_links_pipes_and_folders_are_failures_at_once(tmp_path):
    record = write_file(tmp_path, chain(1))
    path = file_of(tmp_path, record)
    other = tmp_path / "other"
    path.rename(other)
    (stored,) = read_entries(tmp_path, KEY, places(record))
    assert isinstance(stored, Failure) and stored.missing
    for make in (lambda: path.symlink_to(other), lambda: os.mkfifo(path), path.mkdir):
        make()
        (stored,) = read_entries(tmp_path, KEY, places(record))
        assert isinstance(stored, Failure) and not stored.missing
        path.rmdir() if path.is_dir() else path.unlink()


def test_too_many_open_files_is_no_fault_of_an_entry(tmp_path, monkeypatch):
    """It must not be reported as corrupt, or good entries would be dropped."""
    locations = places(write_file(tmp_path, chain(1)))

    def refuse(path: Path) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(segment_reader, "_open", refuse)
    with pytest.raises(DiskError):
        read_entries(tmp_path, KEY, locations)
