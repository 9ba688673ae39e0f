"""Both sides of a ring find arrays at the same places, and none is overwritten before it was read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.replica.group.link.ring_memory import (
    ARRAY_BYTES_MAX,
    BYTES,
    CHUNK_BYTES,
    CHUNKS,
    NUMBERS,
    Places,
    RingMemory,
    Unread,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only CUDA's machines have rings, which run Linux")


def test_arrays_that_may_not_have_been_read_never_overlap():
    random.seed(1)
    places, other, unread = Places(), Places(), Unread()
    there: dict[int, set[int]] = {}
    read = 0
    for _ in range(5000):
        nbytes = random.choice([1, 8192, CHUNK_BYTES, CHUNK_BYTES + 1, 2**24, ARRAY_BYTES_MAX])
        place = places.next(nbytes)
        assert place == other.next(nbytes) and place.chunks * CHUNK_BYTES >= nbytes
        read = max(read, unread.add(place))
        for number in [each for each in there if each <= read]:
            del there[number]
        chunks = set(range(place.first, place.first + place.chunks))
        assert max(chunks) < CHUNKS and all(chunks.isdisjoint(each) for each in there.values())
        there[place.number] = chunks
        assert read < place.number, "an array that is only now written need not be read before"


def test_the_one_before_never_has_to_be_read_for_half_a_ring_or_less():
    """Its number is only written once the next one is read."""
    places, unread = Places(), Unread()
    for nbytes in (ARRAY_BYTES_MAX, ARRAY_BYTES_MAX, CHUNK_BYTES, CHUNK_BYTES):
        assert unread.add(places.next(nbytes)) < places.next(1).number - 1 or nbytes == ARRAY_BYTES_MAX


def test_arrays_that_nobody_wants_are_skipped():
    places, wanted = Places(), Places()
    found = [places.next(4) for _ in range(9)]
    assert [wanted.at(number, 4) for number in (1, 2, 5, 9)] == [found[0], found[1], found[4], found[8]]
    assert wanted.at(3, 4).number == 10


def test_only_what_is_asked_for_and_was_not_read_is_waited_for():
    """And only that is looked at for each array: else a full ring would take a third of a millisecond each time."""
    places, unread = Places(), Unread()
    for number in range(1, 3 * CHUNKS):
        assert unread.add(places.next(4)) == 0
        unread.forget(number) if number % 3 else unread.drop(lambda each, read=number: each < read)
        assert len(unread._places) <= 3
    wanted = places.next(4)
    unread.add(wanted)
    unread.drop(lambda number: number < wanted.number)
    needed = [unread.add(places.next(ARRAY_BYTES_MAX)) for _ in range(2)]
    assert max(needed) == wanted.number


def test_two_processes_see_the_same_memory():
    program = (
        "import sys; from satchel.actors.replica.group.link.ring_memory import RingMemory\n"
        "memory = RingMemory.open(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]))\n"
        "memory.bytes[-1] = 7; memory.break_off()"
    )
    with RingMemory.offered() as (memory, (process, descriptor, token)):
        assert not memory.is_broken
        subprocess.run([sys.executable, "-c", program, str(process), str(descriptor), token.hex()], check=True)
    assert memory.bytes[-1] == 7 and memory.is_broken


def test_what_was_not_offered_here_is_refused(tmp_path: Path):
    with RingMemory.offered() as (_, (process, descriptor, token)), (tmp_path / "large").open("wb+") as other:
        other.truncate(BYTES)
        found = os.open(tmp_path / "large", os.O_RDWR)
        wrong: list[Any] = [
            (process, descriptor, bytes(16)),
            (process, found, token),
            (process, 0, token),
            (process, 10**6, token),
            (2**31, descriptor, token),
            (process, "../exe", token),
            (process,),
        ]
        for given in wrong:
            with pytest.raises((OSError, TypeError, ValueError)):
                RingMemory.open(*given)
        os.close(found)
    with pytest.raises(OSError):
        RingMemory.open(process, descriptor, token)


def test_no_room_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"), RingMemory.offered():
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_numbers_begin_anew():
    with RingMemory.offered() as (memory, _):
        words = memory.bytes[:4].view("u4")
    for read, number, was_read in [(0, 1, False), (1, 1, True), (5, 3, True), (3, 5, False)]:
        words[0] = read
        assert memory.was_read(number) is was_read
    words[0] = 2
    assert memory.was_read(NUMBERS - 3) and memory.was_read(NUMBERS + 2) and not memory.was_read(NUMBERS + 3)
