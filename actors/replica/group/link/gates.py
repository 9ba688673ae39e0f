"""Arrays that come over a network to a device which waits for them: a step is launched before its inputs have come.

A gate is a kernel that waits for a number in memory of the host, then copies what lies behind it. What is launched with
the copy is computed once a thread of the host has written the array and then the number. No launch and no wait of the
thread that computes lies between an array's arrival and its use. If the array does not come, the device fails, so that
nobody reads what was launched with it.

Only on CUDA, whose kernels read memory of the host that is locked in its place, and see what is written there while
they run. Whether they do is tried first (`why_not`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ...device.device import launched_as_numpy, size_class
from ...kernels import gpu_kernels
from . import locked
from .arrays import Plain
from .locked import WORD, place_of

logger = logging.getLogger(__name__)

GATES = 8
"""So many arrays may be awaited at once; who awaits more waits for the first of them to be used."""

BYTES_MAX = 2**21
"""Larger arrays are prompts' hidden states; nothing is launched before those have come."""

WAIT_S = 600.0
"""A device that has waited for so long fails. Watchdogs end the process long before."""

THREADS = 1024

GIVEN_UP = 2**31 - 1
"""Stands for the number of an array that does not come."""

_HEAD = 4
"""Words before an array: the number, and what makes the array begin at a multiple of 16 bytes."""

PTX = """
  #define ACQUIRE(x, from) asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory")
  #define LOAD(x, from) asm volatile("ld.volatile.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory")
  #define LOAD_FOUR(a, b, c, d, from) \\
    asm volatile("ld.volatile.v4.u32 {%0, %1, %2, %3}, [%4];" \\
        : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from) : "memory")
  #define NOW(nanoseconds) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds))
  #define PAUSE() asm volatile("nanosleep.u32 100;")
  #define FAIL() asm volatile("trap;")
"""
"""What the kernel needs of the device. The loads pass no cache that the host's writes do not reach."""

_BODY = """
  const unsigned* memory = (const unsigned*)((unsigned long long)place[0] | ((unsigned long long)place[1] << 32));
  if (THREAD == 0) {
    unsigned number;
    unsigned long long began, now;
    NOW(began);
    while (true) {
      ACQUIRE(number, memory);
      if (number == turn[0]) break;
      PAUSE();
      NOW(now);
      if (number == GIVEN_UP || now - began > how[1] * 1000000ull) {
        if (how[2]) FAIL();
        break;
      }
    }
  }
  SYNC();
  const int words = how[0], whole = words / 4;
  const unsigned* came = memory + HEAD;
  for (int at = THREAD; at < whole; at += THREADS) {
    unsigned a, b, c, d;
    LOAD_FOUR(a, b, c, d, came + 4 * at);
    out[4 * at] = a;
    out[4 * at + 1] = b;
    out[4 * at + 2] = c;
    out[4 * at + 3] = d;
  }
  if (THREAD < words % 4) {
    unsigned word;
    LOAD(word, came + 4 * whole + THREAD);
    out[4 * whole + THREAD] = word;
  }
"""


def wait_and_copy(place: mx.array, turn: int, words: int, *, wait_s: float, fails: bool = True) -> mx.array:
    """Returns the array of `words` words in memory of the host, `(words,) uint32`, once the number before it is `turn`.

    Args:
        place: as `place_of`.
        fails: whether the device fails if that takes over `wait_s`, or if the number is `GIVEN_UP`; if not, it takes
            what is there.
    """
    (out,) = gpu_kernels.kernel("gate", ("place", "turn", "how"), ("out",), PTX + _BODY)(
        inputs=[place, mx.array([turn], mx.uint32), gpu_kernels.int_numbers(words, int(1000 * wait_s), fails)],
        template=[("THREADS", THREADS), ("GIVEN_UP", GIVEN_UP), ("HEAD", _HEAD)],
        grid=(THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(words,)],
        output_dtypes=[mx.uint32],
    )
    return out


