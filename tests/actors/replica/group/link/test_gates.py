"""What a device waits for is what the peer sent, or nobody gets anything."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.group.link import gates, locked
from satchel.actors.replica.group.link.connection import Connection
from satchel.actors.replica.kernels import gpu_kernels
from satchel.cluster.errors import LinkError, LinkGarbage
from tests.actors.replica.group.link.test_connection import connect
from tests.worlds.kernels import cuda_on_cpu, emulator
from tests.worlds.replica.group import on_a_thread
from tests.worlds.replica.waiting import waiting_devices

Two = tuple[Connection, Connection]


@pytest.fixture
def two() -> Iterator[Two]:
    """The second one's device waits."""
    near, far = connect()
    with waiting_devices():
        far.gates, far.lockers = gates.Gates(), locked.Lockers(2**24)
        near.lockers = locked.Lockers(2**24)
        yield near, far
    near.close()
    far.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
def test_awaited_arrays_are_those_that_were_sent_in_order_and_more_than_there_are_gates(two: Two, dtype: mx.Dtype):
    """Of any size that is awaited, with larger ones between them, which are not."""
    near, far = two
    sizes = [1, 3, 64, gates.BYTES_MAX // dtype.size + 64, *(5 + each for each in range(2 * gates.GATES))]
    shapes = [(1, 2 * size) for size in sizes]
    sent = [(mx.arange(2 * size) + size).astype(dtype).reshape(1, -1) for size in sizes]
    mx.eval(sent)
    with on_a_thread(lambda: [near.send_array(array) for array in sent]):
        for array, shape in zip(sent, shapes, strict=True):
            came = far.await_array(shape)
            assert came.dtype == dtype and mx.array_equal(came, array)


def test_large_arrays_go_through_lockers_which_are_used_again(two: Two):
    """Some come before there is a locker, and none is given to another array too early."""
    near, far = two
    sent = [mx.random.normal((1, 1025, 512)).astype(mx.bfloat16) + number for number in range(8)]
    mx.eval(sent)
    with on_a_thread(lambda: [near.send_launched(array) for array in sent]):
        came = [far.receive_array((1, 1025, 512)) for _ in sent]
    assert all(mx.array_equal(one, other) for one, other in zip(came, sent, strict=True))


def test_what_is_launched_is_sent_once_it_is_there(two: Two):
    near, far = two
    array = mx.random.normal((2, 3, 64)).astype(mx.bfloat16)
    near.send_launched(array)
    near.send_numbers([1, 2, 2**32 - 1])
    assert mx.array_equal(far.receive_array((2, 3, 64)), array)
    assert far.receive_array((3,)).tolist() == [1, 2, 2**32 - 1]


def test_a_device_fails_if_what_it_waits_for_does_not_come(two: Two):
    """The group is told before, so that nothing that follows is done."""
    near, far = two
    told = list[str]()
    far.failed = told.append
    near.send_numbers([1])
    far.receive_array((1,))
    with on_a_thread(lambda: far.await_array((1,))) as waiting:
        near.shut()
    assert isinstance(waiting.exception(), RuntimeError) and told == ["the peer has left"]
    with pytest.raises(LinkError):
        far.await_array((1,))


def test_a_device_fails_if_something_else_comes(two: Two):
    near, far = two
    told = list[str]()
    far.failed = told.append
    near.send_numbers([1])
    far.receive_array((1,))
    with on_a_thread(lambda: far.await_array((1,))) as waiting:
        near.send_numbers([1, 2])
    assert isinstance(waiting.exception(), RuntimeError) and "of the shape [1] were to come" in told[0]
    with pytest.raises(LinkGarbage):
        far.await_array((1,))


def test_who_sends_is_told_if_the_device_fails_at_what_is_to_be_sent(two: Two, monkeypatch: pytest.MonkeyPatch):
    near, _ = two
    told = list[str]()
    near.failed = told.append

    def fail(array: mx.array) -> np.ndarray:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("satchel.actors.replica.group.link.connection.launched_as_numpy", fail)
    near.send_launched(mx.zeros(4))
    near.wait_sent()
    assert told == ["RuntimeError: out of memory"]
    with pytest.raises(LinkError, match="out of memory"):
        near.send_numbers([1])


def test_gates_are_not_used_where_the_device_cannot_read_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    def none(words: int) -> np.ndarray:
        raise OSError("no such file")

    monkeypatch.setattr(locked, "locked_memory", none)
    assert "no such file" in gates.why_not()
    monkeypatch.undo()
    with waiting_devices(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "wait_and_copy", lambda place, turn, words, **how: mx.zeros(words, mx.uint32))
        assert "does not see" in gates.try_gates()


IN_C = """
  #define ACQUIRE(x, from) x = *(from)
  #define LOAD(x, from) x = *(from)
  #define LOAD_FOUR(a, b, c, d, from) a = (from)[0]; b = (from)[1]; c = (from)[2]; d = (from)[3]
  #define NOW(nanoseconds) nanoseconds = 0
  #define PAUSE()
  #define FAIL()
"""
"""As `gates.PTX`, for memory that is there already."""


@pytest.mark.skipif(bool(emulator.lacks()), reason=str(emulator.lacks()))
def test_kernels_copy_arrays_of_any_size_into_memory_and_out_of_it(monkeypatch: pytest.MonkeyPatch):
    """A gate also opens for an array that does not come; on a device that fails then, nobody gets it."""
    monkeypatch.setattr(gpu_kernels, "kernel", cuda_on_cpu.kernel)
    monkeypatch.setattr(gates, "PTX", IN_C)
    for size in (1, 3, 8, 1023, 4099, 200_000):
        memory = np.zeros(4 + size, np.uint32)
        array = mx.arange(size, dtype=mx.uint32) + 7
        mx.eval(locked.copy_out(array, locked.place_of(memory[4:])))
        assert np.array_equal(memory[4:], np.arange(size) + 7)
        assert mx.array_equal(locked.copy_in(locked.place_of(memory[4:]), size), array)
        for number in (5, gates.GIVEN_UP):
            memory[0] = number
            copy = gates.wait_and_copy(locked.place_of(memory), 5, size, wait_s=1.0)
            assert mx.array_equal(copy, array)
