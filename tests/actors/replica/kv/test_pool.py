"""The block pool: blocks are where their slots say, in any order of slots and after they have moved."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.kernels.sealing import Plain
from satchel.actors.replica.kv.paged_batch import PagedBatch
from satchel.actors.replica.kv.pool import BlockPool, BlockTable, Field, LayerFields, SlotGroup

SHAPE = (1, 2, 4)


def fields() -> LayerFields:
    one = 4 * SHAPE[1] * SHAPE[2]
    return LayerFields(Plain, [Field(at * one, (at + 1) * one, mx.float32, SHAPE) for at in range(2)])


def records(count: int) -> np.ndarray:
    """Of blocks whose numbers are all their own number, from 1 on."""
    return (
        np.repeat(np.arange(1, count + 1, dtype=np.float32), 2 * SHAPE[1] * SHAPE[2]).reshape(count, -1).view(np.uint8)
    )


def held(group: SlotGroup, number: int) -> float:
    keys, values = (np.array(array[number]) for array in group.layer(0))
    assert (keys == keys.flat[0]).all() and (values == keys.flat[0]).all()
    return float(keys.flat[0])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [1, 3, 5, 7], [2, 3, 4, 9]])
def test_records_are_copied_to_their_slots(order: list[int]):
    group = SlotGroup([0])
    slots = group.take(10)
    group.write_records([slots[place] for place in order], [fields()], records(4))
    assert [held(group, slots[place].number) for place in order] == [1, 2, 3, 4]
    untouched = {slot.number for slot in slots} - {slots[place].number for place in order}
    assert all(held(group, number) == 0 for number in untouched)


def read(batch: PagedBatch) -> list[int]:
    """The numbers of the only sequence's two slots."""
    return [int(number) for number in np.array(batch.blocks(0, [0], [2])[0])[:2]]


def test_a_batch_follows_slots_that_move():
    pool = BlockPool([[0]])
    (group,) = pool.groups
    slots = group.take(8)
    group.write_records(slots, [fields()], records(8))
    sequence = BlockTable(slots[6:])
    batch = PagedBatch(pool, [[sequence]])
    assert read(batch) == [slots[6].number, slots[7].number]
    kept = batch.get([512], None, "what", lambda: "computed before")
    del slots
    pool.shrink(0)
    numbers = read(batch)
    assert numbers == [slot.number for slot in sequence.slots] and max(numbers) < 2
    assert [held(group, number) for number in numbers] == [7, 8]
    assert batch.get([512], None, "what", lambda: "computed anew") != kept
    pool.check()


def test_a_blank_slot_is_zeros_whatever_lay_there():
    pool = BlockPool([[0]])
    (group,) = pool.groups
    slots = group.take(16)
    group.write_records(slots, [fields()], np.full_like(records(16), 255))
    assert np.isnan(np.array(group.layer(0)[0])).all()
    del slots
    one, other = group.blank(), group.blank()
    assert one is other and held(group, one.number) == 0
    del one, other
    assert group.taken == 0
    again = group.take(16)
    group.write_records(again, [fields()], np.full_like(records(16), 255))
    del again
    assert held(group, group.blank().number) == 0
    pool.reset()
    assert group.blank().number == 0 and not group.is_written(0)


def test_a_batch_holds_its_blank_slot():
    pool = BlockPool([[0]])
    (group,) = pool.groups
    batch = PagedBatch.of_sequences(pool, 1)
    number = batch.blank(0)
    assert group.taken == 1 and batch.blank(0) == number == group.blank().number
    del batch
    assert group.taken == 0
