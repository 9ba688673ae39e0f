"""Conversion: which layers get which bits, that the folder is served, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from satchel.actors.model_files.conversion import Converted, convert
from satchel.actors.replica.loading import models
from satchel.api.cli.main import app
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import TOKENIZER_FILES, write_model
from tests.worlds.models.vision_families import write_model as write_vision_model
from tests.worlds.replica import metal_on_cpu


def converted(source: Path, target: Path, recipe: str = "8-4-4") -> Converted:
    return convert(str(source), target, recipe, "auto", lambda what, fraction: None)


def logits(folder: Path) -> np.ndarray:
    loaded = models.load(str(folder), context_tokens_max=None, progress=lambda *_: None)
    prompt = mx.array([[7, 300, 1500, 42, 2000, 11]])
    return np.array(loaded.model(prompt, cache=loaded.new_caches())[0, -1].astype(mx.float32))


def bits_of(folder: Path) -> dict[str, int]:
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    return {path: layer["bits"] for path, layer in quantization.items() if isinstance(layer, dict)}


def test_attention_has_eight_bits_and_the_rest_four(tmp_path: Path):
    source = write_model(tmp_path / "float", "qwen3")
    done = converted(source, tmp_path / "made")
    bits = bits_of(tmp_path / "made")
    assert {path.split(".")[-1] for path, count in bits.items() if count == 8} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert {path.split(".")[-1] for path, count in bits.items() if count == 4} == {
        "embed_tokens",
        "gate_proj",
        "up_proj",
        "down_proj",
    }, "the head is the embedding"
    assert done.layers == {(8, 64): 8, (4, 64): 7}
    assert done.plain == []
    for name in TOKENIZER_FILES:
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes(), name
    assert not list(tmp_path.glob(".made-*"))


def test_weights_of_one_sign_are_as_near_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whose own rule stretches their ranges to 0: every weight is within half a step of its group, and what rounding
    the group's ends adds."""
    source = write_model(tmp_path / "float", "qwen3")
    name = "model.layers.0.mlp.up_proj"
    weights: dict[str, mx.array] = dict(mx.load(str(source / "model.safetensors")))  # type: ignore[arg-type]
    wanted = weights[f"{name}.weight"] = mx.random.uniform(-3.1, -3.0, weights[f"{name}.weight"].shape)
    mx.save_safetensors(str(source / "model.safetensors"), weights, {"format": "mlx"})
    on_cpu, cpu_quantizes, streams = [], mx.quantize, mx.stream

    @contextmanager
    def stream(which: mx.Device | mx.Stream) -> Iterator[None]:
        on_cpu.append(which == mx.cpu)
        with streams(which):
            yield
        on_cpu.pop()

    def quantize(w: mx.array, group_size: int, bits: int, **other: Any) -> Any:
        rule = cpu_quantizes if on_cpu and on_cpu[-1] else metal_on_cpu.quantize
        return rule(w, group_size=group_size, bits=bits, **other)

    monkeypatch.setattr(mx, "stream", stream)
    monkeypatch.setattr(mx, "quantize", quantize)
    converted(source, tmp_path / "made", "4")
    made: dict[str, mx.array] = dict(mx.load(str(tmp_path / "made" / "model.safetensors")))  # type: ignore[arg-type]
    parts = [made[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    off = mx.abs(mx.dequantize(*parts, group_size=64, bits=4) - wanted).max()
    assert float(off) <= 0.1 / 15


def test_more_bits_for_attention_are_nearer_than_four_everywhere(tmp_path: Path):
    exact = logits(write_model(tmp_path / "float", "qwen3"))
    off = {}
    for recipe in ("8", "8-4-4", "4"):
        converted(tmp_path / "float", tmp_path / recipe, recipe)
        off[recipe] = np.linalg.norm(logits(tmp_path / recipe) - exact) / np.linalg.norm(exact)
    assert off["8"] < 0.1 * off["8-4-4"], off
    assert off["8-4-4"] < 0.9 * off["4"], off


@pytest.mark.parametrize(
    ("family", "attention", "others"),
    [
        ("deepseek_v2", {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"}, {"lm_head"}),
        ("nemotron_h", {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}, {"up_proj", "embeddings"}),
    ],
)
def test_attention_is_found_whatever_its_names_are(family: str, attention: set[str], others: set[str], tmp_path: Path):
    converted(write_model(tmp_path / "float", family), tmp_path / "made")
    bits = bits_of(tmp_path / "made")
    assert {path.split(".")[-1] for path, count in bits.items() if count == 8} == attention
    assert others <= {path.split(".")[-1] for path, count in bits.items() if count == 4}
    assert np.isfinite(logits(tmp_path / "made")).all()


def test_a_layer_that_no_group_fits_stays_as_it_is_and_is_named(tmp_path: Path):
    source = write_model(tmp_path / "float", "llama", hidden_size=96, intermediate_size=72)
    told = CliRunner().invoke(app, ["convert", str(source), "--to", str(tmp_path / "made")])
    assert told.exit_code == 0, told.output
    assert "6 with 4 bits in groups of 32, 6 with 8 bits in groups of 32, 2 with 8 bits in groups of 64" in told.output
    assert "inputs: model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj\n" in told.output
    assert np.isfinite(logits(tmp_path / "made")).all()


def test_recipes_of_mlx_lm_are_taken(tmp_path: Path):
    source = write_model(tmp_path / "float", "llama", num_hidden_layers=3)
    converted(source, tmp_path / "made", "mixed_4_6")
    bits = bits_of(tmp_path / "made")
    assert (bits["lm_head"], bits["model.layers.2.self_attn.v_proj"], bits["model.layers.2.self_attn.q_proj"]) == (
        6,
        6,
        4,
    )


def test_pictures_are_encoded_in_full_precision(tmp_path: Path):
    source = write_vision_model(tmp_path / "float", "qwen3_vl")
    converted(source, tmp_path / "made")
    bits = bits_of(tmp_path / "made")
    assert {count for path, count in bits.items() if "self_attn" in path} == {8}
    assert all(path.startswith("language_model.") for path in bits)
    loaded = models.load(str(tmp_path / "made"), context_tokens_max=None, progress=lambda *_: None)
    assert loaded.vision is not None


def test_what_cannot_be_converted_is_refused_and_nothing_is_left(tmp_path: Path):
    source = write_model(tmp_path / "float", "llama")
    converted(source, tmp_path / "made", "4")
    for model, target, said in (
        (source, tmp_path / "made", "exists already"),
        (tmp_path / "made", tmp_path / "again", "is quantized already"),
        (tmp_path / "none", tmp_path / "again", "neither a folder"),
        (source, tmp_path / "made" / "config.json" / "inside", "cannot be written"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            converted(model, target)
    assert {path.name for path in tmp_path.iterdir()} == {"float", "made"}
