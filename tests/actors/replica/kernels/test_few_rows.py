"""The kernel for few rows compared with plain products: its own text on a CPU, and itself where there is CUDA; and
where a model uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.activations import swiglu

from satchel.actors.replica.device.device import on_cuda
from satchel.actors.replica.kernels import few_rows
from satchel.actors.replica.loading import joined, prepare
from satchel.actors.replica.loading.model_id import products_id
from satchel.actors.replica.loading.ways import few_rows_check
from satchel.actors.replica.proving.findings import Findings
from tests.worlds.kernels import cuda_on_cpu, emulator

ROUNDING = {mx.bfloat16: 2**-8, mx.float16: 2**-11}
"""Of the largest number: half a step of its last bit, and what the additions make of it."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel, as far as this machine has it."""
    if on_cuda():
        yield
        return
    if lacks := emulator.lacks():
        pytest.skip(lacks)
    monkeypatch.setattr(few_rows, "kernel", cuda_on_cpu.kernel)
    few_rows._plan.cache_clear()
    mx.disable_compile()
    yield
    mx.enable_compile()
    few_rows._plan.cache_clear()


def quantized(outputs: int, inputs: int, dtype: mx.Dtype, *, group_size: int = 64, bias: bool = False) -> Any:
    layer = nn.QuantizedLinear(inputs, outputs, bias=bias, group_size=group_size, bits=4)
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(outputs)).astype(dtype)
    layer.weight, layer.scales, layer.biases = mx.quantize(weight, group_size, 4)
    if bias:
        layer.bias = mx.random.normal((outputs,), key=mx.random.key(1)).astype(dtype)
    return layer


def exact(layer: Any, x: mx.array) -> mx.array:
    scales, biases = (array.astype(mx.float32) for array in (layer.scales, layer.biases))
    weight = mx.dequantize(layer.weight, scales, biases, layer.group_size, 4)
    return x.astype(mx.float32) @ weight.T + (layer.bias.astype(mx.float32) if "bias" in layer else 0)


def drawn(shape: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(3)).astype(dtype)


