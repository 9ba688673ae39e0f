"""Checkpoints as the Hub has them, of which tiny ones that tests write know nothing: they compute what the same weights
compute in plain floats, or are refused with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import deepseek_v2
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_model

from satchel.actors.model_files.checkpoints import drop_nulls
from satchel.actors.replica.loading import models
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.families import config_of, copy_tokenizer, random_weights, write_model
from tests.zoo import text_types

PROMPT = mx.array([[5, 700, 41, 2600, 9, 18, 27]])
NEAR = 1e-4
GROUP = 32


def logits(folder: Path, weights: str = "stored") -> np.ndarray:
    loaded = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, weights=weights, numerics="reproducible"
    )
    return np.array(loaded.model(PROMPT, cache=loaded.new_caches()))


def assert_same(folder: Path, plain: Path) -> None:
    expected = logits(plain)
    for weights in ("stored", "dequantized"):
        assert np.abs(logits(folder, weights) - expected).max() <= NEAR * np.abs(expected).max(), weights


def write(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    """A folder with tensors, MLX's or numpy's."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: mx.array(each) if isinstance(each, np.ndarray) else each for name, each in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Any]:
    return dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]


# Tied and missing weights.


def with_head(folder: Path, into: Path, head: mx.array, name: str = "lm_head.weight") -> Path:
    """Writes a model again, with an output layer beside its embeddings."""
    more = {name: head, "model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones((16,))}
    write(into, tensors_of(folder) | more, json.loads((folder / "config.json").read_text()))
    return into


def tied(folder: Path, kind: str) -> Path:
    """Writes a tiny model of a type of mlx-lm's, with its output layer tied."""
    config = {"model_type": kind, **text_types.TYPES[kind], "tie_word_embeddings": True}
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(json.loads(json.dumps(config))))
    model.update(random_weights(model, 7))
    return write(folder, dict(tree_flatten(model.parameters())), config)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere2", "phi3", "qwen3_next", "lfm2", "starcoder2", "exaone4"])
def test_a_copy_of_tied_embeddings_is_dropped(tmp_path: Path, kind: str):
    folder = tied(tmp_path / "tied", kind)
    embeddings = next(
        value for name, value in tensors_of(folder).items() if name.endswith(("embed_tokens.weight", "wte.weight"))
    )
    more = {"lm_head.weight": embeddings}
    write(tmp_path / "both", tensors_of(folder) | more, json.loads((folder / "config.json").read_text()))
    assert np.array_equal(logits(tmp_path / "both"), logits(folder))


def test_a_quantized_copy_is_compared_with_its_scales(tmp_path: Path):
    folder = write_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    model, config = load_model(folder)
    model, config = quantize_model(model, config, 64, 4)
    quantized = dict(tree_flatten(model.parameters()))
    copy = {f"lm_head.{leaf}": quantized[f"model.embed_tokens.{leaf}"] for leaf in ("weight", "scales", "biases")}
    write(tmp_path / "one", quantized, config)
    write(tmp_path / "both", quantized | copy, config)
    assert np.array_equal(logits(tmp_path / "both"), logits(tmp_path / "one"))
    other = copy | {"lm_head.scales": copy["lm_head.scales"] * 2}
    write(tmp_path / "other", quantized | other, config)
    assert not np.array_equal(logits(tmp_path / "other"), logits(tmp_path / "one"))


def test_a_head_that_is_not_the_tied_embeddings_is_a_layer_of_its_own(tmp_path: Path, caplog):
    folder = write_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    head = mx.random.normal(tensors_of(folder)["model.embed_tokens.weight"].shape, key=mx.random.key(3))
    both = with_head(folder, tmp_path / "both", head)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    write(tmp_path / "own", tensors_of(both), config)
    assert np.array_equal(logits(both), logits(tmp_path / "own"))
    assert not np.array_equal(logits(both), logits(folder))
    assert "lm_head.weight is not its embeddings" in caplog.text


def test_a_head_for_which_the_type_has_no_place_is_refused(tmp_path: Path):
    folder = tied(tmp_path / "tied", "gemma2")
    head = mx.zeros_like(tensors_of(folder)["model.embed_tokens.weight"])
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is not its embeddings"):
        logits(with_head(folder, tmp_path / "both", head))


# Nulls.


@pytest.mark.parametrize(
    "name",
    ["rope_theta", "rope_scaling", "rope_traditional", "attention_bias", "text_config", "vision_config",
     "quantization", "quantization_config", "architectures", "max_position_embeddings", "nobody_knows"],
)  # fmt: skip
def test_a_setting_that_is_null_is_one_that_is_absent(tmp_path: Path, name: str):
    folder = write_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != name}))
    absent = logits(folder)
    (folder / "config.json").write_text(json.dumps(config | {name: None}))
    assert np.array_equal(logits(folder), absent)


