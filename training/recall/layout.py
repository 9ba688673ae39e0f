"""The model's shape and its folder in the Hugging Face layout, apart from weights and tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tokenizer import CONTEXT, CONTROLS, VOCABULARY

CONTROL_IDS = {text: VOCABULARY - 7 + index for index, text in enumerate(CONTROLS)}
PAD_ID = CONTROL_IDS["<|endoftext|>"]
END_ID = CONTROL_IDS["<|im_end|>"]


@dataclass(frozen=True, slots=True)
class RecallShape:
    """Qwen3's sizes; about 5.5 million parameters as they stand."""

    vocabulary: int = VOCABULARY
    hidden: int = 256
    intermediate: int = 768
    layers: int = 6
    heads: int = 4
    key_value_heads: int = 2
    head: int = 64
    rope_theta: float = 1e6
    epsilon: float = 1e-6
    context: int = CONTEXT


def config(shape: RecallShape) -> dict[str, Any]:
    """config.json's content."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_ID,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.epsilon,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def write_configs(folder: Path, shape: RecallShape) -> None:
    """Writes config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"do_sample": False, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    for name, content in [("config.json", config(shape)), ("generation_config.json", generation)]:
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