@dataclass
class _Gate:
    """A place for one array at a time.

    Attributes:
        memory: of the host: the number of the array that is there, and from `_HEAD` on the array.
        place: its address, for `wait_and_copy`.
        turn: the number of the array for which the device waits now.
        copy: of that array; None before the first.
    """

    memory: np.ndarray
    place: mx.array = field(init=False)
    turn: int = 0
    copy: mx.array | None = None
    order: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.place = place_of(self.memory)

    @classmethod
    def of(cls, nbytes: int) -> _Gate:
        return cls(locked.locked_memory(_HEAD + size_class(-(-nbytes // WORD))))

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes - _HEAD * WORD


class Awaited:
    """An array that comes later.

    Args:
        gate: where it comes in this `turn`.
    """

    def __init__(self, gate: _Gate, turn: int, shape: Sequence[int], dtype: mx.Dtype) -> None:
        self._gate, self._turn, self._shape, self._dtype = gate, turn, shape, dtype
        self._nbytes = math.prod(shape) * dtype.size

    def give(self, plain: Plain | None) -> None:
        """Opens the gate, from any thread.

        Args:
            plain: the array; None if it does not come.
        """
        gate = self._gate
        if plain is not None:
            gate.memory[_HEAD : _HEAD + len(plain.data) // WORD] = plain.data.view(np.uint32)
        # The array must be in memory before the number is, whatever the processor reorders.
        with gate.order:
            gate.memory[0] = GIVEN_UP if plain is None else self._turn

    def array(self, *, wait_s: float = WAIT_S, fails: bool = True) -> mx.array:
        """Returns the array. What is computed with it waits on the device. Arguments as for `wait_and_copy`."""
        gate, words = self._gate, self._nbytes // WORD
        gate.copy = wait_and_copy(gate.place, self._turn, words, wait_s=wait_s, fails=fails)
        return gate.copy.view(self._dtype).reshape(self._shape)


class Gates:
    """The gates of one connection. Used on the thread that computes."""

    def __init__(self) -> None:
        self._gates: deque[_Gate] = deque()

    def await_one(self, shape: Sequence[int], dtype: mx.Dtype) -> Awaited | None:
        """Returns an array that comes later; None if such arrays are not awaited. Waits until a gate is free."""
        nbytes = math.prod(shape) * dtype.size
        if nbytes > BYTES_MAX or nbytes % WORD:
            return None
        gate = self._free(nbytes)
        gate.turn = (gate.turn + 1) % GIVEN_UP
        return Awaited(gate, gate.turn, shape, dtype)

    def _free(self, nbytes: int) -> _Gate:
        """Returns a gate for which no device waits."""
        if len(self._gates) < GATES:
            gate = _Gate.of(nbytes)
        else:
            gate = self._gates.popleft()
            if gate.copy is not None:
                mx.eval(gate.copy)
            if gate.nbytes < nbytes:
                gate = _Gate.of(nbytes)
        self._gates.append(gate)
        return gate


TRIALS, TRIAL_PAUSE_S, TRIAL_WAIT_S = 5, 0.002, 2.0


def why_not() -> str:
    """Tries gates on this device. Returns why they cannot be used; empty if they can."""
    try:
        locked.locked_memory(1)
    except (OSError, AttributeError) as error:
        return f"no memory of the host can be shared with the device: {error}"
    return try_gates()


def try_gates() -> str:
    """As `why_not`, with memory that can be shared. While the device waits at a gate, another thread must be able to
    read what was launched before, and to open the gate."""
    gates, lockers, sent = Gates(), locked.Lockers(2**20), np.arange(4096, dtype=np.float32)
    took: list[float] = []
    for trial in range(TRIALS):
        if not trial:
            lockers.make(sent.nbytes)
        locker = lockers.take(sent.nbytes)
        assert locker is not None
        before = locker.put(mx.arange(sent.size, dtype=mx.uint32) + trial)
        mx.async_eval(before)
        awaited = gates.await_one(sent.shape, mx.float32)
        assert awaited is not None
        behind = awaited.array(wait_s=TRIAL_WAIT_S, fails=False) + 1
        mx.async_eval(behind)
        opened_at: list[float] = []
        thread = threading.Thread(target=_open, args=(before, awaited, sent, opened_at), name="gate", daemon=True)
        began = time.monotonic()
        thread.start()
        mx.eval(behind)
        passed = time.monotonic()
        thread.join()
        if not np.array_equal(np.array(behind), sent + 1) or passed - began > TRIAL_WAIT_S:
            return "the device does not see what the host writes meanwhile"
        if not np.array_equal(locker.memory[: sent.size], np.arange(sent.size) + trial):
            return "the host does not see what the device writes"
        lockers.give_back(locker)
        took.append(passed - opened_at[0])
        sent = sent + 1
    logger.info("a device that waits for an array goes on %.0f us after it came", 1e6 * min(took))
    return ""


def _open(before: mx.array, awaited: Awaited, sent: np.ndarray, opened_at: list[float]) -> None:
    launched_as_numpy(before)
    time.sleep(TRIAL_PAUSE_S)
    opened_at.append(time.monotonic())
    awaited.give(Plain("float32", sent.shape, sent.view(np.uint8)))
