"""Joined products: models of all families compute the same to the last bit, and what is no such group is left alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from satchel.actors.replica.device import blas
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import joined, models, prepare
from satchel.actors.replica.loading.joined import Joined, Part
from satchel.actors.replica.proving.agreement import agree
from tests.worlds.models import families, vision_families

pytestmark = pytest.mark.skipif(on_gpu(), reason="there models are joined when they are loaded")

STEPS = ([5, 6, 7, 8, 9, 10, 11], [3], [4])

JOINED = {
    "qwen2": "q_proj k_proj v_proj gate_proj up_proj",
    "qwen3": "q_proj k_proj v_proj gate_proj up_proj",
    "qwen3_moe": "q_proj k_proj v_proj",
    "qwen3_next": "q_proj k_proj v_proj in_proj_qkvz in_proj_ba gate shared_expert_gate gate_proj up_proj",
    "llama": "q_proj k_proj v_proj gate_proj up_proj",
    "gemma3_text": "q_proj k_proj v_proj gate_proj up_proj",
    "glm4": "q_proj k_proj v_proj",
    "gpt_oss": "q_proj k_proj v_proj",
    "deepseek_v2": "q_a_proj kv_a_proj_with_mqa gate_proj up_proj",
    "nemotron_h": "q_proj k_proj v_proj",
}
"""What is given the same input, by family."""


def load(folder: Path, **named: Any) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="fp16", **named)


def logits(loaded: LoadedModel) -> list[np.ndarray]:
    caches = loaded.new_caches()
    return [np.array(loaded.model(mx.array([tokens]), cache=caches)) for tokens in STEPS]


def sizes(module: nn.Module) -> dict[str, int]:
    arrays: Any = tree_flatten(module.parameters())
    return {name: array.nbytes for name, array in arrays}


def parts(module: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, layer in module.named_modules() if isinstance(layer, Part)}


WEIGHTS = ("plain", "stored", "both")
"""How weights lie. Families take turns with them; the other pairs are slow."""


@pytest.fixture(autouse=True)
def layers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are joined there, and those with a bias are of another kind on a CPU with OpenBLAS."""
    monkeypatch.setattr(blas, "chosen", lambda: blas.Blas(reason="it is not wanted"))


def lay_out(module: nn.Module) -> None:
    """Puts weights as they lie on a CPU: MLX adds in another order otherwise."""
    module.apply(prepare._column_major, prepare._is_transposed_in_use)


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        pytest.param(family, weights, marks=[pytest.mark.slow] * ((at + turn) % len(WEIGHTS) != 0))
        for at, family in enumerate(families.FAMILIES)
        for turn, weights in enumerate(WEIGHTS)
    ],
)
def test_joined_products_are_those_of_the_layers(family: str, weights: str, tmp_path: Path):
    assert set(JOINED) == set(families.FAMILIES)
    bits, form = (None, "stored") if weights == "plain" else (4, weights)
    loaded = load(families.write_model(tmp_path, family, bits=bits), weights=form)
    before, were = logits(loaded), sizes(loaded.model)
    assert joined.join(loaded.model, loaded.model) > 0
    lay_out(loaded.model)
    for one, other in zip(before, logits(loaded), strict=True):
        assert np.array_equal(one, other)
    assert parts(loaded.model) == set(JOINED[family].split())
    now = sizes(loaded.model)
    assert sum(now.values()) == sum(were.values()), "weights are there once"
    products = [layer for _, layer in loaded.model.named_modules() if isinstance(layer, Joined)]
    assert not any(product._pending.outputs or product._pending.x is not None for product in products)


@pytest.mark.parametrize("family", vision_families.FAMILIES)
def test_the_language_part_of_a_model_that_sees_is_joined(family: str, tmp_path: Path):
    loaded = load(vision_families.write_model(tmp_path, family))
    assert loaded.vision is not None
    before = logits(loaded)
    assert joined.join(loaded.model._language, loaded.model) > 0
    lay_out(loaded.model._language)
    for one, other in zip(before, logits(loaded), strict=True):
        assert np.array_equal(one, other)


