"""Tiny checkpoints of every model type that mlx-lm has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes, save_model

from tests.worlds.models.families import END_TOKEN, VOCABULARY, copy_tokenizer, random_weights

_CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _types() -> dict[str, dict[str, Any]]:
    common = _CONFIGS["common"]
    return {
        **{name: {**common, **more} for name, more in _CONFIGS["like_common"].items()},
        **{
            name: {"vocab_size": VOCABULARY, "text_config": {**common, **more}}
            for name, more in _CONFIGS["wrapped"].items()
        },
        **_CONFIGS["own"],
    }


TYPES = _types()
"""The config of each type by its name; what follows a `+` is a variant of the type."""


def write(folder: Path, name: str, *, seed: int = 7) -> Path:
    """Writes a tiny model of random weights into `folder`."""
    config = {"model_type": name.partition("+")[0], **TYPES[name], "eos_token_id": END_TOKEN}
    model_class, arguments_class = _get_classes(config)
    model: nn.Module = model_class(arguments_class.from_dict(json.loads(json.dumps(config))))
    model.update(random_weights(model, seed))
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, donate_model=False)
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(folder)
    return folder
