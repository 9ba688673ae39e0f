"""What recipes of quantized weights cost and save: size, speed of prefill and decoding, and divergence from the weights
they were made of.

`python -m benchmarks.recipes --model qwen3-0.6b --recipes 4,8-4-4 --rows 1,8 [--json FILE]`. The model is the embedded
one, a folder or a Hub id, or one of random weights in a shape of `benchmarks/serve/shapes.py` without its bits, whose
divergence says nothing about a real one's. Recipes are measured in turns, so that a busy machine troubles all alike;
weights are multiplied as stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from satchel.actors.model_files.conversion import convert
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models

from . import machine
from .kept import now, plain
from .prefix import print_table
from .serve import folders
from .serve.shapes import SHAPES

FLOAT = "as it is"
STEPS = 16


def shaped(name: str, folder: Path) -> str:
    """Writes a model of random weights and returns its folder; any other model's name is returned as it is."""
    shape = next((shape for known, shape in SHAPES.items() if shape and known.removesuffix("-4bit") == name), None)
    if shape is None:
        return name
    SHAPES[name] = dataclasses.replace(shape, bits=None)
    folders.write_folder(name, folder, mx.bfloat16 if on_gpu() else mx.float32)
    return str(folder)


def load(source: str) -> LoadedModel:
    return models.load(source, context_tokens_max=None, progress=lambda *_: None, weights="stored", warm=False)


def tokens_of(loaded: LoadedModel, rows: int, count: int) -> mx.array:
    draw = random.Random(rows).randrange
    return mx.array([[draw(256, loaded.vocabulary_size) for _ in range(count)] for _ in range(rows)], mx.uint32)


def log_odds(loaded: LoadedModel, prompt: mx.array) -> mx.array:
    """Returns `(tokens, vocabulary)` float32 of the first sequence."""
    logits = loaded.model(prompt[:1], cache=models.make_prompt_cache(loaded.model))[0]
    return nn.log_softmax(logits.astype(mx.float32), axis=-1)


def timed(loaded: LoadedModel, prompt: mx.array) -> tuple[float, float]:
    """Returns the seconds of a prompt, all sequences together, and the median of decode steps, with the model's own
    caches."""
    caches = models.make_prompt_cache(loaded.model)
    began = time.perf_counter()
    mx.eval(loaded.model(prompt, cache=caches)[:, -1], [cache.state for cache in caches])
    prefill, steps = time.perf_counter() - began, []
    for _ in range(STEPS):
        began = time.perf_counter()
        mx.eval(loaded.model(prompt[:, :1], cache=caches))
        steps.append(time.perf_counter() - began)
    return prefill, statistics.median(steps)


def own_words(loaded: LoadedModel, count: int) -> mx.array:
    """What the model itself says after a few random tokens, greedily: `(1, tokens)`."""
    said, caches = tokens_of(loaded, 1, 8), models.make_prompt_cache(loaded.model)
    given = said
    for _ in range(count):
        given = mx.argmax(loaded.model(given, cache=caches)[:, -1:], axis=-1).astype(mx.uint32)
        said = mx.concatenate([said, given], axis=1)
        mx.eval(said)
    return said


def measure(source: str, recipes: list[str], rows: list[int], prompt_tokens: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        source = shaped(source, Path(home) / "float")
        made = {FLOAT: source}
        for recipe in recipes:
            convert(source, Path(home) / recipe, recipe, "auto", lambda *_: None)
            made[recipe] = str(Path(home) / recipe)
        loaded = {name: load(folder) for name, folder in made.items()}
        words = own_words(loaded[FLOAT], prompt_tokens)
        exact, lines = log_odds(loaded[FLOAT], words), []
        times: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(rounds + 1):
            for name, one in loaded.items():
                for count in rows:
                    times.setdefault((name, count), []).append(timed(one, tokens_of(one, count, prompt_tokens)))
        for name, one in loaded.items():
            odds = log_odds(one, words)
            divergence = (mx.exp(exact) * (exact - odds)).sum(axis=-1)
            line: dict[str, Any] = {
                "recipe": name,
                "MB": sum(path.stat().st_size for path in one.folder.glob("*.safetensors")) / 1e6,
                "KL mean, nats": float(divergence.mean()),
                "same likeliest": float((mx.argmax(exact, -1) == mx.argmax(odds, -1)).mean()),
            }
            for count in rows:
                # The first round meets kernels and shapes.
                prefill, step = (statistics.median(kind) for kind in zip(*times[name, count][1:], strict=True))
                line |= {f"prefill ms, {count} rows": 1000 * prefill, f"step ms, {count} rows": 1000 * step}
            lines.append(line)
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:recall")
    parser.add_argument("--recipes", default="8,8-4-4,4")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "measured": now(),
        "machine": machine.facts("gpu" if on_gpu() else "cpu"),
        "model": given.model,
        "prompt_tokens": given.prompt_tokens,
    }
    print(json.dumps(found, indent=1))
    rows = [int(count) for count in given.rows.split(",")]
    found["recipes"] = measure(given.model, given.recipes.split(","), rows, given.prompt_tokens, given.rounds)
    print_table(
        [
            {key: f"{cell:.5f}" if key.startswith("KL") else cell for key, cell in line.items()}
            for line in found["recipes"]
        ]
    )
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(plain(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
