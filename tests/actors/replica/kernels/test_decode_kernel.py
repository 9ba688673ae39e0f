"""The decode kernel compared with the reference in plain MLX operations, for sequences of any lengths; and how work is
divided. Where there is no GPU, its text for Metal runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise, product
from math import sqrt
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.kernels import block_kernels, decode_kernel, decode_views, sealing
from satchel.actors.replica.kernels.decode_views import (
    NEW_MOST,
    KernelStep,
    KernelView,
    NewTokens,
    padded_rows,
)
from satchel.actors.replica.kernels.head_transform import HeadTransform, Rotation
from satchel.actors.replica.kernels.sealing import POLICIES
from satchel.actors.replica.kv.pool import Field, LayerFields, SlotGroup, slots_of
from satchel.actors.replica.kv.steps import first_block
from satchel.actors.replica.selftest import kernel_check
from tests.worlds.kernels import emulator, metal_source, same_bits, shapes
from tests.worlds.kernels.faults import fault
from tests.worlds.replica import metal_on_cpu

LENGTHS = (1, 256, 257, 90, 700)
"""Of sequences, where a GPU's threads take turns."""

DRAFTED = (1, 5, 1, 16, 2)
"""How many tokens of each of these are new."""

WATCHED = shapes.Shape("q4", "float32", (128, 128), 4, 0, 2, False)
"""The shape in which faults are to be noticed."""

FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "a barrier is missing": (decode_kernel, "  SYNC();\n  if (ROPE)", "  if (ROPE)"),
    "a barrier before others' results is missing": (
        *(decode_kernel, "  SYNC();\n  for (int i = THREAD; i < GC * DV;"),
        "  for (int i = THREAD; i < GC * DV;",
    ),
    "a lane is off by one": (decode_kernel, "x += XOR(x, 8);", "x += XOR(x, 9);"),
    "half of a warp is added up": (
        *(decode_kernel, "for (int o = 16; o; o >>= 1) sum += XOR(sum, o);"),
        "for (int o = 8; o; o >>= 1) sum += XOR(sum, o);",
    ),
    "a token too many is seen": (decode_kernel, "if (t < tl &&", "if (t <= tl &&"),
    "the new token goes to another place": (decode_kernel, "to = tail_at + tl - 1;", "to = tail_at + 256 - tl;"),
    "a lane leaves": (decode_kernel, "if (token < 0) return;", "if (token < 0 || LANE == 7) return;"),
    "a thread leaves": (decode_kernel, "if (token < 0) return;", "if (token < 0 || THREAD == 40) return;"),
    "parts are joined without the last": (decode_kernel, "job < jobs[token + 1]", "job < jobs[token + 1] - 1"),
    "an output ends later": (decode_kernel, "out[(long)GROUP * DV + d]", "out[(long)GROUP * DV + d + 1]"),
    "more memory is shared than Metal has": (decode_kernel, "SHARED float rm[NW * GC];", "SHARED float rm[8192];"),
    "a block goes to the next slot": (block_kernels, "const long to = slots[n];", "const long to = slots[n] + 1;"),
}

SLOW_DIMS = (96, 96), (192, 128), (256, 256)

DRAFT_FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "keys of a draft have the last one's position": (decode_kernel, "(h < GC ? 0 : GC + news - 1 - h)", "0"),
    "a draft's keys are read from the open block": (decode_kernel, "fresh = t >= old;", "fresh = t >= tl - 1;"),
    "a draft's values are read from the open block": (decode_kernel, "fresh = column >= old;", "fresh = false;"),
    "a draft is written to another sequence": (decode_kernel, "(long)owners[token] * KV", "(long)owners[0] * KV"),
}


def error_of(shape: shapes.Shape, new: Sequence[int] | None = None) -> float:
    dtype, lengths = kernel_check.DTYPES[shape.dtype], kernel_check.LENGTHS if on_gpu() else LENGTHS
    mx.random.seed(5)
    transform = kernel_check.all_transforms(shape.dims[0], dtype)[shape.transform]
    with pytest.MonkeyPatch.context() as patch:
        if shape.whole:
            patch.setattr(decode_views, "UNITS_OF_ONE", 1e-6)
        lengths = lengths if new is None else [*lengths[: len(new)]]
        return kernel_check.error(shape.dims, shape.grouped, shape.policy, shape.window, dtype, transform, lengths, new)


def bound_of(shape: shapes.Shape) -> float:
    return kernel_check.BOUND if shape.dtype == "float32" else kernel_check.BOUND_16


def is_wrong(shape: shapes.Shape, new: Sequence[int] | None = None) -> bool:
    try:
        return not error_of(shape, new) <= bound_of(shape)
    except (AssertionError, RuntimeError):
        # Of what is written in place, or of threads that wait for ever.
        return True


