"""What the benchmarks of pure code share: the machine they ran on, and how figures are shown and kept."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = (
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        )
        processor = next(names, processor)
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values are below."""
    return sorted(values)[int(len(values) * share)]


def print_table(rows: list[dict[str, Any]]) -> None:
    """As Markdown."""
    names = list(rows[0])
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = (f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        print("| " + " | ".join(cells) + " |")


def save(path: Path, results: dict[str, Any]) -> None:
    """As JSON, with three decimals."""
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
