"""A stand-in for the driver's `nvidia-smi`, to be put at the head of a PATH: it lists cards that there are not."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

UUIDS = ("GPU-0a000000-1111-2222-3333-444444444444", "GPU-0b000000-1111-2222-3333-444444444444")


def listing(count: int = 2) -> str:
    """What `nvidia-smi` prints for `number, UUID, MiB, name`."""
    return "".join(f"{number}, {UUIDS[number]}, 143771, NVIDIA H200\n" for number in range(count))


def fake_nvidia_smi(folder: Path, *, text: str | None = None, status: int = 0) -> Path:
    """Writes the program. Returns its folder.

    Args:
        text: what it prints; None lists two cards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(listing() if text is None else text)}\nexit {status}\n")
    program.chmod(0o755)
    return folder


def path_with(folder: Path) -> str:
    """A PATH on which the programs of a folder come first."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