SEQUENCE = st.tuples(st.integers(0, 400), st.integers(1, 256 - NEW_MOST), st.integers(1, NEW_MOST))


@given(sequences=st.lists(SEQUENCE, min_size=1, max_size=40), single=st.booleans(), padded=st.booleans())
def test_every_token_has_its_groups_and_one_of_a_long_sequence_most(
    sequences: list[tuple[int, int, int]], single: bool, padded: bool
):
    nothing = mx.zeros((1,), mx.uint32)
    blocks, opened, new = (list(column) for column in zip(*sequences, strict=True))
    new = [1] * len(new) if single else new
    lengths = [BLOCK_TOKENS * count + tokens - 1 for count, tokens in zip(blocks, opened, strict=True)]
    starts = [0, *accumulate(blocks)]
    rows = padded_rows(len(sequences)) if padded else 0
    made = NewTokens.of(nothing, starts, lengths, [0] * len(sequences), 0, 8, None if single else new, rows)
    total, (tokens, *numbers) = sum(new), np.array(made.numbers).tolist()
    assert tokens == made.tokens == (max(total, rows) if single else 1 << (total - 1).bit_length())
    columns = [numbers[at * tokens : (at + 1) * tokens] for at in range(7)]
    pairs = [(sequence, at) for sequence, count in enumerate(new) for at in range(count)]
    expected = [
        (opened[owner] + at, 0, lengths[owner] + at, owner, at + 1, starts[owner], starts[owner + 1])
        for owner, at in pairs
    ]
    assert [*zip(*columns, strict=True)] == expected + [(0,) * 7] * (tokens - total)
    jobs, groups = numbers[7 * tokens : 8 * tokens + 1], numbers[8 * tokens + 1 :]
    counts = [end - begin for begin, end in pairwise(jobs)]
    assert min(counts[:total]) >= 1 and not any(counts[total:]) and len(groups) == made.count
    assert groups[: jobs[-1]] == [token for token in range(total) for _ in range(counts[token])]
    assert set(groups[jobs[-1] :]) <= {-1}
    # The number of groups says whether each token has one.
    assert (len(groups) == tokens) == (set(counts[:total]) == {1})
    units = [4 * blocks[owner] + -(-(opened[owner] + at) // 32) for owner, at in pairs]
    assert all(count * 4 * (1 + sqrt(8 * of / 200)) >= of for count, of in zip(counts, units, strict=False))
    # Whatever others there are, a token's units are divided in the same way.
    last, at = pairs[-1]
    alone = NewTokens.of(nothing, [0, blocks[last]], lengths[last:], [0], 0, 8, None if single else [at + 1])
    begins = np.array(alone.numbers)[7 * alone.tokens + 1 :][: at + 2]
    assert begins[-1] - begins[-2] == counts[total - 1]


@pytest.mark.parametrize("window", [1, 128, 300, 1024, 2047])
def test_a_token_of_a_draft_reads_behind_a_window_what_it_reads_alone(window: int):
    """Not the blocks that only tokens before it see: else its units would be divided in another way."""
    blocks = 12

    def numbers(length: int, new: int) -> list[tuple[int, ...]]:
        first = first_block(length, window)
        made = NewTokens.of(mx.zeros((1,), mx.uint32), [first, blocks], [length], [first], window, 8, [new])
        found = np.array(made.numbers)[1:]
        opened, hidden, places, _, _, begins, ends, jobs = (found[at * made.tokens :][:new] for at in range(8))
        groups = np.diff([*jobs, found[8 * made.tokens]])[: new - 1]
        return [*zip(opened, hidden, places, begins, ends, [*groups, 0], strict=True)]

    for length in range(blocks * BLOCK_TOKENS, (blocks + 1) * BLOCK_TOKENS - NEW_MOST, 5):
        # The last one's groups are followed by padding.
        together = numbers(length, NEW_MOST)[:-1]
        assert together == [numbers(length + at, 2)[0] for at in range(NEW_MOST - 1)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sunk", [False, True])
def test_a_token_attends_to_the_same_bits_beside_any_others(sunk: bool):
    """Alone and in a batch, as a step's only token and in a draft: so drafts change no answer."""
    # The second has a single group of threads if it is alone, and nothing is joined.
    made = kernel_check.world((700, 90, 1290), 2, (128, 128), 4, "q4", 0, new=(3, 1, 2))
    same_bits.check(made, POLICIES["q4"], mx.random.normal((8,)) if sunk else None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(("lengths", "new"), [((3,), None), ((700, 3), None), ((700, 3), (2, 1))])
def test_a_kernel_gets_what_it_names(
    lengths: tuple[int, ...], new: tuple[int, ...] | None, number: int, policy: str, monkeypatch: pytest.MonkeyPatch
):
    """Where there is no GPU to run it."""
    names: list[str] = []

    def kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str):
        def launch(*, inputs: list[mx.array], **rest: Any) -> list[mx.array]:
            names.append(name)
            assert len(inputs) == len(read) and all(named in body for named in read if named not in ("order", "sinks"))
            assert len(rest["output_shapes"]) == len(rest["output_dtypes"]) == len(outputs)
            return [mx.zeros(*of) for of in zip(rest["output_shapes"], rest["output_dtypes"], strict=True)]

        read = inputs
        return launch

    monkeypatch.setattr(decode_kernel, "kernel", kernel)
    decode_kernel._plan.cache_clear()
    transform = kernel_check.all_transforms(64, mx.float32)[number]
    pool = block_kernels.empty_slot(2, 64, 64, mx.float32, POLICIES[policy])
    blocks = [length // BLOCK_TOKENS for length in lengths]
    slots, one = mx.zeros((64,), mx.uint32), mx.zeros((1,), mx.uint32)
    read = NewTokens.of(slots, [0, *accumulate(blocks)], lengths, [0] * len(lengths), 0, 2, new)
    tails = [mx.zeros((len(lengths), 2, BLOCK_TOKENS, 64))] * 2
    fresh = mx.zeros((read.tokens, 2, 1, 64))
    view = KernelView(fresh, fresh, KernelStep((tails[0], tails[1]), pool, read, one), lambda dim: transform)
    queries = mx.zeros((read.tokens, 4, 1, 64))
    assert decode_kernel.attend(queries, view, POLICIES[policy], 0.1).shape == queries.shape
    assert names[-1].endswith("join") == (len(lengths) > 1)
    decode_kernel._plan.cache_clear()


@pytest.mark.skipif(emulator.lacks() is not None, reason=str(emulator.lacks()))
@pytest.mark.parametrize("position", [0, 5003, 131_071, 1_000_003])
def test_far_tokens_are_rotated_as_metal_rotates_a_prompt(position: int):
    """The kernel's text for Metal, run here, puts the same new key into a sequence's open block as MLX's rotations with
    their fast cosines do in prefill, wherever the sequence is."""
    dim, policy, numbers = 64, POLICIES["q4"], np.random.default_rng(position)
    rotation = Rotation.of(nn.RoPE(dim, base=1e6), dim, mx.float32)
    pool = block_kernels.empty_slot(1, dim, dim, mx.float32, policy)
    nothing = mx.zeros((1,), mx.uint32)
    read = NewTokens.of(mx.zeros((64,), mx.uint32), [0, 0], [position], [0], 0, 1)
    tails = mx.zeros((1, 1, BLOCK_TOKENS, dim)), mx.zeros((1, 1, BLOCK_TOKENS, dim))
    query, key, value = (mx.array(numbers.standard_normal((1, 1, 1, dim), np.float32)) for _ in range(3))
    step = KernelStep(tails, pool, read, nothing)
    view = KernelView(key, value, step, lambda _: HeadTransform(rotation=rotation))
    mx.eval(tails)
    with metal_source.kernels(metal_source.emulated):
        mx.eval(decode_kernel.attend(query, view, policy, 1))
    got = np.array(tails[0])[0, 0, position % BLOCK_TOKENS]
    assert np.abs(got - metal_on_cpu.rotate(np.array(key)[0, 0, 0], position, 1e6)).max() < 1e-5
    assert np.array_equal(np.array(tails[1])[0, 0, position % BLOCK_TOKENS], np.array(value)[0, 0, 0])


@pytest.mark.variants(8)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.slow] * (at % 3 > 0)) for at, shape in enumerate(shapes.usual())],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_the_kernel_agrees_with_the_reference(shape: shapes.Shape):
    assert error_of(shape) <= bound_of(shape)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", shapes.usual()[::12], ids=lambda shape: "-".join(map(str, shape)))
def test_the_kernel_agrees_with_the_reference_about_drafts(shape: shapes.Shape):
    assert error_of(shape, DRAFTED) <= bound_of(shape)


def test_in_the_usual_shapes_each_two_values_meet():
    usual = shapes.usual()
    every = [shape._replace(window=window) for shape, window in product(shapes.every(), kernel_check.WINDOWS)]
    for one, other in combinations(range(len(shapes.Shape._fields)), 2):
        assert {(shape[one], shape[other]) for shape in usual} == {(shape[one], shape[other]) for shape in every}


@pytest.mark.metal
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [*product(POLICIES, kernel_check.DTYPES, kernel_check.HEAD_SIZES)], ids=str)
def test_the_kernel_agrees_with_the_reference_in_every_shape(kind: tuple[str, str, tuple[int, int]]):
    for shape in shapes.every():
        if shape[:3] == kind:
            assert error_of(shape) <= bound_of(shape), shape


@pytest.mark.skipif(emulator.lacks() is not None, reason=str(emulator.lacks()))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_text_is_noticed(name: str):
    with metal_source.kernels(metal_source.emulated):
        assert not is_wrong(WATCHED)
    with fault(*FAULTS[name]), metal_source.kernels(metal_source.emulated):
        assert is_wrong(WATCHED)


@pytest.mark.skipif(emulator.lacks() is not None, reason=str(emulator.lacks()))
@pytest.mark.parametrize("name", DRAFT_FAULTS)
def test_a_fault_in_what_drafts_read_is_noticed(name: str):
    with fault(*DRAFT_FAULTS[name]), metal_source.kernels(metal_source.emulated):
        assert is_wrong(WATCHED._replace(transform=2), DRAFTED)


@pytest.mark.variants(5)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_blocks_are_written_from_their_records_and_copied_into_others(policy: str, dtype: mx.Dtype):
    """Both layers' arrays, after each other in each record, end in the slots to the last bit, and come back."""
    mx.random.seed(4)
    group, other = SlotGroup([0, 1], kernels=True), SlotGroup([0, 1], kernels=True)
    shape = (1, 2, 3 * BLOCK_TOKENS, 128)
    layers = [
        slots_of(sealing.seal(mx.random.normal(shape).astype(dtype), mx.random.normal(shape).astype(dtype), seal), 3)
        for seal in [POLICIES[policy]] * 2
    ]
    parts = [array.reshape(3, -1).view(mx.uint8) for layer in layers for array in layer]
    records, fields, at = mx.concatenate(parts, axis=1), [], 0
    for part, array in zip(parts, [array for layer in layers for array in layer], strict=True):
        fields.append(Field(at, at + part.shape[1], array.dtype, array.shape))
        at += part.shape[1]
    half = len(fields) // 2
    slots = group.take(5)[1:4]
    numbers = mx.array([slot.number for slot in slots], mx.uint32)
    told = [LayerFields(type(layer), part) for layer, part in zip(layers, (fields[:half], fields[half:]), strict=True)]
    group.write_records(slots, told, records)
    assert other.take(5)
    for place, layer in enumerate(layers):
        other.write(place, numbers, layer)
        for one, wanted in zip(group.layer(place), layer, strict=True):
            assert mx.array_equal(one[numbers + group.written(place)], wanted)
        copies, layout = group.read_records(place, numbers)
        start, stop = told[place].fields[0].start, told[place].fields[-1].stop
        assert mx.array_equal(copies, records[:, start:stop])
        assert [field.start + start for field in layout.fields] == [field.start for field in told[place].fields]


