"""Tiny vision-language models whose language parts want something of their own: states that recur, masks of another
width, inputs of every layer, attention both ways, or positions that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .vision_families import IMAGES, QWEN_IDS, QWEN_IMAGES, QWEN_TOKENS, Family, write

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_TOWER: dict[str, Any] = {
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
_HYBRID: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MROPE: dict[str, Any] = {"type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}


def _qwen(kind: str, text: dict[str, Any], levels: Sequence[int] = ()) -> Family:
    tower = {"num_position_embeddings": 64, "deepstack_visual_indexes": [*levels]}
    return Family(
        QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            **QWEN_IDS,
            "text_config": {**_TEXT, **text, "model_type": f"{kind}_text"},
            "vision_config": {**_TOWER, **tower, "model_type": kind},
        },
        {"preprocessor_config.json": QWEN_IMAGES, "video_preprocessor_config.json": QWEN_IMAGES},
    )


def _gemma(**text: Any) -> Family:
    names = {"image": "<image_soft_token>", "audio": "<audio_soft_token>", "video": "<video_soft_token>"}
    marks = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
    return Family(
        (*names.values(), *marks.values()),
        "<image_soft_token>",
        {
            "model_type": "gemma4",
            **{f"{name}_token_id": token for name, token in (names | marks).items()},
            "text_config": {
                **_TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "global_head_dim": 64,
                "sliding_window": 300,
                "sliding_window_pattern": 2,
                **text,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "default_output_length": 16,
                "patch_size": 4,
                "position_embedding_size": 512,
                "pooling_kernel_size": 2,
            },
            "audio_config": None,
        },
        {
            "processor_config.json": {
                "processor_class": "Gemma4Processor",
                "image_seq_length": 16,
                "image_processor": {
                    **IMAGES,
                    "image_processor_type": "Gemma4ImageProcessor",
                    "patch_size": 4,
                    "pooling_kernel_size": 2,
                    "max_soft_tokens": 70,
                },
            }
        },
        {f"{name}_token": token for name, token in (names | marks).items()},
        sizes=("vocab_size_per_layer_input",),
    )


_HUNYUAN = Family(
    ("<im_start>", "<im_end>", "<image>", "<im_newline>", "<pad>"),
    "<im_start><image><im_end>",
    {
        "image_start_token_id": "<im_start>",
        "image_end_token_id": "<im_end>",
        "image_token_id": "<image>",
        "image_newline_token_id": "<im_newline>",
        "text_config": {
            **_TEXT,
            "model_type": "hunyuan_vl",
            "attention_head_dim": 32,
            "use_qk_norm": True,
            "rope_scaling": {
                "type": "xdrope",
                "xdrope_section": [4, 4, 4, 4],
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        "vision_config": {
            **_TOWER,
            "model_type": "hunyuan_vl",
            "patch_size": 16,
            "num_channels": 3,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "img_max_token_num": 256,
            "max_vit_seq_len": 1024,
            "max_image_size": 256,
        },
    },
    {
        "preprocessor_config.json": {
            "image_processor_type": "HunYuanVLImageProcessor",
            "min_pixels": 64 * 64,
            "max_pixels": 192 * 192,
        }
    },
)
NUMBERS = {
    "hunyuan_vl": {
        "IMAGE_TOKEN_ID": "<image>",
        "IM_START_TOKEN_ID": "<im_start>",
        "IM_END_TOKEN_ID": "<im_end>",
        "PAD_TOKEN_ID": "<pad>",
    }
}
"""Tokens that a family's processor knows by the numbers of its real tokenizer, by the names of its attributes."""

FAMILIES: dict[str, Family] = {
    "qwen3_5": _qwen("qwen3_5", _HYBRID),
    "qwen3_5_moe": _qwen("qwen3_5_moe", {**_HYBRID, **_EXPERTS}),
    "gemma4": _gemma(hidden_size_per_layer_input=16, num_kv_shared_layers=1),
    "gemma4_both_ways": _gemma(
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_bidirectional_attention="vision"
    ),
    "hunyuan_vl": _HUNYUAN,
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", {**_EXPERTS, "rope_scaling": _MROPE}, (0, 1)),
}


_SQUARE: dict[str, Any] = {**IMAGES, "size": {"height": 112, "width": 112}}
_OTHER_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 112,
}

REFUSED: dict[str, tuple[Family, str]] = {
    "paligemma": (
        Family(
            ("<image>", "<bos>"),
            "<image>",
            {
                "image_token_index": "<image>",
                "hidden_size": 64,
                "text_config": {**_TEXT, "model_type": "gemma", "num_image_tokens": 64},
                "vision_config": {**_OTHER_TOWER, "model_type": "siglip_vision_model", "projection_dim": 64},
            },
            {
                "preprocessor_config.json": {
                    **_SQUARE,
                    "image_processor_type": "SiglipImageProcessor",
                    "image_seq_length": 64,
                },
                "processor_config.json": {"processor_class": "PaliGemmaProcessor"},
            },
            {"bos_token": "<bos>"},
        ),
        "attend to each other",
    ),
    "mllama": (
        Family(
            ("<|image|>", "<bos>"),
            "<|image|>",
            {
                "image_token_index": "<|image|>",
                "text_config": {
                    **_TEXT,
                    "tie_word_embeddings": False,
                    "model_type": "mllama",
                    "cross_attention_layers": [1],
                },
                "vision_config": {
                    **_OTHER_TOWER,
                    "model_type": "mllama_vision_model",
                    "num_channels": 3,
                    "attention_heads": 2,
                    "max_num_tiles": 4,
                    "num_global_layers": 2,
                    "vision_output_dim": 96,
                    "intermediate_layers_indices": [0, 1],
                    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
                },
            },
            {},
        ),
        "cross attention",
    ),
    "florence2": (
        Family(
            ("<image>",),
            "<image>",
            {
                "image_token_index": "<image>",
                "text_config": {
                    "d_model": 64,
                    "encoder_attention_heads": 2,
                    "decoder_attention_heads": 2,
                    "encoder_ffn_dim": 64,
                    "decoder_ffn_dim": 64,
                    "encoder_layers": 1,
                    "decoder_layers": 1,
                },
                "vision_config": {
                    "model_type": "davit",
                    "hidden_size": 64,
                    "dim_embed": [16, 16, 16, 64],
                    "num_heads": [2, 2, 2, 2],
                    "num_groups": [2, 2, 2, 2],
                    "depths": [1, 1, 1, 1],
                },
            },
            {},
        ),
        "encoder",
    ),
}
"""Families that are refused, and a word of the reason."""


def write_model(folder: Path, family: str) -> Path:
    """Write a tiny model of `family` into `folder`."""
    return write(folder, family, FAMILIES[family] if family in FAMILIES else REFUSED[family][0])
