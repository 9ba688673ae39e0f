"""A process that has the whole model, as it is served, or a stage of it, on a card of its own.

    python -m benchmarks.group.stage FOLDER START STOP LAYERS HOST

It is asked as `process.py` is, and for where its time goes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.forming import Member
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.loading import models
from satchel.actors.rpc.shell import SWITCH_S

from ..cluster.worker import answer, methods_of, start_answering
from .process import GROUP, KEY, TIMES, Call, Follower, Process

LIMIT_S = 120.0
"""The time limit of an answer."""


class StageProcess(Process):
    """The whole model, the last stage, or the first one."""

    def _load(self, folder: str, start: int, stop: int) -> LoadedModel:
        if self._whole:
            return models.load(folder, context_tokens_max=None, progress=lambda *_: None, kv="q4")
        return load_stage(folder, start, stop, weights="auto")

    def follow(self) -> None:
        """As `Process.follow`."""
        self._member = Member(GROUP, 0, KEY, self._listener, TIMES)
        try:
            self._member.follow(self._loaded).run()
        finally:
            self._member.close()

    def pid(self) -> int:
        return os.getpid()

    def way(self) -> str:
        """How it reads KV in decode steps, and how hidden states come."""
        way = self._loaded.way.describe()
        by_cards = not self._whole and self._loaded.model.before.receiving is not None
        return f"{way}, hidden states by the cards" if by_cards else way

    def times(self) -> dict[str, tuple[int, float]]:
        """What it has done since it was last asked, how often and for how many seconds in all."""
        if self._member is None:
            return {}
        return {what: (each.count, each.seconds) for what, each in self._member.times.take().items()}

    def _timed(self) -> list[Call]:
        return []


def limited(ask: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Returns `ask`, but if an answer takes too long, all threads' stacks go to the log and the process ends."""

    def asked(question: list[Any]) -> Any:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            return ask(question)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return asked


def main() -> None:
    start_answering()
    # As the actors do.
    sys.setswitchinterval(SWITCH_S)
    folder, start, stop, layers, host = sys.argv[1:]
    given: tuple[Any, ...] = folder, int(start), int(stop), int(layers), host
    if stop == layers:
        process = StageProcess(*given)
        answer(limited(methods_of(process)))
        process.close()
    else:
        follower = Follower(*given, kind=StageProcess)
        # It follows on another thread, so it is asked for its stacks when the leader does not answer.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        answer(follower.ask)


if __name__ == "__main__":
    main()
