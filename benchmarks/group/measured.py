"""The processes that are measured: the whole model in one, and two stages in two, each on a core of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..cluster.worker import Worker
from ..programs import program
from .process import Call

ANSWER_S = 1800.0


class Measured:
    """A model in some processes.

    Args:
        workers: one for each stage; the last one leads.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        *followers, self._leader = workers
        if followers:
            addresses = [worker.ask(["address"], ANSWER_S) for worker in workers]
            for worker in followers:
                worker.ask(["follow"])
            self._leader.ask(["form", addresses], ANSWER_S)

    @property
    def leader(self) -> Worker:
        return self._leader

    def ask(self, *question: Any) -> dict[str, float]:
        """Has the leader do something; adds the CPU seconds of the other processes to its own."""
        others = self._workers[:-1]
        before = [worker.ask(["cpu_s"]) for worker in others]
        found = self._leader.ask([*question], ANSWER_S)
        after = [worker.ask(["cpu_s"]) for worker in others]
        return {**found, "cpu_s": found["cpu_s"] + sum(after) - sum(before)}

    def timed(self, *question: Any) -> tuple[dict[str, float], list[list[Call]]]:
        """As `ask`, with stages that note how long they compute. Returns the calls of each stage too."""
        for worker in self._workers:
            worker.ask(["time_stage", True])
        found = self.ask(*question)
        return found, [worker.ask(["time_stage", False]) for worker in self._workers]


def cores() -> list[int]:
    """The cores of this machine that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def measured(
    folder: Path, layers: int, stops: Sequence[int], work: Path, host: Any | None = None
) -> Iterator[Measured]:
    """Loads a model with a process for each stage.

    Args:
        layers: how many the model has.
        stops: the last layer of each stage, exclusive.
        host: a namespace where all but the last run; None for this machine.
    """
    starts, pinned = [0, *stops[:-1]], cores()
    environment = {**os.environ, "SATCHEL_OPENBLAS": "1"}
    with ExitStack() as stack:
        workers = []
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            away = host if stop < layers else None
            # Of the bridge that connects the hosts, this machine has the last address.
            near = "127.0.0.1" if host is None else f"{host.address.rpartition('.')[0]}.254"
            address = near if away is None else away.address
            command = program("group.process", folder, start, stop, layers, address)
            if shutil.which("taskset"):
                command = ["taskset", "-c", str(pinned[number % len(pinned)]), *command]
            command = command if away is None else away.command(*command)
            log = work / f"stage-{number}-of-{len(stops)}.log"
            workers.append(stack.enter_context(Worker(command, log, environment)))
        yield Measured(workers)
