"""Writes the model folders of the papers' experiments, as those of `benchmarks/serve/folders.py`: every answer has as
many tokens as were asked for, and each is a whole word.

    python -m benchmarks.papers.folders OUT NAME RECIPE [--small]

RECIPE is one of `satchel convert`, or `none` for weights that are not quantized.
"""

from __future__ import annotations

import argparse
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes as classes_of
from mlx_lm.utils import quantize_model, save_model

from satchel.actors.model_files.conversion import bits_of_layers

from ..serve.folders import keep_rows, write_settings, write_text_files
from .shapes import MODELS

NONE = "none"


def random_model(config: dict[str, Any]) -> Any:
    """Returns a model with lazy random weights: nothing is computed."""
    mx.random.seed(20)
    model_class, arguments_class = classes_of(config)
    model = model_class(arguments_class.from_dict(config))
    if config["tie_word_embeddings"] and "lm_head" in model:
        # Gemma 3 has this layer until weights without it are loaded.
        del model["lm_head"]
        model.tie_word_embeddings = True
    return model


def embedding_of(model: Any) -> nn.Module:
    """The layer of a model's token embeddings."""
    return next(layer for _, layer in model.named_modules() if isinstance(layer, nn.Embedding))


def write_paper_folder(name: str, folder: Path, recipe: str, dtype: mx.Dtype, *, small: bool) -> None:
    """Writes a model of random weights. One layer at a time is in memory unquantized.

    Args:
        recipe: of `satchel convert`, or `NONE`.
        dtype: of unquantized weights and of scales.
    """
    config = MODELS[name].config(small=small)
    drawable, words, end = write_text_files(folder, config["vocab_size"])
    model = random_model(config)
    keep_rows(getattr(model, "lm_head", None) or embedding_of(model), drawable)
    casts = getattr(model, "cast_predicate", lambda path: True)
    model.update(tree_map_with_path(lambda path, w: w.astype(dtype) if casts(path) else w, model.parameters()))
    if recipe != NONE:
        chosen = bits_of_layers(name, model, recipe, seeing=False)
        with redirect_stdout(StringIO()):
            model, config = quantize_model(model, config, chosen.group_size, 4, quant_predicate=chosen)
    layers: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    for _, layer in layers:
        mx.eval(layer.parameters())
    save_model(folder, model, donate_model=True)
    write_settings(folder, config, words, end, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("recipe")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    gpu = mx.default_device().type == mx.DeviceType.gpu
    dtype = mx.bfloat16 if gpu else mx.float32
    # Written last.
    if not (given.folder / "config.json").exists():
        write_paper_folder(given.name, given.folder, given.recipe, dtype, small=given.small)
    print(json.dumps({"device": "gpu" if gpu else "cpu"}))


if __name__ == "__main__":
    main()
