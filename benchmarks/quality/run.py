"""Measures what quantized KV does to models' answers on real text: code and prose, every policy and MLX's own caches.

    python -m benchmarks.quality.run --models FOLDER,FOLDER [--lengths 1024,4096] [--budget-s 3600] [--out FOLDER]

Needs Satchel's packages alone, no network and no git.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.cluster.environment import default_home, mlx_settings

from .. import kept, machine
from ..parts import Budget, ResultTable, markdown
from ..programs import RESULTS
from .measure import SCORED_FROM, Subject, divergence, load, recall
from .texts import TEXTS

GPU_LENGTHS, CPU_LENGTHS = [1024, 4096, 12_288, 28_672], [1024, 2048]
RECALL = "recall"


def say(text: str) -> None:
    print(text, flush=True)


def read_options(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def counts(text: str) -> list[int]:
        found = [int(part) for part in text.split(",")]
        if min(found) <= SCORED_FROM:
            raise argparse.ArgumentTypeError(f"lengths are above {SCORED_FROM}, from where on places are scored")
        return found

    def words(text: str) -> list[str]:
        return [word for word in text.replace(",", " ").split() if word]

    add = parser.add_argument
    add("--models", type=words, required=True, help="folders, Hub ids or embedded:NAME")
    add("--lengths", type=counts, default=GPU_LENGTHS if on_gpu else CPU_LENGTHS)
    add("--parts", type=words, default=[*TEXTS, RECALL], help=f"among {', '.join([*TEXTS, RECALL])}")
    add("--samples", type=int, default=2 if on_gpu else 1, help="conversations with codes, of each length")
    add("--budget-s", type=float, default=3600.0, help="after this many seconds nothing is begun")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    options = parser.parse_args()
    if not options.models:
        parser.error("name a model at least")
    if unknown := set(options.parts) - {*TEXTS, RECALL}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return options


def parts_of(options: argparse.Namespace, budget: Budget) -> Iterator[tuple[str, Callable[[], ResultTable]]]:
    """Every model's parts by name. A model is loaded with the first of them, and one at a time is in memory."""
    held: dict[str, Subject] = {}

    def subject(source: str, name: str) -> Subject:
        if name not in held:
            held.clear()
            mx.clear_cache()
            held[name] = load(source, name)
        return held[name]

    def divergences(source: str, name: str, text: str) -> ResultTable:
        return divergence(subject(source, name), text, options.lengths, budget, say)

    def recalls(source: str, name: str) -> ResultTable:
        return recall(subject(source, name), options.lengths, options.samples, budget, say)

    for source in options.models:
        # Without the paths of this machine.
        name = Path(source).name
        for text in TEXTS:
            if text in options.parts:
                yield f"{name} {text}", partial(divergences, source, name, text)
        if RECALL in options.parts:
            yield f"{name} {RECALL}", partial(recalls, source, name)


def main() -> None:
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    options = read_options(on_gpu)
    # As a replica's process has it.
    os.environ.update(mlx_settings(default_home()))
    facts = machine.facts("gpu" if on_gpu else "cpu")
    result: dict[str, Any] = {
        "title": "Quality",
        "machine": facts,
        "versions": machine.versions(sys.executable),
        "when": kept.now(),
        "parts": {},
    }
    path = options.out / f"quality-{options.machine or machine.name_of(facts)}"
    budget = Budget(options.budget_s)
    measures = dict(parts_of(options, budget))
    result["parts"] = kept.earlier(path, result, None)
    kept.measure_all(measures, budget, path, result, markdown)


if __name__ == "__main__":
    main()
