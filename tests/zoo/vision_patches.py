"""Vision types whose encoders take a picture's patches in its own size, or nearly."""

from __future__ import annotations

from typing import Any

from tests.worlds.models.vision_families import IMAGES as SCALED
from tests.worlds.models.vision_families import QWEN_IDS, QWEN_IMAGES, QWEN_TOKENS, Family

from .vision_parts import (
    ALTERNATING,
    EXPERTS,
    HEAD,
    HIDDEN,
    LATENT,
    LINEAR,
    MERGING,
    PIXTRAL,
    QWEN_FILES,
    TEXT,
    TOWER,
    WINDOW,
    only,
)

_QWEN, _QWEN_VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
_LEVELS: dict[str, Any] = {**MERGING, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_WITHOUT_LEVELS: dict[str, Any] = {**_LEVELS, "deepstack_visual_indexes": []}
_AXES_3 = {"type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}

_QWEN_TYPES: dict[str, Family] = {
    "qwen2_vl": Family(
        QWEN_TOKENS,
        _QWEN,
        {
            **TEXT,
            **QWEN_IDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "vision_config": {**MERGING, "model_type": "qwen2_vl", "hidden_size": HIDDEN},
        },
        {"preprocessor_config.json": QWEN_IMAGES},
        video=_QWEN_VIDEO,
    ),
    "qwen3_vl_moe": Family(
        QWEN_TOKENS,
        _QWEN,
        {
            **QWEN_IDS,
            "text_config": {**TEXT, **EXPERTS, "model_type": "qwen3_vl_moe_text", "rope_scaling": _AXES_3},
            "vision_config": {**_LEVELS, "model_type": "qwen3_vl_moe"},
        },
        QWEN_FILES,
        video=_QWEN_VIDEO,
    ),
    "qwen3_5": Family(
        QWEN_TOKENS,
        _QWEN,
        {
            **QWEN_IDS,
            "text_config": {**TEXT, **LINEAR, "model_type": "qwen3_5_text"},
            "vision_config": {**_WITHOUT_LEVELS, "model_type": "qwen3_5"},
        },
        QWEN_FILES,
        video=_QWEN_VIDEO,
    ),
    "qwen3_5_moe": Family(
        QWEN_TOKENS,
        _QWEN,
        {
            **QWEN_IDS,
            "text_config": {**TEXT, **EXPERTS, **LINEAR, "model_type": "qwen3_5_moe_text"},
            "vision_config": {**_WITHOUT_LEVELS, "model_type": "qwen3_5_moe"},
        },
        QWEN_FILES,
        video=_QWEN_VIDEO,
    ),
    "cohere_compass": Family(
        ("<|VISION_START|>", "<|VISION_END|>", "<|IMAGE_PAD|>", "<|VIDEO_PAD|>"),
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        {
            "image_token_id": "<|IMAGE_PAD|>",
            "video_token_id": "<|VIDEO_PAD|>",
            "vision_start_token_id": "<|VISION_START|>",
            "vision_end_token_id": "<|VISION_END|>",
            "text_config": {
                **TEXT,
                "model_type": "cohere_compass_text",
                "sliding_window": WINDOW,
                "layer_types": ALTERNATING,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
                    "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
                },
            },
            "vision_config": {**_LEVELS, "model_type": "cohere_compass_vision"},
        },
        {"preprocessor_config.json": QWEN_IMAGES},
    ),
    "mage_vl": Family(
        QWEN_TOKENS,
        _QWEN,
        {
            **QWEN_IDS,
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {
                **MERGING,
                "model_type": "mage_vl_vision",
                "hidden_size": 64,
                "text_hidden_size": HIDDEN,
                "patch_size": 16,
                "temporal_patch_size": 1,
            },
        },
        {"preprocessor_config.json": {**QWEN_IMAGES, "patch_size": 16, "temporal_patch_size": 1}},
    ),
}

_GEMMA_TOKENS = (
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<video_soft_token>"),
    *("<start_of_audio>", "<end_of_audio>", "<audio_soft_token>"),
)
_GEMMA_NAMES = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "video_token": "<video_soft_token>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
_GEMMA_IDS = {
    "image_token_id": "<image_soft_token>",
    "video_token_id": "<video_soft_token>",
    "audio_token_id": "<audio_soft_token>",
    "boi_token_id": "<start_of_image>",
    "eoi_token_id": "<end_of_image>",
}
_GEMMA_TEXT: dict[str, Any] = {
    **TEXT,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "global_head_dim": 2 * HEAD,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 1,
    "use_bidirectional_attention": None,
    "tie_word_embeddings": True,
}
_GEMMA_PLAIN: dict[str, Any] = {
    **_GEMMA_TEXT,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_double_wide_mlp": False,
}
_GEMMA_FILES: dict[str, Any] = {
    "processor_config.json": {
        "processor_class": "Gemma4Processor",
        "image_seq_length": 16,
        "image_processor": {
            **SCALED,
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
    }
}
_GEMMA_TOWER: dict[str, Any] = {
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
}


def _gemma(text: dict[str, Any], **parts: Any) -> Family:
    config = {**_GEMMA_IDS, "vision_config": _GEMMA_TOWER, "audio_config": None, "text_config": text, **parts}
    sizes = ("vocab_size_per_layer_input",)
    return Family(_GEMMA_TOKENS, "<image_soft_token>", config, _GEMMA_FILES, _GEMMA_NAMES, sizes=sizes)


_GEMMA_TYPES: dict[str, Family] = {
    "gemma4": _gemma(_GEMMA_TEXT),
    # Without inputs of each layer.
    "gemma4+plain": _gemma(_GEMMA_PLAIN, model_type="gemma4"),
    # A picture's tokens see each other.
    "gemma4+both-ways": _gemma(_GEMMA_PLAIN | {"use_bidirectional_attention": "vision"}, model_type="gemma4"),
    "gemma4_unified": _gemma(
        _GEMMA_PLAIN | {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"},
        vision_config={
            "model_type": "gemma4_unified_vision",
            # Those that mlx-vlm's processor has, whatever the files say.
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "model_patch_size": 48,
            "mm_embed_dim": HIDDEN,
            "mm_posemb_size": 1120,
            "num_soft_tokens": 280,
            "output_proj_dims": HIDDEN,
        },
        audio_config={"model_type": "gemma4_unified_audio"},
    ),
}

_GLM_TOKENS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)
_GLM_IDS = {
    "image_token_id": "<|image|>",
    "image_token_index": "<|image|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_token_id": "<|video|>",
    "video_token_index": "<|video|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "vision_start_token_id": "<|begin_of_image|>",
    "vision_end_token_id": "<|end_of_image|>",
}
_GLM_IMAGES: dict[str, Any] = {
    **QWEN_IMAGES,
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224},
}


def _glm(text: dict[str, Any], tower: dict[str, Any], processor: str = "Glm4vProcessor") -> Family:
    files = {
        "preprocessor_config.json": _GLM_IMAGES,
        "video_preprocessor_config.json": _GLM_IMAGES,
        "processor_config.json": {"processor_class": processor},
    }
    config = {**_GLM_IDS, "text_config": text, "vision_config": tower}
    return Family(_GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>", config, files)


_GLM_TYPES: dict[str, Family] = {
    "glm4v": _glm(
        {**TEXT, "model_type": "glm4v_text", "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {**MERGING, "model_type": "glm4v_vision"},
    ),
    "glm4v_moe": _glm(
        {
            **TEXT,
            **EXPERTS,
            "model_type": "glm4v_moe_text",
            "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
        },
        {**MERGING, "model_type": "glm4v_moe_vision"},
    ),
    "glm_ocr": _glm(
        only(
            TEXT,
            *("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
            *("num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps"),
            model_type="glm_ocr_text",
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [4, 6, 6],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000,
            },
        ),
        only(
            MERGING,
            *("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "image_size", "in_channels"),
            *("out_hidden_size", "spatial_merge_size", "temporal_patch_size"),
            model_type="glm_ocr_vision",
        ),
        "GlmOcrProcessor",
    ),
}

_KIMI_TOKENS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
_KIMI = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
_MOON_TOWER: dict[str, Any] = {
    **TOWER,
    "model_type": "moonvit",
    "embed_dim": 32,
    "init_pos_emb_height": 16,
    "init_pos_emb_width": 16,
    "merge_kernel_size": [2, 2],
}
_KIMI_TYPE = Family(
    _KIMI_TOKENS,
    _KIMI,
    {
        "media_placeholder_token_id": "<|media_pad|>",
        "text_config": {**LATENT, "model_type": "deepseek_v3"},
        "vision_config": _MOON_TOWER,
    },
    {
        "preprocessor_config.json": {
            **SCALED,
            "image_processor_type": "KimiVLImageProcessor",
            "patch_size": 14,
            "in_token_limit": 64,
            "merge_kernel_size": [2, 2],
        }
    },
)
_KIMI_TYPES: dict[str, Family] = {
    "kimi_vl": _KIMI_TYPE,
    "kimi_k25": _KIMI_TYPE,
    "kimi_k3": Family(
        _KIMI_TOKENS,
        _KIMI,
        {
            "media_placeholder_token_id": "<|media_pad|>",
            "text_config": {
                **LATENT,
                "model_type": "kimi_linear",
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3],
                    "full_attn_layers": [4],
                    "num_heads": 4,
                    "head_dim": HEAD,
                    "short_conv_kernel_size": 4,
                    "gate_lower_bound": -5.0,
                },
                "hidden_act": "situ",
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": None,
                "attn_res_block_size": 2,
            },
            "vision_config": {
                "model_type": "moonvit3d",
                "init_pos_emb_height": 16,
                "init_pos_emb_width": 16,
                "vt_num_attention_heads": 2,
                "vt_num_hidden_layers": 2,
                "vt_hidden_size": 32,
                "vt_intermediate_size": 64,
                "qkv_hidden_size": 32,
                "mm_hidden_size": 32,
                "text_hidden_size": HIDDEN,
                "merge_kernel_size": [2, 2],
            },
        },
        {},
    ),
    "locateanything": Family(
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "<image-1>",
        {
            "image_token_index": "<IMG_CONTEXT>",
            "text_config": {**TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
            "vision_config": _MOON_TOWER,
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": "LocateAnythingImageProcessor",
                "patch_size": 14,
                "in_token_limit": 64,
                "merge_kernel_size": [2, 2],
            },
            "processor_config.json": {"processor_class": "LocateAnythingProcessor"},
        },
    ),
}

_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_PIXTRAL_PROCESSOR: dict[str, Any] = {
    "processor_class": "PixtralProcessor",
    "patch_size": 14,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}


def _pixtral(text: dict[str, Any], *, merged: int = 1, **parts: Any) -> Family:
    config = {
        "image_token_index": "[IMG]",
        "spatial_merge_size": merged,
        "vision_feature_layer": -1,
        "text_config": {**TEXT, **text},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16},
    }
    files = {
        "preprocessor_config.json": PIXTRAL,
        "processor_config.json": {**_PIXTRAL_PROCESSOR, "spatial_merge_size": merged},
    }
    return Family(_PIXTRAL_TOKENS, "[IMG]", config | parts, files)


_PIXTRAL_TYPES: dict[str, Family] = {
    "pixtral": _pixtral({"model_type": "mistral"}),
    "mistral3": _pixtral({"model_type": "mistral"}, merged=2),
    "mistral3+windows": _pixtral(
        {
            "model_type": "ministral3",
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": {
                "rope_type": "default",
                "type": "default",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 512,
            },
        },
        merged=2,
        model_type="mistral3",
    ),
}

