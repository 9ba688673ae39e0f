"""Digests of files: every byte counts, is read once, and is read again where anything may have changed."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.identity import digests
from satchel.actors.model_files.identity.digests import FileDigest, check_unchanged, digest_files, digests_meanwhile
from satchel.cluster.errors import ModelLoadError


class Reader:
    """Digests files as processes of one home do, and counts the pieces that are read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept = folder / "home" / "digests.json"
        self.pieces = 0
        self.later_s = 60.0
        hash_piece = digests._hash_piece

        def counted(*arguments: object) -> bytes:
            self.pieces += 1
            return hash_piece(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(digests, "_hash_piece", counted)
        monkeypatch.setattr(digests, "PIECE_BYTES", 1000)

    def read(self, *paths: Path, kept: Path | None = None) -> list[FileDigest]:
        found = digest_files(
            {str(number): path for number, path in enumerate(paths)},
            kept or self.kept,
            lambda fraction: None,
            lambda: time.time_ns() + int(self.later_s * 1e9),
        )
        return list(found.values())

    def digests(self, *paths: Path) -> list[bytes]:
        return [each.digest for each in self.read(*paths)]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(250)) * 10)
    return path


def test_every_byte_and_the_length_count(reader: Reader, file: Path):
    """Whatever byte is changed, wherever pieces end, and where only zeros are added."""
    data = file.read_bytes()
    found = {reader.digests(file)[0]}
    for place in (0, 1, 999, 1000, 1001, 1250, 1999, 2000, 2498, 2499):
        changed = bytearray(data)
        changed[place] ^= 1
        file.write_bytes(changed)
        found.add(reader.digests(file)[0])
    for other in (data + b"\0", data[:-1], b"", b"\0"):
        file.write_bytes(other)
        found.add(reader.digests(file)[0])
    assert len(found) == 15


def test_a_file_is_read_once(reader: Reader, file: Path, tmp_path: Path):
    """By whatever link it is reached, in this process or another; a copy is another file."""
    blob = tmp_path / "snapshot" / "link"
    blob.parent.mkdir()
    blob.symlink_to(file)
    first = reader.digests(file)
    assert reader.pieces == 3
    assert reader.digests(blob, file) == first * 2 and reader.pieces == 3
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    assert reader.digests(copy) == first and reader.pieces == 6


def test_a_link_that_points_elsewhere_is_another_file(reader: Reader, file: Path, tmp_path: Path):
    """As when a snapshot of the Hub's cache is brought up to date."""
    link, other = tmp_path / "link", tmp_path / "other"
    other.write_bytes(b"other")
    link.symlink_to(file)
    before = reader.digests(link)
    link.unlink()
    link.symlink_to(other)
    assert reader.digests(link) == reader.digests(other) != before


def test_the_name_of_a_blob_is_not_believed(reader: Reader, file: Path, tmp_path: Path):
    """The Hub's cache calls a blob by its SHA-256; what is in it may be something else."""
    one, two = tmp_path / "a" / ("e3" * 32), tmp_path / "b" / ("e3" * 32)
    for path, data in ((one, b"what it says"), (two, b"what it hides")):
        path.parent.mkdir()
        path.write_bytes(data)
    assert len(set(reader.digests(one, two))) == 2


def test_a_changed_file_of_the_same_size_and_times_is_read_again(reader: Reader, file: Path):
    """As tools leave it that write in place and set the time back: its inode changed all the same."""
    before, times = reader.digests(file), file.stat()
    changed = bytearray(file.read_bytes())
    changed[1250] ^= 1
    with file.open("r+b") as opened:
        opened.write(changed)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    now = file.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (times.st_ino, times.st_size, times.st_mtime_ns)
    assert reader.digests(file) != before


def test_a_file_that_was_just_written_is_read_again(reader: Reader, file: Path):
    """It may be written once more within one tick of its file system's clock, and nothing would show it."""
    reader.later_s = 0.0
    reader.digests(file)
    reader.digests(file)
    assert reader.pieces == 6
    reader.later_s = 60.0
    reader.digests(file)
    reader.digests(file)
    assert reader.pieces == 9


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_while_it_is_read_has_no_digest(
    reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
):
    """No digest of half the old and half the new bytes, and nothing is kept."""
    hash_piece, done = digests._hash_piece, threading.Event()

    def slowly(path: Path, descriptor: int, start: int, end: int) -> bytes:
        piece = hash_piece(path, descriptor, start, end)
        if not done.is_set():
            done.set()
            time.sleep(0.02)
            with file.open("r+b") as opened:
                if grows:
                    opened.seek(0, os.SEEK_END)
                    opened.write(b"more")
                else:
                    opened.truncate(1500)
        return piece

    monkeypatch.setattr(digests, "_hash_piece", slowly)
    with pytest.raises(ModelLoadError, match="is being changed") as error:
        reader.read(file)
    assert str(file) in error.value.message
    assert not reader.kept.exists()


