"""Arrays pass through a ring to the bit. The kernels' own text runs on a CPU; a thread stands for each card."""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgpack
import pytest

from satchel.actors.replica.group.calls.leading import PUT, Leading
from satchel.actors.replica.group.link import device_ring, ring_memory
from satchel.actors.replica.group.link.broken import Wholeness
from satchel.actors.replica.group.link.connection import Connection
from satchel.actors.replica.group.link.device_ring import Offer, Receiving, Sending, answer
from satchel.actors.replica.group.link.ring_memory import ARRAY_BYTES_MAX, CHUNK_BYTES, RingMemory
from satchel.cluster.errors import LinkError, LinkGarbage
from tests.actors.replica.group.link.test_connection import connect
from tests.worlds.kernels import cuda_on_cpu, emulator

pytestmark = pytest.mark.skipif(
    bool(emulator.lacks()) or sys.platform != "linux", reason="kernels run on a CPU only on Linux with g++"
)

UNTIL = time.monotonic() + 3600


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU when they are launched, and wait there."""
    monkeypatch.setattr(device_ring, "kernel", cuda_on_cpu.kernel)
    monkeypatch.setattr(device_ring, "on_cuda", lambda: True)
    monkeypatch.setattr(device_ring, "_card", lambda: secrets.token_bytes(16))
    monkeypatch.setattr(device_ring, "_registered", lambda memory: memory.address)
    monkeypatch.setattr(device_ring, "_release", lambda memory: None)


@pytest.fixture
def sides() -> tuple[Sending, Receiving]:
    with RingMemory.offered() as (memory, found):
        other = RingMemory.open(*found)
    return Sending(memory, memory.address), Receiving(other, other.address)


@pytest.fixture
def card() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def two() -> Iterator[tuple[Connection, Connection]]:
    near, far = connect()
    yield near, far
    near.close()
    far.close()


def same(one: mx.array, other: mx.array) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)))


def took(receiving: Receiving, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Takes an array on a thread that computes."""
    array = receiving.take(shape, dtype)
    mx.eval(array)
    return array


