"""A process that has a share of every layer of a model, or the whole model, on a GPU of its own.

    python -m benchmarks.group.share FOLDER RANK RANKS HOST BACKEND

It is asked as `process.py` is. With RANKS 0 it has the whole model, as it is served.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.forming import GroupTimes, Member
from satchel.actors.replica.group.loading import load_part
from satchel.actors.replica.group.tensor.member import Joining
from satchel.actors.replica.group.tensor.model import SharePart
from satchel.actors.replica.group.tensor.ranks import Ranks
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.cluster.config.config import Scheduling
from satchel.cluster.config.stages import Split

from ..cluster.worker import answer, methods_of, start_answering
from .process import GROUP, KEY, Call, Follower, Process

KV_BYTES = 24 * 2**30
TIMES = GroupTimes(form_s=90.0, silent_s=3.0)
LOGITS_TOKENS = 600


class ShareProcess(Process):
    """The whole model, the last rank of a group, or another rank."""

    def __init__(self, folder: str, rank: int, ranks: int, host: str, backend: str) -> None:
        self._rank, self._ranks, self._backend = rank, ranks, backend
        self._listener = socket.create_server((host, 0))
        self._member: Member | None = None
        self._requests = 0
        mx.reset_peak_memory()
        self._loaded = self._of(folder)
        self._peak_bytes = mx.get_peak_memory()
        if rank == max(0, ranks - 1):
            self._engine = Engine(self._loaded, Scheduling(sequences_max=32), KV_BYTES, self._take)
            self._drawn: dict[str, int] = {}

    def _of(self, folder: str) -> LoadedModel:
        if self._ranks:
            return load_part(folder, SharePart(Ranks(self._rank, self._ranks)), weights="auto")
        return models.load(folder, context_tokens_max=None, progress=lambda *_: None, kv="q4")

    def facts(self) -> dict[str, Any]:
        """What was loaded: how it decodes, the bytes of its weights, and the most that loading took."""
        mx.clear_cache()
        return {
            "way": self._loaded.way.describe(),
            "weights": self._loaded.weights,
            "gib": round(mx.get_active_memory() / 2**30, 2),
            "peak_gib": round(self._peak_bytes / 2**30, 2),
        }

    def pid(self) -> int:
        return os.getpid()

    def form(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._member = self._new_member()
        self._member.lead(self._loaded, self._engine.executor, [(host, port) for host, port in addresses])

    def follow(self) -> None:
        member = self._new_member()
        try:
            member.follow(self._loaded).run()
        finally:
            member.close()

    def logits(self) -> list[float]:
        """The probabilities of the likeliest tokens after each of the last tokens of a prompt, as logarithms."""
        name, found = "logits", list[float]()
        rows = [at * 31 % 3000 + 10 for at in range(LOGITS_TOKENS)]
        executor = self._engine.executor
        executor.open(name, [], None, 0)
        executor.prefill([(name, rows[:-4])])
        executor.line_up(name)
        executor.change()
        for number in range(4):
            logits = executor.compute(mx.array(rows[-4 + number : len(rows) - 3 + number], mx.uint32))
            mx.eval(logits)
            executor.advance([1])
            values = logits[0].astype(mx.float32)
            # Most tokens of these models have the same probability.
            found += map(float, np.array(mx.sort(values - mx.logsumexp(values))[-16:]))
        executor.leave([name])
        return found

    def hang(self) -> None:
        """Decodes until the group breaks, which ends the process."""
        self._submit(100, max_tokens=100_000)
        while True:
            self._engine.step()

    def _new_member(self) -> Member:
        split = Split(tensor=self._ranks, backend=self._backend, trusted_wires=True)  # pyright: ignore
        joining = Joining(split, TIMES.beat_s, TIMES.silent_s, TIMES.stalled_s)
        broken = lambda why: (print(why, file=sys.stderr, flush=True), os._exit(1))  # noqa: E731
        return Member(GROUP, self._rank, KEY, self._listener, TIMES, broken=broken, joining=joining)

    def _timed(self) -> list[Call]:
        return []


def main() -> None:
    folder, rank, ranks, host, backend = sys.argv[1:]
    # NCCL's start writes to standard output.
    start_answering()
    given = folder, int(rank), int(ranks), host, backend
    if int(rank) == max(0, int(ranks) - 1):
        process = ShareProcess(*given)
        answer(methods_of(process))
        process.close()
    else:
        answer(Follower(*given, kind=ShareProcess).ask)


if __name__ == "__main__":
    main()
