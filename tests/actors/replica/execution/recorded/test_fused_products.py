"""Products of few rows that compute what comes after them in recorded steps: which do, and that a model computes the
same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.models.activations import swiglu

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.recorded.compiled_step import CompiledStep
from satchel.actors.replica.execution.recorded.fused_products import FusedProducts
from satchel.actors.replica.execution.recorded.layer_outputs import LayerOutputs
from satchel.actors.replica.execution.recorded.residual_sums import ResidualSums, fusions_of
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.kernels import few_rows
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.joined import Joined, Part
from satchel.actors.replica.loading.ways import decode_ways
from satchel.actors.replica.loading.ways.decode_ways import is_faster
from satchel.actors.replica.proving.pieces import IN_ONE_PIECE
from tests.worlds.kernels import cuda_on_cpu, emulator
from tests.worlds.models.adapters import write_adapter
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_products
from tests.worlds.replica.bench import Bench

DIM = 64
ADDED = Callable[[mx.array, mx.array], mx.array]


@pytest.fixture
def launched() -> Iterator[list[str]]:
    if on_gpu():
        pytest.skip("a GPU has its own kernels")
    with fake_products.cuda() as launched:
        yield launched


def load(folder: Path, **how: Any) -> LoadedModel:
    how = {"context_tokens_max": None, "weights": "stored", "dtype": "float16", "warm": False} | how
    return models.load(str(folder), progress=lambda *_: None, **how)


def written(folder: Path, family: str = "llama", **other: Any) -> Path:
    return write_model(folder / "model", family, bits=4, group_size=64, **other)


def logits(loaded: LoadedModel) -> list[mx.array]:
    """Of recorded steps with several sequences."""
    step = CompiledStep(loaded.model, loaded.deferral, fusions=loaded.fusions)
    return decode_ways._batch_steps(loaded.model, loaded.spec, step, 0, IN_ONE_PIECE)


def unfused(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, way=replace(loaded.way, summed=False, gated=False))


@pytest.mark.parametrize(
    "family, gates",
    [
        ("llama", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("qwen3", 1), ("glm4", 0), ("gemma3_text", 0)]),
    ],
)
def test_a_models_sums_and_gates_are_computed_by_its_products(
    family: str, gates: int, launched: list[str], tmp_path: Path
):
    """To the last bit. GLM 4 has one layer for both, and Gemma another activation; both norm what is added."""
    loaded = load(written(tmp_path, family))
    assert loaded.way.gated and loaded.way.summed and "with sums, with gates" in loaded.way.describe()
    expected = logits(unfused(loaded))
    launched.clear()
    assert all(map(mx.array_equal, logits(loaded), expected))
    count, steps = len(loaded.model.layers), 4
    normed = family in ("glm4", "gemma3_text")
    assert launched.count("gates") == count * gates * steps
    # The stream begins after the first sum: an embedding may be normed before it is one.
    assert launched.count("sum") == (0 if normed else (2 * count - 1) * steps)


def test_what_layers_give_is_what_products_have_computed(
    launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To the last bit; the model's own sums would have to be computed for it too."""
    loaded = load(written(tmp_path, num_hidden_layers=3))
    outputs, taken = LayerOutputs(loaded.model.layers[:2]), list[bool]()
    computed = ResidualSums.computed

    def noted(sums: ResidualSums, array: mx.array) -> mx.array:
        taken.append(computed(sums, array) is not array)
        return computed(sums, array)

    monkeypatch.setattr(ResidualSums, "computed", noted)
    found: list[Any] = []
    for how in (unfused(loaded), loaded):
        step = CompiledStep(how.model, how.deferral, fusions=how.fusions, outputs=outputs)
        decode_ways._batch_steps(how.model, how.spec, step, 0, IN_ONE_PIECE)
        found.append(step.hidden)
    assert found[0].shape[1] == 2 * DIM and mx.array_equal(*found)
    assert taken and all(taken)