def test_arrays_of_all_sizes_arrive_in_order_and_wait_for_room(
    sides: tuple[Sending, Receiving], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    """Through a ring that is smaller, so that it is filled many times."""
    monkeypatch.setattr(ring_memory, "CHUNKS", 32)
    sending, receiving = sides
    random.seed(3)
    dtypes = [mx.bfloat16, mx.float16, mx.float32, mx.uint32]
    arrays = [
        mx.random.randint(0, 2**16, (size,), mx.int32).astype(mx.uint16).view(mx.uint8)
        for size in (
            random.choice([1, 2, 33, CHUNK_BYTES // 2, CHUNK_BYTES, 8 * CHUNK_BYTES]) * 4 // 2 for _ in range(60)
        )
    ]
    arrays = [array.view(random.choice(dtypes)) for array in arrays]
    mx.eval(arrays)

    def send() -> None:
        for number, array in enumerate(arrays, 1):
            assert sending.put(array)[1] == number

    sent = card.submit(send)
    for array in arrays:
        assert same(receiving.take(array.shape, array.dtype), array)
    sent.result(20)


def test_groups_of_threads_take_several_chunks_each(sides: tuple[Sending, Receiving]):
    """Of an array that is larger than they are many, and of one that begins within a word."""
    sending, receiving = sides
    large = mx.random.randint(0, 2**16, (5 * device_ring._GROUPS * CHUNK_BYTES // 4 + 13,), mx.uint32)
    within = mx.random.normal((CHUNK_BYTES,)).astype(mx.bfloat16)[3:]
    for array in (large, within):
        mx.eval(array)
        sending.put(array)
        assert same(receiving.take(array.shape, array.dtype), array)


def test_a_card_waits_for_what_was_not_put_yet(sides: tuple[Sending, Receiving], card: ThreadPoolExecutor):
    sending, receiving = sides
    array = mx.random.normal((3, 5001)).astype(mx.bfloat16)
    taken = card.submit(took, receiving, (3, 5001), mx.bfloat16)
    with pytest.raises(TimeoutError):
        taken.result(0.1)
    sending.put(array)
    assert same(taken.result(20), array)


def test_a_broken_connection_ends_a_cards_wait_by_its_failure(
    sides: tuple[Sending, Receiving], card: ThreadPoolExecutor
):
    """Only on the side that says so: the other one first has to know why."""
    sending, receiving = sides
    taken = card.submit(took, receiving, (3, 5001), mx.bfloat16)
    sending.break_off()
    with pytest.raises(TimeoutError):
        taken.result(0.1)
    receiving.break_off()
    with pytest.raises(RuntimeError, match="a trap"):
        taken.result(20)
    with pytest.raises(LinkError):
        receiving.take((1,), mx.uint32, 7)


def test_a_card_does_not_wait_for_ever(sides: tuple[Sending, Receiving], monkeypatch: pytest.MonkeyPatch):
    for tries in ("TRIES", "_TRIES_OF_TRIAL"):
        monkeypatch.setattr(device_ring, tries, 3)
    with pytest.raises(RuntimeError, match="a trap"):
        sides[1].take((5001,), mx.float32)
    assert sides[1].take((5001,), mx.float32, trial=True).tolist() == [0.0] * 5001


def test_tokens_that_are_not_wanted_are_left_out(sides: tuple[Sending, Receiving]):
    sending, receiving = sides
    numbers = [sending.put(mx.array([number] * (1 + number % 3), mx.uint32))[1] for number in range(9)]
    assert numbers == list(range(1, 10))
    assert [receiving.take((1 + (n - 1) % 3,), mx.uint32, n).tolist() for n in (2, 3, 7)] == [[1, 1], [2, 2, 2], [6]]
    with pytest.raises(LinkGarbage):
        receiving.take((1,), mx.uint32, 4)


def test_who_does_not_read_breaks_the_connection(sides: tuple[Sending, Receiving], monkeypatch: pytest.MonkeyPatch):
    sending, _ = sides
    monkeypatch.setattr(device_ring, "ROOM_S", 0.2)
    large = mx.zeros(ARRAY_BYTES_MAX // 4)
    sending.put(large)
    sending.put(large)
    with pytest.raises(LinkError, match="reads nothing"):
        sending.put(large)
    sending.break_off()
    with pytest.raises(LinkError, match="closed"):
        sending.put(large)


def test_what_is_never_asked_for_is_not_waited_for(sides: tuple[Sending, Receiving], monkeypatch: pytest.MonkeyPatch):
    """Tokens of batches that change in each step go another way."""
    monkeypatch.setattr(device_ring, "ROOM_S", 0.2)
    monkeypatch.setattr(ring_memory, "CHUNKS", 8)
    sending, _ = sides
    connection: Any = SimpleNamespace(sending=sending)
    leading = Leading([], Wholeness(lambda: None), tokens=connection)
    for number in range(30):
        tokens = mx.array([number])
        mx.eval(leading.copies_of(tokens))
    # The last ones may still be asked for.
    told = leading._packed(tokens)
    assert told == msgpack.ExtType(PUT, (1).to_bytes(8, "big") + (30).to_bytes(8, "big"))


def test_tokens_that_are_told_out_of_order_are_put_there_again(sides: tuple[Sending, Receiving]):
    """One micro-batch has changed, and its tokens are told before those of the other that were put there first."""
    sending, receiving = sides
    connection: Any = SimpleNamespace(sending=sending)
    leading = Leading([], Wholeness(lambda: None), tokens=connection)
    one, other = mx.array([1, 2], mx.uint32), mx.array([3], mx.uint32)
    mx.eval(leading.copies_of(one), leading.copies_of(other))
    told = [leading._packed(tokens).data for tokens in (other, one)]
    found = [(int.from_bytes(each[:8], "big"), int.from_bytes(each[8:], "big")) for each in told]
    assert [receiving.take((count,), mx.uint32, number).tolist() for count, number in found] == [[3], [1, 2]]


def test_a_connection_that_is_closed_waits_for_what_is_in_flight(
    sides: tuple[Sending, Receiving], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    """Its device fails only if that does not come."""
    sending, receiving = sides
    taken = card.submit(took, receiving, (5,), mx.float32)
    monkeypatch.setattr(device_ring, "_release", lambda memory: taken.result(20))
    closed = Thread(target=receiving.close)
    closed.start()
    time.sleep(0.1)
    sending.put(mx.ones(5))
    closed.join(20)
    assert taken.result(0).tolist() == [1.0] * 5

    late = card.submit(took, Receiving(receiving._memory, receiving._address), (5,), mx.float32)
    assert isinstance(late.exception(20), LinkError)


# What two processes say of it.


def agree_on_one(two: tuple[Connection, Connection], card: ThreadPoolExecutor) -> None:
    near, far = two
    answered = card.submit(answer, far, UNTIL)
    near.sending = Offer(near, UNTIL).tried()
    far.receiving = answered.result(20)


def test_a_connection_passes_arrays_through_a_ring_that_works(
    two: tuple[Connection, Connection], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    """All but the first, and large ones in parts."""
    near, far = two
    agree_on_one(two, card)
    assert near.sending is not None and far.receiving is not None
    monkeypatch.setattr(device_ring, "ARRAY_BYTES_MAX", 2**16)
    arrays = [mx.random.normal((1, tokens, 64)).astype(mx.bfloat16) for tokens in (3, 1, 7, 1300, 2)]
    passed: list[int] = []
    put = near.sending.put
    monkeypatch.setattr(near.sending, "put", lambda array: passed.append(array.nbytes) or put(array))
    for array in arrays:
        near.send_launched(array)
    for array in arrays:
        assert card.submit(lambda array=array: same(far.await_array(array.shape), array)).result(20)
    assert passed == [128, 896, 65536, 65536, 35328, 256]
    with pytest.raises(LinkGarbage, match="float32, not bfloat16"):
        near.send_launched(arrays[0].astype(mx.float32))
    far.shut()
    with pytest.raises(LinkError):
        far.receive_array((1, 1, 64))


@pytest.mark.parametrize("where", ["near", "far", "both"])
def test_memory_that_a_device_may_not_have_leaves_the_network(
    two: tuple[Connection, Connection], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, where: str
):
    near, far = two
    addresses: list[int] = []

    def refused(memory: RingMemory) -> int:
        # The other side has it first.
        addresses.append(memory.address)
        if where == "both" or (where == "far") == (len(addresses) == 1):
            raise RuntimeError("CUDA's cuMemHostRegister_v2 gave error 801")
        return memory.address

    # A card waits for minutes, unless it is told that nothing comes.
    monkeypatch.setattr(device_ring, "_TRIES_OF_TRIAL", device_ring.TRIES)
    monkeypatch.setattr(device_ring, "_registered", refused)
    agree_on_one(two, card)
    assert near.sending is None and far.receiving is None
    array = mx.random.normal((1, 2, 64))
    for _ in range(2):
        near.send_launched(array)
        assert same(far.receive_array((1, 2, 64)), array)


def test_a_ring_that_passes_something_else_is_not_used(
    two: tuple[Connection, Connection], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Sending, "put", lambda self, array, put=Sending.put: put(self, array + 1))
    agree_on_one(two, card)
    assert two[0].sending is None and two[1].receiving is None


@pytest.mark.parametrize("cuda", [(False, False), (True, False), (False, True)])
def test_machines_without_a_card_have_none(
    two: tuple[Connection, Connection],
    card: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    cuda: tuple[bool, bool],
):
    answers = iter([cuda[1]])
    near, far = two
    monkeypatch.setattr(device_ring, "on_cuda", lambda: cuda[0])
    made = Offer(near, UNTIL)
    monkeypatch.setattr(device_ring, "on_cuda", lambda: next(answers, False))
    answered = card.submit(answer, far, UNTIL)
    assert made.tried() is None and answered.result(20) is None


def test_who_wants_no_rings_has_none(
    two: tuple[Connection, Connection],
    card: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("SATCHEL_RINGS", "0")
    with caplog.at_level("INFO"):
        agree_on_one(two, card)
    assert two[0].sending is None and two[1].receiving is None
    assert "SATCHEL_RINGS is 0" in caplog.text


def test_two_processes_on_one_card_have_none(
    two: tuple[Connection, Connection], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    """A card that waits for itself computes nothing meanwhile."""
    monkeypatch.setattr(device_ring, "_card", lambda: bytes(16))
    agree_on_one(two, card)
    assert two[0].sending is None and two[1].receiving is None


def test_a_card_that_fails_is_noticed_though_nothing_more_is_launched(
    sides: tuple[Sending, Receiving], monkeypatch: pytest.MonkeyPatch
):
    def fail(array: mx.array) -> None:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(device_ring, "LOOK_S", 0.02)
    monkeypatch.setattr(device_ring, "launched_as_numpy", fail)
    told: Queue[str] = Queue()
    sides[0].failed = told.put
    sides[0].send(mx.zeros(4))
    assert told.get(timeout=20) == "RuntimeError: an illegal address"


def test_another_machine_has_none(
    two: tuple[Connection, Connection], card: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    def missing(*found: object) -> RingMemory:
        raise FileNotFoundError(found)

    monkeypatch.setattr(RingMemory, "open", missing)
    agree_on_one(two, card)
    assert two[0].sending is None and two[1].receiving is None
