"""Arrays are sent before they are computed and used before they have come, and are what they would have been."""

from __future__ import annotations

import time
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.group.link import connection
from satchel.actors.replica.group.link.connection import INSIDE_BYTES, Connection
from satchel.cluster.errors import LinkError, LinkGarbage
from tests.actors.replica.group.link.test_connection import connect

Two = tuple[Connection, Connection]


@pytest.fixture
def two() -> Iterator[Two]:
    near, far = connect()
    yield near, far
    near.close()
    far.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_graphs_that_are_built_before_their_inputs_have_come_compute_with_them(two: Two, dtype: mx.Dtype):
    """The first array says in which dtype the others are; a large one is no exception."""
    near, far = two
    run = mx.compile(lambda hidden: (mx.pad(hidden, [(0, 1), (0, 0), (0, 0)]) * 2).astype(mx.float32))
    shapes = [(1, 1, 64), (3, 1, 64), (1, 1, 64), (2, 1, INSIDE_BYTES)]
    sent = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mx.eval(sent)
    near.send_array(sent[0])
    assert mx.array_equal(far.await_array(shapes[0]), sent[0])
    built = [run(far.await_array(shape)) for shape in shapes[1:]]
    for array in sent[1:]:
        near.send_array(array)
    far.wait_came()
    for result, array in zip(built, sent[1:], strict=True):
        assert mx.array_equal(result, run(array)) and mx.array_equal(result[:-1], (array * 2).astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_launched_is_sent_to_the_bit_once_it_is_there(two: Two, dtype: mx.Dtype):
    near, far = two
    array = mx.random.normal((2, 3, 64)).astype(dtype)
    array[0, 0, :3] = mx.array([float("nan"), float("-inf"), -0.0])
    near.send_launched(array)
    near.send_numbers([1, 2, 2**32 - 1])
    near.wait_sent()
    came = far.receive_array((2, 3, 64))
    assert came.dtype == dtype and mx.array_equal(came.view(mx.uint8), array.view(mx.uint8))
    assert far.receive_array((3,)).tolist() == [1, 2, 2**32 - 1]


def test_who_waits_for_an_array_is_told_if_it_does_not_come(two: Two):
    near, far = two
    near.send_numbers([1])
    far.receive_array((1,))
    for _ in range(2):
        far.await_array((1,))
    near.send_numbers([2])
    near.shut()
    with pytest.raises(LinkError):
        far.wait_came()
    with pytest.raises(LinkError):
        far.await_array((1,))


def test_who_waits_for_an_array_is_told_if_another_one_comes(two: Two):
    near, far = two
    near.send_numbers([1])
    far.receive_array((1,))
    far.await_array((1,))
    near.send_numbers([1, 2])
    with pytest.raises(LinkGarbage, match=r"of the shape \[1\] were to come"):
        far.wait_came()


def test_who_waits_for_an_array_is_told_if_it_cannot_be_written(two: Two, monkeypatch: pytest.MonkeyPatch):
    near, far = two
    near.send_numbers([1])
    far.receive_array((1,))
    far.await_array((1,))

    def fail(*given: object) -> str:
        raise MemoryError

    monkeypatch.setattr(connection, "_why_another", fail)
    near.send_numbers([2])
    assert far._awaited[0].came.wait(10)
    with pytest.raises(LinkError, match="MemoryError"):
        far.wait_came()


def test_who_sends_is_told_if_the_device_fails_at_what_is_to_be_sent(two: Two, monkeypatch: pytest.MonkeyPatch):
    """Also if it has nothing more to send."""
    near, _ = two
    told = list[str]()
    near.failed = told.append

    def fail(array: mx.array) -> np.ndarray:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(connection, "launched_as_numpy", fail)
    near.send_launched(mx.zeros(4))
    near.wait_sent()
    assert told == ["RuntimeError: out of memory"]
    with pytest.raises(LinkError, match="out of memory"):
        near.send_numbers([1])


def test_nothing_is_left_to_be_sent_where_a_card_may_wait_for_another_one(two: Two, monkeypatch: pytest.MonkeyPatch):
    """Who waits for that card lets no other thread run, and what is sent may be what the other card waits for."""
    near, far = two
    sent = list[int]()
    send = near._send_plain
    monkeypatch.setattr(near, "_send_plain", lambda plain: (time.sleep(0.1), send(plain), sent.append(1)))
    near.send_launched(mx.zeros(4))
    assert not sent
    near.wait_sent()
    near.leaves_nothing = True
    near.send_launched(mx.zeros(4))
    assert sent == [1, 1]
    assert [far.receive_array((4,)).tolist() for _ in range(2)] == [[0.0] * 4] * 2
