"""What the configs of vision types have in common: every name under which a family looks for a size, and the settings
of processors."""

from __future__ import annotations

from typing import Any

from tests.worlds.models.vision_families import CONTEXT, QWEN_IMAGES
from tests.worlds.models.vision_families import IMAGES as SCALED

HIDDEN, HEAD, WINDOW = 128, 32, 192
ALTERNATING = ["sliding_attention", "full_attention"] * 2

TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT: dict[str, Any] = {
    **TEXT,
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": HEAD,
    "qk_nope_head_dim": HEAD,
    "v_head_dim": HEAD,
}
"""Of DeepSeek's attention."""

LINEAR: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""Of layers with a recurrent state, as Qwen3.5's."""

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "depth": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_heads": 2,
    "patch_size": 14,
    "image_size": 112,
    "num_channels": 3,
    "in_channels": 3,
    "in_chans": 3,
    "layer_norm_eps": 1e-6,
    "rms_norm_eps": 1e-6,
}
MERGING: dict[str, Any] = {
    **TOWER,
    "out_hidden_size": HIDDEN,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "embed_dim": 32,
}
"""Of towers that merge patches, as Qwen's."""

SQUARE: dict[str, Any] = {**SCALED, "size": {"height": 112, "width": 112}}
CLIP: dict[str, Any] = {**SQUARE, "image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
SIGLIP: dict[str, Any] = {**SQUARE, "image_processor_type": "SiglipImageProcessor"}
TILES = [[112, 224], [224, 112], [224, 224]]
TILED: dict[str, Any] = {
    **SCALED,
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 112},
    "crop_size": {"height": 112, "width": 112},
    "do_center_crop": True,
    "image_grid_pinpoints": TILES,
}
PIXTRAL: dict[str, Any] = {
    **SCALED,
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 112},
    "patch_size": {"height": 14, "width": 14},
}
QWEN_FILES: dict[str, Any] = {
    "preprocessor_config.json": QWEN_IMAGES,
    "video_preprocessor_config.json": QWEN_IMAGES,
}


def less(config: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    """Return a config without some of its entries, and with others."""
    return {name: value for name, value in config.items() if name not in names} | more


def only(config: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    """Return some of a config's entries, and others."""
    return {name: config[name] for name in names} | more
