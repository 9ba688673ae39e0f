"""Arrays that pass between the CUDA cards of one machine without their hosts: a kernel of one card writes them into
memory that both processes share (`ring_memory.py`), and a kernel of the other waits there and reads them.

So a stage launches its work before its hidden states exist, and its host is never between two cards. Whether that works
is tried when a group is formed: the memory may be on another machine, or a system may not let devices have it. Then
arrays pass as between machines (`arrays.py`).
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from .....cluster.environment import rings_wanted
from .....cluster.errors import LinkError, LinkGarbage
from ...device.device import launched_as_numpy, on_cuda
from ...kernels.gpu_kernels import int_numbers, kernel, prepare
from .broken import in_words
from .ring_memory import (
    ARRAY_BYTES_MAX,
    BROKEN,
    BYTES,
    CHUNK_BYTES,
    FLAGS,
    HEAD_BYTES,
    NUMBERS,
    READ,
    Place,
    Places,
    RingMemory,
    Unread,
)

logger = logging.getLogger(__name__)

ROOM_S = 60.0
"""How long the other side may not read, before the connection counts as broken."""

LOOK_S = 1.0
"""How often it is looked at whether the device has failed, by a process that only launches."""

LATE_S = 2.0
"""How long what is in flight may take to come when a connection is closed."""

_ROOM_LOOK_S = 50e-6

_THREADS = 512

TRIES, _TRIES_OF_TRIAL = 100_000_000, 3_000_000
"""A device looks so many times at a flag, which takes it one or two microseconds each time: minutes, so that a group
ends even if its heartbeats cannot run, and seconds, so that a group is formed in time without rings."""

_TRIAL = (301, 1001)
"""The shape of what passes in a trial, of more chunks than groups, and no whole number of them."""

_RING, _READY, _SAME = "ring", "ready", "same"
"""Kinds of messages: how the shared memory is opened, and the card, None if there is none; whether the other side has
it; and whether what was read there is what was to be written."""

_DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.uint32)
"""What passes: the trial's, hidden states' and tokens'."""

_GROUPS = 64
"""So many groups of threads pass an array at most: what they have under way is many times what a bus needs, and while
they wait, other kernels have room, and looking at flags takes little of the bus."""