class Block(nn.Module):
    """Layers of all kinds, in a list, in a dict and by name, and what is given to which."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = (nn.Linear(32, width, bias=False) for width in (16, 48, 16))
        self.biased = nn.Linear(32, 16)
        self.twice = nn.Linear(32, 16, bias=False)
        self.never = nn.Linear(32, 16, bias=False)
        self.narrow = nn.Linear(16, 16, bias=False)
        self.adapted = LoRALinear.from_base(nn.Linear(32, 16, bias=False))
        self.listed = [nn.Linear(32, 8), nn.Linear(32, 24)]
        self.quantized, self.quantized_too = (nn.QuantizedLinear(32, 16, False, 32, 4) for _ in range(2))
        self.coarser = nn.QuantizedLinear(32, 16, False, 32, 8)
        self.shared = nn.Linear(32, 16, bias=False)
        self.same = self.shared

    def __call__(self, x: mx.array) -> mx.array:
        one, two, other = self.one(x), self.two(x), self.other(x + 0)
        sixteen = [one, two[..., :16], two[..., 16:32], two[..., 32:], other, self.biased(x), self.twice(x)]
        sixteen += [self.twice(x), self.adapted(x), self.narrow(x[..., :16]), self.shared(x)]
        sixteen += [self.quantized(x), self.quantized_too(x), self.coarser(x)]
        sixteen.append(
            mx.concatenate([layer(x) for layer in self.listed], axis=-1).reshape(*x.shape[:-1], 2, 16)[..., 0, :]
        )
        return sum((number * each for number, each in enumerate(sixteen, 1)), mx.array(0.0))


class Model(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.embedding, self.block, self.layers = nn.Embedding(64, 32), block, []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return self.block(self.embedding(tokens))


def run(model: Model) -> np.ndarray:
    return np.array(model(mx.array([STEPS[0]]), None))


def test_only_layers_of_one_kind_with_one_input_are_joined():
    model = Model(Block())
    mx.eval(model.parameters())
    before, were = run(model), sum(sizes(model).values())
    assert joined.join(model, model) == 3
    found = {name for name, layer in model.named_modules() if isinstance(layer, Part)}
    assert found == {f"block.{name}" for name in ("one", "two", "listed.0", "listed.1", "quantized", "quantized_too")}
    assert isinstance(model.block.adapted, LoRALinear) and model.block.same is model.block.shared
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-5)
    assert sum(sizes(model).values()) == were
    names = [name for name in sizes(model) if name.startswith(("block.one", "block.two"))]
    assert names == ["block.one.product.layer.weight"]


def test_adapters_are_left_alone(tmp_path: Path):
    """Of the embedded model: queries and the second of the gate's pair have adapters in two layers."""
    loaded = load(models.EMBEDDED / "recall")
    layer: Any = loaded.model.layers[5]
    layer.self_attn.q_proj = LoRALinear.from_base(layer.self_attn.q_proj)
    layer.mlp.up_proj = LoRALinear.from_base(layer.mlp.up_proj)
    loaded.model.eval()
    before = logits(loaded)
    assert joined.join(loaded.model, loaded.model) == 2 * len(loaded.model.layers) - 1
    assert type(layer.self_attn.q_proj) is LoRALinear and type(layer.self_attn.k_proj) is Part
    assert type(layer.mlp.up_proj) is LoRALinear and type(layer.mlp.gate_proj) is nn.Linear
    lay_out(loaded.model)
    for one, other in zip(before, logits(loaded), strict=True):
        assert np.array_equal(one, other)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)


class OnlyInPrompts(Pair):
    def __call__(self, x: mx.array) -> mx.array:
        return self.one(x) + self.two(x) if x.shape[1] > 1 else self.one(x)


class OneOfThem(Pair):
    """As a layer that attends to the keys of another does."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.one(x)


class Written(Pair):
    """The array is the same, but its contents change."""

    def __call__(self, x: mx.array) -> mx.array:
        one = self.one(x)
        x += 1
        return one + self.two(x)


class Reads(Pair):
    """The model also needs the weights themselves."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.one(x) + self.two(x).astype(self.two.weight.dtype)


@pytest.mark.parametrize("block", [OnlyInPrompts, OneOfThem])
def test_layers_that_are_not_always_called_together_are_left_alone(block: type[Pair]):
    model = Model(block())
    assert joined.join(model, model) == 0
    assert not parts(model)


