"""Measures how real checkpoints are served: starts, what memory saves a conversation, tool calls and schemas.

    python -m benchmarks.checkpoints.run --models FOLDER,FOLDER [--parts start,turns,calls,schemas] [--out FOLDER]

Figures are medians over the rounds; compare ratios, and only within one run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import kept, machine
from ..parts import Budget, ResultTable, markdown
from ..programs import RESULTS
from ..serve.targets import RunFolder, make_place
from .calls import WAYS, calls, schemas
from .server import Server, satchel
from .start import start
from .turns import turns

PARTS = ("start", "turns", "calls", "schemas")


def say(text: str) -> None:
    print(text, flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def words(text: str) -> list[str]:
        return [word for word in text.replace(",", " ").split() if word]

    def counts(text: str) -> list[int]:
        found = [int(word) for word in words(text)]
        if not found or min(found) < 1:
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    add = parser.add_argument
    add("--models", type=words, required=True, help="folders of checkpoints")
    add("--parts", type=words, default=list(PARTS), help=f"among {', '.join(PARTS)}")
    add("--rounds", type=int, default=1, help="starts of each server")
    add("--lengths", type=counts, default=[1000, 2000, 4000], help="of the files that conversations are about, tokens")
    add("--agents", type=counts, default=[1, 8], help="conversations at once")
    add("--numerics", choices=("fast", "reproducible"), default="fast", help="of the part turns")
    add("--budget-s", type=float, default=3600.0, help="after this many seconds nothing is begun")
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.models:
        parser.error("name a model at least")
    if unknown := set(options.parts) - {*PARTS}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = read_options()
    device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    facts = machine.facts(device)
    result: dict[str, Any] = {
        "title": "Real checkpoints",
        "machine": facts,
        "versions": machine.versions(sys.executable),
        "when": kept.now(),
        "parts": {},
    }
    path = options.out / f"checkpoints-{machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, None)
    budget = Budget(options.budget_s)
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as work:
        measures = dict(_measures(options, make_place(Path(work), None, options.budget_s), device, budget))
        kept.measure_all(measures, budget, path, result, markdown)


def _measures(
    options: argparse.Namespace, place: RunFolder, device: str, budget: Budget
) -> Iterator[tuple[str, Callable[[], ResultTable]]]:
    """Every checkpoint's parts by name."""

    @contextmanager
    def served(folder: Path, **model: Any) -> Iterator[Server]:
        # The results of the first start's self-test are kept for the other parts.
        with satchel(folder, place.work / f"home-{folder.name}", place, budget.left_s, **model) as server:
            say(f"  ready after {server.ready_s:.1f} s, proven after {server.proven_s(budget.left_s):.0f} s")
            yield server

    def turned(name: str, folder: Path) -> ResultTable:
        with served(folder, numerics=options.numerics) as server:
            return turns(name, server, options.lengths, options.agents, budget, say)

    def called(name: str, folder: Path) -> ResultTable:
        with served(folder) as server:
            return calls(name, server, budget, say)

    def bound(name: str, folder: Path) -> ResultTable:
        return schemas(name, {way: partial(served, folder, schema_in_prompt=way) for way in WAYS}, budget, say)

    for source in options.models:
        folder = Path(source).resolve()
        name = folder.name
        by_part = {
            "start": partial(start, name, folder, place, options.rounds, device, budget, say),
            "turns": partial(turned, f"{name}, {options.numerics}", folder),
            "calls": partial(called, name, folder),
            "schemas": partial(bound, name, folder),
        }
        for part in options.parts:
            label = f"{name} {part}" if options.numerics == "fast" else f"{name} {part} {options.numerics}"
            yield label, by_part[part]


if __name__ == "__main__":
    main()
