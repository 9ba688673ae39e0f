"""Vision types whose encoders take squares of one size: a picture, or its tiles."""

from __future__ import annotations

from typing import Any

from tests.worlds.models.vision_families import FAMILIES, Family
from tests.worlds.models.vision_families import IMAGES as SCALED

from .vision_parts import (
    EXPERTS,
    HEAD,
    HIDDEN,
    LATENT,
    SIGLIP,
    SQUARE,
    TEXT,
    TILED,
    TILES,
    TOWER,
    WINDOW,
)

_SIGLIP_TOWER: dict[str, Any] = {**TOWER, "model_type": "siglip_vision_model"}
_SMOLVLM = FAMILIES["smolvlm"]
_ROWS = (1, 2, 3)


def _image(text: str, tower: dict[str, Any], files: dict[str, Any], **config: Any) -> Family:
    """A family whose pictures are one token, `<image>`, in a prompt."""
    parts = {"image_token_index": "<image>", "text_config": {**TEXT, "model_type": text}, "vision_config": tower}
    return Family(("<image>",), "<image>", parts | config, files)


_LLAVA_TYPES: dict[str, Family] = {
    "llava_next": _image(
        "mistral",
        {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        {
            "preprocessor_config.json": TILED,
            "processor_config.json": {
                "processor_class": "LlavaNextProcessor",
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
        },
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=TILES,
    ),
    "llava_onevision": Family(
        ("<image>", "<video>"),
        "<image>",
        {
            "image_token_index": "<image>",
            "video_token_index": "<video>",
            "image_grid_pinpoints": TILES,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": _SIGLIP_TOWER,
        },
        {
            "preprocessor_config.json": {
                **SQUARE,
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "image_grid_pinpoints": TILES,
            },
            "processor_config.json": {
                "processor_class": "LlavaOnevisionProcessor",
                "num_image_tokens": 64,
                "vision_feature_select_strategy": "full",
            },
        },
    ),
    "llava_bunny": _image(
        "qwen2",
        _SIGLIP_TOWER,
        {"preprocessor_config.json": SIGLIP},
        model_type="llava-qwen2",
        image_token_index=-200,
        auto_map={},
        hidden_size=HIDDEN,
        mm_hidden_size=32,
    ),
    "granite_vision": _image(
        "granite",
        _SIGLIP_TOWER,
        {
            "preprocessor_config.json": TILED,
            "processor_config.json": {
                "processor_class": "GraniteVisionProcessor",
                "patch_size": 14,
                "vision_feature_select_strategy": "full",
                "num_additional_image_tokens": 0,
            },
        },
        image_grid_pinpoints=TILES,
        vision_feature_layer=[-1, -2],
    ),
    "granite4_vision": _image(
        "granitemoehybrid",
        {**_SIGLIP_TOWER, "hidden_size": HIDDEN},
        {},
        image_grid_pinpoints=TILES,
        downsample_rate="4/8",
        deepstack_layer_map=[[-1, 0], [-2, 1]],
    ),
    "paligemma": Family(
        ("<image>", "<bos>"),
        "<image>",
        {
            "image_token_index": "<image>",
            "hidden_size": HIDDEN,
            "text_config": {**TEXT, "model_type": "gemma", "num_image_tokens": 64},
            "vision_config": {**_SIGLIP_TOWER, "projection_dim": HIDDEN},
        },
        {
            "preprocessor_config.json": {**SIGLIP, "image_seq_length": 64},
            "processor_config.json": {"processor_class": "PaliGemmaProcessor"},
        },
        {"bos_token": "<bos>"},
    ),
    "multi_modality": Family(
        ("<image_placeholder>",),
        "<image_placeholder>",
        {
            "image_token_index": "<image_placeholder>",
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {
                **TOWER,
                "model_type": "vision",
                "cls": "SigLIP",
                "params": {},
                "patch_size": 16,
                "image_size": 384,
            },
            "projector_config": {
                "cls": "MlpProjector",
                "model_type": "aligner",
                "params": {"depth": 2, "input_dim": 32, "n_embed": HIDDEN, "projector_type": "mlp_gelu"},
            },
        },
        {},
    ),
    "llmjpvl": _image("llama", _SIGLIP_TOWER, {}),
}

_IDEFICS_TYPES: dict[str, Family] = {
    "idefics2": Family(
        ("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
        "<image>",
        {
            "image_token_id": "<image>",
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**TOWER, "model_type": "idefics2", "num_key_value_heads": 2},
            "perceiver_config": {
                "model_type": "idefics2_perceiver",
                "num_key_value_heads": 2,
                "resampler_depth": 2,
                "resampler_head_dim": HEAD,
                "resampler_n_heads": 4,
                "resampler_n_latents": 8,
            },
        },
        {
            "preprocessor_config.json": {
                **SCALED,
                "image_processor_type": "Idefics2ImageProcessor",
                "size": {"longest_edge": 112, "shortest_edge": 56},
                "do_image_splitting": False,
            },
            "processor_config.json": {"processor_class": "Idefics2Processor", "image_seq_len": 8},
        },
    ),
    "idefics3": Family(
        _SMOLVLM.tokens,
        "<image>",
        {
            "image_token_id": "<image>",
            "scale_factor": 2,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "idefics3_vision"},
        },
        {
            "preprocessor_config.json": {
                **_SMOLVLM.files["preprocessor_config.json"],
                "image_processor_type": "Idefics3ImageProcessor",
            },
            "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 16},
        },
    ),
    "internvl": Family(
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>",
        {
            "image_token_id": "<IMG_CONTEXT>",
            "downsample_ratio": 0.5,
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {
                **TOWER,
                "model_type": "internvl_vision",
                "image_size": [112, 112],
                "patch_size": [14, 14],
            },
        },
        {
            "preprocessor_config.json": {
                **SQUARE,
                "image_processor_type": "GotOcr2ImageProcessorFast",
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 2,
            },
            "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": 16},
        },
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "aya_vision": Family(
        (
            *("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
            *("<image>", "TILE", "TILE_GLOBAL"),
        ),
        "<image>",
        {
            "image_token_index": "<|IMG_PATCH|>",
            "downsample_factor": 2,
            "alignment_intermediate_size": HIDDEN,
            "text_config": {
                **TEXT,
                "model_type": "cohere2",
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
            },
            "vision_config": _SIGLIP_TOWER,
        },
        {
            "preprocessor_config.json": {
                **SQUARE,
                "image_processor_type": "GotOcr2ImageProcessor",
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 2,
            },
            "processor_config.json": {
                "processor_class": "AyaVisionProcessor",
                "patch_size": 14,
                "img_size": 112,
                "downsample_factor": 2,
                "image_token": "<image>",
                "img_patch_token": "<|IMG_PATCH|>",
                "start_of_img_token": "<|START_OF_IMG|>",
                "end_of_img_token": "<|END_OF_IMG|>",
                "tile_token": "TILE",
                "tile_global_token": "TILE_GLOBAL",
            },
        },
    ),
    "lfm2_vl": Family(
        (
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_sequence_{sequence}_col_{column}|>" for sequence in _ROWS for column in _ROWS),
        ),
        "<image>",
        {
            "model_type": "lfm2-vl",
            "image_token_id": "<image>",
            "downsample_factor": 2,
            "encoder_patch_size": 14,
            "projector_hidden_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "lfm2",
                "block_dim": HIDDEN,
                "block_multiple_of": 32,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
                "block_ff_dim": 160,
                "conv_bias": False,
                "conv_L_cache": 3,
                "layer_types": ["conv", "full_attention"] * 2,
                "full_attn_idxs": [1, 3],
            },
            "vision_config": {**TOWER, "model_type": "siglip2_vision_model", "num_patches": 64},
        },
        {
            "preprocessor_config.json": {
                **SCALED,
                "image_processor_type": "Lfm2VlImageProcessorFast",
                "tile_size": 112,
                "encoder_patch_size": 14,
                "downsample_factor": 2,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "max_num_patches": 64,
                "min_tiles": 2,
                "max_tiles": 4,
                "use_thumbnail": True,
                "do_image_splitting": True,
            },
            "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
        },
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    ),
}

_LLAMA_TYPES: dict[str, Family] = {
    "llama4": Family(
        (
            *("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        "<|image|>",
        {
            "image_token_index": "<|patch|>",
            "text_config": {
                **TEXT,
                **EXPERTS,
                "model_type": "llama4_text",
                "attention_chunk_size": 256,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 160,
                "num_experts_per_tok": 1,
                "rope_scaling": None,
            },
            "vision_config": {
                **TOWER,
                "model_type": "llama4_vision_model",
                "intermediate_size": HIDDEN,
                "initializer_range": 0.02,
                "norm_eps": 1e-5,
                "pixel_shuffle_ratio": 0.5,
                "projector_dropout": 0.0,
                "projector_input_dim": HIDDEN,
                "projector_output_dim": HIDDEN,
                "rope_theta": 10000,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default",
                "vision_output_dim": HIDDEN,
            },
        },
        {
            "preprocessor_config.json": {
                **SQUARE,
                "image_processor_type": "Llama4ImageProcessorFast",
                "max_patches": 2,
                "resize_to_max_canvas": False,
            },
            "processor_config.json": {
                "processor_class": "Llama4Processor",
                "patch_size": 14,
                "pixel_shuffle_ratio": 0.5,
            },
        },
    ),
    "mllama": Family(
        ("<|image|>", "<bos>"),
        "<|image|>",
        {
            "image_token_index": "<|image|>",
            "text_config": {**TEXT, "model_type": "mllama", "cross_attention_layers": [1, 3]},
            "vision_config": {
                **TOWER,
                "model_type": "mllama_vision_model",
                "attention_heads": 2,
                "max_num_tiles": 4,
                "num_global_layers": 2,
                "vision_output_dim": 96,
                "intermediate_layers_indices": [0, 1],
                "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            },
        },
        {
            "preprocessor_config.json": {
                **SQUARE,
                "image_processor_type": "MllamaImageProcessor",
                "max_image_tiles": 4,
                "do_pad": True,
            },
            "processor_config.json": {"processor_class": "MllamaProcessor"},
        },
        {"image_token": "<|image|>", "bos_token": "<bos>"},
    ),
    "minimax_m3_vl": Family(
        ("]<]image[>[", "]<]video[>["),
        "]<]image[>[",
        {
            "image_token_index": "]<]image[>[",
            "video_token_index": "]<]video[>[",
            "projector_hidden_size": 64,
            "text_config": {
                **TEXT,
                **EXPERTS,
                "model_type": "minimax_m3",
                "dense_intermediate_size": 128,
                "shared_intermediate_size": 64,
                "rotary_dim": 16,
                "moe_layer_freq": [0, 1, 1, 1],
                "use_routing_bias": True,
            },
            "vision_config": {
                **TOWER,
                "model_type": "clip_vision_model",
                "hidden_size": 64,
                "projection_dim": HIDDEN,
            },
        },
        {},
    ),
}

_DEEPSEEK_TOKENS = (
    *("<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>"),
    *("<|User|>", "<|Assistant|>", "<bos>", "<pad>"),
)
_DEEPSEEK_NAMES = {"bos_token": "<bos>", "pad_token": "<pad>"}
_DEEPSEEK_TEXT: dict[str, Any] = {
    **LATENT,
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "rope_scaling": None,
}


def _deepseek_files(resolutions: list[list[int]], downsampled: int) -> dict[str, Any]:
    return {
        "preprocessor_config.json": {},
        "processor_config.json": {
            "processor_class": "DeepseekVLV2Processor",
            "candidate_resolutions": resolutions,
            "downsample_ratio": downsampled,
            "patch_size": 16,
            "image_token": "<image>",
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "normalize": True,
        },
    }


_OCR = Family(
    _DEEPSEEK_TOKENS,
    "<image>",
    {
        "image_token_index": "<image>",
        "text_config": {
            **_DEEPSEEK_TEXT,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 0,
            "use_mla": False,
            "sliding_window": 128,
            "sliding_window_size": 128,
        },
        "vision_config": {
            "model_type": "vision",
            "layers": 2,
            "width": 1024,
            "hidden_size": 1024,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "image_size": 224,
            "patch_size": 14,
        },
        "projector_config": {"projector_type": "linear", "input_dim": 2048, "n_embed": HIDDEN},
    },
    _deepseek_files([[1024, 1024]], 4),
    _DEEPSEEK_NAMES,
)
_DEEPSEEK_TYPES: dict[str, Family] = {
    "deepseek_vl_v2": Family(
        _DEEPSEEK_TOKENS,
        "<image>",
        {
            "image_token_index": "<image>",
            "text_config": _DEEPSEEK_TEXT,
            "vision_config": {
                "model_type": "vision",
                "layers": 2,
                "width": 32,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "image_size": 384,
                "patch_size": 16,
                "mlp_ratio": 2.0,
            },
            "projector_config": {
                "projector_type": "downsample_mlp_gelu",
                "input_dim": 32,
                "n_embed": HIDDEN,
                "depth": 2,
                "mlp_ratio": 1,
                "downsample_ratio": 2,
            },
            "candidate_resolutions": [[384, 384], [384, 768]],
        },
        _deepseek_files([[384, 384], [384, 768]], 2),
        _DEEPSEEK_NAMES,
    ),
    "deepseekocr": _OCR,
    "unlimited_ocr": _OCR,
}

SQUARES = {**_LLAVA_TYPES, **_IDEFICS_TYPES, **_LLAMA_TYPES, **_DEEPSEEK_TYPES}
