"""Memory that two processes of one machine share. One's device puts arrays into it, the other's takes them out.

The memory is a ring of chunks. An array takes chunks that follow each other, and each chunk has a flag: the number of
the array that was put there last. Both sides count the arrays, so both know where each one is.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

CHUNK_BYTES, CHUNKS = 2**14, 2**12

ARRAY_BYTES_MAX = CHUNK_BYTES * CHUNKS // 2
"""Half of the ring, so that an array can be put there while the one before is read."""

READ, BROKEN, TOKEN, FLAGS = 0, 64, 128, 1024
"""Where words of four bytes are: up to which array all were read, whether the side that reads waits no more, by what
the memory is recognized, and the first chunk's flag. What two devices write is far from each other."""

TOKEN_BYTES = 16

HEAD_BYTES = 4 * (FLAGS + CHUNKS)
BYTES = HEAD_BYTES + CHUNK_BYTES * CHUNKS

NUMBERS = 2**30
"""Numbers of arrays begin anew behind this one."""


class Place(NamedTuple):
    """Where an array is.

    Attributes:
        number: of the array, from 1 on.
        first, chunks: its first chunk, and how many it has.
    """

    number: int
    first: int
    chunks: int


class Places:
    """Finds arrays' places. Pure."""

    def __init__(self) -> None:
        self._number = self._next = 0

    def next(self, nbytes: int) -> Place:
        """Returns the place of the next array, of 1 to `ARRAY_BYTES_MAX` bytes."""
        chunks = -(-nbytes // CHUNK_BYTES)
        if self._next + chunks > CHUNKS:
            self._next = 0
        self._number += 1
        place = Place(self._number, self._next, chunks)
        self._next = (self._next + chunks) % CHUNKS
        return place

    def at(self, number: int, nbytes: int) -> Place:
        """Returns the place of an array of this number; those before it that were not asked for have one chunk."""
        while self._number + 1 < number:
            self.next(1)
        return self.next(nbytes)


class Unread:
    """The places of arrays that may not have been read yet. Pure."""

    def __init__(self) -> None:
        self._places: deque[Place] = deque()

    def add(self, place: Place) -> int:
        """Adds a place. Returns the number of the last array that has to be read before it can be written; 0 if none
        is there."""
        needed = 0
        while self._places and self._covers(place):
            needed = self._places.popleft().number
        self._places.append(place)
        return needed

    def drop(self, was_read: Callable[[int], bool]) -> None:
        """Drops those that were read, by their numbers, which are read in order: so few are left to be looked at."""
        while self._places and was_read(self._places[0].number):
            self._places.popleft()

    def forget(self, number: int) -> None:
        """Drops an array that nobody will ask for."""
        self._places = deque(place for place in self._places if place.number != number)

    def _covers(self, place: Place) -> bool:
        """Whether an array that is still there overlaps `place`."""
        return any(
            each.first < place.first + place.chunks and place.first < each.first + each.chunks for each in self._places
        )


class RingMemory:
    """The shared memory, as one of the processes sees it. Linux only.

    Args:
        descriptor: of the memory.

    Attributes:
        address: where it is in this process.
        bytes: all of it, `(BYTES,) uint8`.
        token: the part by which it is recognized.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, BYTES)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self._words = self.bytes[:HEAD_BYTES].view(np.uint32)
        self.token = self.bytes[4 * TOKEN : 4 * TOKEN + TOKEN_BYTES]
        self.address = int(self.bytes.ctypes.data)

    @classmethod
    @contextmanager
    def offered(cls) -> Iterator[tuple[RingMemory, tuple[int, int, bytes]]]:
        """A context in which another process of this machine and user can open new memory, of zeros.

        Yields:
            It, and the arguments of `open`.

        Raises:
            OSError: there is no room for it.
        """
        descriptor = os.memfd_create("satchel-ring", os.MFD_CLOEXEC)
        try:
            # Without it, writing would end the process if there is no room.
            os.posix_fallocate(descriptor, 0, BYTES)
            memory, token = cls(descriptor), secrets.token_bytes(TOKEN_BYTES)
            memory.token[:] = np.frombuffer(token, np.uint8)
            yield memory, (os.getpid(), descriptor, token)
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, process: int, descriptor: int, token: bytes) -> RingMemory:
        """Opens memory that another process offers.

        Args:
            process, descriptor: the number of that process, and of the memory there.
            token: what is written in it.

        Raises:
            OSError: it is not on this machine.
        """
        found = os.open(f"/proc/{process:d}/fd/{descriptor:d}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            is_memory = stat.S_ISREG((state := os.fstat(found)).st_mode) and state.st_size == BYTES
            # Another machine has other processes of these numbers.
            if not is_memory or bytes((memory := cls(found)).token) != token:
                raise OSError(errno.ENOENT, "the other process is on another machine")
            return memory
        finally:
            os.close(found)

    @property
    def is_broken(self) -> bool:
        """Whether `break_off` was called."""
        return bool(self._words[BROKEN])

    def break_off(self) -> None:
        """Ends the waits of the device that reads; from any thread. Only the side that reads calls it, once it knows
        why, and the other one in a trial."""
        self._words[BROKEN] = 1

    def was_read(self, number: int) -> bool:
        """Whether an array was read, or is not asked for any more."""
        return (int(self._words[READ]) - number) % NUMBERS < NUMBERS // 2
