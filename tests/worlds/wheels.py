"""Satchel's wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("cluster", "actors", "api", "configs")
"""What is in it, below `satchel`."""


def build_wheel(folder: Path) -> Path:
    """Builds it in `folder`, from a copy (setuptools writes next to its sources) and without a network."""
    source = folder / "source"
    source.mkdir()
    for each in FOLDERS:
        shutil.copytree(ROOT / each, source / each, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built
