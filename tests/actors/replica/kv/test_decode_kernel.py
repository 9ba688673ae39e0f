"""The decode kernel beside the reference in plain MLX operations, on rows of any lengths; and how work is divided."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import kernel_check
from satchel.actors.replica.kv import decode_kernel
from satchel.actors.replica.kv.decode_kernel import RowBlocks
from satchel.actors.replica.kv.sealing import POLICIES


@given(rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 256)), min_size=1, max_size=40))
def test_every_row_has_its_groups_and_a_long_one_most(rows: list[tuple[int, int]]):
    nothing = mx.zeros((1,), mx.uint32)
    blocks, opened = [count for count, _ in rows], [tokens for _, tokens in rows]
    made = RowBlocks.of(nothing, nothing, blocks, opened, [0] * len(rows), 8)
    begins: list[int] = np.array(made.jobs).tolist()
    owners: list[int] = np.array(made.job_rows).tolist()
    assert owners == [row for row in range(len(rows)) for _ in range(begins[row], begins[row + 1])]
    counts = [end - begin for begin, end in pairwise(begins)]
    assert min(counts) >= 1 and made.count == len(owners) <= decode_kernel.GROUPS_WANTED + len(rows)
    units = [4 * count + -(-tokens // 32) for count, tokens in rows]
    assert counts[units.index(max(units))] == max(counts)


@pytest.mark.skipif(not decode_kernel.is_available(), reason="this device runs no kernels")
@pytest.mark.parametrize("window", kernel_check.WINDOWS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grouped", kernel_check.GROUPED)
@pytest.mark.parametrize("dims", kernel_check.HEAD_SIZES)
def test_the_kernel_agrees_with_the_reference(dims: tuple[int, int], grouped: int, policy: str, window: int):
    assert kernel_check.error(dims, grouped, policy, window, mx.bfloat16) <= kernel_check.BOUND_16
