"""Writes the vision model that is measured, in the Hugging Face layout, and says what this machine computes on.

    python -m benchmarks.vision.folders OUT NAME

As for serving, weights are float32 on a CPU, for all servers alike. A random model's answers have exactly `max_tokens`
tokens, whole words that every server can send at once.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs

from ..programs import ROOT
from ..serve import folders
from .shapes import VISION_SHAPES, VisionShape

MODEL = ROOT / "actors" / "model_files" / "embedded" / "shapes"
COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")


def write_vision_folder(name: str, folder: Path, dtype: mx.Dtype) -> None:
    """Write the model called `name`."""
    folder.mkdir(parents=True)
    for file in (*COPIED, *PROCESSORS):
        shutil.copy(MODEL / file, folder)
    config = json.loads((MODEL / "config.json").read_text())
    shape = VISION_SHAPES[name]
    if shape is None:
        weights = mx.load(str(MODEL / "model.safetensors"))
        assert isinstance(weights, dict)
    else:
        config = shape.config(config)
        weights = dict(tree_flatten(_random(shape, config, folder)))
    weights = {key: weight.astype(dtype) for key, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    told = str(dtype).removeprefix("mlx.core.")
    config.update(dtype=told, torch_dtype=told)
    config["text_config"]["dtype"] = told
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _random(shape: VisionShape, config: dict[str, Any], folder: Path) -> Any:
    """Seeded weights that draw only whole words. Writes the tokenizer, and what depends on its end token."""
    # The tokenizer with tokens for pictures, filled up in the same way.
    folders.EMBEDDED = MODEL
    drawable, _, end = folders.write_tokenizer(folder, shape.vocabulary)
    for part in (config, config["text_config"]):
        part.update(eos_token_id=end, pad_token_id=end)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": end}))
    path = folder / "tokenizer_config.json"
    ends = {"eos_token": folders.END, "pad_token": folders.END, "model_max_length": shape.context}
    path.write_text(json.dumps({**json.loads(path.read_text()), **ends}))
    for file, (least, most) in zip(PROCESSORS, (shape.pixels, shape.frames_pixels), strict=True):
        settings = json.loads((folder / file).read_text())
        settings["size"] = {"shortest_edge": least, "longest_edge": most}
        (folder / file).write_text(json.dumps(settings))
    mx.random.seed(20)
    told = json.loads(json.dumps(config))
    classes, _ = get_model_and_args(told)
    arguments = update_module_configs(classes.ModelConfig.from_dict(told), classes, told, ["text", "vision"])
    model = classes.Model(arguments)
    folders.keep_rows(model.language_model.model.embed_tokens, drawable)
    return model.parameters()


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    gpu = mx.default_device().type == mx.DeviceType.gpu
    # Written last.
    if not (folder / "config.json").exists():
        write_vision_folder(name, folder, mx.bfloat16 if gpu else mx.float32)
    print(json.dumps({"device": "gpu" if gpu else "cpu"}))


if __name__ == "__main__":
    main()