@pytest.mark.variants(10)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "widths", "group_size", "shape"),
    [
        (2, 64, (16,), 64, (1, 8, 1, 1)),
        (8, 640, (48,), 64, (1, 4, 2, 2)),
        (3, 1792, (48, 16), 64, (1, 4, 4, 4)),
        (7, 256, (30, 2, 64), 128, (2, 8, 2, 4)),
        (16, 512, (64, 112, 32), 64, (4, 4, 2, 2)),
        (17, 1152, (96,), 128, (1, 8, 2, 2)),
        (17, 384, (96,), 128, (2, 8, 1, 2)),
        (32, 256, (80, 32), 64, (2, 8, 2, 2)),
        (29, 1024, (208,), 64, (4, 4, 1, 4)),
        (11, 1280, (80,), 128, (2, 2, 4, 4)),
        (71, 320, (48, 16), 64, (2, 8, 1, 1)),
        (128, 256, (80,), 128, (1, 8, 2, 2)),
    ],
)
def test_the_kernel_multiplies(
    dtype: mx.Dtype,
    rows: int,
    inputs: int,
    widths: tuple[int, ...],
    group_size: int,
    shape: tuple[int, int, int, int],
    kernel: None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(few_rows, "_shape", lambda *sizes: shape)
    layer = quantized(sum(widths), inputs, dtype, group_size=group_size, bias=rows % 2 == 1)
    x = drawn((rows, 1, inputs), dtype)
    parts = few_rows.multiply(layer, x, widths)
    assert [part.shape for part in parts] == [(rows, 1, width) for width in widths]
    assert {part.dtype for part in parts} == {dtype}
    expected = exact(layer, x)
    error = mx.abs(mx.concatenate(parts, axis=-1).astype(mx.float32) - expected).max()
    assert error <= 1.5 * ROUNDING[dtype] * mx.abs(expected).max()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows, bias", [(3, False), (13, True), (45, True)])
def test_it_adds_to_a_product_as_a_sum_after_it_does(dtype: mx.Dtype, rows: int, bias: bool, kernel: None):
    """To the last bit."""
    layer, x = quantized(48, 192, dtype, bias=bias), drawn((rows, 1, 192), dtype)
    add = mx.random.normal((rows, 1, 48), key=mx.random.key(5)).astype(dtype) * 16
    (product,), (added,) = few_rows.multiply(layer, x, (48,)), few_rows.multiply(layer, x, (48,), add)
    assert added.dtype == dtype and mx.array_equal(added, product + add)


@pytest.mark.variants(4)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "width", "shape"),
    [
        (2, 64, 16, (2, 8, 1, 1)),
        (7, 640, 48, (4, 4, 2, 2)),
        (16, 512, 80, (2, 4, 2, 4)),
        (67, 256, 48, (4, 4, 1, 1)),
    ],
)
def test_gates_let_through_what_mlx_lm_lets_through(
    dtype: mx.Dtype,
    rows: int,
    inputs: int,
    width: int,
    shape: tuple[int, int, int, int],
    kernel: None,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(few_rows, "_shape", lambda *sizes: shape)
    layer, x = quantized(2 * width, inputs, dtype, bias=rows % 2 == 1), drawn((rows, 1, inputs), dtype) / 4
    gate, up = few_rows.multiply(layer, x, (width, width))
    out = few_rows.multiply_gated(layer, x)
    assert out.shape == (rows, 1, width) and out.dtype == dtype
    rounded = swiglu_in_steps(gate.astype(mx.float32), up.astype(mx.float32), dtype)
    # Exponentials differ by a last bit of float32, which may decide how they are rounded.
    assert (out != rounded).astype(mx.float32).mean() < 0.01
    # MLX rounds less often on a CPU: sigmoids may be off by some of their last bits, of 1.
    for one in (out, rounded):
        off = mx.abs(one.astype(mx.float32) - swiglu(gate, up).astype(mx.float32))
        assert (off <= 4 * ROUNDING[dtype] * mx.abs(gate.astype(mx.float32) * up.astype(mx.float32))).all()


def swiglu_in_steps(gate: mx.array, up: mx.array, dtype: mx.Dtype) -> mx.array:
    """What MLX computes on CUDA, where each operation of `Sigmoid` in its `unary_ops.cuh` is rounded to the dtype."""

    def rounded(x: mx.array) -> mx.array:
        return x.astype(dtype).astype(mx.float32)

    part = rounded(1 / rounded(1 + rounded(mx.exp(mx.abs(gate)))))
    return (rounded(gate * mx.where(gate < 0, part, rounded(1 - part))) * up).astype(dtype)


@pytest.mark.parametrize("gated", [False, True])
def test_a_rows_product_has_the_same_bits_beside_any_others(gated: bool, kernel: None, monkeypatch: pytest.MonkeyPatch):
    """So a token's logits do not depend on what else a step computes."""
    # As of more outputs and inputs, in less time.
    monkeypatch.setitem(few_rows._ORDERS, 0, (2, 4))
    monkeypatch.setitem(few_rows._SHAPES, 2, {0: (2, 2)})
    monkeypatch.setattr(few_rows, "_ORDER_GATED", (2, 4))
    layer, x = quantized(96, 1280, mx.bfloat16), drawn((128, 1280))
    product = few_rows.multiply_gated if gated else lambda layer, x: few_rows.multiply(layer, x, (96,))[0]
    whole = product(layer, x)
    for first, count in ((0, 1), (5, 8), (30, 9), (8, 16), (60, 17), (3, 32)):
        assert mx.array_equal(product(layer, x[first : first + count]), whole[first : first + count]), count


def test_gates_are_found_by_the_widths():
    layers = [(32, 32), (24, 24), (32, 16), (32,), (32, 32, 32)]
    assert [few_rows.gates(widths) for widths in layers] == [True, False, False, False, False]
    for tiles in (1, 2, 4):
        assert all(few_rows._shape(tiles, outputs, 64, True)[0] % 2 == 0 for outputs in (32, 5000, 10_000, 70_000))


def test_rows_may_begin_anywhere_in_memory(kernel: None, monkeypatch: pytest.MonkeyPatch):
    if on_cuda():
        flat = drawn((5 * 128 + 1,))
        x = mx.contiguous(flat)[1:].reshape(5, 128)
    else:
        # Arrays of numpy are aligned.
        monkeypatch.setattr(few_rows, "_BODY", few_rows._BODY.replace("if (aligned)", "if (false)"))
        x = drawn((5, 128))
    layer = quantized(32, 128, mx.bfloat16)
    expected = exact(layer, x)
    error = mx.abs(few_rows.multiply(layer, x, (32,))[0].astype(mx.float32) - expected).max()
    assert error <= 1.5 * ROUNDING[mx.bfloat16] * mx.abs(expected).max()


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_runs_divide_the_inputs_and_all_warps_have_one(tiles: int):
    for inputs in (64, 128, 896, 960, 1024, 2048, 4096, 12288):
        for outputs in (16, 1024, 4096, 8192, 151_936):
            _, warps, run, turn = few_rows._shape(tiles, outputs, inputs)
            assert inputs % (64 * turn) == 0 and turn % run == 0
            assert turn == 1 or inputs // (64 * turn) >= warps
            assert (warps, turn) == few_rows._shape(1, outputs, inputs)[1::2]
            gated = few_rows._shape(tiles, outputs, inputs, True)
            assert (
                gated[0] % 2 == 0
                and gated[3] % gated[2] == 0
                and gated[1::2] == few_rows._shape(1, outputs, inputs, True)[1::2]
            )


def test_only_few_rows_of_the_weights_dtype_are_taken():
    layer = few_rows.by_kernel(quantized(32, 64, mx.bfloat16), 16)
    taken = [rows for rows in (1, 2, 16, 17, 32) if few_rows.takes(layer, drawn((rows, 1, 64)))]
    assert taken == [2, 16]
    assert not few_rows.takes(layer, drawn((4, 64), mx.float32))
    assert not few_rows.takes(quantized(32, 64, mx.bfloat16), drawn((4, 64)))


@pytest.mark.parametrize(
    ("layer", "does"),
    [
        (quantized(32, 64, mx.bfloat16), True),
        (quantized(32, 128, mx.float16, group_size=128, bias=True), True),
        (quantized(24, 64, mx.bfloat16), False),
        (quantized(32, 64, mx.float32), False),
        (quantized(32, 64, mx.bfloat16, group_size=32), False),
        (nn.QuantizedLinear(64, 32, bits=8), False),
        (nn.QuantizedLinear(64, 32, mode="mxfp4"), False),
        (nn.Linear(64, 32), False),
    ],
)
def test_what_the_kernel_cannot_read_is_left_alone(layer: Any, does: bool):
    assert few_rows.fits(layer) is does


class Tiny(nn.Module):
    """Layers in both forms and in one, some joined, and an embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.QuantizedEmbedding(48, 64, 64, 4)
        self.embedding.weight, self.embedding.scales, self.embedding.biases = mx.quantize(drawn((48, 64)), 64, 4)
        self.one, self.two = (prepare._both(quantized(outputs, 64, mx.bfloat16)) for outputs in (32, 48))
        self.last = quantized(64, 64, mx.bfloat16)
        self.odd = quantized(24, 64, mx.bfloat16)
        self.layers: list[Any] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embedding(tokens)
        x = x + mx.pad(self.one(x), [(0, 0), (0, 0), (0, 32)]) * mx.pad(self.two(x), [(0, 0), (0, 0), (0, 16)])
        return self.embedding.as_linear(self.last(x) / 8 + self.odd(-x).mean(axis=-1, keepdims=True))


@pytest.fixture
def device(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with CUDA, on which the kernel is no slower."""
    monkeypatch.setattr(few_rows_check, "on_cuda", lambda: True)
    monkeypatch.setattr(few_rows_check.gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(few_rows_check, "is_slower", lambda *_: False)
    monkeypatch.setattr(few_rows_check, "TIMED_LEAST", 1)
    monkeypatch.setattr(few_rows_check, "TIMED_ROUNDS", 1)


def test_a_models_layers_multiply_few_rows_by_the_kernel(device: None, monkeypatch: pytest.MonkeyPatch):
    model = Tiny()
    tokens = mx.array([[1], [2], [3]], mx.uint32)
    before = model(tokens, None)
    assert joined.join(model, model) == 1
    assert few_rows_check.install(model) == 3
    seen = []
    multiply = few_rows.multiply
    monkeypatch.setattr(
        few_rows, "multiply", lambda layer, x, widths: seen.append(widths) or multiply(layer, x, widths)
    )
    monkeypatch.setattr(prepare, "STORED_PRODUCTS_MAX", 0)
    after = model(tokens, None)
    assert seen == [(32, 48), (64,), (48,)]
    # On a CPU MLX rounds sums of codes to 16 bits.
    assert mx.abs(after - before).max() <= 5e-2 * mx.abs(before).max()
    seen.clear()
    model(mx.zeros((129, 1), mx.uint32), None)
    assert not seen
    model(tokens[:1], None)
    assert len(seen) == 3


def test_one_row_is_multiplied_by_the_kernel_where_that_is_not_slower(device: None, monkeypatch: pytest.MonkeyPatch):
    is_slower, timed = few_rows_check._kernel_is_slower, list[int]()

    def slower(alike: Any, rows: int, *rest: Any) -> bool:
        timed.append(rows)
        return is_slower(alike, rows, *rest) or rows == 1

    monkeypatch.setattr(few_rows_check, "_kernel_is_slower", slower)
    model = Tiny()
    few_rows_check.install(model)
    assert timed == [128, 1] * 3
    assert [few_rows.takes(model.last, drawn((rows, 64))) for rows in (1, 2, 32)] == [False, True, True]
    assert few_rows.rows_alike(model) == 0


def test_a_kernel_that_is_slower_is_used_for_fewer_rows_or_not_at_all(device: None, monkeypatch: pytest.MonkeyPatch):
    model, tried = Tiny(), []
    monkeypatch.setattr(few_rows_check, "is_slower", lambda *_: tried.append(1) or len(tried) < 5)
    few_rows_check.install(model)
    # The layer that was tried first.
    assert model.last.rows_most == 8 == few_rows.rows_alike(model)
    monkeypatch.setattr(few_rows_check, "is_slower", lambda *_: True)
    assert few_rows_check.install(Tiny()) == 0


@pytest.mark.parametrize(("times", "most"), [(1.05, 32), (1.15, 0)])
def test_up_to_32_rows_the_kernel_may_take_a_little_longer(
    times: float, most: int, device: None, monkeypatch: pytest.MonkeyPatch
):
    """Else noise would decide how many tokens a step may have that changes no bit."""
    seconds = cycle([1.0, times])
    monkeypatch.setattr(few_rows_check, "_product_s", lambda *_: next(seconds))
    monkeypatch.setattr(few_rows_check, "is_slower", lambda today_s, kernel_s: kernel_s > today_s)
    layer = quantized(32, 64, mx.bfloat16)
    assert few_rows_check._bounds([(layer, layer)], (32,))[1] == most


class Gated(nn.Module):
    """A layer of gates and of what they let through, as one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = joined._joined([quantized(32, 64, mx.bfloat16), quantized(32, 64, mx.bfloat16)])


def test_a_layer_of_gates_is_used_if_it_is_right_as_such_too(device: None, monkeypatch: pytest.MonkeyPatch):
    assert few_rows_check.install(Gated()) == 1
    multiply_gated = few_rows.multiply_gated
    monkeypatch.setattr(few_rows_check, "multiply_gated", lambda layer, x: multiply_gated(layer, x) * 1.1)
    assert few_rows_check.install(Gated()) == 0


@pytest.mark.parametrize("fault", ["wrong", "nothing", "refused"])
def test_a_kernel_that_is_wrong_here_is_not_used_and_why_is_logged(
    fault: str, device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    multiply = few_rows.multiply

    def faulty(layer: Any, x: mx.array, widths: tuple[int, ...]) -> list[mx.array]:
        if fault == "refused":
            raise RuntimeError("it cannot be compiled. At all")
        return [part * (1.05 if fault == "wrong" else mx.nan) for part in multiply(layer, x, widths)]

    monkeypatch.setattr(few_rows_check, "multiply", faulty)
    with caplog.at_level(logging.WARNING):
        assert few_rows_check.install(Tiny()) == 0
    assert ("cannot be compiled" if fault == "refused" else "the kernel is off by") in caplog.text


def test_without_cuda_nothing_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(few_rows_check, "on_cuda", lambda: False)
    assert few_rows_check.install(Tiny()) == 0


def test_what_is_found_of_a_shape_holds_for_every_model(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parts of a divided model have layers of equal shapes. Another form of the weights is something else."""
    tried, bounds = [], few_rows_check._bounds
    monkeypatch.setattr(few_rows_check, "_bounds", lambda *given: tried.append(1) or bounds(*given))

    def found(weights: str) -> Findings:
        return Findings(tmp_path / "trials.json", products_id(weights))

    assert few_rows_check.install(Tiny(), found("both")) == 4
    shapes = len(tried)
    assert few_rows_check.install(Tiny(), found("both")) == 4 and len(tried) == shapes
    few_rows_check.install(Tiny(), found("stored"))
    assert len(tried) == 2 * shapes
