"""Checks every type of model that mlx-lm and mlx-vlm have, each in a process of its own, and writes the table.

`python -m tests.zoo.run` checks all; names check only those, and their results replace the earlier ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, versions

from . import text_types, vision_types
from .check import CRASHED, LIMITED, REFUSED, RIGHT, SERVED, UNCHECKED, WRONG

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
TIMEOUT_S = 900
KINDS = {"text": text_types.TYPES, "vision": vision_types.TYPES}
BLIND = "it does not support pictures"
_SAID = {
    RIGHT: "right",
    LIMITED: "right, but",
    REFUSED: "refused",
    UNCHECKED: "not compared",
    WRONG: "**wrong**",
    CRASHED: "**crashed**",
}


def outcome_of(kind: str, name: str) -> dict[str, Any]:
    """What a process of its own finds of a type. A type whose code ends the process ends a replica while it loads, and
    the load is refused."""
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as root:
            command = [sys.executable, "-m", "tests.zoo.check", kind, name, root]
            run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if run.returncode < 0 and SERVED not in run.stderr:
            why = f"its code ends the process, by signal {-run.returncode}, while it is loaded"
            return {"state": REFUSED, "notes": [why], "error": 0.0, "seconds": round(time.monotonic() - began, 1)}
        outcome = json.loads(run.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        outcome = {"state": CRASHED, "notes": [f"no end within {TIMEOUT_S} s"], "error": 0.0}
    except (ValueError, IndexError):
        last = (run.stderr.strip().splitlines() or ["nothing was said"])[-1]
        outcome = {"state": CRASHED, "notes": [f"exit status {run.returncode}: {last}"], "error": 0.0}
    return {**outcome, "seconds": round(time.monotonic() - began, 1)}


def main(names: list[str]) -> int:
    """Returns the exit status: 1 if a type is wrong or crashed."""
    wanted = [(kind, name) for kind, types in KINDS.items() for name in types if not names or {name, kind} & set(names)]
    if unknown := set(names) - {name for _, name in wanted} - set(KINDS):
        print(f"there are no such types: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    machine, measured = facts("cpu"), versions(sys.executable)
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        outcomes = pool.map(lambda one: outcome_of(*one), wanted)
        for (kind, name), outcome in zip(wanted, outcomes, strict=True):
            found[kind][name] = outcome
            print(f"{kind} {name}: {outcome['state']}  {'; '.join(outcome['notes'])}", flush=True)
            # A run that is cut off has not been for nothing.
            _keep({"machine": machine, "versions": measured, "types": found}, partial=True)
    if not _keep({"machine": machine, "versions": measured, "types": found}, partial=bool(names)):
        print("the results are of other versions: they stay as they are", file=sys.stderr)
    states = [outcome["state"] for types in found.values() for outcome in types.values()]
    return int(WRONG in states or CRASHED in states)


def _keep(result: dict[str, Any], *, partial: bool) -> bool:
    """Writes the results, and the table of them.

    Args:
        partial: whether the earlier results of other types stay, in the same order.

    Returns:
        Whether it did: those may be of other versions.
    """
    if partial:
        earlier = json.loads((RESULTS / "zoo.json").read_text(encoding="utf-8"))
        if earlier["versions"] != result["versions"]:
            return False
        kinds = result["types"].items()
        result = {**result, "types": {kind: {**earlier["types"].get(kind, {}), **found} for kind, found in kinds}}
    (RESULTS / "zoo.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "zoo.md").write_text(table(result), encoding="utf-8")
    return True


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    shown = {name: result["versions"].get(name, "?") for name in ("satchel", "mlx", "mlx-lm", "mlx-vlm")}
    lines = [
        "# Every type of model of mlx-lm and mlx-vlm",
        "",
        f"`make test-zoo` with {', '.join(f'{name} {version}' for name, version in shown.items())}, on a CPU. "
        "Tiny models of random weights, loaded and tried as they are served, then compared with the bare model: alone, "
        "in company, from memory, and from disk after a restart. What follows a + is a variant of a type. The error is "
        "the largest one of a logit, relative to the largest logit.",
    ]
    for kind, types in result["types"].items():
        counts = Counter(outcome["state"] for outcome in types.values())
        lines += [
            "",
            f"## {kind.capitalize()}",
            "",
            ", ".join(f"{counts[state]} {said}" for state, said in _SAID.items()),
        ]
        if kind == "vision":
            seeing = Counter(outcome["state"] for outcome in types.values() if BLIND not in " ".join(outcome["notes"]))
            lines[-1] += f"; with pictures {seeing[RIGHT] + seeing[LIMITED]} of {len(types)}"
        lines += ["", "| type | served | why | error |", "|---|---|---|---|"]
        for name, outcome in sorted(types.items()):
            why = "; ".join(outcome["notes"]).replace("|", "\\|")
            error = f"{outcome['error']:.0e}" if outcome["error"] else ""
            lines.append(f"| {name} | {_SAID[outcome['state']]} | {why} | {error} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
