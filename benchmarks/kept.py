"""Results that are kept from run to run: a JSON file, and the same as Markdown tables."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import machine

FACTS = ("machine", "versions")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def begun(facts: dict[str, Any], options: Any, **more: Any) -> dict[str, Any]:
    """Results without parts yet: `more`, the facts of this machine, and what was asked for."""
    return {
        **more,
        "machine": facts,
        "versions": machine.versions(sys.executable),
        "when": now(),
        # Without the paths of this machine.
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "parts": {},
    }


def earlier(path: Path, result: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The parts `names`, or all where that is None, that other runs with the same machine and versions have left in the
    results: each says when it was measured. What is measured now takes their places."""
    try:
        kept = json.loads(path.with_name(path.name + ".json").read_text(encoding="utf-8"))
        same = all({**kept[name], "load_before": 0} == {**result[name], "load_before": 0} for name in FACTS)
        names = list(kept["parts"]) if names is None else names
        return {name: part for name in names if (part := kept["parts"].get(name)) is not None} if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def noted(name: str, part: Any, note: str) -> str:
    """The part says when it was measured, and what the machine had to do besides."""
    part.notes.append(note)
    return name


def measure_all(
    measures: Mapping[str, Callable[[], Any]],
    budget: Any,
    path: Path,
    result: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str],
    finish: Callable[[str, Any, str], str] = noted,
) -> None:
    """Measure parts one after the other, keep each in `result` and the files of `path` as soon as it is there, and
    print all tables.

    Args:
        measures: makes each part, a dataclass, by its name.
        budget: nothing is begun when its `left_s` is over.
        finish: given a name, its part, and when it was measured; what the part is kept as.

    Raises:
        SystemExit: some parts failed.
    """
    failed: list[str] = []
    for name, measure in measures.items():
        if budget.left_s <= 0:
            print(f"{name}: no time is left", flush=True)
            continue
        print(name, flush=True)
        load, started, when = os.getloadavg()[0], time.monotonic(), now()
        try:
            part = measure()
        except Exception:
            # What the other parts find is worth having.
            traceback.print_exc()
            failed.append(name)
            continue
        label = finish(name, part, f"{when}, load of the machine before it {load:.2f}.")
        result["parts"][label] = {**asdict(part), "seconds": time.monotonic() - started}
        save(path, result, markdown)
    print(markdown(result))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def save(path: Path, result: dict[str, Any], markdown: Callable[[dict[str, Any]], str]) -> None:
    """After every part, so that what was measured stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = json.dumps(plain(result), indent=1, allow_nan=False)
    path.with_name(path.name + ".json").write_text(told + "\n", encoding="utf-8")
    path.with_name(path.name + ".md").write_text(markdown(result) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """For JSON: no infinite number and no NaN, and no more digits than were measured."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
