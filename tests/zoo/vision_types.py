"""Tiny checkpoints of the model types that mlx-vlm builds without a network."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from tests.worlds.models import vision_families
from tests.worlds.models.vision_families import FAMILIES, Family
from tests.worlds.models.vision_families import IMAGES as SCALED

from .vision_omni import OMNI
from .vision_parts import ALTERNATING, EXPERTS, HEAD, HIDDEN, LINEAR, TEXT, TOWER, WINDOW, only
from .vision_patches import PATCHES
from .vision_squares import SQUARES

_PHI_TEXT = {**TEXT, "num_key_value_heads": 4, "partial_rotary_factor": 1.0}
_PHI_TYPES: dict[str, Family] = {
    "phi3_v": Family(
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|image_1|>",
        {
            **_PHI_TEXT,
            "vision_config": {
                **TOWER,
                "model_type": "phi3_v",
                "image_size": 336,
                "image_dim_out": 32,
                "num_img_tokens": 144,
            },
        },
        {
            "preprocessor_config.json": {
                **SCALED,
                "image_processor_type": "Phi3VImageProcessor",
                "num_crops": 1,
                "num_img_tokens": 144,
            }
        },
    ),
    "phi4mm": Family(
        ("<|endoftext10|>", "<|endoftext11|>"),
        "<|image_1|>",
        {
            **TEXT,
            "mm_hidden_size": 32,
            "audio_token_index": "<|endoftext11|>",
            "vision_config": {**TOWER, "model_type": "siglip2_vision_model"},
        },
        {},
    ),
    "phi4_siglip": Family(
        ("<image>",),
        "<image>",
        {
            "model_type": "phi4-siglip",
            "mm_hidden_size": 32,
            "min_num_patches": 16,
            "max_num_patches": 64,
            "text_config": only(
                TEXT,
                *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
                *("num_key_value_heads", "rope_theta", "rms_norm_eps"),
                model_type="phi4-siglip",
            ),
            "vision_config": only(
                TOWER,
                *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
                *("num_channels", "image_size", "patch_size"),
                model_type="siglip2_vision_model",
                num_patches=64,
            ),
        },
        {},
    ),
    "fastvlm": Family(
        ("<image>",),
        "<image>",
        {
            **TEXT,
            "model_type": "llava_qwen2",
            "image_token_index": -200,
            "mm_hidden_size": 128,
            "vision_config": {"model_type": "llava_qwen2", "image_size": 1024},
        },
        {
            "preprocessor_config.json": {
                **SCALED,
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 1024},
                "crop_size": {"height": 1024, "width": 1024},
                "do_center_crop": True,
            },
            "processor_config.json": {"processor_class": "FastVLMProcessor"},
        },
    ),
}

_MOON_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "proj_inner_dim": 64,
    "proj_out_dim": HIDDEN,
}
_OWN_TYPES: dict[str, Family] = {
    "minicpmv4_6": Family(
        (
            *("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>"),
            *("<|image_pad|>", "<|video_pad|>"),
        ),
        "<|image_pad|>",
        {
            "query_num": 16,
            "image_size": 112,
            "insert_layer_id": 0,
            "text_config": {**TEXT, **LINEAR, "model_type": "qwen3_5_text"},
            "vision_config": {**TOWER, "model_type": "minicpmv4_6_vision"},
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMVImageProcessor",
                "max_slice_nums": 4,
                "scale_resolution": 112,
                "patch_size": 14,
                "image_feature_size": 16,
                "use_image_id": False,
                "slice_mode": True,
                "norm_mean": [0.5] * 3,
                "norm_std": [0.5] * 3,
            }
        },
    ),
    "florence2": Family(
        ("<image>",),
        "<image>",
        {
            "image_token_index": "<image>",
            "image_token_id": "<image>",
            "text_config": {
                "d_model": 64,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
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
    "got": Family(
        ("<img>", "</img>", "<imgpad>"),
        "<image>",
        {
            **TEXT,
            "im_patch_token": "<imgpad>",
            "im_start_token": "<img>",
            "im_end_token": "</img>",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                "model_type": "got",
                "img_size": 1024,
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 2,
                "out_chans": 16,
                "out_dim": 1024,
                "global_attn_indexes": [1],
            },
        },
        {"preprocessor_config.json": {"image_processor_type": "GotOcrImageProcessor"}},
    ),
    "moondream2": Family(
        (),
        "<image>",
        {
            "text_config": {**TEXT, "model_type": "moondream2"},
            "vision_config": {**_MOON_TOWER, "model_type": "moondream2_vision"},
        },
        {},
    ),
    "moondream3": Family(
        (),
        "<image>",
        {
            "text_config": {
                **TEXT,
                **EXPERTS,
                "model_type": "moondream3",
                "num_key_value_heads": 4,
                "rope_dim": 16,
                "moe_start_layer": 2,
            },
            "vision_config": {**_MOON_TOWER, "model_type": "moondream3_vision"},
        },
        {},
    ),
    "muse_glimmer": Family(
        ("<|patch|>", "<|video|>"),
        "<|patch|>",
        {
            "image_token_id": "<|patch|>",
            "video_token_id": "<|video|>",
            "out_hidden_size": HIDDEN,
            "projector_hidden_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "muse_glimmer_text",
                "sliding_window": WINDOW,
                "layer_types": ALTERNATING,
            },
            "vision_config": {**TOWER, "model_type": "muse_glimmer_vision"},
        },
        {},
    ),
    "nemotron_h_nano_omni": Family(
        ("<image>", "<img>", "</img>"),
        "<image>",
        {
            "img_context_token_id": "<image>",
            "projector_hidden_size": 64,
            "vit_hidden_size": 32,
            "force_image_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "nemotron_h",
                "hybrid_override_pattern": ["M", "*", "M", "-"],
                "mamba_num_heads": 4,
                "mamba_head_dim": HEAD,
                "mamba_proj_bias": False,
                "ssm_state_size": HEAD,
                "conv_kernel": 4,
                "n_groups": 2,
                "use_conv_bias": True,
                "time_step_limit": [0.001, 0.1],
            },
            "vision_config": {
                **TOWER,
                "model_type": "radio",
                "patch_size": 16,
                "image_size": 64,
                "max_resolution": 128,
            },
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": "NemotronHNanoOmniImageProcessor",
                "norm_mean": [0.5] * 3,
                "norm_std": [0.5] * 3,
                "patch_size": 16,
                "downsample_ratio": 0.5,
                "min_num_patches": 4,
                "max_num_patches": 64,
            }
        },
    ),
    "plamo2vl": Family(
        ("<|image|>",),
        "<|image|>",
        {
            "image_token_index": "<|image|>",
            "text_config": {
                **TEXT,
                "hidden_size_per_head": HEAD,
                "mamba_num_heads": 4,
                "mamba_d_state": 16,
                "mamba_step": 2,
                "attention_window_size": WINDOW,
            },
            "vision_config": {
                **TOWER,
                "model_type": "siglip_vision_model",
                "image_token_id": "<|image|>",
                "image_feature_size": 32,
                "image_proj_hidden_size": HIDDEN,
            },
        },
        {},
    ),
    "step3p7": Family(
        ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        "<im_patch>",
        {
            "image_token_id": "<im_patch>",
            "text_config": {
                **TEXT,
                "model_type": "step3p5",
                "num_attention_groups": 2,
                "sliding_window": WINDOW,
                "layer_types": ALTERNATING,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "share_expert_dim": 64,
                "moe_layers_enum": "1,2,3",
                "moe_intermediate_size": 64,
            },
            "vision_config": {
                "model_type": "perception_encoder",
                "width": 32,
                "layers": 2,
                "heads": 2,
                "image_size": 728,
                "patch_size": 14,
                "mlp_ratio": 2.0,
            },
        },
        {"processor_config.json": {"processor_class": "Step3VLProcessor"}},
    ),
}
_MOLMO_TOKENS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
_MOLMO_TYPES: dict[str, Family] = {
    "molmo": Family(
        _MOLMO_TOKENS,
        "<|image|>",
        {
            "text_config": {
                "d_model": HIDDEN,
                "n_heads": 4,
                "n_kv_heads": 2,
                "n_layers": 2,
                "mlp_hidden_size": 256,
                "additional_vocab_size": 16,
                "max_position_embeddings": 4096,
                "rope_theta": 10000.0,
            },
            "vision_config": {
                "model_type": "molmo",
                "hidden_size": 64,
                "image_emb_dim": 32,
                "image_num_heads": 2,
                "image_num_key_value_heads": 2,
                "image_num_layers": 3,
                "image_head_dim": 16,
                "image_mlp_dim": 64,
                "d_model": HIDDEN,
                "vit_layers": [-1, -2],
            },
        },
        {},
        sizes=("embedding_size",),
    ),
    "molmo2": Family(
        (*_MOLMO_TOKENS, "<low_res_im_start>", "<im_low>", "<frame_start>", "<frame_end>"),
        "<|image|>",
        {
            "image_start_token_id": "<im_start>",
            "image_end_token_id": "<im_end>",
            "image_patch_id": "<im_patch>",
            "image_col_id": "<im_col>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "image_low_res_id": "<im_low>",
            "text_config": {**TEXT, "model_type": "molmo2", "additional_vocab_size": 16},
            "vision_config": {
                "vit_config": {
                    **TOWER,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "image_default_input_size": [378, 378],
                    "image_num_pos": 729,
                    "image_patch_size": 14,
                },
                "adapter_config": {
                    "hidden_size": 32,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "intermediate_size": 64,
                    "text_hidden_size": HIDDEN,
                    "vit_layers": [-1, -2],
                },
            },
        },
        {
            "preprocessor_config.json": {
                "image_processor_type": "Molmo2ImageProcessor",
                "size": {"height": 378, "width": 378},
                "max_crops": 8,
                "overlap_margins": [4, 4],
                "patch_size": 14,
                "pooling_size": [2, 2],
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
            "processor_config.json": {"processor_class": "Molmo2Processor"},
        },
        sizes=("embedding_size",),
    ),
    "jina_vlm": Family(
        _MOLMO_TOKENS,
        "<|image|>",
        {
            "image_token_id": "<|image|>",
            "image_token_index": "<|image|>",
            "image_start_token_id": "<im_start>",
            "image_end_token_id": "<im_end>",
            "image_patch_token_id": "<im_patch>",
            "image_column_token_id": "<im_col>",
            "text_config": {
                "hidden_size": HIDDEN,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 160,
                "max_position_embeddings": 4096,
                "rope_theta": 10000.0,
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "intermediate_size": 64,
                "vit_layers": [-1, -2],
                "output_size": HIDDEN,
                "connector_hidden_size": 64,
            },
        },
        {"processor_config.json": {"processor_class": "JinaVLMProcessor"}},
    ),
}

IN_CODE: dict[str, dict[str, Any]] = {
    "phi3_v": {
        "vision:VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG.num_hidden_layers": 2,
        "vision:VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG.intermediate_size": 64,
    },
    "fastvlm": {
        "config:VisionConfig.layers": [1] * 5,
        "config:VisionConfig.embed_dims": [16, 32, 32, 32, 64],
        "config:VisionConfig.mlp_ratios": [2] * 5,
    },
    # Width 24, 2 layers and 2 heads in the place of 768, 12 and 12.
    "deepseekocr": {
        "config:SAMViTConfig.__init__.__defaults__": (1024, 24, 2, 2, 16, 14, 256, (1,), (512, 1024)),
    },
}
"""Sizes that mlx-vlm has in its code, and smaller ones in their place."""

TYPES: dict[str, Family] = {**FAMILIES, **PATCHES, **SQUARES, **_PHI_TYPES, **_MOLMO_TYPES, **_OWN_TYPES, **OMNI}
"""By name; behind a plus sign is what makes one another variant of its type."""


def write(folder: Path, name: str) -> Path:
    """Write a checkpoint of one type into `folder`. The sizes that mlx-vlm has in its code are smaller from now on."""
    for place, size in IN_CODE.get(name, {}).items():
        module, _, path = place.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = import_module(f"mlx_vlm.models.{name}.{module}")
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, attribute, size)
    return vision_families.write(folder, name, TYPES[name])