@pytest.mark.parametrize(("block", "says"), [(Written, "something else"), (Reads, "needs its layers")])
def test_layers_are_put_back_if_the_model_needs_them(block: type[Pair], says: str, caplog: pytest.LogCaptureFixture):
    model = Model(block())
    mx.eval(model.parameters())
    before, were = run(model), sizes(model)
    with caplog.at_level(logging.WARNING):
        assert joined.join(model, model) == 0
    assert says in caplog.text
    assert type(model.block.one) is nn.Linear and sizes(model) == were
    np.testing.assert_allclose(run(model), before, rtol=1e-5, atol=1e-5)


class MakesMuchOfRounding(Pair):
    """The outputs cancel, but for a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.two.update({"weight": self.one.weight * 0.99, "bias": self.one.bias * 0.99})

    def __call__(self, x: mx.array) -> mx.array:
        return self.one(x) - self.two(x)


@pytest.mark.parametrize(("differs", "products"), [("in the last bit", 1), ("by a twentieth", 0)])
def test_the_last_bit_counts_as_much_as_the_model_makes_of_it(
    differs: str, products: int, monkeypatch: pytest.MonkeyPatch
):
    def multiply(self: Joined, x: mx.array) -> list[mx.array | None]:
        output = self.layer(x)
        odd = mx.arange(output.shape[-1]) % 2
        factor = 1 + (mx.finfo(output.dtype).eps if products else 0.05) * odd
        return [*mx.split(output * factor.astype(output.dtype), [32], axis=-1)]

    mx.random.seed(3)
    model = Model(MakesMuchOfRounding())
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    before = [model(mx.array([STEPS[0]]), None)]
    monkeypatch.setattr(Joined, "_multiply", multiply)
    assert joined.join(model, model) == products
    if products:
        assert not agree(before, [model(mx.array([STEPS[0]]), None)]), "a usual model agrees better"


def test_a_model_that_cannot_be_recorded_is_as_it_was(caplog: pytest.LogCaptureFixture):
    class Particular(Pair):
        def __call__(self, x: mx.array) -> mx.array:
            if type(self.one) is not nn.Linear:
                raise TypeError("it wants its own")
            return self.one(x) + self.two(x)

    model = Model(Particular())
    assert joined.join(model, model) == 0
    assert "recording fails: it wants its own" in caplog.text
    assert type(model.block.one) is nn.Linear


def test_outputs_wait_for_one_input_only():
    first, second = (mx.random.normal((3, 32), key=mx.random.key(number)) for number in (1, 2))
    layers = [nn.Linear(32, width) for width in (16, 8)]
    one, two = joined._joined(layers)
    product = one.product
    taken = [one(first), one(second), two(second), one(second), one(second), two(first)]
    expected = [layers[index](x) for index, x in zip((0, 0, 1, 0, 0, 1), (first, *[second] * 4, first), strict=True)]
    for got, wanted in zip(taken, expected, strict=True):
        np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5, atol=1e-6)
    assert product._pending.x is first, "the other part has not taken its own yet"
    one(first)
    assert product._pending.x is None and not product._pending.outputs


def test_a_joined_model_can_be_recorded():
    class Both(Pair):
        def __call__(self, x: mx.array) -> mx.array:
            return self.one(x) + self.two(x)

    block: Any = Both()
    model = Model(block)
    mx.eval(model.parameters())
    before = [np.array(model(mx.array([tokens]), None)) for tokens in STEPS]
    assert joined.join(model, model) == 1
    recorded = mx.compile(lambda tokens: model(tokens, None))
    for _ in range(2):
        for tokens, expected in zip(STEPS, before, strict=True):
            np.testing.assert_allclose(np.array(recorded(mx.array([tokens]))), expected, rtol=1e-5, atol=1e-6)
    assert block.one.product._pending.x is None


def test_a_joined_model_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its numbers may differ by rounding, so its blocks are not to be mixed with those of one that is not joined."""
    folder = families.write_model(tmp_path, "qwen3", bits=4)
    unbatched = load(folder, dtype="float32", weights="stored")
    monkeypatch.setattr(models, "on_gpu", lambda: True)
    together = load(folder, dtype="float32", weights="stored")
    assert not parts(unbatched.model) and parts(together.model)
    assert unbatched.weights == together.weights == "stored"
    assert unbatched.model_id != together.model_id
