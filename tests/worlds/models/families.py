"""Tiny models of every family, written the way real ones lie on disk: config, safetensors, tokenizer and template.

The weights are random but seeded, and larger than usual, so that a wrong position or a lost state shows in the logits.
The tokenizer is the embedded model's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, quantize_model, save_model

from satchel.actors.replica.loading.models import EMBEDDED

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
VOCABULARY = 3072
CONTEXT = 4096
END_TOKEN = 3067

_SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 4,
    },
    "llama": {},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
        "sliding_window": 300,
        "sliding_window_pattern": 3,
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2,
            "original_max_position_embeddings": CONTEXT // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "num_hidden_layers": 4,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 0.1],
    },
}
"""What each family's config has beyond, or other than, the shared part."""

PECULIAR: dict[str, dict[str, Any]] = {
    # Computes attention itself, with capped scores: it adds masks by groups of heads.
    "gemma2": {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 1.0},
    # Its last layer attends to another one's KV.
    "gemma3n": {
        "text_config": {
            **_SHARED,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 300,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.95, 0, 0, 0],
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
            "query_pre_attn_scalar": 32,
        }
    },
    # Its windows are one longer in prompts than in steps.
    "plamo3": {"window_size": 400, "sliding_window_pattern": 2, "rope_local_theta": 10000},
    # Each layer has two caches: KV and a state.
    "falcon_h1": {
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
        "mamba_d_conv": 4,
    },
}
"""The same of families whose code expects something else of masks or caches."""

UNBATCHED: dict[str, dict[str, Any]] = {
    # Attends within chunks, in caches of which there is no batch.
    "llama4": {
        "text_config": {
            **_SHARED,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 256,
            "attention_bias": False,
            "use_qk_norm": True,
            "rope_scaling": None,
        }
    },
}
"""The same of families whose sequences are computed one by one."""


def config_of(family: str, **other: Any) -> dict[str, Any]:
    return {
        **_SHARED,
        **(FAMILIES | PECULIAR | UNBATCHED)[family],
        "model_type": family,
        "eos_token_id": END_TOKEN,
        **other,
    }


def write_model(
    folder: Path, family: str, *, bits: int | None = None, group_size: int = 32, seed: int = 7, **other: Any
) -> Path:
    """Write a tiny model of `family`, with `other` entries in its config, into `folder`; with `bits`, quantized in
    groups."""
    config = config_of(family, **other)
    model_class, arguments_class = _get_classes(config)
    # A layer's biases begin with numbers of MLX's own generator.
    mx.random.seed(seed)
    model: nn.Module = model_class(arguments_class.from_dict(config))
    model.update(random_weights(model, seed))
    if bits is not None:
        model, config = quantize_model(model, config, group_size=group_size, bits=bits)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, donate_model=False)
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Gives a model the embedded one's tokenizer, template and generation config."""
    for name in TOKENIZER_FILES:
        if (EMBEDDED / "recall" / name).is_file():
            shutil.copy(EMBEDDED / "recall" / name, folder / name)


def random_weights(model: nn.Module, seed: int) -> Any:
    names = sorted(name for name, _ in tree_flatten(model.parameters()))
    keys = dict(zip(names, mx.random.split(mx.random.key(seed), len(names)), strict=True))

    def draw(name: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            # Norms, biases and decays keep their kind: near what the model starts with.
            return weight + 0.05 * mx.random.normal(weight.shape, key=keys[name])
        scale = 1.5 * weight.shape[-1] ** -0.5
        return scale * mx.random.normal(weight.shape, key=keys[name])

    return tree_map_with_path(draw, model.parameters())
