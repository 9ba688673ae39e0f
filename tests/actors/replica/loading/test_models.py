"""Sources of models, their ids, and what is refused before it does harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_model
from safetensors.numpy import save_file

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models, prepare
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import config_of, write_model
from tests.worlds.replica.bench import Bench


def quiet(what: str, fraction: float | None) -> None:
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(models.EMBEDDED / "recall", tmp_path / "model"))


def test_the_embedded_model_is_small_and_loads_like_any_folder(folder: Path):
    size = sum(path.stat().st_size for path in (models.EMBEDDED / "recall").rglob("*"))
    assert size <= 12_000_000
    fractions: list[float | None] = []
    loaded = models.load(
        str(folder), context_tokens_max=2048, progress=lambda what, fraction: fractions.append(fraction)
    )
    assert fractions[0] is None
    known = [fraction for fraction in fractions if fraction is not None]
    assert known == sorted(known) and known[-1] == 1.0
    assert loaded.context_tokens == 2048
    assert loaded.dtype == "float32"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("embedded:nothing", "no embedded model 'nothing'; there are: recall"),
        ("/no/such/folder", "neither a folder nor a Hub id"),
        ("just-a-word", "neither a folder nor a Hub id"),
    ],
)
def test_a_source_that_is_nowhere_is_named(source: str, says: str):
    with pytest.raises(ModelLoadError, match=says):
        models.resolve(source, quiet)


def test_a_folder_without_a_model_is_named(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        models.resolve(str(tmp_path), quiet)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ModelLoadError, match="no weights"):
        models.load(str(tmp_path), context_tokens_max=None, progress=quiet)


def test_a_folder_may_be_written_from_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert models.resolve("~/model", quiet) == folder
    with pytest.raises(ModelLoadError, match="a user who does not exist"):
        models.resolve("~nobody-has-this-name/model", quiet)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda whole: whole[:-1000], "is cut off"),
        (lambda whole: whole[: len(whole) // 2], "is cut off"),
        (lambda whole: whole[:100], "only the beginning of one"),
        (lambda whole: whole[:3], "only the beginning of one"),
        (lambda whole: b"", "only the beginning of one"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "no safetensors file"),
        (lambda whole: whole[:8] + b"[" + whole[9:], "its header makes no sense"),
        (lambda whole: whole.replace(b"data_offsets", b"data_offset_"), "its header makes no sense"),
    ],
)
def test_damaged_weights_are_one_sentence_with_the_file(folder: Path, damage: Any, says: str):
    """Before anything is loaded, so that no damaged weight can compute an answer."""
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelLoadError, match=says) as error:
        models.load(str(folder), context_tokens_max=None, progress=quiet)
    assert str(weights) in error.value.message and "\n" not in error.value.message


def in_shards(folder: Path, *, named: str = "model-{}-of-3.safetensors") -> None:
    """Splits a folder's weights into the first and the third of three files, and writes an index with their names."""
    whole: Any = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (1, 3):
        part = {name: weight for place, (name, weight) in enumerate(sorted(whole.items())) if place % 2 == number // 3}
        mx.save_safetensors(str(folder / f"model-{number}-of-3.safetensors"), part)
        index |= dict.fromkeys(part, named.format(number))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("named", ["model-{}-of-3.safetensors", "pytorch_model-{}.bin"])
def test_shards_may_have_gaps_and_the_index_may_be_of_another_layout(tmp_path: Path, named: str):
    folder = write_model(tmp_path, "llama")
    in_shards(folder, named=named)
    assert models.load(str(folder), context_tokens_max=None, progress=quiet).vocabulary_size


def test_a_shard_that_is_missing_is_named(tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    in_shards(folder)
    (folder / "model-3-of-3.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"its index names model-3-of-3\.safetensors, which is not in ") as error:
        models.load(str(folder), context_tokens_max=None, progress=quiet)
    assert "\n" not in error.value.message


def test_a_tensor_that_is_missing_is_named(tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    whole: Any = mx.load(str(folder / "model.safetensors"))
    del whole["model.layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), whole)
    with pytest.raises(ModelLoadError, match=r"cannot be loaded: .*model\.layers\.1\.mlp\.up_proj\.weight"):
        models.load(str(folder), context_tokens_max=None, progress=quiet)


def test_a_type_that_nobody_has_is_refused_with_what_to_do(tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "what_is_this"}))
    with pytest.raises(ModelLoadError, match=r"what_is_this not supported: .*; take another model, or a newer Satchel"):
        models.load(str(folder), context_tokens_max=None, progress=quiet)


def test_weights_that_do_not_fit_the_free_memory_are_refused_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file's 11 MB of bfloat16 take twice that in float32; the free memory lies between."""

    class Memory:
        available = 16 * 10**6

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert models.load(str(folder), dtype="bfloat16", context_tokens_max=None, progress=quiet)
    with pytest.raises(ModelLoadError, match=r"needs 0\.02 GiB .* 0\.01 GiB are free"):
        models.load(str(folder), dtype="float32", context_tokens_max=None, progress=quiet)


@pytest.mark.parametrize("named", ["n_positions", "max_seq_len", "model_max_length"])
def test_a_prompt_longer_than_the_context_is_refused_whatever_its_name(tmp_path: Path, named: str):
    """Beyond its table of positions a model would read arbitrary memory."""
    folder = write_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | {named: 256}))
    bench = Bench(models.load(str(folder), context_tokens_max=None, progress=quiet))
    bench.submit("long", [7] * 400)
    bench.turn()
    assert "256 tokens" in bench.refused["long"].message
    bench.submit("short", [7] * 200, max_tokens=2)
    bench.drain()
    assert bench.sequences["short"].finish == "length"


RANK = 4
ADAPTER = {"fine_tune_type": "lora", "num_layers": 2}
LORA = {"rank": RANK, "scale": 2.0, "dropout": 0.5, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
OUTPUTS = {"self_attn.q_proj": 256, "mlp.up_proj": 768}


def write_adapter(folder: Path, *, zero: bool = False, seed: int = 1, **config: Any) -> Path:
    """A random LoRA adapter of the last two layers of the embedded model, in mlx-lm's layout."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in (4, 5):
        for name, outputs in OUTPUTS.items():
            place = f"model.layers.{layer}.{name}"
            tensors[f"{place}.lora_a"] = rng.normal(size=(256, RANK)).astype(np.float32) / 16
            drawn = rng.normal(size=(RANK, outputs)).astype(np.float32)
            tensors[f"{place}.lora_b"] = drawn * (0 if zero else 1)
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, "lora_parameters": LORA, **config}))
    return folder


def load_with(adapter: Path | None) -> LoadedModel:
    source = "embedded:recall"
    given = None if adapter is None else str(adapter)
    return models.load(source, context_tokens_max=None, progress=quiet, adapter=given, numerics="reproducible")


def logits(loaded: LoadedModel) -> np.ndarray:
    return np.array(loaded.model(mx.array([[5, 70, 900, 33, 12]])))


def test_an_adapter_changes_what_the_model_says_and_what_it_is_called(tmp_path: Path):
    """And with B = 0 it changes the name only: a zero adapter computes the very same bits."""
    plain = load_with(None)
    trained = load_with(write_adapter(tmp_path / "trained"))
    again = load_with(tmp_path / "trained")
    zero = load_with(write_adapter(tmp_path / "zero", zero=True))
    assert np.abs(logits(trained) - logits(plain)).max() > 0.1
    assert np.array_equal(logits(trained), logits(again)), "nothing random is left in it, no dropout either"
    assert np.array_equal(logits(zero), logits(plain))
    assert len({plain.model_id, trained.model_id, zero.model_id}) == 3
    assert trained.model_id == again.model_id
    assert plain.folder == trained.folder, "the tokenizer is the model's own"


def test_an_adapter_computes_what_its_formula_says(tmp_path: Path):
    """One adapted layer against x W' + scale (x A) B, with the model's matrices in either memory order."""
    layer = load_with(write_adapter(tmp_path / "adapter")).model.layers[5].mlp.up_proj
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    weight, a, b = (np.array(matrix) for matrix in (layer.linear.weight, layer.lora_a, layer.lora_b))
    assert np.allclose(np.array(layer(mx.array(x))), x @ weight.T + 2.0 * (x @ a) @ b, atol=1e-4)


def test_only_matrices_used_transposed_are_stored_by_columns(tmp_path: Path):
    """A wrong order would be slow and not wrong, so it is the strides that are looked at: a view of an array in
    sequence order is contiguous for numpy."""
    model = load_with(write_adapter(tmp_path / "adapter")).model
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    matrices = {name: memoryview(matrix) for name, matrix in parameters.items() if matrix.ndim == 2}  # type: ignore
    by_rows = {name for name, matrix in matrices.items() if matrix.c_contiguous}
    assert by_rows == {name for name in matrices if name.endswith((".lora_a", ".lora_b"))}
    assert "model.layers.5.mlp.up_proj.linear.weight" in matrices


def test_an_adapter_is_identified_by_all_of_its_bytes(tmp_path: Path):
    """Its weights and their scale; transcripts belong to it in the same way."""
    ids = set()
    for name, fields in {"one": {}, "two": {"seed": 2}, "three": {"seed": 2, "learning_rate": 1.0}}.items():
        ids.add(load_with(write_adapter(tmp_path / name, **fields)).identity.files_id)  # type: ignore[arg-type]
    weights = bytearray((tmp_path / "one" / "adapters.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "one" / "adapters.safetensors").write_bytes(weights)
    ids.add(load_with(tmp_path / "one").identity.files_id)
    assert len(ids) == 4


def test_a_dora_adapter_is_loaded_too(tmp_path: Path):
    folder = write_adapter(tmp_path / "adapter", fine_tune_type="dora")
    with pytest.raises(ModelLoadError, match=r"is incomplete: it lacks .*\.m$"):
        load_with(folder)
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(folder / "adapters.safetensors")
    tensors |= {
        f"model.layers.{layer}.{name}.m": np.ones(outputs, np.float32)
        for layer in (4, 5)
        for name, outputs in OUTPUTS.items()
    }
    save_file(tensors, folder / "adapters.safetensors")
    assert np.abs(logits(load_with(folder)) - logits(load_with(None))).max() > 0.1


def spoil(folder: Path, what: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapters.safetensors"
    if what in ("num_layers", "lora_parameters"):
        config.write_text(
            json.dumps({name: value for name, value in json.loads(config.read_text()).items() if name != what})
        )
    elif what == "half":
        import safetensors.numpy

        tensors = safetensors.numpy.load_file(weights)
        save_file(
            {name: tensor for name, tensor in tensors.items() if not name.endswith("5.mlp.up_proj.lora_a")}, weights
        )
    elif what == "shape":
        save_file({"model.layers.5.mlp.up_proj.lora_a": np.zeros((128, RANK), np.float32)}, weights)
    elif what == "place":
        save_file({"model.layers.77.mlp.up_proj.lora_a": np.zeros((256, RANK), np.float32)}, weights)
    elif what == "empty":
        save_file({}, weights)
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif what == "json":
        config.write_text("{")
    elif what == "peft":
        config.write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    elif what == "weights":
        weights.unlink()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("num_layers", "does not fit the model: .*num_layers"),
        ("lora_parameters", "does not fit the model: .*lora_parameters"),
        ("half", r"lacks model\.layers\.5\.mlp\.up_proj\.lora_a"),
        ("shape", r"does not match model parameter shape \(256, 4\)"),
        ("place", r"layers\.77\..*: not an adapter parameter"),
        ("empty", "lacks all tensors"),
        ("cut", "is cut off"),
        ("json", r"adapter_config\.json cannot be read"),
        ("peft", "is PEFT's"),
        ("weights", r"has no adapters\.safetensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_clear_sentence(tmp_path: Path, what: str, says: str):
    folder = write_adapter(tmp_path / "adapter")
    spoil(folder, what)
    with pytest.raises(ModelLoadError, match=says) as error:
        load_with(folder)
    assert str(folder) in error.value.message and "\n" not in error.value.message


def test_an_adapter_that_is_nowhere_is_named():
    with pytest.raises(ModelLoadError, match="'/no/such/adapter' is neither a folder nor a Hub id"):
        load_with(Path("/no/such/adapter"))


def test_dequantized_weights_say_the_same_and_are_another_model(tmp_path: Path):
    """They may differ by rounding, so their blocks are not to be mixed."""
    folder = str(write_model(tmp_path / "m", "qwen3", bits=4))
    kept = {
        weights: models.load(folder, context_tokens_max=None, progress=lambda *_: None, weights=weights)
        for weights in ("stored", "dequantized", "both", "auto")
    }
    prompt = mx.array([[5, 6, 7, 8, 9]])
    logits = {weights: np.array(loaded.model(prompt)) for weights, loaded in kept.items()}
    scale = np.abs(logits["stored"]).max()
    for weights in kept:
        assert np.abs(logits["stored"] - logits[weights]).max() < 1e-4 * scale
    assert len({kept[weights].model_id for weights in ("stored", "dequantized", "both")}) == 3
    assert kept["auto"].weights == "dequantized", "on a CPU it is faster"
    assert kept["auto"].model_id == kept["dequantized"].model_id


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)])
def test_formats_without_biases_say_the_same_in_all_forms(mode: str, group_size: int, bits: int, tmp_path: Path):
    folder = write_model(tmp_path / "m", "llama", hidden_size=128)
    model, config = quantize_model(
        load_model(folder)[0], config_of("llama", hidden_size=128), group_size, bits, mode=mode
    )
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    logits = []
    for weights in ("stored", "dequantized", "both"):
        loaded = models.load(
            str(folder), context_tokens_max=None, progress=quiet, weights=weights, numerics="reproducible"
        )
        logits.append(np.array(loaded.model(mx.array([[5, 6, 7, 8, 9]]))))
    assert all(np.abs(one - logits[0]).max() < 1e-4 * np.abs(logits[0]).max() for one in logits)


def test_both_forms_of_weights_serve_the_products_that_each_is_good_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The two forms hardly differ, so the stored one is spoiled to see which products use it."""
    folder = str(write_model(tmp_path / "m", "qwen3", bits=4))
    model = models.load(folder, context_tokens_max=None, progress=lambda *_: None, weights="both").model
    layer = model.layers[0].mlp.down_proj
    monkeypatch.setattr(prepare, "STORED_PRODUCTS_MAX", 4 * layer.weight.size)
    prompts = [mx.array([[7] * sequences]) for sequences in (4, 5)]
    before = [np.array(model(prompt)) for prompt in prompts]
    layer.stored.scales = layer.stored.scales * 2
    few, many = (np.array(model(prompt)) for prompt in prompts)
    assert not np.array_equal(few, before[0]) and np.array_equal(many, before[1])
