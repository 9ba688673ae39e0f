"""`satchel top`: nodes, replicas and memory of the running server, live."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ....cluster.errors import NotRunning
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json
from ..tables import NameTable, duration, size, state_line, table
from ..views import client, get_json, node_table

_ANSWER_S = 15.0


def top(
    every: Annotated[float, typer.Option("--every", min=0.5, metavar="SECONDS", help="The time between views.")] = 2.0,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show what runs, until Ctrl-C: nodes, replicas, tokens a second, memory by state. Once if not in a terminal."""
    with client(chosen_home(home), timeout_s=_ANSWER_S) as session:
        view = get_json(session, "/v1/cluster")
        if json:
            print_json({**view, "totals": totals(view)})
            return
        console = Console(highlight=False)
        if not sys.stdout.isatty():
            console.print(_shown(view))
            return
        try:
            with Live(_shown(view), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(every)
                    live.update(_shown(get_json(session, "/v1/cluster")), refresh=True)
        except KeyboardInterrupt:
            return
        except NotRunning as error:
            raise NotRunning(f"{error.message}; it ran a moment ago") from None


def totals(view: dict[str, Any]) -> dict[str, Any]:
    """Returns the sums over all replicas of a view of the cluster, and the number of agents."""
    replicas = view["replicas"]
    return {
        "running": sum(each["running"] for each in replicas),
        "waiting": sum(each["waiting"] for each in replicas),
        "tokens_per_s": round(sum(each["tokens_per_s"] or 0.0 for each in replicas), 1),
        "memory_bytes": sum(each["memory_bytes"] for each in replicas),
        "memory_bytes_max": sum(each["memory_bytes_max"] for each in replicas),
        "agents": view["agents_count"],
    }


def _shown(view: dict[str, Any]) -> Group:
    found = totals(view)
    count = found["agents"]
    agents = "" if count is None else f", {count}{'+' * view['agents_has_more']} agent{'s' * (count != 1)}"
    busy = f"{found['running']} running, {found['waiting']} waiting, {found['tokens_per_s']:g} tokens/s"
    held = f"KV {size(found['memory_bytes'])} of {size(found['memory_bytes_max'])} in memory"
    return Group(
        Text(f"{time.strftime('%H:%M:%S')}  {busy}{agents}; {held}"),
        node_table(view["nodes"]),
        _replica_table(view["replicas"]),
        *(Text(f"{model['id']}: {state_line(model)}") for model in view["models"] if model["progress"]),
    )


def _replica_table(replicas: list[dict[str, Any]]) -> NameTable:
    """Returns the replicas. The slots of the block pool are by state: of sequences, kept for later, free."""
    shown = table("replica", "node", numbers=("runs", "waits", "tokens/s", "KV", "of", "runs/kept/free", "idle"))
    for each in replicas:
        slots = each["slots"]
        states = "/".join(str(slots[state]) for state in ("running", "kept", "free"))
        numbers = [str(each["running"]), str(each["waiting"]), f"{each['tokens_per_s'] or 0:g}"]
        numbers += [size(each["memory_bytes"]), size(each["memory_bytes_max"]), states]
        idle = duration(each["idle_s"]) if each["up"] else "down"
        shown.add_row(Text(each["id"]), Text(each["node"]), *numbers, idle)
    return shown
