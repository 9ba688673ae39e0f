"""The cells in which routers are compared: a workload, its rate, and the nodes; and what is wanted of Satchel there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .engines import Machine
from .replaying import ReplayOutcome, Router, names, replay
from .workloads import WorkloadSession, bursts, chat_service, coding_agents, one_prompt, synthetic

SWEEP_PERCENT = (0, 15, 30, 45, 60, 75, 90)
RECORDED, SWEPT = "(recorded)", "under one prompt of 8K"
CODING_HOURS = 0.05
P99_OVER_BEST_MAX = 1.05
HIT_POINTS_MAX = 2.0


@dataclass(frozen=True)
class Cell:
    """A workload on so many nodes.

    `sessions` makes it by seed. Small clusters see several seeds, so that a hundredth of the requests is more than one.
    """

    workload: str
    rate: str
    nodes: int
    machine: Machine
    sessions: Callable[[int], list[WorkloadSession]]

    @property
    def seeds(self) -> int:
        return max(1, 24 // self.nodes)

    def outcome(self, made: Callable[[list[str]], AbstractContextManager[Router]]) -> ReplayOutcome:
        """Of a router that is made anew for every seed, for the replicas of the names that it is given."""
        found = ReplayOutcome()
        for seed in range(self.seeds):
            with made(names(self.nodes)) as router:
                found.add(replay(self.sessions(seed), router, replicas=self.nodes, machine=self.machine))
        return found


def cells(nodes: int, traces: Path | None) -> Iterator[Cell]:
    """Every workload at its rates, all in proportion to the nodes; recorded ones where there are any."""
    chatting = Machine(disk_blocks_max=20_000)
    for agents in (8, 14):
        made = lambda seed, agents=agents: synthetic(seed, agents=agents * nodes, turns=6)  # noqa: E731
        yield Cell("agents, one system prompt", f"{agents} agents a node", nodes, chatting, made)
    yield Cell(
        "bursts on one's prefix", "8 a node at once", nodes, chatting, lambda seed: bursts(seed, width=8 * nodes)
    )
    if traces and (file := traces / "claude_code_agents.jsonl.gz").exists():
        yield from _coding(nodes, file)
    if traces and (file := traces / "mooncake_conversation.jsonl").exists():
        yield from _chat(nodes, file, chatting)
    for percent in SWEEP_PERCENT:
        made = lambda seed, percent=percent: one_prompt(seed, percent / 100, nodes=nodes)  # noqa: E731
        yield Cell(f"{percent}% {SWEPT}", "4 agents a node", nodes, chatting, made)


def _coding(nodes: int, file: Path) -> Iterator[Cell]:
    machine = Machine(prefill_tokens_per_s=6000.0, blocks_max=2000, disk_blocks_max=40_000)
    for rate in (20, 40):
        count = round(rate * CODING_HOURS * nodes)
        made = lambda seed, count=count: coding_agents(seed, file, hours=CODING_HOURS, sessions_max=count)  # noqa: E731
        yield Cell(f"coding agents {RECORDED}", f"{rate} sessions an hour a node", nodes, machine, made)


def _chat(nodes: int, file: Path, machine: Machine) -> Iterator[Cell]:
    slow = replace(machine, link_bytes_per_s=12.5e6)
    for rate, linked, links in ((0.05, machine, ""), (0.1, machine, ""), (0.1, slow, ", links of 100 Mb/s")):
        made = lambda seed, rate=rate: chat_service(seed, file, requests=40 * nodes, per_s=rate * nodes)  # noqa: E731
        yield Cell(f"chat service {RECORDED}{links}", f"{rate} requests a second a node", nodes, linked, made)


def line(cell: Cell, router: str, outcome: ReplayOutcome) -> dict[str, Any]:
    """A row of the table."""
    return {
        "nodes": cell.nodes,
        "workload": cell.workload,
        "rate": cell.rate,
        "router": router,
        **outcome.figures(),
    }


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["nodes"], row["workload"], row["rate"]


def least(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """The least p99 of each cell."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        best[cell_of(row)] = min(best.get(cell_of(row), math.inf), row["ttft_p99_s"])
    return best


def totals(rows: Sequence[dict[str, Any]], ours: str = "satchel") -> list[dict[str, Any]]:
    """For each router, over the cells that it has with `ours`: the sum of p99 and the most it is over the cell's best,
    and the most by which its hit ratio is above that of `ours`, in points."""
    best, mine = least(rows), {cell_of(row): row for row in rows if row["router"] == ours}
    found = []
    for name in dict.fromkeys(row["router"] for row in rows):
        shared = [row for row in rows if row["router"] == name and cell_of(row) in mine]
        if not shared:
            continue
        found.append(
            {
                "router": name,
                "cells": len(shared),
                "sum of p99, s": sum(row["ttft_p99_s"] for row in shared),
                "of satchel's": sum(row["ttft_p99_s"] for row in shared)
                / sum(mine[cell_of(row)]["ttft_p99_s"] for row in shared),
                "most over the best": max(row["ttft_p99_s"] / best[cell_of(row)] for row in shared),
                "cells within 5%": sum(row["ttft_p99_s"] <= P99_OVER_BEST_MAX * best[cell_of(row)] for row in shared),
                "hit ratio over satchel's, points": max(
                    100 * (row["hit_rate"] - mine[cell_of(row)]["hit_rate"]) for row in shared
                ),
            }
        )
    return found


def wanted(rows: Sequence[dict[str, Any]], ours: str = "satchel") -> list[tuple[str, float, float]]:
    """What is wanted of `ours` in recorded cells and those of the sweep: what, found, and the most that it may be."""
    judged = [row for row in rows if RECORDED in row["workload"] or SWEPT in row["workload"]]
    found = {total["router"]: total for total in totals(judged, ours)}
    if ours not in found or len(found) < 2:
        return []
    others = [total for name, total in found.items() if name != ours]
    return [
        ("p99 over the cell's best, in the worst cell", found[ours]["most over the best"], P99_OVER_BEST_MAX),
        (
            "sum of p99 over the least of another, in the same cells",
            max(1.0 / total["of satchel's"] for total in others),
            1.0,
        ),
        (
            "another's hit ratio over its own, in points",
            max(total["hit ratio over satchel's, points"] for total in others),
            HIT_POINTS_MAX,
        ),
    ]
