"""The kernels that append tokens to open blocks, cut queries into pieces, and put the pieces' results together."""

from __future__ import annotations

import random
from collections.abc import Iterator

import mlx.core as mx
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kernels import block_kernels, query_kernels, sealing
from satchel.actors.replica.kernels.sealing import POLICIES, SealPolicy
from satchel.actors.replica.kv import query_pieces
from tests.worlds.kernels import cuda_on_cpu, emulator
from tests.worlds.replica import fake_kernels


@pytest.fixture(params=["as here", "cuda"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels as this device has them, or as Metal's or CUDA's text computes on a CPU."""
    if request.param == "cuda":
        if lacks := emulator.lacks():
            pytest.skip(lacks)
        for module in (block_kernels, query_kernels):
            monkeypatch.setattr(module, "kernel", cuda_on_cpu.kernel)
    else:
        request.getfixturevalue("kernels")
    yield


def drawn(sequences: int, heads: int, tokens: int, dim: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((sequences, heads, tokens, dim)).astype(dtype)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("seed", range(6))
def test_new_tokens_come_behind_the_old_ones(seed: int):
    rng = random.Random(seed)
    mx.random.seed(seed)
    sequences, new, held = rng.choice([1, 3]), rng.choice([5, 64, 300, 704]), rng.choice([200, BLOCK_TOKENS])
    opened = [rng.randrange(held) * (seed != 3) for _ in range(sequences)]
    ends = [start + rng.randrange(1, new + 1) for start in opened]
    full, columns = [end // BLOCK_TOKENS for end in ends], -(-max(ends) // BLOCK_TOKENS) * BLOCK_TOKENS
    dims, dtype = ((64, 32) if seed % 2 else (16, 16)), (mx.float32, mx.float16, mx.bfloat16)[seed % 3]
    old = (drawn(sequences, 2, held, dims[0], dtype), drawn(sequences, 2, held, dims[1], dtype))
    fresh = (drawn(sequences, 2, new, dims[0], dtype), drawn(sequences, 2, new, dims[1], dtype))
    given = old if any(opened) else None
    joined, rest = block_kernels.append(given, fresh, opened, full, columns)
    wanted, wanted_rest = fake_kernels.append(given, fresh, opened, full, columns)
    assert all(mx.array_equal(one, other) for one, other in zip(joined, wanted, strict=True))
    assert len(rest) == len(wanted_rest)
    for sequence, count in enumerate(full):
        # What comes after the tokens is never read.
        real = ends[sequence] - count * BLOCK_TOKENS
        for one, other in zip(rest, wanted_rest, strict=True):
            assert mx.array_equal(one[sequence, :, :real], other[sequence, :, :real])
            assert mx.all(mx.isfinite(one)).item()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("rows, held", [((2, 1), (256, 200)), ((1, 4), (3, 256)), ((5, 3), (256, 256))])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_open_blocks_come_behind_others(rows: tuple[int, int], held: tuple[int, int], dtype: mx.Dtype):
    first, second = (
        (drawn(count, 2, tokens, 32, dtype), drawn(count, 2, tokens, 24, dtype))
        for count, tokens in zip(rows, held, strict=True)
    )
    for padded in (sum(rows), 16):
        made, wanted = block_kernels.stack(first, second, padded), fake_kernels.stack(first, second, padded)
        assert all(mx.array_equal(one, other) for one, other in zip(made, wanted, strict=True))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("policy", [policy for policy in POLICIES.values() if policy.quantizes], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_blocks_are_sealed_into_their_slots_and_no_others(policy: SealPolicy, dtype: mx.Dtype):
    dims, slots, columns = (64, 40), 7, 3 * BLOCK_TOKENS
    keys, values = drawn(3, 2, columns, dims[0], dtype), drawn(3, 2, columns, dims[1], dtype)
    pool = [
        mx.zeros((slots, *array.shape[1:]), array.dtype) for array in block_kernels.empty_slot(2, *dims, dtype, policy)
    ]
    mx.eval(pool, keys, values)
    places, numbers = [(2, 1), (0, 0), (0, 2), (1, 0)], [5, 0, 3, 2]
    done = sealing.seal_into(
        sealing.Quantized(*pool), mx.array(numbers, mx.uint32), keys, values, places, policy, mx.zeros((1,), mx.uint32)
    )
    assert done.item() == 0
    for (sequence, block), number in zip(places, numbers, strict=True):
        span = (slice(sequence, sequence + 1), slice(None), slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS))
        alone = sealing.seal(keys[span], values[span], policy, kernels=True)
        for array, wanted in zip(pool, alone, strict=True):
            assert mx.array_equal(array[number], wanted[0])
    assert not any(mx.any(array[mx.array([1, 4, 6])]).item() for array in pool)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("tokens, few", [(1209, 128), (64, 0), (300, 64), (2048, 0), (3400, 128)])
def test_pieces_are_padded_and_put_together_again(tokens: int, few: int):
    heads, dim, sequences = 3, 16, 2
    queries = drawn(sequences, heads, tokens, dim, mx.float16)
    spans = [
        (piece.start, piece.stop - piece.start, piece.size or piece.stop - piece.start)
        for piece in query_pieces.pieces_of(tokens, few)
    ]
    for sequence in range(sequences):
        pieces = query_kernels.cut(queries, sequence, spans)
        for piece, (start, count, size) in zip(pieces, spans, strict=True):
            assert piece.shape == (1, heads, size, dim)
            assert mx.array_equal(piece[0, :, :count], queries[sequence, :, start : start + count])
            assert not mx.any(piece[0, :, count:]).item()
        joined = query_kernels.join(pieces, spans)
        assert mx.array_equal(joined[0], queries[sequence].swapaxes(0, 1))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "right, wrong",
    [("", ""), ("i / D < count", "i / D < count - 1"), ("head * size * D + i]", "head * size * D + i / 2]")],
)
def test_kernels_that_do_otherwise_are_not_used(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("_CUT", "_JOIN"):
        text = getattr(query_kernels, name)
        monkeypatch.setattr(query_kernels, name, text.replace(right, wrong) if right else text)
    monkeypatch.setattr(query_kernels, "is_available", lambda: True)
    query_kernels.work.cache_clear()
    assert query_kernels.work() == (not right)
    query_kernels.work.cache_clear()