def test_a_file_that_changes_while_it_is_loaded_is_seen(reader: Reader, file: Path, tmp_path: Path):
    """Also one that takes its place."""
    paths = {"w": file}
    found = digest_files(paths, reader.kept, lambda fraction: None)
    check_unchanged(found, paths)
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    other.replace(file)
    with pytest.raises(ModelLoadError, match="is being changed"):
        check_unchanged(found, paths)
    file.unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        check_unchanged(found, paths)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 1, "files": []}',
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": {"PATH": null}}',
        b'{"version": 1, "files": {"PATH": [1, 2, 3, 4, "00"]}}',
        b'{"version": 1, "files": {"PATH": {"digest": 1}}}',
    ],
)
def test_a_damaged_file_of_digests_costs_reading_again(reader: Reader, file: Path, damage: bytes):
    before = reader.digests(file)
    reader.kept.write_bytes(damage.replace(b"PATH", str(file).encode()))
    assert reader.digests(file) == before and reader.pieces == 6
    assert reader.digests(file) == before and reader.pieces == 6, "it is whole again"


def test_a_digest_that_is_none_is_not_believed(reader: Reader, file: Path):
    """Its length is right, and the facts are those of the file."""
    before = reader.digests(file)
    data = json.loads(reader.kept.read_text())
    data["files"][str(file)][4] = "zz" * 32
    reader.kept.write_text(json.dumps(data))
    assert reader.digests(file) == before and reader.pieces == 6


def test_a_home_that_cannot_be_written_costs_reading_again(reader: Reader, file: Path, tmp_path: Path):
    """Nobody may write through a file that is in the place of the home's folder, not even root."""
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"")
    first = reader.read(file, kept=blocked / "digests.json")
    assert reader.read(file, kept=blocked / "digests.json") == first
    assert reader.pieces == 6
    assert not list(tmp_path.glob("*.tmp"))


def test_only_so_many_files_are_known_and_those_met_last_stay(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(digests, "FILES_MAX", 3)
    files = [tmp_path / str(number) for number in range(5)]
    for path in files:
        path.write_bytes(b"x")
        reader.digests(files[0], path)
    assert list(json.loads(reader.kept.read_text())["files"]) == [str(files[3]), str(files[0]), str(files[4])]
    assert [path.name for path in reader.kept.parent.iterdir() if path.suffix == ".json"] == ["digests.json"]
    assert reader.kept.stat().st_mode & 0o777 == 0o600


def test_two_that_start_together_read_once(reader: Reader, file: Path):
    """As two replicas of one model on one node do; the second waits, and finds what the first has kept."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: reader.digests(file), range(4)))
    assert len({digest for each in found for digest in each}) == 1
    assert reader.pieces == 3


def test_whoever_reads_for_ever_does_not_stop_others(reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing waits for ever: after its time the files are read beside it."""
    monkeypatch.setattr(digests, "LOCK_WAIT_S", 0.2)
    with digests._alone(reader.kept):
        assert reader.digests(file)


def test_reading_much_is_shown(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In fractions that grow to 1; little is read before anybody looks."""
    monkeypatch.setattr(digests, "PIECE_BYTES", 1000)
    shown: list[float] = []
    digest_files({"a": file}, None, shown.append)
    assert shown == []
    monkeypatch.setattr(digests, "SHOWN_BYTES_MIN", 1)
    digest_files({"a": file, "b": file}, None, shown.append)
    assert shown == [0.2, 0.4, 0.5, 0.7, 0.9, 1.0]


def test_files_are_hashed_while_they_are_loaded(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """How far that is is shown once somebody waits for it."""
    paths, shown, go = {"w": file}, [], threading.Event()
    hash_piece = digests._hash_piece
    monkeypatch.setattr(digests, "_hash_piece", lambda *given: (go.wait(), hash_piece(*given))[1])
    monkeypatch.setattr(digests, "SHOWN_EVERY_S", 0.01)

    def show(fraction: float) -> None:
        shown.append(fraction)
        go.set()

    with digests_meanwhile(paths, None, show) as digests_of:
        assert not shown, "nobody waits"
        found = digests_of()
    assert set(shown) == {0.0}
    assert found == digest_files(paths, None, shown.append)


def test_a_file_that_changes_before_it_is_hashed_is_seen(file: Path, monkeypatch: pytest.MonkeyPatch):
    """It may have been loaded already."""

    def late(*given: Any) -> Any:
        file.write_bytes(b"other")
        return digest_files(*given)

    monkeypatch.setattr(digests, "digest_files", late)
    with pytest.raises(ModelLoadError, match="is being changed"), digests_meanwhile({"w": file}, None, print) as found:
        found()


def test_hashing_ends_with_a_load_that_fails(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    large = tmp_path / "large"
    large.write_bytes(bytes(100_000))
    monkeypatch.setattr(digests, "SHOWN_BYTES_MIN", 1)
    monkeypatch.setattr(digests, "THREADS_MAX", 1)
    hash_piece = digests._hash_piece
    monkeypatch.setattr(digests, "_hash_piece", lambda *given: (time.sleep(0.02), hash_piece(*given))[1])
    with pytest.raises(ModelLoadError, match="no room"), digests_meanwhile({"w": large}, None, print):
        raise ModelLoadError("no room")
    assert reader.pieces < 50, "of a hundred"


@pytest.mark.parametrize("what", ["nothing", "folder", "loop"])
def test_what_cannot_be_read_is_named(reader: Reader, tmp_path: Path, what: str):
    path = tmp_path / "weights"
    if what == "folder":
        path.mkdir()
    if what == "loop":
        path.symlink_to(path)
    with pytest.raises(ModelLoadError, match="cannot be read") as error:
        reader.read(path)
    assert str(path) in error.value.message