_OWN_TYPES: dict[str, Family] = {
    "dots_ocr": Family(
        ("<|img|>", "<|imgpad|>", "<|endofimg|>"),
        "<|img|><|imgpad|><|endofimg|>",
        {
            "image_token_id": "<|imgpad|>",
            "text_config": {**TEXT, "model_type": "dots_ocr", "tie_word_embeddings": True},
            "vision_config": {**MERGING, "model_type": "dots_vit", "hidden_size": HIDDEN, "temporal_patch_size": 1},
        },
        {
            "preprocessor_config.json": {
                **QWEN_IMAGES,
                "image_processor_type": "Qwen2VLImageProcessor",
                "temporal_patch_size": 1,
            },
            "processor_config.json": {"processor_class": "DotsVLProcessor"},
        },
        {"image_token": "<|imgpad|>"},
        ids={"<|imgpad|>": 151665},
    ),
    "hunyuan_vl": Family(
        ("<im_start>", "<im_end>", "<image>", "<im_newline>", "<pad>", "<placeholder>"),
        "<im_start><image><im_end>",
        {
            "image_start_token_id": "<im_start>",
            "image_end_token_id": "<im_end>",
            "image_token_id": "<image>",
            "image_newline_token_id": "<im_newline>",
            "min_pixels": 64 * 64,
            "max_pixels": 192 * 192,
            "text_config": {
                **TEXT,
                "model_type": "hunyuan_vl",
                "tie_word_embeddings": True,
                "attention_head_dim": HEAD,
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
                **MERGING,
                "model_type": "hunyuan_vl",
                "patch_size": 16,
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
        ids={
            "<im_start>": 120118,
            "<im_end>": 120119,
            "<image>": 120120,
            "<im_newline>": 120121,
            "<pad>": 120002,
            # The processor takes the token that is numbered as the last one of a vocabulary without gaps.
            "<placeholder>": 3070,
        },
    ),
    "paddleocr_vl": Family(
        ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video_pad|>"),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {
            **TEXT,
            "hidden_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "head_dim": 128,
            "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24]},
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
            "vision_config": {**MERGING, "model_type": "paddleocr_vl"},
        },
        {
            "preprocessor_config.json": {
                **QWEN_IMAGES,
                "image_processor_type": "PaddleOCRVLImageProcessor",
                "temporal_patch_size": 1,
            },
            "processor_config.json": {"processor_class": "PaddleOCRVLProcessor"},
        },
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
}

PATCHES = {**_QWEN_TYPES, **_GEMMA_TYPES, **_GLM_TYPES, **_KIMI_TYPES, **_PIXTRAL_TYPES, **_OWN_TYPES}
