"""Kernels are compiled while weights are read: all that a load and the first answers need."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.model_files.weights import Tensor, WeightFile
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group import loading as parts
from satchel.actors.replica.group.tensor.model import SharePart
from satchel.actors.replica.group.tensor.ranks import Ranks
from satchel.actors.replica.kernels import few_rows, gpu_kernels
from satchel.actors.replica.kv.caches import PooledBlock, into_pool, out_of_pool
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading import joined, models
from satchel.actors.replica.loading.warming import kernels_ahead
from satchel.actors.replica.loading.warming.kernels_ahead import Shapes
from satchel.actors.replica.loading.ways import few_rows_check
from tests.worlds.models.families import write_model
from tests.worlds.replica import compiled_kernels
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.compiled_kernels import Compiled, kind_of

NORMED = {"head_dim": 64}
"""Of heads that tensor cores can read."""

ANY = {"append", "stack", "decode_join"}
QUANTIZED = {"unseal", "seal", "write_sealed_8", "write_8", "write_records_8", *ANY}
QUANTIZED |= {"quantized_decode_one", "quantized_decode_parts"}
TENSOR = {"quantized_decode_tensor_one", "quantized_decode_tensor_parts"}
PLAIN = {"write_2", "write_records_2", "plain_decode_one", "plain_decode_parts", *ANY}


def load(compiled: Compiled, module: ModuleType, source: Path, *given: Any, **how: Any) -> LoadedModel:
    """Loads a model whose weights are read once all kernels that were begun are compiled."""
    prepare = module.prepare_weights

    def prepared(*given: Any) -> str:
        compiled.settle()
        assert compiled.ahead and not compiled.awaited and not compiled.launched
        return prepare(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "prepare_weights", prepared)
        called = models.load if module is models else parts.load_part
        return called(str(source), *given, context_tokens_max=None, progress=lambda *_: None, **how)


def serve(loaded: LoadedModel) -> None:
    """Serves sequences that join, draft and fill blocks, and copies a block out of the pool and in."""
    bench = Bench(loaded, drafts=True)
    bench.engine.executor.batched_prefill = True
    for name, count in {"one": 300, "two": 20, "three": 700}.items():
        bench.submit(name, [5 + at % 7 for at in range(count)], max_tokens=12)
        bench.turn()
        bench.turn()
    bench.drain()
    assert all(len(each.tokens) == 12 for each in bench.sequences.values())
    assert loaded.pool is not None
    block = PooledBlock(tuple(group.take(1)[0] for group in loaded.pool.groups), 1, 0, None)
    (record,) = out_of_pool(loaded.spec, loaded.pool, [block])
    into_pool(loaded.pool, record.records)


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("family", "other", "kv", "dtype", "kinds"),
    [
        pytest.param("llama", {}, "q4", "bfloat16", {"prefill_bf16", *QUANTIZED}, marks=pytest.mark.slow),
        ("qwen3", NORMED, "q4", "bfloat16", {"prefill_bf16", *TENSOR, *QUANTIZED}),
        ("qwen3", {}, "fp16", "float16", {"prefill_f16", *PLAIN}),
        pytest.param("gemma2", {}, "q4", "bfloat16", {*QUANTIZED}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {}, "k8v4", "bfloat16", {"prefill_bf16", *QUANTIZED}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, "q4", "float32", QUANTIZED, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_after_the_weights_are_read(
    family: str, other: dict[str, Any], kv: str, dtype: str, kinds: set[str], tmp_path: Path
):
    folder = write_model(tmp_path / "model", family, **other)
    with compiled_kernels.world() as compiled:
        loaded = load(compiled, models, folder, kv=kv, dtype=dtype)
        assert loaded.way.reads is Reads.KERNEL and loaded.way.fused, loaded.way
        serve(loaded)
        launched = {kind_of(name) for name in compiled.launched}
        reads = {kind for kind in launched if kind.startswith("read_records_")}
        assert reads and launched == kinds | reads
        assert not {kind_of(name) for name in compiled.awaited}
        assert compiled.launched <= compiled.ahead


@pytest.mark.parametrize("part", [parts.StagePart(0, 1), SharePart(Ranks(1, 2))], ids=["stage", "share"])
def test_nor_for_a_part_of_a_model(part: parts.Part, tmp_path: Path):
    folder = write_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    with compiled_kernels.world() as compiled:
        loaded = load(compiled, parts, folder, part, dtype="bfloat16")
        assert loaded.way.reads is Reads.KERNEL and loaded.way.fused, loaded.way
        assert {kind_of(name) for name in compiled.launched} >= {
            "unseal",
            "seal",
            "quantized_decode_parts",
            "decode_join",
        }
        assert not {kind_of(name) for name in compiled.awaited}


def test_a_model_that_reads_no_kv_by_a_kernel_needs_only_that_of_prompts(tmp_path: Path):
    folder = write_model(tmp_path / "model", "llama")
    with compiled_kernels.world() as compiled:
        load(compiled, models, folder, dtype="bfloat16", numerics="reproducible")
        assert {kind_of(name) for name in compiled.ahead} == {"prefill_bf16"}


def weights(**dtypes: str) -> list[WeightFile]:
    tensors = {name.replace("__", "."): Tensor(dtype, (4,), 8) for name, dtype in dtypes.items()}
    return [WeightFile(Path("model.safetensors"), b"", tensors, 8)]


QUANTIZED_WEIGHTS = weights(a__weight="U32", a__scales="BF16", a__biases="BF16", norm="F32")
CONFIG: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def test_shapes_are_read_from_config_and_headers():
    assert Shapes.read(CONFIG, QUANTIZED_WEIGHTS, None) == Shapes(32, 8, 128, mx.bfloat16)
    assert Shapes.read(CONFIG, QUANTIZED_WEIGHTS, mx.float16) == Shapes(32, 8, 128, mx.float16)
    text = {"text_config": {**CONFIG, "head_dim": 256, "num_hidden_layers": 36}, "hidden_size": 12}
    assert Shapes.read(text, QUANTIZED_WEIGHTS, None) == Shapes(32, 8, 256, mx.bfloat16, None, 36)
    assert Shapes.read(text, QUANTIZED_WEIGHTS, None, 4) == Shapes(8, 2, 256, mx.bfloat16)
    many = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}
    sunk = weights(a="F16", layers__0__sinks="F32", b="F16")
    assert Shapes.read(many, sunk, None) == Shapes(4, 4, 16, mx.float16, mx.float32)


def test_automatic_kv_begins_what_is_tried_first():
    ahead: dict[str, set[str]] = {}
    for kv in ("auto", "q4", "k8v4"):
        with compiled_kernels.world() as compiled:
            assert kernels_ahead.begin(CONFIG, QUANTIZED_WEIGHTS, None, kv) is not None
            compiled.settle()
            ahead[kv] = compiled.ahead
    assert ahead["auto"] == ahead["q4"] != ahead["k8v4"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_size": 64},
        {**CONFIG, "num_attention_heads": "many"},
        {**CONFIG, "num_attention_heads": [32, 16]},
        {**CONFIG, "num_key_value_heads": 5},
        {**CONFIG, "kv_lora_rank": 512},
    ],
)
def test_an_odd_config_begins_nothing(config: dict[str, Any]):
    with compiled_kernels.world() as compiled:
        assert kernels_ahead.begin(config, QUANTIZED_WEIGHTS, None, "q4") is None
        compiled.settle()
        assert not compiled.ahead


def test_what_cannot_be_built_is_no_error():
    with compiled_kernels.world() as compiled:
        assert kernels_ahead.begin(CONFIG, weights(a="I8"), None, "q4") is None
        assert kernels_ahead.begin(CONFIG, QUANTIZED_WEIGHTS, None, "unknown") is None
        # Heads for which there is no decode kernel.
        ahead = kernels_ahead.begin({**CONFIG, "head_dim": 8192}, QUANTIZED_WEIGHTS, None, "q4")
        assert ahead is not None
        nothing: Any = object()
        ahead.opened(nothing)
        compiled.settle()
        assert "append" in {kind_of(name) for name in compiled.ahead}


def test_a_device_without_nvrtc_begins_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels_ahead, "_launches", lambda *_, **__: pytest.fail("it has no kernels"))
    monkeypatch.setattr(gpu_kernels, "has_nvrtc", lambda: False)
    assert kernels_ahead.begin(CONFIG, QUANTIZED_WEIGHTS, None, "q4") is None


def test_products_are_begun_as_they_are_joined_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_model(tmp_path / "model", "qwen2", bits=4, group_size=64)
    model = load_checkpoint(folder, trusted=False)[0]
    model.set_dtype(mx.bfloat16)
    begun: set[str] = set()
    monkeypatch.setattr(few_rows, "kernel", lambda name, *_: name)
    monkeypatch.setattr(few_rows, "prepare", lambda *given: begun.add(str(given)))
    few_rows._plan.cache_clear()
    for _, module in model.named_modules():
        kernels_ahead._products(module)
    ahead = {*begun}
    begun.clear()
    assert joined.join(model, model) == 2 * len(model.layers)
    monkeypatch.setattr(few_rows_check, "on_cuda", lambda: True)
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(few_rows_check, "_bounds", lambda *_: [2, 0])
    few_rows_check.install(model)
    few_rows._plan.cache_clear()
    assert begun and begun <= ahead
