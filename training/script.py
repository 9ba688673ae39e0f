"""Writes the scripted model: the shipped tokenizer and template, and a layer of random weights with a long context.

python -m training.script OUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3

from satchel.actors.model_files.source import EMBEDDED

CONTEXT_TOKENS = 131_072
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", "generation_config.json")


def write(folder: Path) -> None:
    """Writes the model into `folder`, but for its script."""
    source = EMBEDDED / "recall"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "model_max_length": CONTEXT_TOKENS}, indent=2) + "\n"
    )
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    mx.random.seed(7)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
