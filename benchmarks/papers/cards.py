"""The parts of the papers' page on several cards of a machine: each card measures one at a time."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from satchel.cluster.environment import set_during

from ..parts import Budget

MEANWHILE = "Other parts were measured on the machine's other cards at the same time."

_PAGE = "papers-part"
_LOOK_S = 5.0


def groups_of(parts: Sequence[str]) -> list[list[str]]:
    """Returns the parts, with those of a model together: it is written once for them. A part without a model is alone.

    Args:
        parts: names, as `ml-drift speed gemma-2b`.
    """
    groups: dict[str, list[str]] = {}
    for part in parts:
        groups.setdefault(part.split()[-1] if len(part.split()) == 3 else part, []).append(part)
    return list(groups.values())


def measure_on_cards(
    options: argparse.Namespace,
    measured: Callable[[argparse.Namespace], None],
    work: Path,
    add: Callable[[dict[str, Any]], None],
) -> list[str]:
    """Measures parts in processes of their own.

    Args:
        options: of the program; `cards` says how many cards measure.
        measured: measures the parts of some options, in such a process, and writes their page. A function of a module.
        work: an empty folder.
        add: is given what was measured so far of a group of parts, by name; several times, never at the same time.

    Returns:
        The groups of which something failed.
    """
    budget, context, guard = Budget(options.budget_s), multiprocessing.get_context("spawn"), threading.Lock()
    waiting, failed = groups_of(options.parts), list[str]()

    def serve(card: int) -> None:
        models = (options.models or work / "models") / f"card-{card}"
        while True:
            with guard:
                if not waiting or budget.left_s <= 0:
                    return
                group = waiting.pop(0)
                given = argparse.Namespace(**vars(options))
                given.parts, given.cards, given.resume = group, 1, False
                given.machine, given.models, given.budget_s = _PAGE.partition("-")[2], models, budget.left_s
                given.out = work / f"page-{len(waiting)}"
                process = context.Process(target=measured, args=(given,), daemon=True)
                # It reads the environment when it starts.
                with set_during(CUDA_VISIBLE_DEVICES=_visible(card)):
                    process.start()
            runs = True
            while runs:
                process.join(_LOOK_S)
                runs = process.is_alive()
                # What was measured stays, even if the rest of the group is ended from outside.
                with guard:
                    add(_parts_of(given.out))
            shutil.rmtree(models, ignore_errors=True)
            if process.exitcode:
                failed.append(", ".join(group))

    threads = [threading.Thread(target=serve, args=(card,), daemon=True) for card in range(options.cards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A signal is noticed only in between.
        while thread.is_alive():
            thread.join(0.5)
    return failed


def _visible(card: int) -> str:
    """Returns the number of a card in CUDA_VISIBLE_DEVICES, among those that this process sees."""
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return seen[card] if card < len(seen) else str(card)


def _parts_of(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / f"{_PAGE}.json").read_text(encoding="utf-8"))["parts"]
    except (OSError, ValueError, KeyError):
        return {}
    for part in found.values():
        part["notes"].append(MEANWHILE)
    return found
