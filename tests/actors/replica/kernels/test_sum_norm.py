"""A residual sum and its norm by one kernel, and which sums of a model it computes while a step is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from satchel.actors.replica.execution.recorded.deferral import CannotDefer
from satchel.actors.replica.execution.recorded.residual_sums import ResidualSums
from satchel.actors.replica.kernels import sum_norm
from tests.worlds.replica import fake_kernels

DIM = 64


def error(dtype: mx.Dtype, dim: int, rows: int) -> float:
    """How far the kernel's sum and norm are from MLX's own, of the largest number."""
    mx.random.seed(dim)
    x, y = (mx.random.normal((rows, 1, dim)).astype(dtype) * 3 for _ in range(2))
    weight = mx.random.normal((dim,))
    total, normed = sum_norm.sum_norm(x, y, weight, mx.array([1e-5]))
    assert mx.array_equal(total, x + y) and normed.dtype == dtype
    expected = mx.fast.rms_norm((x + y).astype(mx.float32), weight, 1e-5)
    return float(mx.abs(normed.astype(mx.float32) - expected).max() / mx.abs(expected).max())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype, bound", [(mx.float32, 1e-6), (mx.float16, 1e-3), (mx.bfloat16, 5e-3)])
@pytest.mark.parametrize("dim, rows", [(64, 1), (96, 3), (1000, 2), (5120, 1)])
def test_it_computes_what_mlx_does(dtype: mx.Dtype, bound: float, dim: int, rows: int):
    assert error(dtype, dim, rows) < bound


class Layer(nn.Module):
    """A layer of a model. `add` makes the next stream of the stream and of what a part has returned."""

    def __init__(self, add: Callable[[mx.array, mx.array], mx.array], *, normed: bool) -> None:
        super().__init__()
        self.input_norm, self.part = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)
        if normed:
            self.output_norm = nn.RMSNorm(DIM)
        self._add, self._normed = add, normed

    def __call__(self, x: mx.array) -> mx.array:
        out = self.part(self.input_norm(x))
        return self._add(x, self.output_norm(out) if self._normed else out)


class Model(nn.Module):
    def __init__(self, add: Callable[[mx.array, mx.array], mx.array] = mx.add, *, normed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, DIM)
        self.layers = [Layer(add, normed=normed) for _ in range(3)]
        self.norm = nn.RMSNorm(DIM)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens) * 2.0
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def both(model: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[mx.array, mx.array, int]:
    """What a model computes, what it computes with the sums, and how many these were."""
    monkeypatch.setattr(sum_norm, "sum_norm", fake_kernels.sum_and_norm)
    called = list[Any]()
    kernel = sum_norm.sum_norm
    monkeypatch.setattr(sum_norm, "sum_norm", lambda *given: called.append(given) or kernel(*given))
    tokens, sums = mx.array([[1], [5]]), ResidualSums(model)
    expected = model(tokens)
    with sums.active():
        got = model(tokens)
    assert mx.array_equal(model(tokens), expected), "the model's own parts are back"
    return expected, got, len(called)


@pytest.mark.parametrize("normed", [False, True])
def test_each_sum_but_those_of_the_first_layer_is_computed_with_its_norm(normed: bool, monkeypatch: pytest.MonkeyPatch):
    expected, got, count = both(Model(normed=normed), monkeypatch)
    assert count == 3 and mx.allclose(got, expected, atol=1e-5)


def test_the_models_own_sums_are_not_in_a_recorded_graph(monkeypatch: pytest.MonkeyPatch):
    """Else the kernel would come on top of them."""
    monkeypatch.setattr(sum_norm, "sum_norm", fake_kernels.sum_and_norm)
    # Nothing else computes this.
    model = Model(mx.arctan2)
    sums = ResidualSums(model)

    def operations(context: AbstractContextManager[None]) -> Counter[str]:
        found = list[dict[str, Any]]()

        def run(tokens: mx.array) -> mx.array:
            with context:
                return model(tokens)

        mx.export_function(found.append, run, mx.array([[1], [5]]))
        return Counter(step["name"] for step in found if "name" in step)

    assert operations(nullcontext())["ArcTan2"] == 3 and operations(sums.active())["ArcTan2"] == 0


def test_a_model_that_adds_something_else_is_told_apart_by_its_results(monkeypatch: pytest.MonkeyPatch):
    expected, got, _ = both(Model(lambda x, y: x + 0.5 * y), monkeypatch)
    assert not mx.allclose(got, expected, atol=1e-2)


class Twice(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        return x + self.output_norm(self.input_norm(x) * 2)


def test_a_model_that_norms_twice_without_a_part_between_cannot_be_recorded_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sum_norm, "sum_norm", fake_kernels.sum_and_norm)
    model = Model()
    model.layers[1] = Twice(mx.add, normed=True)
    with ResidualSums(model).active(), pytest.raises(CannotDefer):
        model(mx.array([[1]]))


def test_a_model_without_norms_has_none():
    assert ResidualSums(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))).is_empty
