"""Adapters by request that do not fit are refused in one sentence that names them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.model_files.identity.adapter_infos import all_files, with_adapter
from satchel.actors.model_files.identity.digests import digest_files
from satchel.actors.protocol.replica_messages import AdapterInfo
from satchel.actors.replica.adapters.layers import Matrices, Stack, adapt
from satchel.actors.replica.adapters.rows import Adapted
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels.few_rows import FewRowsLinear
from satchel.actors.replica.loading import adapters as by_request
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.joined import Joined, Part
from satchel.actors.start import differing
from satchel.cluster.errors import ModelLoadError
from tests.worlds.direct import model_info
from tests.worlds.models import vision_families
from tests.worlds.models.adapters import write_adapter
from tests.worlds.models.families import write_model

INFO = model_info()


def quiet(what: str, fraction: float | None) -> None: ...


def load(folder: Path, **how: Any) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=quiet, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "llama")


def adapter_of(folder: Path, to: Path, **fields: Any) -> Path:
    return write_adapter(to, load_checkpoint(folder, trusted=False)[0], **fields)


def spoil(folder: Path, what: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapters.safetensors"
    data, tensors = json.loads(config.read_text()), load_file(weights)
    first = next(iter(tensors)).rpartition(".")[0]
    match what:
        case "dora" | "full":
            data["fine_tune_type"] = what
        case "peft":
            data = {"peft_type": "LORA", "r": 8}
        case "scale":
            del data["lora_parameters"]["scale"]
        case "rank":
            data["lora_parameters"]["rank"] = 5
        case "half":
            del tensors[f"{first}.lora_b"]
        case "magnitude":
            tensors[f"{first}.m"] = np.zeros(3, np.float32)
        case "empty":
            tensors = {}
        case "place":
            tensors = {f"model.layers.77.{name}": tensor for name, tensor in tensors.items()}
        case "shape":
            tensors = {name: np.concatenate([tensor, tensor]) for name, tensor in tensors.items() if "lora_a" in name}
            tensors |= {f"{name[:-6]}lora_b": np.zeros((4, 64), np.float32) for name in [*tensors]}
        case "norm":
            tensors = {f"model.norm.{leaf}": np.zeros((4, 4), np.float32) for leaf in ("lora_a", "lora_b")}
    config.write_text(json.dumps(data))
    save_file(tensors, weights)
    if what == "weights":
        weights.unlink()
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("dora", "is of the type 'dora': by request there is only lora; use `adapter`"),
        ("full", "is of the type 'full'"),
        ("peft", "is PEFT's"),
        ("scale", "has no rank and scale in lora_parameters"),
        ("rank", "does not fit its own config: .* the rank is 5"),
        ("half", r"is incomplete: it lacks .*\.lora_b"),
        ("magnitude", r"\.m is no tensor of a LoRA adapter"),
        ("empty", "lacks all tensors"),
        ("place", r"has no layer model\.layers\.77\..*an adapter of another model"),
        (
            "shape",
            r"has adapter shapes \(256, 4\) and \(4, 64\), and takes 128 to 64; it is an adapter of another model",
        ),
        ("norm", r"model\.norm is a RMSNorm, which has no adapter by request"),
        ("weights", r"has no adapters\.safetensors"),
        ("cut", "is cut off"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_clear_sentence(folder: Path, tmp_path: Path, what: str, says: str):
    adapter = adapter_of(folder, tmp_path / "adapter")
    spoil(adapter, what)
    with pytest.raises(ModelLoadError, match=says) as error:
        load(folder, adapters={"mine": str(adapter)})
    assert str(adapter) in error.value.message and "\n" not in error.value.message


def test_experts_and_models_with_pictures_have_none(tmp_path: Path):
    folder = write_model(tmp_path / "experts", "qwen3_moe")
    tensors = {
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a": np.zeros((4, 4, 64), np.float32),
        "model.layers.0.mlp.switch_mlp.up_proj.lora_b": np.zeros((4, 64, 4), np.float32),
    }
    adapter = adapter_of(folder, tmp_path / "adapter", keys=("self_attn.q_proj",))
    load(folder, adapters={"attention": str(adapter)})
    save_file(tensors, adapter / "adapters.safetensors")
    with pytest.raises(ModelLoadError, match=r"changes experts \(model.* no adapter by request; use `adapter`"):
        load(folder, adapters={"experts": str(adapter)})
    other = adapter_of(folder, tmp_path / "other", keys=("self_attn.q_proj",))
    seeing = vision_families.write_model(tmp_path / "seeing", "qwen2_5_vl")
    with pytest.raises(ModelLoadError, match="adapters are only served on models of text"):
        load(seeing, adapters={"mine": str(other)})


def test_a_model_that_does_not_call_a_layer_is_not_served_with_it(folder: Path, tmp_path: Path):
    """Such as one that multiplies by its weights itself: the adapter would be ignored."""
    adapter = adapter_of(folder, tmp_path / "adapter", keys=("lm_head",))
    files = by_request.find_adapters({"mine": str(adapter)}, quiet)
    loaded = load(folder, dtype="float32")
    model, weight = loaded.model, loaded.model.lm_head.weight

    class Direct:
        layers = model.layers

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            return model.model(tokens, cache=cache) @ weight.T

    digested = digest_files(files[0].paths, None, lambda _: None)
    adapters = by_request.described(files, digested)
    with pytest.raises(ModelLoadError, match="the model never calls lm_head as a layer"):
        by_request.install(model, Direct(), files, adapters)


def test_a_model_that_mixes_rows_is_not_served_with_adapters(folder: Path, tmp_path: Path):
    """A layer that gets the tokens of all rows as one list cannot know whose they are."""
    adapter = adapter_of(folder, tmp_path / "adapter", keys=("lm_head",))
    files = by_request.find_adapters({"mine": str(adapter)}, quiet)
    model = load(folder, dtype="float32").model

    class Flat:
        layers = model.layers

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            hidden = model.model(tokens, cache=cache)
            return model.lm_head(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)

    digested = digest_files(files[0].paths, None, lambda _: None)
    with pytest.raises(ModelLoadError, match=r"a layer with adapters gets inputs .* for 1 sequences; use `adapter`"):
        by_request.install(model, Flat(), files, by_request.described(files, digested))


def test_layers_in_other_forms_have_adapters_too():
    """As on a GPU, where layers are joined into one product, or multiply few rows by a kernel."""
    layer, other = nn.Linear(32, 16), nn.Linear(32, 24)
    both = nn.Linear(32, 40)
    both.weight, both.bias = (
        mx.concatenate([layer.weight, other.weight]),
        mx.concatenate([layer.bias, other.bias]),
    )
    product = Joined(both, (16, 24))
    parts = [Part(product, 0), Part(product, 1)]
    matrices = Matrices(mx.random.normal((32, 4)), mx.random.normal((4, 16)), 2.0)
    adapted = Adapted(gathers=False)
    adapt(parts[0], Stack({1: matrices}, 1, stacked=False), adapted)
    x = mx.random.normal((2, 3, 32))
    plain = [part(x) for part in parts]
    with adapted.calling([1, 0]):
        changed = [part(x) for part in parts]
    expected = plain[0] + mx.stack([2.0 * (x[0] @ matrices.a @ matrices.b), mx.zeros((3, 16))])
    assert mx.allclose(changed[0], expected) and mx.array_equal(changed[1], plain[1])
    assert mx.array_equal(changed[0][1], plain[0][1]), "the product is computed once for both"
    few = nn.QuantizedLinear(64, 16, bits=4)
    few.__class__ = FewRowsLinear
    few.rows_most = 0  # type: ignore[attr-defined]
    adapt(few, Stack({1: Matrices(mx.ones((64, 2)), mx.ones((2, 16)), 1.0)}, 1, stacked=True), adapted)
    assert isinstance(few, FewRowsLinear) and few.bits == 4


def test_matrices_have_the_dtype_in_which_layers_compute(folder: Path, tmp_path: Path):
    """And so have the layers' outputs, also gathered."""
    adapter = str(adapter_of(folder, tmp_path / "adapter"))
    for gathers in (False, True):
        loaded = load(folder, adapters={"a": adapter, "b": adapter}, dtype="bfloat16", gathers=gathers)
        layer = loaded.model.model.layers[0].mlp.up_proj
        x = mx.ones((3, 1, 64), mx.bfloat16)
        with loaded.adapters.adapted.calling([0, 1, 2]):
            assert layer(x).dtype == mx.bfloat16
        assert layer.products._stack.alone(1).a.dtype == mx.bfloat16


