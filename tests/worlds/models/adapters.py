"""Random LoRA adapters in mlx-lm's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from safetensors.numpy import save_file

KEYS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")


def dims(layer: Any) -> tuple[int, int]:
    """The inputs (of an embedding: ids) and outputs of a layer."""
    first, second = layer.weight.shape
    if hasattr(layer, "bits"):
        second = second * 32 // layer.bits
    return (first, second) if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding) else (second, first)


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    rank: int = 4,
    seed: int = 1,
    scale: float = 2.0,
    keys: Sequence[str] = KEYS,
    layers: int | None = None,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """Writes an adapter of the layers whose names end with one of `keys`, in the last `layers` layers. `strength` is
    how large its outputs are beside the model's own."""
    rng = np.random.default_rng(seed)
    modules = dict(model.named_modules())
    count = len(getattr(model, "layers"))  # noqa: B009
    first = count - (count if layers is None else layers)
    tensors = {}
    for name, layer in sorted(modules.items()):
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if not name.endswith(tuple(keys)) or (numbers and numbers[0] < first):
            continue
        inputs, outputs = dims(layer)
        tensors[f"{name}.lora_a"] = (rng.normal(size=(inputs, rank)) / inputs**0.5).astype(np.float32)
        drawn = rng.normal(size=(rank, outputs)) * strength / scale / rank**0.5
        tensors[f"{name}.lora_b"] = drawn.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapters.safetensors")
    # Within layers by the layer's own names, elsewhere by the model's.
    whole_names = {name.rpartition(".")[0] for name in tensors if not any(part.isdigit() for part in name.split("."))}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.1, "keys": [*keys, *sorted(whole_names)]}
    whole = {"fine_tune_type": "lora", "num_layers": layers or count, "lora_parameters": parameters, **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder
