"""The decode kernel's text for tensor cores of CUDA, run on the CPU, compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

from satchel.actors.replica.kernels import decode_kernel, decode_tensor, decode_views
from satchel.actors.replica.kernels.sealing import POLICIES, Plain, Quantized
from satchel.actors.replica.selftest import kernel_check
from tests.worlds.kernels import cuda_on_cpu, emulator, metal_source, same_bits
from tests.worlds.kernels.faults import fault

LENGTHS = (1, 256, 257, 90, 700)
DRAFTED = (1, 5, 1, 16, 2)
"""Of sequences, where a GPU's threads take turns, and how many of these tokens are new."""

BOUND = 4e-3
"""Of the largest output, whose last bit in bfloat16 is worth this."""

FAULTS = {
    "codes are shifted by one": ("4 * i - (i > 0 ? 3 : 0)", "4 * i - (i > 0 ? 2 : 0)"),
    "a lane fills another head's column": ("GC ? g / 2 :", "GC ? g % 4 :"),
    "scales of other tokens are taken": ("half_of(pair, g & 1)", "half_of(pair, g >> 1 & 1)"),
    "halves of the sum are left out": ("shift[v] += XOR(shift[v], 2);", ""),
    "values lack what the upper halves lack": ("REST(f, second, half);", "f;"),
    "an offset goes to other heads": ("8 * q + (g & 4)", "8 * q"),
    "the first token is as coded": ("if (g == 0) sc[0]", "if (g == 9) sc[0]"),
    "a draft's values are read from the open block": ("fresh = column >= old;", "fresh = false;"),
}


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    if lacks := emulator.lacks():
        pytest.skip(lacks)
    # Blocks are written by other kernels, for which Metal's text is used.
    with metal_source.kernels(metal_source.emulated):
        monkeypatch.setattr(decode_kernel, "_tensor_cores", True)
        monkeypatch.setattr(decode_kernel, "has_tensor_cores", lambda: True)
        monkeypatch.setattr(decode_kernel, "kernel", cuda_on_cpu.kernel)
        decode_kernel._plan.cache_clear()
        yield monkeypatch
        decode_kernel._plan.cache_clear()


def error_of(
    grouped: int,
    dims: tuple[int, int] = (128, 128),
    dtype: mx.Dtype = mx.bfloat16,
    window: int = 0,
    new: Sequence[int] | None = None,
    transform: int = 2,
) -> float:
    mx.random.seed(5)
    decode_kernel._plan.cache_clear()
    done = kernel_check.all_transforms(dims[0], dtype)[transform]
    return kernel_check.error(dims, grouped, "q4", window, dtype, done, LENGTHS, new)


@pytest.mark.variants(6)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("grouped", "dims", "dtype", "window"),
    [
        (4, (128, 128), mx.bfloat16, 0),
        (8, (128, 128), mx.float16, 700),
        (1, (64, 64), mx.bfloat16, 0),
        (2, (192, 128), mx.bfloat16, 700),
        (6, (256, 256), mx.float16, 0),
        (16, (192, 192), mx.bfloat16, 0),
    ],
)
def test_it_agrees_with_the_reference(
    grouped: int,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    window: int,
    whole: bool,
    tensor_cores: pytest.MonkeyPatch,
):
    if whole:
        tensor_cores.setattr(decode_views, "UNITS_OF_ONE", 1e-6)
    assert error_of(grouped, dims, dtype, window) <= BOUND


@pytest.mark.parametrize("grouped", [4, 8])
def test_it_agrees_with_the_reference_about_drafts(grouped: int, tensor_cores: pytest.MonkeyPatch):
    assert error_of(grouped, new=DRAFTED) <= BOUND


def test_a_token_attends_to_the_same_bits_beside_any_others(tensor_cores: pytest.MonkeyPatch):
    made = kernel_check.world((700, 300), 1, (128, 128), 4, "q4", 0, new=(3, 2))
    same_bits.check(made, POLICIES["q4"])


def test_open_blocks_may_begin_anywhere_in_memory(tensor_cores: pytest.MonkeyPatch):
    with fault(decode_tensor, "if (aligned)", "if (false)"):
        assert error_of(4) <= BOUND


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_text_is_noticed(name: str, tensor_cores: pytest.MonkeyPatch):
    with fault(decode_tensor, *FAULTS[name]):
        try:
            assert not error_of(4, new=DRAFTED) <= BOUND
        except AssertionError as raised:
            assert "in place" in str(raised)


def test_what_fits():
    half, dims, coded = (mx.bfloat16, mx.bfloat16), (128, 128), (4, 32)
    assert decode_tensor.fits(Quantized, half, dims, coded)
    assert not decode_tensor.fits(Plain, half, dims, coded)
    assert not decode_tensor.fits(Quantized, (mx.float32, mx.float16), dims, coded)
    assert not any(decode_tensor.fits(Quantized, half, dims, coded) for dims in [(80, 80), (96, 96), (72, 128)])
    policies = {
        name
        for name, policy in POLICIES.items()
        if decode_tensor.fits(Quantized, half, dims, (policy.key_bits, policy.key_group))
    }
    assert policies == {"q4"}


def test_few_heads_share_a_group_and_a_single_one_of_several_takes_no_tensor_core(tensor_cores: pytest.MonkeyPatch):
    shared: dict[int, tuple[int, bool]] = {}
    for grouped in range(1, 9):
        texts: list[str] = []

        def noted(name: str, inputs: object, outputs: object, body: str, noted: list[str] = texts):
            noted.append(body)

        tensor_cores.setattr(decode_kernel, "kernel", noted)
        decode_kernel._plan.cache_clear()
        types, left = (mx.bfloat16, mx.bfloat16), (False, False, 0, False, False, False)
        plan = decode_kernel._plan(Quantized, types, (128, 128, 2, grouped), (4, 32), left, 1, sinks=False, tensor=True)
        shared[grouped] = dict(plan.template)["GC"], "mma.sync" in texts[0]
        assert plan.chunks == grouped // shared[grouped][0]
    together = [1, 2, 3, 4, 5, 3, 7, 4]
    assert shared == {at: (count, count <= decode_tensor.HEADS_MOST) for at, count in enumerate(together, 1)}
