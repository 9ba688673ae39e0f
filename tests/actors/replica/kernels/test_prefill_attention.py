"""The kernel for prompts' attention compared with plain products: its own text on a CPU, and itself where there is
CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.device.device import on_cuda
from satchel.actors.replica.kernels import prefill_kernel
from satchel.actors.replica.kernels.prefill_kernel import Chunk
from satchel.actors.replica.kv import attention
from satchel.actors.replica.kv.steps import mask_of, step_of
from tests.worlds.kernels import cuda_on_cpu, emulator


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel, as far as this machine has it."""
    if not on_cuda():
        if lacks := emulator.lacks():
            pytest.skip(lacks)
        monkeypatch.setattr(prefill_kernel, "kernel", cuda_on_cpu.kernel)
        prefill_kernel._plan.cache_clear()
    yield
    prefill_kernel._plan.cache_clear()


@pytest.mark.variants(13)
@pytest.mark.parametrize(
    ("lengths", "new", "window", "exact", "heads", "dims"),
    [
        ([0], [100], 0, False, (4, 2), (64, 64)),
        ([255], [2], 0, False, (2, 2), (64, 64)),
        ([256], [1], 0, False, (2, 1), (64, 64)),
        ([520, 10], [300, 70], 0, False, (4, 2), (64, 64)),
        ([520, 10], [30, 50], 0, False, (4, 2), (64, 64)),
        ([1000, 700], [300, 64], 200, False, (2, 1), (64, 64)),
        ([1000, 700], [30, 64], 200, False, (2, 2), (64, 64)),
        ([700], [300], 0, True, (2, 2), (64, 64)),
        ([700, 256], [100, 200], 90, True, (2, 2), (64, 64)),
        ([500], [130], 0, False, (4, 1), (128, 128)),
        ([500], [13], 0, False, (2, 1), (96, 48)),
        ([300], [60], 0, False, (2, 1), (256, 256)),
        ([520, 10], [300, 30], 200, False, (2, 1), (256, 256)),
        ([4000], [5], 0, False, (2, 1), (32, 16)),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "sinks"),
    [
        (mx.bfloat16, False),
        (mx.float16, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(mx.bfloat16, True), (mx.float16, False)]),
    ],
)
def test_it_agrees_with_plain_products(
    lengths: list[int],
    new: list[int],
    window: int,
    exact: bool,
    heads: tuple[int, int],
    dims: tuple[int, int],
    sinks: bool,
    dtype: mx.Dtype,
    kernel: None,
):
    count = -(-max(new) // 64) * 64
    step = step_of(lengths, window, new, padded=True, exact=exact)
    mask = mask_of(step, lengths, step.first, count, window)
    assert mask is not None
    columns, sequences = 256 * step.used + step.columns, len(lengths)
    shapes = (heads[0], count, dims[0]), (heads[1], columns, dims[0]), (heads[1], columns, dims[1])
    drawn = [mx.random.normal((sequences, *shape), key=mx.random.key(at)) for at, shape in enumerate(shapes)]
    queries, keys, values = (each.astype(dtype) for each in drawn)
    sunk = mx.random.normal((heads[0],), key=mx.random.key(9)) if sinks else None
    chunk = Chunk(lengths, new, step.first, 256 * step.used, exact)
    assert prefill_kernel.fits(heads, dims, dtype)
    got = prefill_kernel.attend(queries, keys, values, chunk, 0.2, window, sunk)
    assert (got.shape, got.dtype) == ((sequences, heads[0], count, dims[1]), dtype)
    plain = queries.astype(mx.float32), keys.astype(mx.float32), values.astype(mx.float32)
    expected = attention.attend_few(*plain, mask, 0.2, sunk)
    for sequence, tokens in enumerate(new):
        off = mx.abs(got[sequence, :, :tokens].astype(mx.float32) - expected[sequence, :, :tokens]).max()
        assert off <= 8e-3 * mx.abs(expected[sequence]).max()
        assert not mx.any(got[sequence, :, tokens:]), "padding is zeros"


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        ((4, 2), (64, 64), mx.float32),
        ((4, 2), (72, 64), mx.bfloat16),
        ((4, 2), (576, 512), mx.bfloat16),
        ((6, 4), (64, 64), mx.bfloat16),
    ],
)
def test_other_heads_are_left_alone(heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype):
    assert not prefill_kernel.fits(heads, dims, dtype)


def test_tiles_are_small_where_large_ones_would_be_mostly_padding():
    assert prefill_kernel._tiling([6000], 64, 128) == (64, 2)
    assert prefill_kernel._tiling([5988], 1216, 128) == (128, 11)
    assert prefill_kernel._tiling([0, 100], 128, 128) == (64, 3)
    assert prefill_kernel._tiling([5988], 1216, 64) == (64, 20)


@pytest.mark.parametrize(
    ("dims", "kib", "rows"),
    [((128, 128), 227, 128), ((128, 128), 99, 64), ((256, 256), 227, 64), ((256, 256), 163, 0), ((64, 64), 99, 128)],
)
def test_tiles_fit_into_the_memory_of_a_group(dims: tuple[int, int], kib: int, rows: int):
    assert prefill_kernel._rows_most(dims, kib * 1024) == rows


def test_a_load_tries_tiles_of_both_sizes(kernel: None, monkeypatch: pytest.MonkeyPatch):
    tried: list[int] = []
    tiling = prefill_kernel._tiling
    monkeypatch.setattr(prefill_kernel, "_tiling", lambda *given: tried.append(tiling(*given)[0]) or tiling(*given))
    for most in (300, 20):
        assert attention._prefill_kernel_off(attention.Heads(2, 1, 32, 32, mx.bfloat16, None), 0, most) < 0.02
    assert set(tried) == {64, 128}


def test_keys_of_padding_that_are_not_numbers_spread_nowhere(kernel: None):
    queries, keys, values = (mx.random.normal((1, 2, count, 64)).astype(mx.float16) for count in (64, 256, 256))
    keys[:, :, 40:64] = mx.inf
    out = prefill_kernel.attend(queries, keys, values, Chunk([0], [40], [0], 0, False), 0.1)
    assert not mx.any(mx.isnan(out))
    assert not mx.any(out[:, :, 40:])


def test_a_kernel_that_computes_something_else_is_not_used(
    kernel: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    attention.prefill_kernel_works.cache_clear()
    monkeypatch.setattr(attention.decode_kernel, "has_tensor_cores", lambda: True)
    monkeypatch.setattr(attention.gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(attention.gpu_kernels, "has_nvrtc", lambda: True)
    heads = attention.Heads(4, 2, 32, 32, mx.bfloat16, mx.bfloat16)
    assert attention.prefill_kernel_works(heads, True)
    attention.prefill_kernel_works.cache_clear()
    attend = prefill_kernel.attend

    def wrong(*given: Any) -> mx.array:
        return attend(*given) * 1.1

    monkeypatch.setattr(prefill_kernel, "attend", wrong)
    assert not attention.prefill_kernel_works(heads, True)
    assert "prompts attend without the kernel: it is off by" in caplog.text
    attention.prefill_kernel_works.cache_clear()
