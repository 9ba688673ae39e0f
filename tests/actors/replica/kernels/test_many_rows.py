"""Products of many rows with quantized weights: what MLX would have to compile a kernel for is never asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from satchel.actors.replica.kernels import few_rows, many_rows
from satchel.actors.replica.loading import joined, prepare
from satchel.actors.replica.loading.ways import few_rows_check

INPUTS = 128


def exactly(layer: Any, x: mx.array) -> mx.array:
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    return x @ weight.T + (layer.bias if "bias" in layer else 0)


def quantized(outputs: int, *, bits: int = 4, bias: bool = False) -> Any:
    layer = nn.QuantizedLinear(INPUTS, outputs, bias=bias, group_size=64, bits=bits)
    weight = mx.random.normal((outputs, INPUTS), key=mx.random.key(outputs)).astype(mx.bfloat16)
    layer.weight, layer.scales, layer.biases = mx.quantize(weight, 64, bits)
    if bias:
        layer.bias = mx.random.normal((outputs,), key=mx.random.key(1)).astype(mx.bfloat16)
    return layer


def drawn(*shape: int) -> mx.array:
    return mx.random.normal((*shape, INPUTS), key=mx.random.key(2)).astype(mx.bfloat16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with CUDA, whose kernel for few rows is right and not slower."""
    for module in (many_rows, few_rows_check):
        monkeypatch.setattr(module, "on_cuda", lambda: True)
    monkeypatch.setattr(many_rows.gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(few_rows_check, "is_slower", lambda *_: False)
    monkeypatch.setattr(few_rows_check, "TIMED_LEAST", 1)
    monkeypatch.setattr(few_rows_check, "TIMED_ROUNDS", 1)

    def multiply_gated(layer: Any, x: mx.array) -> mx.array:
        gate, up = mx.split(exactly(layer, x), 2, axis=-1)
        return gate * mx.sigmoid(gate) * up

    def multiply(layer: Any, x: mx.array, widths: Any) -> list[mx.array]:
        assert x.size // x.shape[-1] <= few_rows.ROWS_MOST
        ends = [sum(widths[: part + 1]) for part in range(len(widths) - 1)]
        return [*mx.split(exactly(layer, x), ends, axis=-1)]

    for module in (few_rows, few_rows_check):
        monkeypatch.setattr(module, "multiply", multiply)
    monkeypatch.setattr(few_rows_check, "multiply_gated", multiply_gated)
    monkeypatch.setattr(few_rows_check, "prepare_products", lambda layer, widths: None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each product that MLX's own quantized kernels are asked for."""
    asked, usual = list[int](), mx.quantized_matmul

    def noted(x: mx.array, *given: Any, **named: Any) -> mx.array:
        asked.append(x.size // x.shape[-1])
        return usual(x, *given, **named)

    monkeypatch.setattr(mx, "quantized_matmul", noted)
    yield asked


class Tiny(nn.Module):
    """Two layers of one input, which can be joined, one more, and an embedding that is the output layer."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.embedding = nn.QuantizedEmbedding(96, INPUTS, group_size=64, bits=bits)
        weight = mx.random.normal((96, INPUTS), key=mx.random.key(0)).astype(mx.bfloat16)
        self.embedding.weight, self.embedding.scales, self.embedding.biases = mx.quantize(weight, 64, bits)
        self.one, self.two = quantized(INPUTS, bits=bits, bias=True), quantized(INPUTS, bits=bits)
        self.three = quantized(INPUTS, bits=bits)
        self.two.bias = mx.zeros((INPUTS,), mx.bfloat16)
        self.layers: list[Any] = []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embedding(tokens)
        return self.embedding.as_linear(self.three(x + self.one(x) * self.two(x) / 8) / 8)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_load_and_prompts_ask_mlx_for_no_kernel_that_must_be_compiled(bits: int, cuda: None, asked: list[int]):
    """Only products of fewer rows are MLX's, and decode steps of many sequences with weights that no other kernel
    reads."""
    model, whole = Tiny(bits), Tiny(bits)
    prompt = mx.array([[at % 96 for at in range(300)]], mx.uint32)
    before = whole(prompt)
    asked.clear()
    assert prepare.prepare_weights(model, None, "stored", lambda fraction: None) == "stored"
    assert joined.join(model, model) == 1
    assert few_rows_check.install(model) == (3 if bits == 4 else 0)
    outputs = [model(prompt[:, :rows]) for rows in (2, 9, 24, 40, 128, 200, 300)]
    mx.eval(outputs)
    assert not [rows for rows in asked if rows >= many_rows.ROWS_LEAST]
    # On a CPU MLX rounds sums of codes to 16 bits.
    assert mx.abs(outputs[-1] - before).max() <= 5e-2 * mx.abs(before).max()
    asked.clear()
    mx.eval(model(prompt[0, :40, None]))
    assert bool(asked) == (bits == 8)


@pytest.mark.parametrize("bias", [False, True])
def test_pieces_and_turns_are_the_whole_product(bias: bool, cuda: None, monkeypatch: pytest.MonkeyPatch):
    layer, x = quantized(80, bias=bias), drawn(2, 35)
    expected = exactly(layer, x)
    stored = few_rows_check.by_kernel(many_rows.recast(layer, many_rows.StoredLinear), 0)
    assert mx.array_equal(stored(x), expected)
    monkeypatch.setattr(many_rows, "PIECE_BYTES", 32 * INPUTS * 2)
    assert mx.array_equal(stored(x), expected)
    turned = few_rows_check.by_kernel(layer, 32)
    assert turned(x).shape == expected.shape
    assert mx.abs(turned(x) - expected).max() <= 2**-8 * mx.abs(expected).max()


def test_elsewhere_layers_stay_mlxs(monkeypatch: pytest.MonkeyPatch):
    assert many_rows.install(Tiny(4)) == 0
    monkeypatch.setattr(many_rows, "on_cuda", lambda: True)
    monkeypatch.setattr(many_rows.gpu_kernels, "is_available", lambda: False)
    assert many_rows.install(Tiny(4)) == 0


def test_small_products_of_eight_rows_use_the_dequantized_form():
    both, asked = prepare._both(quantized(64)), []
    both.stored = lambda x: asked.append(x.shape[0]) or x @ both.weight.T
    for rows in (1, 7, 8, 32):
        both(drawn(rows))
    assert asked == [1, 7]
