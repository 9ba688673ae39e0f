"""What sealing keeps of keys like those of real models, compared with a reference in NumPy."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.kernels import sealing
from satchel.actors.replica.kernels.sealing import POLICIES, Quantized, SealPolicy

QUANTIZING = [policy for policy in POLICIES.values() if policy.quantizes]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
KERNELS = pytest.mark.parametrize("kernels", [False, True], indirect=True)
OFFSETS = (0, 3, -3, 40, -40, 359, -359, 500, -500)


def drawn(
    offset: float, dtype: mx.Dtype, dims: tuple[int, int] = (128, 128), blocks: int = 2
) -> tuple[mx.array, mx.array]:
    """Keys whose channels lie around an offset, and values."""
    rng = np.random.default_rng(int(abs(offset)) + dims[1])
    keys, values = (rng.normal(size=(2, 2, 256 * blocks, dim)).astype(np.float32) for dim in dims)
    return mx.array(keys + np.float32(offset)).astype(dtype), mx.array(values).astype(dtype)


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def groups_of(array: np.ndarray, policy: SealPolicy, *, keys: bool) -> np.ndarray:
    """Numbers in their groups, (…, group), without those that are kept as computed."""
    blocks = array.reshape((*array.shape[:2], -1, 256, array.shape[3]))
    if keys:
        blocks = blocks.swapaxes(3, 4)
        blocks = np.concatenate([blocks[..., 1:2], blocks[..., 1:]], axis=-1)
        return blocks.reshape(*blocks.shape[:4], -1, policy.key_group)
    return blocks[:, :, :, 1:].reshape(*blocks.shape[:3], 255, -1, sealing.value_group(array.shape[3]))


def check(array: mx.array, back: mx.array, policy: SealPolicy, scale: mx.Dtype, *, keys: bool) -> None:
    """Every number is within half a step of the code, where a step divides its group's range, both ends included; more
    only by what 16 bits of a scale and a bias and the dtype of the result cost."""
    bits = policy.key_bits if keys else policy.value_bits
    wanted, got = (groups_of(as_numpy(each), policy, keys=keys) for each in (array, back))
    least, most = wanted.min(-1, keepdims=True), wanted.max(-1, keepdims=True)
    fraction = 2.0**-10 if scale == mx.float16 else 2.0**-7
    # The bias may be two numbers of 16 bits below the least one.
    step = (most - least + 2 * fraction * np.abs(least) + 1e-7) / (2**bits - 1)
    own = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[array.dtype]
    room = step * (0.5 + (2**bits - 1) * fraction / 2) + own * np.abs(wanted).max()
    assert (np.abs(got - wanted) <= room).all(), (np.abs(got - wanted) / step).max()


@pytest.mark.variants(7)
@KERNELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", QUANTIZING, ids=lambda policy: policy.name)
def test_a_channel_keeps_its_steps_wherever_it_lies(policy: SealPolicy, dtype: mx.Dtype, kernels: bool):
    """Keys of real models have biases: -359 in a channel with a spread of 2. A group that reached up to 0 would have
    codes for what is never there."""
    for offset in OFFSETS[::4] if kernels and not on_gpu() else OFFSETS:
        keys, values = drawn(offset, dtype)
        sealed = sealing.seal(keys, values, policy, kernels=kernels)
        back = sealing.unseal(sealed, policy, 128, dtype)
        check(keys, back[0], policy, sealing.scale_dtype(dtype), keys=True)
        check(values, back[1], policy, sealing.scale_dtype(dtype), keys=False)


@pytest.mark.variants(10)
@KERNELS
@pytest.mark.parametrize("policy", QUANTIZING, ids=lambda policy: policy.name)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (192, 128), (256, 256)])
def test_every_head_size_keeps_its_steps(dims: tuple[int, int], policy: SealPolicy, kernels: bool):
    keys, values = drawn(-7, mx.bfloat16, dims, blocks=3)
    sealed = sealing.seal(keys, values, policy, kernels=kernels)
    back = sealing.unseal(sealed, policy, dims[1], mx.bfloat16)
    check(keys, back[0], policy, mx.bfloat16, keys=True)
    if dims[1] % 32 == 0:
        check(values, back[1], policy, mx.bfloat16, keys=False)
    assert back[1].shape == values.shape


@KERNELS
@pytest.mark.parametrize("policy", QUANTIZING, ids=lambda policy: policy.name)
def test_the_first_token_of_a_block_is_kept_as_computed_and_widens_no_group(policy: SealPolicy, kernels: bool):
    """Heads that look for nothing attend to it, and its keys are unlike all others."""
    keys, values = drawn(0, mx.bfloat16)
    firsts = mx.arange(keys.shape[2]) % 256 == 0
    wild = [mx.where(firsts[:, None], array * 1e4, array) for array in (keys, values)]
    back = sealing.unseal(sealing.seal(wild[0], wild[1], policy, kernels=kernels), policy, 128, mx.bfloat16)
    tame = sealing.unseal(sealing.seal(keys, values, policy, kernels=kernels), policy, 128, mx.bfloat16)
    for given, got, without in zip(wild, back, tame, strict=True):
        assert mx.array_equal(got[:, :, ::256], given[:, :, ::256])
        assert mx.array_equal(mx.where(firsts[:, None], 0, got), mx.where(firsts[:, None], 0, without))


@KERNELS
@pytest.mark.parametrize("number", [0.0, 1.0, -1.0, 500.0, -500.0, 1e-6, 0.1])
@pytest.mark.parametrize("policy", QUANTIZING, ids=lambda policy: policy.name)
def test_a_constant_is_kept(policy: SealPolicy, number: float, kernels: bool):
    """Within a number of 16 bits, though its group has no range to divide."""
    for dtype in DTYPES:
        array = mx.full((1, 1, 256, 64), number).astype(dtype)
        sealed = sealing.seal(array, array, policy, kernels=kernels)
        fraction = 2.0**-9 if sealing.scale_dtype(dtype) == mx.float16 else 2.0**-6
        for back in sealing.unseal(sealed, policy, 64, dtype):
            assert (np.abs(as_numpy(back) - as_numpy(array)) <= abs(number) * fraction + 1e-7).all()


@KERNELS
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("policy", QUANTIZING, ids=lambda policy: policy.name)
def test_what_is_no_number_stays_none_and_stays_where_it_is(policy: SealPolicy, wrong: float, kernels: bool):
    """NaN in a sequence's KV must be noticed, and only in its own group: comparisons ignore NaN on some devices."""
    keys, values = (as_numpy(array) for array in drawn(0, mx.float32))
    keys[1, 1, 400, 5] = values[1, 1, 400, 70] = wrong
    sealed = sealing.seal(mx.array(keys), mx.array(values), policy, kernels=kernels)
    back = [as_numpy(array) for array in sealing.unseal(sealed, policy, 128, mx.float32)]
    finite = [np.isfinite(array) for array in back]
    assert not finite[0][1, 1, 400, 5] and not finite[1][1, 1, 400, 70]
    assert finite[0].sum() == finite[0].size - policy.key_group and finite[1].sum() == finite[1].size - 64


