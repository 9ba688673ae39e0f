"""Modules of the other benchmarks, which are no packages: by way of the one that knows how to reach them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# By its path: a module of that name lies in two folders.
_spec = importlib.util.spec_from_file_location("attack_way_out", Path(__file__).parents[1] / "router" / "beside.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

BENCHMARKS, neighbour = _module.BENCHMARKS, _module.neighbour
"""The folder of all benchmarks, and `neighbour(folder, name)`, a module there."""