_TEMPLATE = [("CHUNK", CHUNK_BYTES), ("HEAD", HEAD_BYTES), ("FLAGS", FLAGS), ("THREADS", _THREADS), ("GROUPS", _GROUPS)]
_RECEIVE_TEMPLATE = [
    *_TEMPLATE,
    ("EACH", CHUNK_BYTES // 4 // _THREADS),
    ("READ", READ),
    ("BROKEN", BROKEN),
    ("NUMBERS", NUMBERS),
]
"""`EACH` is how many words a thread has of a chunk."""

_COMMON = """
  unsigned char* base = (unsigned char*)((unsigned long long)(unsigned)ring[1] << 32 | (unsigned)ring[0]);
  volatile unsigned* words = (volatile unsigned*)base;
  const unsigned number = place[0];
  const int all = size[0], chunks = (all + CHUNK - 1) / CHUNK;
"""

_EACH_CHUNK = """
  // A group has every so many-th chunk.
  for (int at = GROUP; at < chunks; at += GROUPS) {
    const unsigned chunk = place[1] + at;
    const int left = all - at * CHUNK, bytes = left < CHUNK ? left : CHUNK;
    unsigned char* there = base + HEAD + (unsigned long long)chunk * CHUNK;
"""

_SEND = (
    _COMMON
    + _EACH_CHUNK
    + """
    const unsigned char* from = (const unsigned char*)x + (unsigned long long)at * CHUNK;
    // A part of a larger array may begin within a word.
    const int whole = (unsigned long long)from & 3 ? 0 : bytes / 4;
    for (int i = THREAD; i < whole; i += THREADS) ((volatile unsigned*)there)[i] = ((const unsigned*)from)[i];
    for (int i = whole * 4 + THREAD; i < bytes; i += THREADS) ((volatile unsigned char*)there)[i] = from[i];
    SYNC();
    if (THREAD == 0) {
      // Behind the barrier it is for what all threads of the group have written.
      __threadfence_system();
      words[FLAGS + chunk] = number;
    }
  }
  if (GROUP == 0 && THREAD == 0) done[0] = 0;
"""
)

_RECEIVE = (
    _COMMON
    + """
  SHARED unsigned found;
  const bool trial = size[1] < 0;
  int tries = trial ? -size[1] : size[1];
  // All arrays before this one were read, by kernels before this one, or are not asked for. Each group says so,
  // because this one may only be put there then, and groups have no order.
  if (THREAD == 0) words[READ] = (number - 1) & (NUMBERS - 1);
"""
    + _EACH_CHUNK
    + """
    if (THREAD == 0) {
      unsigned seen = words[FLAGS + chunk];
      // Each look takes its way over the bus.
      for (; seen != number && tries && (tries & 63 || !words[BROKEN]); tries--) {
        __nanosleep(100);
        seen = words[FLAGS + chunk];
      }
      // What did not come must not look as if it had. From now on all work of this process on the device fails.
      if (seen != number && !trial) __trap();
      found = seen == number;
      __threadfence_system();
    }
    SYNC();
    const bool came = found;
    unsigned char* to = (unsigned char*)out + (unsigned long long)at * CHUNK;
    // All loads begin before the first of them has ended.
    unsigned taken[EACH];
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = j * THREADS + THREAD;
      taken[j] = came && i < bytes / 4 ? ((volatile unsigned*)there)[i] : 0;
    }
    #pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = j * THREADS + THREAD;
      if (i < bytes / 4) ((unsigned*)to)[i] = taken[j];
    }
    for (int i = bytes / 4 * 4 + THREAD; i < bytes; i += THREADS)
      to[i] = came ? ((volatile unsigned char*)there)[i] : 0;
    // All have seen what was found before the next chunk is looked for.
    SYNC();
  }
  if (GROUP == 0 && THREAD == 0) done[0] = 0;
"""
)


class Messages(Protocol):
    """What a trial needs of a connection."""

    def send(self, kind: str, *fields: Any) -> None: ...

    def expect(self, kind: str, until: float) -> Any: ...


class Sending:
    """The side that puts arrays into the ring. One thread puts them there.

    Attributes:
        failed: called with the reason, by another thread, if the device fails at what `send` has launched: the thread
            that launches may have nothing more to launch.
    """

    def __init__(self, memory: RingMemory, address: int) -> None:
        self._memory, self._address = memory, address
        self.failed: Callable[[str], object] = lambda why: None
        self._launched: mx.array | None = None
        self._closed = threading.Event()
        self._looks: threading.Thread | None = None
        self._places, self._unread = Places(), Unread()
        # Launches are one after another, in one graph too.
        self._order = _first()
        self._broken = False

    def send(self, array: mx.array) -> None:
        """Puts an array of any size there, and launches what computes it. Raises as `put`."""
        for part in _parts(array.size, array.dtype):
            done, _ = self.put(array if part.stop - part.start == array.size else array.reshape(-1)[part])
            mx.async_eval(done)
            if self._launched is None:
                # Another thread reads it, and MLX may move the memory of what it reads: so it is nobody else's. A later
                # failure is seen there too, because a device that has failed stays so.
                copy = done + 0
                mx.async_eval(copy)
                self._launched = copy
        if self._looks is None:
            self._looks = threading.Thread(target=self._look, name="the card that sends", daemon=True)
            self._looks.start()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            launched, self._launched = self._launched, None
            if launched is not None:
                try:
                    launched_as_numpy(launched)
                except Exception as error:
                    self.failed(in_words(error))
                    return

    def put(self, array: mx.array) -> tuple[mx.array, int]:
        """Returns what must be launched to put an array of at most `ARRAY_BYTES_MAX` there, and its number. Waits while
        there is no room.

        Raises:
            LinkError: the connection is broken, or the other side does not read.
        """
        place = self._places.next(array.nbytes)
        self._unread.drop(self._memory.was_read)
        self._await_room(self._unread.add(place))
        self._order = _launched_send(array, self._order, self._address, place)
        return self._order, place.number

    def forget(self, number: int) -> None:
        """Says that the other side will never ask for an array. Nobody waits until it has read it."""
        self._unread.forget(number)

    def _await_room(self, number: int) -> None:
        ends = time.monotonic() + ROOM_S
        while number and not self._memory.was_read(number):
            if self._broken:
                raise LinkError("the connection is closed")
            if time.monotonic() > ends:
                raise LinkError(f"the next stage reads nothing for {ROOM_S:g} s")
            time.sleep(_ROOM_LOOK_S)

    def break_off(self) -> None:
        """Ends a wait for room; from any thread."""
        self._broken = True

    def close(self) -> None:
        """Frees the memory, when nothing is launched any more."""
        self._closed.set()
        _release(self._memory)


class Receiving:
    """The side that takes arrays out of the ring. One thread takes them."""

    def __init__(self, memory: RingMemory, address: int) -> None:
        self._memory, self._address = memory, address
        self._places = Places()
        self._order = _first()

    def receive(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Returns what `send` puts there. Otherwise as `take`."""
        parts = [self.take((part.stop - part.start,), dtype) for part in _parts(math.prod(shape), dtype)]
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).reshape(shape)

    def take(
        self, shape: Sequence[int], dtype: mx.Dtype, number: int | None = None, *, trial: bool = False
    ) -> mx.array:
        """Returns the next array, which need not have been put there yet: the device waits for it. If it does not come,
        or after `break_off`, the device fails.

        Args:
            number: the array's, if some before it are not wanted; those have one chunk.
            trial: whether the device waits shortly, and takes zeros then.

        Raises:
            LinkError: the connection is broken.
        """
        if self._memory.is_broken:
            raise LinkError("the connection is closed")
        nbytes = math.prod(shape) * dtype.size
        place = self._places.next(nbytes) if number is None else self._places.at(number, nbytes)
        if number not in (None, place.number):
            raise LinkGarbage(f"array {number} of a ring comes after {place.number - 1}")
        out, self._order = _launched_receive(shape, dtype, self._order, self._address, place, trial)
        return out

    def break_off(self) -> None:
        """Ends the device's waits, by its failure; from any thread."""
        self._memory.break_off()

    def close(self) -> None:
        """Frees the memory, when nothing is launched any more. What is in flight comes if the group ended in order, so
        it is waited for: a device that fails could end the process before it has said why it ends."""
        late = threading.Timer(LATE_S, self.break_off)
        late.daemon = True
        late.start()
        _release(self._memory)
        late.cancel()
        self.break_off()


def _first() -> mx.array:
    """Returns what the first launch comes after; any thread may launch it."""
    order = mx.zeros(1, mx.uint32)
    mx.eval(order)
    return order


def _parts(size: int, dtype: mx.Dtype) -> list[slice]:
    """Returns the parts in which an array of so many numbers passes."""
    most = ARRAY_BYTES_MAX // dtype.size
    return [slice(start, min(start + most, size)) for start in range(0, size, most)]


class Offer:
    """A ring that is offered to the other side, into which this one puts arrays. `answer` is its part.

    Args:
        until: monotonic seconds, by which the other side must answer.
    """

    def __init__(self, connection: Messages, until: float) -> None:
        self._connection, self._until = connection, until
        self._offered = ExitStack()
        self._memory: RingMemory | None = None
        found: tuple[tuple[int, int, bytes], bytes] | None = None
        if _may_have():
            with _reported("the ring to the next stage"):
                card = _card()
                self._memory, where = self._offered.enter_context(RingMemory.offered())
                for dtype in _DTYPES:
                    prepare(_sends(), _TEMPLATE, [*_TOLD, dtype, mx.uint32], [mx.uint32])
                found = where, card
        connection.send(_RING, found)

    def tried(self) -> Sending | None:
        """Waits for the answer, and tries the ring. Returns None if arrays cannot pass through it.

        Raises:
            LinkError: the connection breaks.
        """
        with self._offered:
            has, memory = self._connection.expect(_READY, self._until), self._memory
        if memory is None or not has:
            if memory is not None:
                logger.info("the ring to the next stage is not used: the other process says why")
            return None
        sending, there = None, False
        with _reported("the ring to the next stage"):
            sending = Sending(memory, _registered(memory))
            mx.eval(sending.put(_trial())[0])
            there = True
        if not there:
            # Nothing comes, so the other device need not wait until it gives up.
            memory.break_off()
        if self._connection.expect(_SAME, self._until) and there:
            logger.info("this card passes arrays to another process's card")
            return sending
        if there:
            logger.info("the ring to the next stage is not used: the other process did not get what was put there")
        if sending is not None:
            sending.close()
        return None


def answer(connection: Messages, until: float) -> Receiving | None:
    """The other side of an `Offer`. Its device mostly waits before anything is put there, as it will later.

    Raises:
        LinkError: the connection breaks.
    """
    found, receiving, came = connection.expect(_RING, until), None, None
    if not found and on_cuda():
        logger.info("the ring of the stage before is not used: that process offers none, and says why")
    if found and _may_have():
        with _reported("the ring of the stage before"):
            where, card = found
            if card == _card():
                # It would compute nothing while it waits for itself.
                raise ValueError("it is the same card's")
            for dtype in _DTYPES:
                prepare(_receives(), _RECEIVE_TEMPLATE, [*_TOLD, mx.uint32], [dtype, mx.uint32])
            memory = RingMemory.open(*where)
            receiving = Receiving(memory, _registered(memory))
    connection.send(_READY, receiving is not None)
    if receiving is None:
        return None
    same = False
    with _reported("the ring of the stage before"):
        came = receiving.take(_TRIAL, mx.float32, trial=True)
        mx.eval(came)
        same = bool(mx.array_equal(came, _trial()))
    connection.send(_SAME, same)
    if same:
        logger.info("this card takes arrays from another process's card")
        return receiving
    if came is not None:
        logger.info("the ring of the stage before is not used: not what was to come was there, or nothing in time")
    receiving.close()
    return None


def _may_have() -> bool:
    cuda, wanted = on_cuda(), rings_wanted()
    if cuda and not wanted:
        logger.info("rings are not used: SATCHEL_RINGS is 0")
    return cuda and wanted


def _trial() -> mx.array:
    return mx.arange(math.prod(_TRIAL), dtype=mx.float32).reshape(_TRIAL)


@contextmanager
def _reported(what: str):
    """A context in which something may fail that the group can do without."""
    try:
        yield
    except Exception as error:
        logger.info("%s is not used: %s", what, error)


def _launched_send(array: mx.array, order: mx.array, address: int, place: Place) -> mx.array:
    """Returns zeros `(1,)`, which are computed once the array is in its place."""
    (done,) = _sends()(
        inputs=[*_told(address, place, array.nbytes), array, order],
        template=_TEMPLATE,
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
        **_threads(place),
    )
    return done


def _launched_receive(
    shape: Sequence[int], dtype: mx.Dtype, order: mx.array, address: int, place: Place, trial: bool
) -> tuple[mx.array, mx.array]:
    """Returns the array that is in a place, and zeros `(1,)`."""
    tries = -_TRIES_OF_TRIAL if trial else TRIES
    out, done = _receives()(
        inputs=[*_told(address, place, math.prod(shape) * dtype.size, tries), order],
        template=_RECEIVE_TEMPLATE,
        output_shapes=[tuple(shape), (1,)],
        output_dtypes=[dtype, mx.uint32],
        **_threads(place),
    )
    return out, done


def _sends() -> Callable[..., list[mx.array]]:
    return kernel("ring_send", (*_TOLD_NAMES, "x", "order"), ("done",), _SEND, (_THREADS, 2))


def _receives() -> Callable[..., list[mx.array]]:
    return kernel("ring_receive", (*_TOLD_NAMES, "order"), ("out", "done"), _RECEIVE, (_THREADS, 2))


_TOLD_NAMES, _TOLD = ("ring", "place", "size"), [mx.int32] * 3
"""What kernels are told, and its dtypes: where the ring is, the array's number and first chunk, and its bytes, and how
often to look for it, negative in a trial."""


def _told(address: int, place: Place, *size: int) -> list[mx.array]:
    # MLX has arrays of eight bytes where both the host and the device reach them. Larger ones move, which takes longer
    # than an array needs to pass.
    return [_ring_at(address), mx.array([place.number % NUMBERS, place.first], mx.int32), int_numbers(*size)]


@cache
def _ring_at(address: int) -> mx.array:
    words = [address & 0xFFFFFFFF, address >> 32]
    return mx.array([word - 2**32 if word >= 2**31 else word for word in words], mx.int32)


def _threads(place: Place) -> dict[str, tuple[int, int, int]]:
    return {"grid": (min(place.chunks, _GROUPS) * _THREADS, 1, 1), "threadgroup": (_THREADS, 1, 1)}


_PORTABLE, _DEVICE_MAP = 1, 2


def _registered(memory: RingMemory) -> int:
    """Lets the device have the memory. Returns where it is for the device.

    Raises:
        OSError: there is no driver.
        RuntimeError: the driver refuses.
    """
    address = ctypes.c_uint64()
    with _context():
        _call("cuMemHostRegister_v2", ctypes.c_void_p(memory.address), ctypes.c_size_t(BYTES), _PORTABLE | _DEVICE_MAP)
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), ctypes.c_void_p(memory.address), 0)
    return address.value


def _release(memory: RingMemory) -> None:
    with _reported("memory of a ring"), _context():
        # Kernels may still look at it.
        _call("cuCtxSynchronize")
        _call("cuMemHostUnregister", ctypes.c_void_p(memory.address))


def _card() -> bytes:
    """Returns the UUID of the only card that this process sees. Raises as `_registered`."""
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDeviceGetUuid_v2", uuid, device)
    return uuid.raw


@contextmanager
def _context():
    """The context of the only card that this process sees, on this thread."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", 0)


def _call(function: str, *arguments: Any) -> None:
    if failed := getattr(_driver(), function)(*arguments):
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(failed, ctypes.byref(name))
        raise RuntimeError(f"CUDA's {function} gave error {failed}, {(name.value or b'unknown').decode()}")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    # MLX has done so if it has computed.
    driver.cuInit(0)
    return driver