@KERNELS
@pytest.mark.parametrize("number", [1e5, -1e5])
def test_what_is_too_large_for_16_bits_is_no_number(number: float, kernels: bool):
    """The self-test notices a model with such keys, and its KV is kept as computed."""
    array = mx.full((1, 1, 256, 64), number) + mx.arange(64)
    back = sealing.unseal(sealing.seal(array, array, POLICIES["q4"], kernels=kernels), POLICIES["q4"], 64, mx.float32)
    for numbers in map(as_numpy, back):
        assert not np.isfinite(numbers[:, :, 1:]).any()


@pytest.mark.parametrize("policy", QUANTIZING, ids=lambda policy: policy.name)
def test_sealing_does_not_ask_mlx_to_quantize(policy: SealPolicy, monkeypatch: pytest.MonkeyPatch):
    """MLX's own rule is another one on each device: on GPUs a group's greatest number is at least 0."""

    def refuse(*_: Any, **__: Any):
        raise AssertionError("mx.quantize was called")

    monkeypatch.setattr(mx, "quantize", refuse)
    keys, values = drawn(-40, mx.float32)
    sealed = sealing.seal(keys, values, policy)
    assert isinstance(sealed, Quantized)
    # MLX reads the codes as it reads its own.
    check(keys, sealing.unseal(sealed, policy, 128, mx.float32)[0], policy, mx.float16, keys=True)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_codes_are_a_stream_of_bits(bits: int):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 128), dtype=np.uint32)
    stream = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, -1)
    wanted = np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)
    assert (np.array(sealing._packed(mx.array(codes), bits)) == wanted).all()


def _each_two() -> list[Any]:
    """Sizes of heads, policies and dtypes: each two of them meet every time, all three slowly."""
    params = []
    sizes = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)]
    for (i, dims), (j, policy), (k, dtype) in product(enumerate(sizes), enumerate(QUANTIZING), enumerate(DTYPES)):
        marks = [pytest.mark.slow] if (i + j + k) % len(DTYPES) else []
        params.append(pytest.param(dims, policy, dtype, marks=marks, id=f"{dims[0]}-{dims[1]}-{policy.name}-{k}"))
    return params


@pytest.mark.variants(7)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dims", "policy", "dtype"), _each_two())
def test_the_kernel_seals_as_plain_operations_do(dims: tuple[int, int], policy: SealPolicy, dtype: mx.Dtype):
    for offset in OFFSETS if on_gpu() else OFFSETS[::4]:
        given = drawn(offset, dtype, dims, blocks=3)
        sealed, plain = (sealing.seal(*given, policy, kernels=kernels) for kernels in (True, False))
        assert sealing.are_alike(sealed, plain), offset
