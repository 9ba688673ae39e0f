"""`satchel logs`: what the processes of this machine have written: Satchel's logs, what else its server and node have
printed, and Ray's."""

from __future__ import annotations

import json as json_text
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Optional

import typer

from ....cluster.connection import last_cluster
from ....cluster.errors import ClusterError, NotRunning
from ....cluster.home import Home
from ..machines.service import log_file
from ..options import HomeOption, JsonOption, chosen_home
from ..views import client, get_json

_POLL_S = 0.3
_ANSWER_S = 5.0
_BYTES_MAX = 2**20
"""How much of a file's end is read at the start."""

_ACTOR = ":actor_name:"
_OF_RAY = (_ACTOR, ":job_id:", ":task_name:")
"""Lines with which Ray marks whose the next lines are."""

_OF_ACTORS = ("worker-*.out", "worker-*.err", "serve/*.log")
"""In the folder of Ray's logs."""


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines of each file.")] = 20,
    node: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--node", metavar="NAME", help="The node (else this machine's); logs stay on their machine."),
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="List the files instead.")] = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show the last lines of the logs on this machine: of the server or node, of each actor, and Ray's."""
    where = chosen_home(home)
    _check_node(node, where)
    found = log_files(where)
    if not found:
        raise NotRunning(f"nothing was written on {where.root} yet: no server or node has run there")
    if files:
        print(json_text.dumps([str(path) for path in found], indent=2) if json else "\n".join(map(str, found)))
        return
    printer = _Printer(where, as_json=json)
    tails = {path: _Tail(path) for path in found}
    for tail in tails.values():
        printer.say(tail.path, deque(tail.read(), maxlen=lines))
    try:
        while follow:
            time.sleep(_POLL_S)
            for path in log_files(where):
                tail = tails.setdefault(path, _Tail(path, begun=True))
                printer.say(path, tail.read())
    except KeyboardInterrupt:
        return


def log_files(home: Home) -> list[Path]:
    """Returns the files of the running server or node, or of the last one, that are not empty: first the logs of
    Satchel's processes."""
    own = [
        *sorted(home.logs.glob("*.log")),
        log_file(home),
        home.run / "service.log",
        home.run / "serve.log",
        home.node_log_file,
        home.log_file,
    ]
    try:
        folder = last_cluster(home).log_dir
    except NotRunning:
        folder = home.ray_logs
    actors = [path for pattern in _OF_ACTORS for path in sorted(folder.glob(pattern))]
    return [path for path in [*own, *actors] if _size(path)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _check_node(node: str | None, home: Home) -> None:
    """
    Raises:
        ClusterError: the node's logs are on another machine, or there is no such node.
    """
    if node is None:
        return
    here = last_cluster(home).node
    if node == here:
        return
    with client(home, timeout_s=_ANSWER_S) as session:
        names = [each["name"] for each in get_json(session, "/v1/cluster?agents=0")["nodes"]]
    if node in names:
        raise ClusterError(f"the logs of {node} cannot be read from {here}: run `satchel logs` on that machine")
    raise ClusterError(f"there is no node {node}; there are: {', '.join(names)}")


@dataclass
class _Tail:
    """Reads what was added to a file. A file that became shorter is read from its beginning.

    Attributes:
        begun: whether it is read from its beginning, and not only its end.
    """

    path: Path
    begun: bool = False
    _at: int = field(default=0, init=False)
    _partial: str = field(default="", init=False)

    def read(self) -> Iterator[str]:
        """Yields the whole lines that were added."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                if end < self._at:
                    self._at, self._partial = 0, ""
                if not self.begun:
                    self._at, self.begun = max(0, end - _BYTES_MAX), True
                file.seek(self._at)
                text = self._partial + file.read(end - self._at).decode(errors="replace")
                self._at = end
        except OSError:
            return
        *whole, self._partial = text.split("\n")
        yield from (line for line in whole if not line.startswith(_OF_RAY))


class _Printer:
    """Prints lines, with the file's name before lines of another file, and the actor's if the file is of one."""

    def __init__(self, home: Home, *, as_json: bool) -> None:
        self._home, self._as_json = home, as_json
        self._last: Path | None = None
        self._actors: dict[Path, str] = {}

    def say(self, path: Path, lines: Iterable[str]) -> None:
        for line in lines:
            if self._as_json:
                named = {"file": str(path), "actor": self._actor(path), "line": line}
                print(json_text.dumps(named), flush=True)
                continue
            if path != self._last:
                actor = self._actor(path)
                print(f"{'' if self._last is None else chr(10)}==> {f'{actor}: ' if actor else ''}{path} <==")
                self._last = path
            print(line, flush=True)

    def _actor(self, path: Path) -> str | None:
        """Returns the process that writes one of Satchel's logs, or the actor that Ray notes in a file."""
        if path.parent == self._home.logs:
            return path.stem
        if path not in self._actors:
            with path.open(encoding="utf-8", errors="replace") as file:
                head = [line.strip() for line in islice(file, 5)]
            names = [line.removeprefix(_ACTOR) for line in head if line.startswith(_ACTOR)]
            self._actors[path] = names[-1] if names else ""
        return self._actors[path] or None