def test_a_null_that_the_code_takes_stays(tmp_path: Path):
    config = {"sliding_window": None, "rms_norm_eps": None}

    @dataclass
    class Arguments:
        sliding_window: int | None = 4096
        rms_norm_eps: float = 1e-5

    drop_nulls(config, Arguments)
    assert config == {"sliding_window": None}


def test_a_null_that_the_code_tests_for_stays():
    """DeepSeek-V2-Lite has none where DeepSeek-V2 has 1,536: then queries have one projection and not two."""
    config = {"q_lora_rank": None, "kv_lora_rank": None}
    drop_nulls(config, deepseek_v2.ModelArgs)
    assert config == {"q_lora_rank": None}


def test_a_head_that_is_missing_is_named_where_embeddings_are_not_tied(tmp_path: Path):
    folder = write_model(tmp_path, "llama")
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    write(folder, tensors, config_of("llama"))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight") as error:
        logits(folder)
    assert "\n" not in error.value.message


# Quantization that is another in every layer.


def plain_of(folder: Path, target: Path) -> Path:
    """The same model with plain weights."""
    model, config = load_model(folder)
    plain = []
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        how: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        matrix = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)
        made: Any = nn.Embedding(1, 1) if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
        made.weight = matrix
        plain.append((name, made))
    assert plain
    model.update_modules(tree_unflatten(plain))
    save_model(target, model, donate_model=False)
    (target / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if not name.startswith("quantization")})
    )
    copy_tokenizer(target)
    return target


