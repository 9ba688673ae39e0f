"""Modules of the folders beside this one, which are no packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]


def neighbour(folder: str, name: str) -> Any:
    """The module `name` of benchmarks/`folder`; "" is benchmarks itself."""
    path = str(BENCHMARKS / folder)
    if path not in sys.path:
        # Last: it must not stand before anything of this folder.
        sys.path.append(path)
    return importlib.import_module(name)
