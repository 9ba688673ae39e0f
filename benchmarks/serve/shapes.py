"""The models that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServedShape:
    """A Qwen3 of random weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    bits: int | None = None
    context: int = 40960

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "silu",
        }
        if self.bits:
            config["quantization"] = config["quantization_config"] = {"group_size": 64, "bits": self.bits}
        return config


SHAPES: dict[str, ServedShape | None] = {
    "recall": None,  # The model that ships with Satchel.
    # So small that a prompt of 180 KB is soon computed, even on a CPU.
    "random-tiny": ServedShape(64, 1, 1, 1, 64, 128, 3072, context=65536),
    "random-30m": ServedShape(512, 8, 8, 4, 64, 1792, 3072),
    "qwen3-0.6b-4bit": ServedShape(1024, 28, 16, 8, 128, 3072, 151936, bits=4),
    "qwen3-8b-4bit": ServedShape(4096, 36, 32, 8, 128, 12288, 151936, bits=4),
}
