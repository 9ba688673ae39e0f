"""Tiny vision-language models of several families, written the way real ones lie on disk.

The weights are random but seeded; the tokenizer is the embedded model's with each family's special tokens besides.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs

from satchel.actors.replica.loading.models import EMBEDDED

from .families import random_weights

BASE = EMBEDDED / "recall"
CONTEXT = 4096

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGES: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 56 * 56,
    "max_pixels": 224 * 224,
}
IMAGES: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 112,
}


class Family:
    """What a family's folder has beyond the shared parts.

    Attributes:
        tokens: special tokens, in addition to the tokenizer's own.
        placeholder: what its template writes for a picture.
        config: of the model, where strings name tokens whose ids are meant.
        files: further files of the folder.
        names: what the tokenizer's config calls some of its tokens.
        video: what its template writes for a video.
        sizes: further names of the vocabulary's size.
        ids: of tokens whose ids mlx-vlm has in its code.
        audio: what its template writes for audio.
    """

    def __init__(
        self,
        tokens: tuple[str, ...],
        placeholder: str,
        config: dict[str, Any],
        files: dict[str, Any],
        names: dict[str, str] | None = None,
        video: str = "",
        sizes: tuple[str, ...] = (),
        ids: dict[str, int] | None = None,
        audio: str = "",
    ) -> None:
        self.tokens, self.placeholder, self.config, self.files = tokens, placeholder, config, files
        self.names, self.video, self.sizes, self.ids, self.audio = names or {}, video, sizes, ids or {}, audio


_VISION_FOR_QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "intermediate_size": 64,
}
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}

FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            **_TEXT,
            **QWEN_IDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "vision_config": {
                **_VISION_FOR_QWEN,
                "model_type": "qwen2_5_vl",
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        {"preprocessor_config.json": QWEN_IMAGES},
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "qwen3_vl": Family(
        QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            **QWEN_IDS,
            "text_config": {
                **_TEXT,
                "model_type": "qwen3_vl_text",
                "head_dim": 32,
                "rope_scaling": {"type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
            "vision_config": {
                **_VISION_FOR_QWEN,
                "model_type": "qwen3_vl",
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        {"preprocessor_config.json": QWEN_IMAGES, "video_preprocessor_config.json": QWEN_IMAGES},
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "gemma3": Family(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<start_of_image>",
        {
            "hidden_size": 64,
            "image_token_index": "<image_soft_token>",
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 300,
                "sliding_window_pattern": 2,
                "num_hidden_layers": 4,
                "mm_tokens_per_image": 16,
            },
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
        },
        {
            "preprocessor_config.json": {
                **IMAGES,
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 112, "width": 112},
            },
            "processor_config.json": {"image_seq_length": 16},
        },
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "smolvlm": Family(
        (
            *("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
            *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
        ),
        "<image>",
        {
            "image_token_id": "<image>",
            "scale_factor": 2,
            "text_config": {**_TEXT, "model_type": "llama", "head_dim": 32},
            "vision_config": {**_TOWER, "model_type": "smolvlm_vision"},
        },
        {
            "preprocessor_config.json": {
                **IMAGES,
                "image_processor_type": "SmolVLMImageProcessor",
                "size": {"longest_edge": 224},
                "max_image_size": {"longest_edge": 112},
                "do_image_splitting": True,
                "do_pad": True,
            },
            "processor_config.json": {"image_seq_len": 16},
        },
    ),
    "internvl_chat": Family(
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        "<image>",
        {
            "image_token_index": "<IMG_CONTEXT>",
            "downsample_ratio": 0.5,
            "force_image_size": 112,
            "max_dynamic_patch": 2,
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "model_type": "intern_vit_6b"},
        },
        {"preprocessor_config.json": IMAGES},
    ),
    "llava": Family(
        ("<image>",),
        "<image>",
        {
            "image_token_index": "<image>",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        },
        {
            "preprocessor_config.json": {
                **IMAGES,
                "image_processor_type": "CLIPImageProcessor",
                "size": {"height": 112, "width": 112},
                "do_center_crop": False,
            },
            "processor_config.json": {
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
        },
    ),
}


def write_model(folder: Path, family: str, *, seed: int = 7) -> Path:
    """Write a tiny model of `family` into `folder`."""
    return write(folder, family, FAMILIES[family], seed=seed)


def write(folder: Path, name: str, kind: Family, *, seed: int = 7) -> Path:
    """Write a tiny model into `folder`, whose type is `name` where its config does not say another one."""
    config = write_files(folder, name, kind)
    # As for the families of text.
    mx.random.seed(seed)
    model = build(config)
    model.update(random_weights(model, seed))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    return folder


def write_files(folder: Path, name: str, kind: Family) -> dict[str, Any]:
    """Write everything but the weights. Returns the config."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder, kind)
    config: dict[str, Any] = {"model_type": name} | _with_ids(kind.config, ids) | {"eos_token_id": ids["<|im_end|>"]}
    sizes = {each: max(ids.values()) + 1 for each in ("vocab_size", *kind.sizes)}
    config["vocab_size"] = sizes["vocab_size"]
    for part in (config, config.get("thinker_config", {})):
        if "text_config" in part:
            part["text_config"] |= sizes
    (folder / "config.json").write_text(json.dumps(config))
    for each, content in kind.files.items():
        (folder / each).write_text(json.dumps(content))
    return config


def build(config: dict[str, Any]) -> Any:
    """The untrained model of a config, as mlx-vlm builds it."""
    config = json.loads(json.dumps(config))
    classes, _ = get_model_and_args(config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    arguments = classes.ModelConfig.from_dict(config)
    arguments = update_module_configs(arguments, classes, config, ["text", "vision", "perceiver", "projector", "audio"])
    return classes.Model(arguments)


def _with_ids(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    return {
        name: _with_ids(value, ids)
        if isinstance(value, dict)
        else ids.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in config.items()
    }


def _write_tokenizer(folder: Path, kind: Family) -> dict[str, int]:
    """The tokenizer with the family's tokens, and a template that writes pictures where they stand. Ids by token."""
    tokenizer = json.loads((BASE / "tokenizer.json").read_text())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    vocabulary |= kind.ids
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added += [{"content": token, "special": True, **flags} for token in kind.tokens if token not in _known(added)]
    # Those that the vocabulary lacks are numbered from its size on, whatever the file says.
    numbers = count(len(vocabulary))
    for entry in added:
        entry["id"] = kind.ids.get(entry["content"]) or next(numbers)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((BASE / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, **kind.names, "extra_special_tokens": kind.names})
    )
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace("PLACEHOLDER", kind.placeholder).replace("VIDEO", kind.video).replace("AUDIO", kind.audio)
    )
    return _known(added)


def _known(added: list[dict[str, Any]]) -> dict[str, int]:
    return {entry["content"]: entry.get("id", -1) for entry in added}


TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}PLACEHOLDER{%- elif part.type == 'video' -%}VIDEO"
    "{%- elif part.type == 'audio' -%}AUDIO{%- else -%}{{ part.text }}"
    "{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