def test_bytes_of_adapters(folder: Path, tmp_path: Path):
    """What is claimed before they are read is what they take."""
    sources = {
        name: str(adapter_of(folder, tmp_path / name, rank=rank, layers=layers))
        for name, rank, layers in (("a", 4, None), ("b", 6, 1))
    }
    files = by_request.find_adapters(sources, quiet)
    loaded = load(folder, adapters=sources, dtype="float32")
    assert loaded.adapters.nbytes == by_request.adapters_bytes(files, 4) > 0
    claimed: list[int] = []
    load(folder, dtype="float32", claim=claimed.append)
    load(folder, dtype="float32", adapters=sources, claim=claimed.append)
    assert claimed[1] - claimed[0] == loaded.adapters.nbytes


def test_an_adapter_is_identified_by_all_of_its_bytes(folder: Path, tmp_path: Path):
    """And the model stays the same one, whatever adapters it has; other names are no other adapters."""
    one, other = adapter_of(folder, tmp_path / "one"), adapter_of(folder, tmp_path / "other", seed=2)
    loaded = load(folder, adapters={"a": str(one), "b": str(other), "c": str(one)})
    a, b, c = (each.digest for each in loaded.adapters.all)
    assert a == c != b
    assert loaded.model_id == load(folder).model_id
    config = json.loads((one / "adapter_config.json").read_text())
    (one / "adapter_config.json").write_text(json.dumps(config | {"more": 1}))
    assert load(folder, adapters={"a": str(one)}).adapters.all[0].digest not in (a, b)


def test_a_model_with_an_adapter_is_described_as_a_model_of_its_own():
    adapter = AdapterInfo("mine", b"d" * 32, {"adapters.safetensors": "ab"}, 4)
    own = with_adapter(INFO, adapter)
    assert (own.name, own.parent, own.replicas_of, INFO.replicas_of) == ("mine", INFO.name, INFO.name, INFO.name)
    assert own.files_id == INFO.files_id and own.model_id != INFO.model_id
    assert own.embedding.refusal


def test_replicas_with_other_adapters_of_that_name_are_other_models():
    """Else an answer would depend on the node."""
    one, other = (
        dataclasses.replace(
            INFO,
            replica=name,
            node=name,
            adapters=[AdapterInfo("mine", name.encode() * 32, {"adapters.safetensors": name}, 4)],
        )
        for name in ("x", "y")
    )
    assert differing({"x": one, "z": one}) == []
    assert "adapters/mine/adapters.safetensors" in all_files(one)
    with pytest.raises(ModelLoadError, match=r"adapters/mine/adapters\.safetensors differs"):
        differing({"x": one, "y": other})