@pytest.mark.variants(7)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("policy", [policy.name for policy in POLICIES.values() if policy.quantizes])
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (80, 80), (128, 128), *(pytest.param(dims, marks=pytest.mark.slow) for dims in SLOW_DIMS)],
)
def test_blocks_are_dequantized_as_by_mlx(dims: tuple[int, int], policy: str, dtype: mx.Dtype):
    assert dequantizes(dims, policy, dtype)


@pytest.mark.skipif(emulator.lacks() is not None, reason=str(emulator.lacks()))
def test_a_missing_barrier_behind_the_codes_of_a_block_is_noticed():
    barrier = "  SYNC();\n  for (int i = THREAD; i < 8 * (DK / 2);"
    without = fault(block_kernels, barrier, barrier.replace("  SYNC();\n", ""))
    with without, metal_source.kernels(metal_source.emulated):
        assert not dequantizes((128, 128), "q4", mx.float32)


def dequantizes(dims: tuple[int, int], policy: str, dtype: mx.Dtype) -> bool:
    """Whether the kernel does as MLX."""
    mx.random.seed(3)
    keys, values = (mx.random.normal((1, 2, 5 * BLOCK_TOKENS, dim)).astype(dtype) for dim in dims)
    group, seal = SlotGroup([0], kernels=True), POLICIES[policy]
    slots = group.take(5)
    numbers = mx.array([slot.number for slot in slots], mx.uint32)
    group.write(0, numbers, slots_of(sealing.seal(keys, values, seal), 5))
    mx.eval(group.arrays())
    table = mx.array([[4, 0, 2], [1, 1, 3]], mx.uint32)
    open_keys, open_values = (mx.random.normal((2, 2, 300, dim)).astype(dtype) for dim in dims)
    got = block_kernels.unseal(group.layer(0), table, open_keys, open_values, seal, group.written(0))
    before = sealing.unseal(group.gather(0, table), seal, dims[1], dtype)
    for one, sealed, fresh in zip(got, before, (open_keys, open_values), strict=True):
        wanted = mx.concatenate([sealed, fresh], axis=2).astype(mx.float32)
        if not bool(mx.abs(one.astype(mx.float32) - wanted).max() <= 1e-2 * mx.abs(wanted).max()):
            return False
    return True
