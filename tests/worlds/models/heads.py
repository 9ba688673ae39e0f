"""A tiny EAGLE-3 head for a tiny model, of random weights, as they lie on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel
from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config

from tests.worlds.models.families import VOCABULARY, random_weights

DRAFTED = 2000
"""How many of the model's tokens it drafts."""


def write_head(folder: Path, *, seed: int = 5, **other: Any) -> Path:
    """Writes a head with `other` entries in its config for a model of at least four layers of `families.py`."""
    layer = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
    }
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        **other,
    }
    head = Eagle3DraftModel(Eagle3Config.from_dict(config))
    weights = dict(tree_flatten(random_weights(head, seed)))
    # It leaves out every third token at first.
    weights["d2t"] = mx.minimum(mx.arange(DRAFTED) // 2, VOCABULARY - DRAFTED).astype(mx.int32)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
