"""What every attack is given: the server, its processes and its disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from .http import AttackOutcome, ask

WATCHED = ("endpoint", "replica", "store", "router")
NAMES = STREAMS, ADMIN, OTHER = "streams", "attacker", "other"


@dataclass
class AttackScene:
    """One attack's world.

    Attributes:
        server: a `soak.server.Server` that runs.
        disk: the file system of its home, a `soak.server.Disk`.
        bodies: how many requests the attacks that draw them make.
        seconds: about how long each of the others lasts, and when each stops beginning new things.
        seed: of all that is drawn.
        keys: of tenants, by name: `STREAMS`, whose streams run beside, `ADMIN`, who attacks, and `OTHER`.
    """

    server: Any
    disk: Any
    bodies: int
    seconds: float
    seed: int
    say: Callable[[str], None]
    keys: dict[str, str]

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    def ends(self) -> float:
        return time.monotonic() + self.seconds

    def process(self, kind: str) -> psutil.Process | None:
        """The endpoint, the store, the router, or the replica that the streams run on."""
        pid = self._replicas().get("recall") if kind == "replica" else self.server.pid_of(kind)
        return None if pid is None else psutil.Process(pid)

    def _replicas(self) -> dict[str, int]:
        """The replicas' process ids, by their models' last names."""
        try:
            replicas = json.loads(ask(self.port, "/v1/cluster").body)["replicas"]
            return {"shapes" if "shapes" in each["id"] else "recall": each["pid"] for each in replicas}
        except (ValueError, KeyError, TypeError):
            return {}

    def memory(self) -> dict[str, float]:
        """MiB in each watched process."""
        found: dict[str, float] = {}
        for kind in WATCHED:
            with suppress(psutil.Error):
                if (process := self.process(kind)) is not None:
                    found[kind] = process.memory_info().rss / 2**20
        return found


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        expected: what a server that stands it does, for the table.
        judged: whether a stream that stops counts against it; a stopped engine stops its streams.
    """

    name: str
    does: str
    expected: str
    run: Callable[[AttackScene], AttackOutcome]
    judged: bool = True
