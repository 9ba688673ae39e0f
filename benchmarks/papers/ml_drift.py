"""ML Drift's experiments: four models in two formats, one sequence of 1,024 tokens in and 256 out, the memory of
activations, and an image by a diffusion model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from .. import images as image_benchmark
from ..parts import Budget
from ..serve.targets import RunFolder
from .engines import OURS, joules_of, single_runs
from .figures import ML_DRIFT
from .page import PaperTable
from .planning import greedy_by_size_bytes, least_bytes, total_bytes, usages_of
from .shapes import MODELS, SMALL_VOCABULARY

DRIFT_MODELS = ("gemma-2b", "gemma2-2b", "llama3.2-3b", "llama3.1-8b")
FORMATS = {"q8": "8", "8/4/4": "8-4-4"}
"""Of the paper, and the recipes of `satchel convert` that are like them."""

Written = Callable[[str, str], Path]
"""Given a model's name and a recipe, returns its folder."""


def speed(
    name: str,
    written: Written,
    place: RunFolder,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    budget: Budget,
    *,
    small: bool,
) -> PaperTable:
    """Prefill and decode of one model in both formats."""
    title = MODELS[name].title(small=small)
    part = PaperTable(f"{title}: {prompt_tokens:,} tokens in, {tokens:,} out, one sequence", paper=ML_DRIFT)
    for called, recipe in FORMATS.items():
        found = single_runs(
            written(name, recipe), place, prompt_tokens, tokens, rounds, budget,
            lambda why, called=called: part.missing.append(f"{called}, {why}"),
        )  # fmt: skip
        ours = found.pop(OURS, None)
        for kind, what in (("prefill_per_s", "prefill"), ("decode_per_s", "decode")):
            part.compare(
                f"{called}, {what}",
                "tokens/s",
                ours and getattr(ours, kind),
                {peer: getattr(run, kind) for peer, run in found.items()},
                joules=joules_of(ours, found) if what == "decode" else None,
            )
        part.compare(
            f"{called}, peak memory",
            "MB",
            ours and ours.peak_bytes / 1e6,
            {peer: run.peak_bytes / 1e6 for peer, run in found.items()},
            less=True,
        )
    part.notes.append(
        "Engines without Ray and HTTP, each in a process of its own, KV in full precision. Prefill lasts until the "
        "first token. The peak is that of MLX's memory, with the weights."
    )
    return part


def planning(name: str, written: Written, prompt_tokens: int, *, small: bool) -> PaperTable:
    """The memory of activations: what MLX's allocator takes, and what a plan by greedy-by-size would."""
    title = MODELS[name].title(small=small)
    part = PaperTable(f"{title}, q8: memory of the activations", paper=ML_DRIFT)
    model: Any = load_model(written(name, FORMATS["q8"]))[0]
    for what, tokens in ((f"prefill of {prompt_tokens:,} tokens", prompt_tokens), ("decode step", 1)):
        prompt = mx.array([[at % SMALL_VOCABULARY for at in range(tokens)]], mx.uint32)
        usages = usages_of(lambda given: _results(model, given), prompt)
        planned = {
            "greedy by size, planned": greedy_by_size_bytes(usages) / 1e6,
            "a buffer for each array, planned": total_bytes(usages) / 1e6,
        }
        part.compare(f"{what}, peak", "MB", _allocated_bytes(model, prompt) / 1e6, planned, less=True)
        part.notes.append(
            f"{what}: {len(usages)} arrays, {planned['a buffer for each array, planned']:,.1f} MB if each had a "
            f"buffer of its own; {least_bytes(usages) / 1e6:,.1f} MB are in use at once."
        )
    part.notes.append(
        "Ours is what MLX's allocator took, beside weights and results. It reuses buffers while a graph is computed, "
        "and MLX has no plan of buffers that could be given to it: so the plan is arithmetic over the call's arrays."
    )
    return part


def images(side: int, steps: int, rounds: int, work: Path, *, small: bool) -> PaperTable:
    """The time of an image, beside mlx-vlm alone."""
    title = f"Stable Diffusion 1.4's scale{' (scaled down)' if small else ''}"
    part = PaperTable(f"{title}: an image of {side} x {side} pixels in {steps} steps", paper=ML_DRIFT)
    with TemporaryDirectory(dir=work) as folder:
        model = Path(folder) / "model"
        sizes = image_benchmark.write_model(model, small=small)
        ours, alone = image_benchmark.measure(model, side, steps, rounds)
    part.compare("an image", "s", ours["s"], {"mlx-vlm alone": alone["s"]}, less=True)
    weights, products = image_benchmark.unet_size()
    part.notes.append(
        f"A transformer of mlx-vlm's Z-Image family with {sizes['layers']} layer(s) and "
        f"{sizes['transformer parameters'] / 1e6:,.0f} million random weights. For 512 x 512 pixels it multiplies "
        f"{sizes['products of a step, G']} thousand million times in a step; Stable Diffusion 1.4's UNet has "
        f"{weights / 1e6:,.0f} million weights and multiplies {products / 1e9:,.0f} thousand million times."
    )
    decoder = "The decoder is that of a tiny model" if small else "The decoder has Z-Image's own shape"
    part.notes.append(
        f"{decoder}, the text encoder that of a tiny one. A step computes the prompt and an empty one. Both take turns "
        "in one process, without Ray and HTTP."
    )
    return part


def _results(model: Any, prompt: mx.array) -> list[mx.array]:
    """The logits of the last token, and the KV."""
    caches = make_prompt_cache(model)
    logits = model(prompt, cache=caches)[:, -1]
    states: Any = tree_flatten([cache.state for cache in caches])
    return [logits, *(array for _, array in states if isinstance(array, mx.array))]


def _allocated_bytes(model: Any, prompt: mx.array) -> int:
    """The peak of MLX's memory during a call, beside what was there before and what it returned."""
    mx.eval(_results(model, prompt))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results = _results(model, prompt)
    mx.eval(results)
    return max(0, mx.get_peak_memory() - before - sum(array.nbytes for array in results))
