"""The model `embedded:recall` with further layers that change nothing: it answers the same and needs more memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.actors.model_files.source import EMBEDDED

LAST_OF_LAYER = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to its input is a product with one of these."""


def write_deep_recall(folder: Path, layers: int) -> Path:
    """Writes the model with so many layers. Those after its own are copies whose last products are zero."""
    source = EMBEDDED / "recall"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    tensors: Any = mx.load(str(source / "model.safetensors"))
    for layer in range(config["num_hidden_layers"], layers):
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            rest = name.removeprefix("model.layers.0.")
            own = tensors[name]
            tensors[f"model.layers.{layer}.{rest}"] = mx.zeros_like(own) if rest in LAST_OF_LAYER else own
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    return folder
