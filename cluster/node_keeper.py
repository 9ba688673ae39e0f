"""The process that keeps this machine in a cluster (`satchel join`), as recorded for other commands of its home."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .home import Home, read_json, write_private_json
from .processes import ProcessMark


@dataclass(frozen=True)
class NodeKeeper:
    """That process, the name of its node, and the join server where it last joined (`HOST:PORT`)."""

    mark: ProcessMark
    name: str
    join_server: str


def note_keeper(home: Home, name: str, join_server: str) -> None:
    """Records this process as the one that keeps the home's machine in a cluster."""
    mark = ProcessMark.of(os.getpid())
    assert mark is not None
    data = {"pid": mark.pid, "created_s": mark.created_s, "name": name, "door": join_server}
    write_private_json(home.node_file, data)


def find_keeper(home: Home) -> NodeKeeper | None:
    """Returns the process that keeps the home's machine in a cluster, whether or not the cluster answers now; None if
    there is none."""
    data = read_json(home.node_file) or {}
    try:
        mark = ProcessMark(int(data["pid"]), float(data["created_s"]))
        found = NodeKeeper(mark, str(data["name"]), str(data["door"]))
    except (KeyError, TypeError, ValueError):
        return None
    return found if mark.is_alive() else None
