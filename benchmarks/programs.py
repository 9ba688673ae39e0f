"""Where the benchmarks lie, and how one starts another's program in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def program(name: str, *words: object) -> list[str]:
    """The command that runs a module of the benchmarks, as `serve.folders`; its working folder has to be `ROOT`."""
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]
