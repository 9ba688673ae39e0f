"""A store that is killed or fails anywhere: what was committed is there, and nothing else is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from satchel.actors.protocol.entries import Entry
from satchel.cluster.errors import DiskError, DiskFull
from tests.worlds.kv_store import kv_scenes
from tests.worlds.kv_store.kv_files import ROOT, Bench, Failing, NoSync, Photographed, chain, evict, payload, tail
from tests.worlds.kv_store.kv_scenes import ALICE, BOB, LONG, OPERATIONS, REPLACED, SHORT, found, no_orphans

copies, prepared = kv_scenes.copies, kv_scenes.prepared
"""Fixtures."""


@pytest.mark.parametrize("power_loss", [False, True], ids=["killed", "power loss"])
def test_a_store_killed_at_any_step_has_what_was_committed_and_nothing_else(tmp_path, power_loss):
    """Every step of every operation is a place to die; with a power loss what was not synced is lost, too."""
    root, pictures = tmp_path / "kv", tmp_path / "pictures"
    root.mkdir(mode=0o700)
    io = Photographed(root, pictures, power_loss=power_loss)
    bench = Bench(root, io)
    io.armed = True
    bench.open()
    states: list[tuple[str, set[bytes], set[bytes], bool]] = [("open", set(), set(), False)] * len(io.taken)
    before: set[bytes] = set()
    forgotten = False
    for name, operation in OPERATIONS:
        operation(bench)
        io.armed = False
        after = found(bench)
        states += [(name, before, after, forgotten)] * (len(io.taken) - len(states))
        before, forgotten, io.armed = after, forgotten or name == "forget", True
    io.armed = False
    bench.store.close()
    assert len(io.taken) > 60, "the matrix has shrunk"
    for (step, picture), (name, before, after, forgotten) in zip(io.taken, states, strict=True):
        where = f"{name}, before {step} ({picture.name})"
        survivor = Bench(picture, session="another")
        survivor.open()
        there = found(survivor)
        assert before & after <= there <= before | after, where
        assert there in (before, after) or name in ("forget", "evict", "compact"), f"{where}: half of it"
        no_orphans(survivor)
        survivor.store.check(payload=True)
        survivor.store.compact()
        if forgotten or name == "forget":
            # As her tombstone has it at every start. Her file may name her again.
            there -= set(survivor.store.forget("default/alice"))
            assert not any(payload(entry) in survivor.bytes_on_disk() for entry in ALICE), where
        assert found(survivor) == there
        survivor.put(chain(1, first=900))
        survivor.store.check()
        survivor.store.close()
        shutil.rmtree(picture)


def compact_what_died(bench: Bench) -> None:
    """With these all but one entry of a file are replaced, and that one is moved."""
    bench.put(REPLACED)
    bench.store.compact()


# With the fewest steps that each must have.


TRIED: list[tuple[str, Callable[[Bench], object], int]] = [
    ("commit", lambda bench: bench.put([LONG, tail([9, 9, 9], 700)]), 6),
    ("replace", lambda bench: bench.put([Entry(BOB[2].id, BOB[2].parent, BOB[2].tokens, BOB[2].parts)]), 5),
    ("forget", lambda bench: bench.store.forget("default/alice"), 6),
    ("evict", lambda bench: evict(bench.store, bench.store.stats()["bytes"] - 1), 2),
    ("compact", compact_what_died, 10),
]


@pytest.mark.parametrize(
    ("number", "forever"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["once", "from then on"]
)
@pytest.mark.parametrize(("name", "operation", "fewest"), TRIED, ids=[name for name, *_ in TRIED])
def test_a_disk_that_fails_at_any_step_costs_that_call_only(copy, name, operation, fewest, forever, number):
    """The error has a type, everything else is served meanwhile, and the call can be made again."""
    at = 0
    while True:
        bench = copy()
        io = Failing(-1, lambda: OSError(number, os.strerror(number)), forever=forever)
        bench.io = io
        bench.open()
        before = found(bench)
        io.at = len(io.steps) + at
        reached = len(io.steps)
        try:
            operation(bench)
        except DiskFull:
            assert number == errno.ENOSPC
        except DiskError:
            assert number == errno.EIO
        during = found(bench)
        assert during <= before | {LONG.id, BOB[2].id}
        if name not in ("evict", "forget"):
            assert before - {SHORT.id} <= during, f"step {at}: reading goes on"
        happened = len(io.steps) > reached + at
        io.at = 10**9
        io.forever = False
        operation(bench)
        bench.now += 1e6
        bench.store.compact()
        bench.now += 1e6
        bench.store.compact()
        bench.store.check(payload=True)
        no_orphans(bench)
        if not happened:
            break
        at += 1
    assert at >= fewest


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if shutil.which("mount")
        else None
    )
    if made is None or made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip() if made else 'no mount'}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def test_a_full_disk_is_an_error_that_keeps_serving(small_disk):
    bench = Bench(small_disk / "kv", io=NoSync())
    bench.open()
    kept: list[Entry] = []
    with pytest.raises(DiskFull):
        for number in range(1000):
            entry = chain(1, first=number, parent=ROOT, length=500)
            bench.put(entry)
            kept += entry
    assert len(kept) > 10 and bench.has(*kept)
    assert len(bench.files()) == len(kept), "what could not be committed is not left behind"
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(512))
    assert bench.has(*kept)
    with pytest.raises(DiskFull):
        bench.put(chain(1, first=5000))
    assert evict(bench.store, bench.store.stats()["bytes"] // 2)
    filler.unlink()
    bench.put(chain(1, first=5000))
    assert bench.has(*chain(1, first=5000))
    bench.store.check(payload=True)
    bench.open()
    bench.store.check(payload=True)
    bench.store.close()