def by_layer(path: str) -> dict[str, Any] | bool:
    if "lm_head" in path or "layers.1.mlp.up_proj" in path:
        return False
    if "self_attn" in path:
        return {"group_size": 64, "bits": 8}
    if path.endswith("down_proj"):
        return {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    if path.endswith("gate_proj"):
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return {"group_size": 32, "bits": 6 if "embed" in path else 3}


def test_layers_of_several_bits_groups_and_modes_in_one_model(tmp_path: Path):
    folder = write_model(tmp_path / "mixed", "llama", hidden_size=128)
    model, config = quantize_model(
        load_model(folder)[0],
        config_of("llama", hidden_size=128),
        64,
        4,
        quant_predicate=lambda path, layer: by_layer(path) if hasattr(layer, "to_quantized") else False,
    )
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {tuple(each.values()) for each in config["quantization"].values() if isinstance(each, dict)}
    assert len(kinds) == 5, kinds
    assert_same(folder, plain_of(folder, tmp_path / "plain"))


# AWQ and GPTQ, as AutoAWQ and AutoGPTQ write them.

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column of eight has which four bits of a word, lowest first."""


def in_words(codes: np.ndarray) -> np.ndarray:
    """(sequences, columns) of codes of four bits as (sequences, columns / 8) of words."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for bits, column in enumerate(AWQ_ORDER):
        words |= eights[:, :, column] << np.uint32(4 * bits)
    return words.view(np.int32)


def write_awq(folder: Path, *, zeros: bool = True, **quantization: Any) -> tuple[Path, Path]:
    """A checkpoint of AutoAWQ's layout, and the same weights in plain floats."""
    tensors, draw = tensors_of(write_model(folder / "float", "llama")), np.random.default_rng(3)
    packed, plain = dict[str, Any](), dict[str, Any]()
    for name, value in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = plain[name] = value.astype(mx.float16)
            continue
        prefix, (outputs, inputs) = name.removesuffix("weight"), value.shape
        codes = draw.integers(0, 16, (inputs, outputs))
        zero = draw.integers(0, 16, (inputs // GROUP, outputs)) if zeros else np.full((inputs // GROUP, outputs), 8)
        # Powers of two, so that no product is rounded.
        scales = 2.0 ** draw.integers(-8, -4, zero.shape)
        packed |= {f"{prefix}qweight": in_words(codes), f"{prefix}scales": scales.astype(np.float16)}
        packed |= {f"{prefix}qzeros": in_words(zero)} if zeros else {}
        matrix = (codes - zero.repeat(GROUP, 0)) * scales.repeat(GROUP, 0)
        plain[name] = matrix.T.astype(np.float16)
    how = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": zeros}
    config = config_of("llama", quantization_config={**how, **quantization})
    return write(folder / "awq", packed, config), write(folder / "plain", plain, config_of("llama"))


@pytest.mark.parametrize("zeros", [True, False])
def test_awq_computes_what_its_codes_say(tmp_path: Path, zeros: bool):
    assert_same(*write_awq(tmp_path, zeros=zeros))


def of_other_bits(folder: Path) -> None:
    write_awq(folder, bits=8)


def with_group_indices(folder: Path) -> None:
    awq, _ = write_awq(folder, quant_method="gptq", desc_act=False)
    indices = {"model.layers.0.mlp.up_proj.g_idx": np.arange(64, dtype=np.int32) // GROUP}
    write(awq, tensors_of(awq) | indices, json.loads((awq / "config.json").read_text()))


def by_inputs(folder: Path) -> None:
    """AutoGPTQ packs eight inputs into a word, not eight outputs."""
    awq, _ = write_awq(folder, quant_method="gptq")
    tensors = tensors_of(awq)
    words = {
        name: mx.zeros((value.shape[0] // 8, value.shape[1] * 8), mx.int32)
        for name, value in tensors.items()
        if name.endswith("qweight")
    }
    write(awq, tensors | words, json.loads((awq / "config.json").read_text()))


def by_bitsandbytes(folder: Path) -> None:
    write_awq(folder, quant_method="bitsandbytes", load_in_4bit=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (of_other_bits, "bits=8 is supported"),
        (with_group_indices, r"g_idx.* not currently supported"),
        (by_inputs, "quantized by gptq"),
        (by_bitsandbytes, "qweight|scales|qzeros"),
    ],
)
def test_what_mlx_lm_does_not_read_is_refused_in_one_sentence(tmp_path: Path, make: Callable[[Path], None], why: str):
    make(tmp_path)
    with pytest.raises(ModelLoadError, match=why) as error:
        logits(tmp_path / "awq")
    assert "\n" not in error.value.message and "(`satchel convert`)" in error.value.message


# MXFP4, as OpenAI writes GPT-OSS.

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def test_mxfp4_computes_what_its_codes_say(tmp_path: Path):
    """Experts are in blocks of 16 bytes with a power of two each, gate and up interleaved; the rest is in floats."""
    tensors, draw = tensors_of(write_model(tmp_path / "float", "gpt_oss")), np.random.default_rng(3)
    packed, plain = dict[str, Any](), dict(tensors)
    for name, value in tensors.items():
        if ".experts." not in name:
            packed[name] = value
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        biases = {part: np.array(tensors[f"{prefix}{part}_proj.bias"]) for part in ("gate", "up", "down")}
        experts, inner, hidden = tensors[f"{prefix}gate_proj.weight"].shape
        for part, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            codes = draw.integers(0, 16, (experts, outputs, inputs // 32, 32)).astype(np.uint8)
            scales = draw.integers(121, 125, codes.shape[:3]).astype(np.uint8)
            packed[f"{prefix}{part}_proj_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
            packed[f"{prefix}{part}_proj_scales"] = scales
            matrix = FP4[codes] * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
            matrix = matrix.reshape(experts, outputs, inputs).astype(np.float32)
            if part == "down":
                plain[f"{prefix}down_proj.weight"] = matrix
            else:
                plain |= {f"{prefix}gate_proj.weight": matrix[:, ::2], f"{prefix}up_proj.weight": matrix[:, 1::2]}
        packed[f"{prefix}gate_up_proj_bias"] = np.stack([biases["gate"], biases["up"]], -1).reshape(experts, -1)
        packed[f"{prefix}down_proj_bias"] = biases["down"]
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = config_of("gpt_oss", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left})
    folder = write(tmp_path / "packed", packed, config)
    assert_same(folder, write(tmp_path / "plain", plain, config_of("gpt_oss")))


# NVFP4, as NVIDIA's ModelOpt names it beside the config.


def test_what_modelopt_says_in_a_file_of_its_own_counts(tmp_path: Path):
    folder = write_model(tmp_path / "made", "llama", hidden_size=128)
    model, _ = quantize_model(load_model(folder)[0], config_of("llama", hidden_size=128), 16, 4, mode="nvfp4")
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config_of("llama", hidden_size=128)))
    said: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16}
    with pytest.raises(ModelLoadError, match="scales"):
        logits(folder)
    named = folder / "hf_quant_config.json"
    named.write_text(json.dumps({"quant_method": "modelopt", "quantization": said}))
    assert_same(folder, plain_of(folder, tmp_path / "plain"))
    named.write_text(json.dumps({"quant_method": "modelopt", "quantization": {**said, "quant_algo": "FP8"}}))
    with pytest.raises(ModelLoadError, match="Unsupported modelopt quant_algo: FP8"):
        logits(folder)


def test_a_recipe_of_mixed_bits_is_served(tmp_path: Path):
    from satchel.actors.model_files.conversion import convert

    source = write_model(tmp_path / "float", "llama", num_hidden_layers=3)
    for recipe in ("8-4-4", "mixed_4_6"):
        folder = tmp_path / recipe
        convert(str(source), folder, recipe, "auto", lambda what, fraction: None)
        assert_same(folder, plain_of(folder, tmp_path / f"plain {recipe}"))
        shutil.rmtree(folder)
