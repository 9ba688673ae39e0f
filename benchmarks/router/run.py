"""Measures the router: its decisions, its rules on simulated nodes, and other routers before the same nodes.

    python -m benchmarks.router.run [--parts decisions,nodes-16] [--routers satchel,sglang] [--traces FOLDER]

`nodes-N` compares routers before N simulated nodes, in every cell of `cells.py`. Other projects' routers are installed
in environments of their own in the user's cache folder, once, and take part where there are `--peer-nodes` nodes;
`--routers` measures those whose names begin so, `--cells` those with such words in their workload; both keep what is
known of the others. `--traces` names a folder with
recorded conversations (`claude_code_agents.jsonl.gz`, `mooncake_conversation.jsonl`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from satchel.actors.router.policy import RULES

from .. import kept, machine, parts
from ..programs import RESULTS
from . import cells
from .decisions import BLOCKS, REPLICAS, time_decisions, time_large, time_reports
from .proxies import PROXIES, ProxyUnavailable, running
from .ray_affinity import RayAffinity
from .replaying import Router, Satchel

RAY = {"Ray PrefixCacheAffinityRouter": float("inf"), "Ray PrefixCacheAffinityRouter, tuned": 4.0}
LARGE_NODES, LARGE_BLOCKS = 1000, 1_000_000
AMONG = f"among {REPLICAS} replicas, {BLOCKS:,} blocks"
TIMED: dict[str, tuple[str, Callable[[int], Iterator[dict[str, Any]]]]] = {
    "decisions": (f"Decisions {AMONG}", time_decisions),
    "decisions_with_disks": (f"Decisions {AMONG}, with disks", partial(time_decisions, disks=True)),
    "reports": ("Taking a report", lambda _calls: time_reports()),
    "large": (
        f"Decisions among {LARGE_NODES:,} nodes, {LARGE_BLOCKS:,} blocks",
        partial(time_large, LARGE_NODES, LARGE_BLOCKS),
    ),
}
"""The parts that are timed, with their titles, by the number of calls."""

NODES = "nodes-"
COMPARED = tuple(f"{NODES}{nodes}" for nodes in range(1, 257))
HEADS = {
    "workload": "workload",
    "rate": "rate",
    "router": "router",
    "requests": "requests",
    "p50, s": "ttft_p50_s",
    "p99, s": "ttft_p99_s",
    "hit ratio": "hit_rate",
    "of an infinite cache's": "of_infinite_cache",
    "pulled": "pulled",
    "most / mean requests": "most_over_mean_requests",
}
"""Of the table: what it is called in the rows."""

CLOCK_NOTE = (
    "Simulated time; the nodes' rates are made up (`engines.py`). Small clusters are replayed with several seeds, and "
    "their requests taken together."
)

Made = Callable[[list[str]], AbstractContextManager[Router]]


def say(text: str) -> None:
    print(text, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument

    def chosen(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        for name in found:
            if name not in TIMED and name not in COMPARED:
                raise argparse.ArgumentTypeError(f"{name}: not among {', '.join(TIMED)}, {NODES}N")
        return found

    add("--parts", type=chosen, default=[*TIMED, *(f"{NODES}{nodes}" for nodes in (4, 8, 16, 64))])
    add("--routers", default="", help="measure only those whose names begin with one of these")
    add("--cells", default="", help="measure only those with these words in their workload")
    add("--peer-nodes", type=int, default=8, help="before how many nodes other projects' routers are put")
    add("--calls", type=int, default=1000, help="decisions timed of each kind")
    add("--budget-s", type=float, default=7200.0, help="after this many seconds nothing is begun")
    add("--traces", type=Path, help="a folder with recorded conversations")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


def routers(peers: bool, log: Path) -> dict[str, Made]:
    """By name; each is made for the names of the replicas."""
    made: dict[str, Made] = {rule: lambda _names, rule=rule: nullcontext(Satchel(rule)) for rule in RULES}
    if peers:
        made |= {name: partial(running, peer, log=log) for name, peer in PROXIES.items()}
        made |= {name: lambda names, most=most: nullcontext(RayAffinity(names, most)) for name, most in RAY.items()}
    return made


class Comparison:
    """The rows of one number of nodes: those that were kept, and those that are measured now."""

    def __init__(self, nodes: int, rows: Sequence[dict[str, Any]]) -> None:
        self._nodes = nodes
        self._rows = {(*cells.cell_of(row), row["router"]): row for row in rows}
        self._notes: dict[str, str] = {}

    def measure(self, chosen: Iterable[cells.Cell], made: dict[str, Made], budget: Any) -> Iterator[dict[str, Any]]:
        """What is known after each cell."""
        for cell in chosen:
            for name, router in made.items():
                if budget.left_s <= 0:
                    self._notes["time"] = "There was no time for all."
                elif name not in self._notes:
                    self._measure(cell, name, router)
            yield {**asdict(self._part()), "all": list(self._rows.values())}

    def _measure(self, cell: cells.Cell, name: str, router: Made) -> None:
        try:
            row = cells.line(cell, name, cell.outcome(router))
        except ProxyUnavailable as error:
            self._notes[name] = f"{name}: {error}"
            return
        self._rows[*cells.cell_of(row), name] = row
        say(f"  {cell.workload}, {cell.rate}, {name}: p99 {row['ttft_p99_s']:.2f} s, hit {row['hit_rate']:.3f}")

    def _part(self) -> Any:
        """Each row beside the best of its cell, and what is wanted of `satchel`."""
        rows = sorted(self._rows.values(), key=cells.cell_of)
        best = cells.least(rows)
        part = parts.ResultTable(f"Routers before {self._nodes} nodes")
        for row in rows:
            over = row["ttft_p99_s"] / best[cells.cell_of(row)]
            part.rows.append({**{head: row[name] for head, name in HEADS.items()}, "p99 / best": over})
        for what, found, most in cells.wanted(rows):
            part.at_most(what, found, most)
        for total in cells.totals(rows):
            part.notes.append(", ".join(f"{name} {parts.shown(value)}" for name, value in total.items()))
        part.notes += [*self._notes.values(), CLOCK_NOTE]
        return part


def measure(
    name: str, options: argparse.Namespace, before: dict[str, Any], log: Path, budget: Any
) -> Iterator[dict[str, Any]]:
    """One part of the results, as far as it is known; of a comparison also its rows in full."""
    if name in TIMED:
        title, rows = TIMED[name]
        yield asdict(parts.ResultTable(title, list(rows(options.calls))))
        return
    nodes = int(name.removeprefix(NODES))
    chosen = tuple(word.strip() for word in options.routers.split(",") if word.strip())
    made = routers(nodes == options.peer_nodes, log)
    if chosen:
        made = {router: make for router, make in made.items() if router.startswith(chosen)}
    among = [cell for cell in cells.cells(nodes, options.traces) if options.cells in cell.workload]
    known = before.get("all", []) if chosen or options.cells else []
    yield from Comparison(nodes, known).measure(among, made, budget)


def main() -> None:
    options = read_options()
    facts = machine.facts("cpu")
    result = kept.begun(facts, options)
    path = options.out / f"router-{options.machine or machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, [*TIMED, *COMPARED])
    budget = parts.Budget(options.budget_s)
    with tempfile.TemporaryDirectory(prefix="satchel-router-") as work:
        for name in options.parts:
            say(name)
            load, started, when = os.getloadavg()[0], time.monotonic(), kept.now()
            for part in measure(name, options, result["parts"].get(name, {}), Path(work) / "log", budget):
                part["notes"].append(f"{when}, load of the machine before it {load:.2f}.")
                result["parts"][name] = {**part, "seconds": time.monotonic() - started}
                kept.save(path, result, markdown)
    print(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    return parts.markdown(result).replace("# Memory", "# The router", 1)


if __name__ == "__main__":
    main()