def test_what_an_earlier_load_found_is_used(launched: list[str], tmp_path: Path):
    folder = written(tmp_path)
    loaded = load(folder, trials=tmp_path / "trials.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_ways, "_found", lambda *_, **__: pytest.fail("it is known"))
        assert load(folder, trials=tmp_path / "trials.json").way == loaded.way


def test_a_stage_computes_gates_so_and_passes_its_sums_on(launched: list[str], tmp_path: Path):
    """Shares of layers compute nothing so: each process would find out by itself whether it takes less time."""
    folder = written(tmp_path)
    loaded = load_stage(str(folder), 1, 2, weights="stored", dtype="float16")
    assert loaded.way.compiled and loaded.way.gated and not loaded.way.summed

    def states(fusions: Sequence[Any]) -> list[mx.array]:
        step = loaded.model.recorded(loaded.deferral, fusions)
        return decode_ways._batch_steps(loaded.model, loaded.spec, step, 0, IN_ONE_PIECE)

    expected = states(())
    launched.clear()
    assert all(map(mx.array_equal, states(loaded.fusions), expected))
    assert launched.count("gates") == 3 and "sum" not in launched, "a stage takes no drafts"
    way = decode_ways.fastest(loaded.model, loaded.spec, loaded.context_tokens, whole=False, shared=True)
    assert way.compiled and not (way.gated or way.summed or way.tensor)


def test_a_model_that_adds_something_else_has_only_its_gates_fused(
    launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + 0.3 * self.self_attn(self.input_layernorm(x), mask, cache)
        return h + 0.3 * self.mlp(self.post_attention_layernorm(h))

    monkeypatch.setattr(llama.TransformerBlock, "__call__", call)
    loaded = load(written(tmp_path))
    assert loaded.way.gated and not loaded.way.summed
    expected = logits(unfused(loaded))
    assert all(map(mx.array_equal, logits(loaded), expected))


def test_neither_is_used_that_takes_no_less_time(launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timed: list[int] = []

    def recorded(model: Any, steps: Any, caches: Any, *, tensor: bool = False) -> list[tuple[float, float]]:
        timed.append(len(caches[0].lengths))
        return [(1.0, 1.0)]

    monkeypatch.setattr(decode_ways, "is_faster", is_faster)
    monkeypatch.setattr(decode_ways, "_recorded_steps_s", recorded)
    way = load(written(tmp_path)).way
    assert way.compiled and not way.gated and not way.summed
    assert timed == [decode_ways.LONG_SEQUENCES], "products of few rows are of several"


def test_sums_are_not_tried_with_norms_on_cuda(launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_model(tmp_path / "model", "llama")
    assert load(folder).way.summed
    monkeypatch.setattr(decode_ways, "on_cuda", lambda: True)
    assert not load(folder).way.summed


def test_adapters_change_what_is_added_and_gated(launched: list[str], tmp_path: Path):
    """What an adapter has changed is not what the product alone would be."""
    folder = written(tmp_path)
    whole = load_checkpoint(folder, trusted=False)[0]
    adapter = str(write_adapter(tmp_path / "adapter", whole, keys=("mlp.up_proj", "self_attn.o_proj"), layers=1))
    loaded = load(folder, adapters={"one": adapter}, gathers=True)
    assert loaded.way.gated and loaded.way.summed

    def said(loaded: LoadedModel, name: str) -> tuple[list[list[int]], Counter[str]]:
        bench = Bench(loaded)
        for number in range(3):
            bench.submit(str(number), [5 + number, 6, 7], max_tokens=8, adapter=name if number else "")
        while len(bench.engine.executor._sequences) < 3:
            bench.turn()
        launched.clear()
        bench.turn()
        seen = Counter(launched)
        bench.drain()
        return [bench.sequences[str(number)].tokens for number in range(3)], seen

    plain, adapted = said(loaded, ""), said(loaded, "one")
    assert adapted[0] == said(unfused(loaded), "one")[0] != plain[0]
    assert (plain[1]["sum"], plain[1]["gates"]) == (3, 2)
    # The gates and the feed-forward part's sum of the first layer, and that sum of the second.
    assert (adapted[1]["sum"], adapted[1]["gates"]) == (2, 1)


def quantized(inputs: int, outputs: int, seed: int) -> Any:
    layer = nn.QuantizedLinear(inputs, outputs, bias=False, bits=4)
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(seed)) * inputs**-0.5
    layer.weight, layer.scales, layer.biases = mx.quantize(weight.astype(mx.float16), 64, 4)
    return few_rows.by_kernel(layer, 8)


class FeedForward(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        product = Joined(quantized(DIM, 4 * DIM, seed), (2 * DIM, 2 * DIM))
        self.gate, self.up, self.down = Part(product, 0), Part(product, 1), quantized(2 * DIM, DIM, 10 + seed)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(swiglu(self.gate(x), self.up(x)))


class Layer(nn.Module):
    def __init__(self, seed: int, add: ADDED) -> None:
        super().__init__()
        self.norm, self.part = nn.RMSNorm(DIM), FeedForward(seed)
        self._add = add

    def __call__(self, x: mx.array) -> mx.array:
        return self._add(x, self.part(self.norm(x)))


class Model(nn.Module):
    def __init__(self, add: ADDED = mx.add) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, DIM)
        self.layers = [Layer(seed, add) for seed in (1, 2, 3)]
        self.norm = nn.RMSNorm(DIM)
        self.set_dtype(mx.float16)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens) * 2.0
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def fused(model: Model, tokens: mx.array) -> mx.array:
    with ExitStack() as active:
        for fusion in fusions_of(model, summed=True, gated=True):
            active.enter_context(fusion.active())
        return model(tokens)


def test_the_kernels_own_text_computes_what_the_model_does(monkeypatch: pytest.MonkeyPatch):
    """Also the sum before the last norm; and the layers are as before after it."""
    if on_gpu() or (lacks := emulator.lacks()):
        pytest.skip("a GPU has its own kernels" if on_gpu() else lacks)
    monkeypatch.setattr(few_rows, "kernel", cuda_on_cpu.kernel)
    few_rows._plan.cache_clear()
    mx.disable_compile()
    try:
        model, tokens = Model(), mx.array([[1], [5], [7]])
        expected = model(tokens)
        got = fused(model, tokens)
        assert mx.abs(got - expected).max() <= 2**-8 * mx.abs(expected).max()
        assert mx.array_equal(model(tokens), expected)
    finally:
        mx.enable_compile()
        few_rows._plan.cache_clear()


def test_products_that_compute_more_take_the_place_of_those_alone(monkeypatch: pytest.MonkeyPatch):
    """In a recorded graph there are no more products than before, and none of the model's sums."""
    monkeypatch.setattr(few_rows, "multiply", fake_products.product)
    monkeypatch.setattr(few_rows, "multiply_gated", fake_products.gated)
    # Nothing else computes this.
    model = Model(mx.arctan2)

    def operations(run: Callable[[mx.array], mx.array]) -> Counter[str]:
        found = list[dict[str, Any]]()
        mx.export_function(found.append, run, mx.array([[1], [5]]))
        return Counter(step["name"] for step in found if "name" in step)

    before, after = operations(model), operations(lambda tokens: fused(model, tokens))
    assert before["Matmul"] == after["Matmul"] == 6
    assert before["ArcTan2"] == 3 and after["ArcTan2"] == 0


def test_one_row_and_many_are_computed_by_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(few_rows, "_launch", lambda *_, **__: pytest.fail("the kernel does not compute these"))
    model = Model()
    for rows in (1, 9):
        tokens = mx.arange(rows)[:, None] % 8
        assert mx.array_equal(fused(model, tokens), model(tokens))


def test_a_model_without_such_products_has_none():
    model = nn.Sequential(nn.QuantizedLinear(64, 64), nn.RMSNorm(64))
    assert FusedProducts(model).is_empty
    assert not fusions_of(model, summed=False, gated=True)
