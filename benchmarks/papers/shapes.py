"""The models of the papers as configs of mlx-lm, with random weights: each in its own size, and scaled down for a CPU
with the same kinds of layers: grouped heads, windows, experts, states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALL_VOCABULARY = 3072
CONTEXT = 40_960


@dataclass(frozen=True)
class PaperModel:
    """A model of a paper.

    Attributes:
        name: as the paper calls it.
        whole: its config.
        small: what a scaled-down one has in place of it.
    """

    name: str
    whole: dict[str, Any]
    small: dict[str, Any]

    def config(self, *, small: bool) -> dict[str, Any]:
        return {**self.whole, **self.small, "vocab_size": SMALL_VOCABULARY} if small else dict(self.whole)

    def title(self, *, small: bool) -> str:
        """The name that tables show."""
        return f"{self.name} (scaled down)" if small else self.name


def _dense(family: str, sizes: tuple[int, ...], vocabulary: int, tied: bool, **more: Any) -> dict[str, Any]:
    """A config of `sizes`: hidden, layers, heads, KV heads, head size, feed-forward."""
    hidden, layers, heads, kv_heads, head_dim, intermediate = sizes
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        **more,
    }


def _small(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
    }


def _llama(sizes: tuple[int, ...], tied: bool) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _dense("llama", sizes, 128_256, tied, rms_norm_eps=1e-5, rope_theta=500_000.0, rope_scaling=scaling)


def _qwen3(sizes: tuple[int, ...], tied: bool) -> dict[str, Any]:
    return _dense("qwen3", sizes, 151_936, tied, rope_theta=1_000_000.0)


def _gemma3(sizes: tuple[int, ...]) -> dict[str, Any]:
    windows = {"sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
    return _dense("gemma3_text", sizes, 262_208, True, rope_theta=1_000_000.0, **windows)


_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_EXPERTS_SMALL = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
_NEMOTRON = _dense(
    "nemotron_h",
    (2688, 52, 32, 2, 128, 1856),
    131_072,
    False,
    hybrid_override_pattern=list("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    attention_bias=False,
    mamba_num_heads=64,
    mamba_head_dim=64,
    mamba_proj_bias=False,
    ssm_state_size=128,
    conv_kernel=4,
    n_groups=8,
    mlp_bias=False,
    layer_norm_epsilon=1e-5,
    use_bias=False,
    use_conv_bias=True,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    n_group=1,
    topk_group=1,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=6,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
_NEMOTRON_SMALL = {
    **_small(128, 7, 4, 2, 64, 128),
    "hybrid_override_pattern": list("MEM*EME"),
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}
_DEEPSEEK = _dense(
    "deepseek_v2",
    (2048, 27, 16, 16, 192, 10_944),
    102_400,
    False,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    topk_method="greedy",
    rope_scaling={
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    n_group=1,
    topk_group=1,
)
_DEEPSEEK_SMALL = {
    **_small(128, 2, 2, 2, 96, 256),
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}

MODELS: dict[str, PaperModel] = {
    "gemma-2b": PaperModel(
        "Gemma 2B",
        _dense("gemma", (2048, 18, 8, 1, 256, 16_384), 256_000, True),
        _small(128, 3, 4, 1, 256, 1024),
    ),
    "gemma2-2b": PaperModel(
        "Gemma 2 2B",
        _dense("gemma2", (2304, 26, 8, 4, 256, 9216), 256_000, True, **_GEMMA2),
        _small(128, 3, 4, 2, 256, 512),
    ),
    "llama3.2-1b": PaperModel("Llama 3.2 1B", _llama((2048, 16, 32, 8, 64, 8192), True), _small(128, 3, 4, 1, 64, 512)),
    "llama3.2-3b": PaperModel(
        "Llama 3.2 3B", _llama((3072, 28, 24, 8, 128, 8192), True), _small(192, 3, 6, 2, 128, 512)
    ),
    "llama3.1-8b": PaperModel(
        "Llama 3.1 8B", _llama((4096, 32, 32, 8, 128, 14_336), False), _small(256, 2, 4, 1, 64, 896)
    ),
    "qwen3-0.6b": PaperModel("Qwen3 0.6B", _qwen3((1024, 28, 16, 8, 128, 3072), True), _small(128, 3, 2, 1, 128, 384)),
    "qwen3-4b": PaperModel("Qwen3 4B", _qwen3((2560, 36, 32, 8, 128, 9728), True), _small(192, 3, 4, 1, 128, 640)),
    "qwen3-8b": PaperModel("Qwen3 8B", _qwen3((4096, 36, 32, 8, 128, 12_288), False), _small(256, 3, 4, 1, 128, 768)),
    "qwen3-30b-a3b": PaperModel(
        "Qwen3 30B-A3B",
        {**_qwen3((2048, 48, 32, 4, 128, 6144), False), **_QWEN3_MOE},
        {**_small(128, 3, 4, 1, 128, 384), **_EXPERTS_SMALL},
    ),
    "gemma3-4b": PaperModel("Gemma 3 4B", _gemma3((2560, 34, 8, 4, 256, 10_240)), _small(128, 6, 2, 1, 256, 512)),
    "gemma3-12b": PaperModel(
        "Gemma 3 12B",
        _gemma3((3840, 48, 16, 8, 256, 15_360)),
        {**_small(128, 3, 2, 1, 64, 512), "sliding_window_pattern": 3},
    ),
    "nemotron-30b-a3b": PaperModel("Nemotron 3 Nano 30B-A3B", _NEMOTRON, _NEMOTRON_SMALL),
    "deepseek-v2-lite": PaperModel("DeepSeek-Coder-V2-Lite 16B", _DEEPSEEK, _DEEPSEEK_SMALL),
}
"""By the names of parts. A scaled-down model has the vocabulary of the embedded one."""
