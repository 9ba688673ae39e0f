"""How long a start takes, from the command to the first answer: a checkpoint's first one, a later one, mlx-lm's."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..parts import Budget, ResultTable, Say, median
from ..serve.targets import RunFolder
from .server import mlx_lm_server, satchel

LATER_GOAL_S = {"cpu": 15.0, "gpu": 10.0}
"""How much longer than mlx-lm's server it may take, by device."""


def start(name: str, folder: Path, place: RunFolder, rounds: int, device: str, budget: Budget, say: Say) -> ResultTable:
    """Starts both in turns. Every round has its own home, which is empty at the first start; that start ends when the
    model's self-test has ended."""
    proven: list[float] = []
    found: dict[str, list[float]] = {"satchel, first start": [], "satchel, later start": [], "mlx_lm.server": []}
    cpu: dict[str, list[float]] = {server: [] for server in found}
    for number in budget.rounds(rounds):
        with tempfile.TemporaryDirectory(dir=place.work) as work:
            for server in found:
                run = (
                    mlx_lm_server(folder, place, budget.left_s)
                    if server == "mlx_lm.server"
                    else satchel(folder, Path(work) / "home", place, budget.left_s)
                )
                with run as running:
                    found[server].append(running.ready_s)
                    cpu[server].append(sum(running.group.cpu_s().values()))
                    if server == "satchel, first start":
                        proven.append(running.proven_s(budget.left_s))
                say(f"  {number + 1}: {server}: {found[server][-1]:.1f} s")
    table = ResultTable(f"{name}: from the command to the first answer")
    for server, times in found.items():
        row = {"server": server, "s": median(times), "least": min(times), "most": max(times)}
        table.rows.append({**row, "CPU seconds": median(cpu[server])})
    peer = median(found["mlx_lm.server"])
    for server in ("satchel, first start", "satchel, later start"):
        table.at_most(
            f"{server}, seconds longer than mlx_lm.server", median(found[server]) - peer, LATER_GOAL_S[device]
        )
    table.notes.append(
        f"Of the first start the model was proven, and served with all that it has, after {median(proven):.0f} s."
    )
    table.notes.append("CPU seconds are those of all its processes until then.")
    return table
