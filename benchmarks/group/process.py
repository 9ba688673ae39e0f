"""A process that computes a model, or a stage of it.

    python -m benchmarks.group.process FOLDER START STOP LAYERS HOST

Asked for something by its name (a method of `Process`), with arguments, it answers with what that returns. See
`cluster/worker.py`. Pin it to a core from outside: libraries look at their cores once.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.group.division.pipeline import PipelinedStage
from satchel.actors.replica.group.forming import GroupTimes, Member
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.cluster.config.config import Scheduling

from ..cluster.worker import answer, methods_of

GROUP, KEY = "measured", b"a cluster's key for benchmarks"
TIMES = GroupTimes(form_s=60.0, silent_s=20.0, stalled_s=60.0)


Call = tuple[int, float, float]
"""A call of a stage: tokens of each sequence, seconds, and CPU seconds of its process."""


class TimedStage(PipelinedStage):
    """A stage that notes for how long it computes; nothing waits for its results meanwhile."""

    def __init__(self, plain: PipelinedStage) -> None:
        vars(self).update(vars(plain))
        self.calls, self.on = list[Call](), False

    def compute(self, tokens: mx.array, cache: Sequence[Any], hidden: mx.array | None) -> mx.array:
        if not self.on:
            return super().compute(tokens, cache, hidden)
        mx.synchronize()
        began, cpu = time.perf_counter(), time.process_time()
        states = super().compute(tokens, cache, hidden)
        mx.eval(states, [each.state for each in cache])
        self.calls.append((tokens.shape[1], time.perf_counter() - began, time.process_time() - cpu))
        return states


class Process:
    """The whole model, the leader of a group, or a follower."""

    def __init__(self, folder: str, start: int, stop: int, layers: int, host: str) -> None:
        self._whole, self._leads = stop - start == layers, stop == layers
        self._listener = socket.create_server((host, 0))
        self._member: Member | None = None
        self._loaded = self._load(folder, start, stop)
        self._requests = 0
        if self._leads:
            self._engine = Engine(self._loaded, Scheduling(sequences_max=32, kv_bytes_max=2**32), 2**32, self._take)
            self._drawn: dict[str, int] = {}

    def _load(self, folder: str, start: int, stop: int) -> LoadedModel:
        if self._whole:
            # As stages compute.
            how: dict[str, Any] = {"weights": "stored", "numerics": "reproducible"}
            return models.load(folder, context_tokens_max=None, progress=lambda *_: None, **how)
        loaded = load_stage(folder, start, stop)
        object.__setattr__(loaded, "model", TimedStage(loaded.model))
        return loaded

    # Forming the group.

    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def form(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._member = Member(GROUP, len(addresses) - 1, KEY, self._listener, TIMES)
        self._member.lead(self._loaded, self._engine.executor, [(host, port) for host, port in addresses])

    def follow(self) -> None:
        """Does what the leader tells until the group ends."""
        member = Member(GROUP, 0, KEY, self._listener, TIMES)
        try:
            member.follow(self._loaded).run()
        finally:
            member.close()

    def close(self) -> None:
        if self._member is not None:
            self._member.close()

    # Being measured.

    def cpu_s(self) -> float:
        return time.process_time()

    def time_stage(self, on: bool) -> list[Call]:
        """Begins or ends to time the stage's calls, which then wait for the device. Returns those so far."""
        stage = self._loaded.model
        calls, stage.calls, stage.on = stage.calls, [], on
        return calls

    def decode(self, rows: int, tokens: int, steps: int, link: str = "") -> dict[str, float]:
        """Decodes some steps of so many sequences with prompts of `tokens` tokens; counts the bytes on a link."""
        self._drawn.clear()
        names = [self._submit(tokens, max_tokens=steps + 200, common=BLOCK_TOKENS) for _ in range(rows)]
        while len(self._drawn) < rows or min(self._drawn.values()) < 4:
            self._engine.step()
        wire, before, cpu, began = wire_bytes(link), sum(self._drawn.values()), self.cpu_s(), time.perf_counter()
        calls = len(self._timed())
        for _ in range(steps):
            self._engine.step()
        found = {
            "calls": len(self._timed()) - calls,
            "s": time.perf_counter() - began,
            "cpu_s": self.cpu_s() - cpu,
            "tokens": sum(self._drawn.values()) - before,
            "wire": wire_bytes(link) - wire,
        }
        self._engine.abort(tuple(names))
        while self._engine.step():
            pass
        return found

    def _timed(self) -> list[Call]:
        return [] if self._whole else self._loaded.model.calls

    def prefill(self, tokens: int) -> dict[str, float]:
        """Computes a new prompt until its first token."""
        self._drawn.clear()
        cpu, began = self.cpu_s(), time.perf_counter()
        self._submit(tokens, max_tokens=1)
        while not self._drawn:
            self._engine.step()
        found = {"s": time.perf_counter() - began, "cpu_s": self.cpu_s() - cpu}
        while self._engine.step():
            pass
        self._engine.clear_cache()
        return found

    def _submit(self, tokens: int, max_tokens: int, common: int = 0) -> str:
        """Submits a prompt, of which the first `common` tokens are those of other prompts too."""
        self._requests += 1
        name, same, own = str(self._requests), random.Random(0), random.Random(self._requests)
        size = self._loaded.vocabulary_size - 10
        prompt = [(same if at < common else own).randrange(10, size) for at in range(tokens)]
        root = root_id(self._loaded.model_id, "tenant:bench")
        self._engine.submit(
            GenerateRequest(
                request_id=name,
                consumer="",
                model="m",
                agent="",
                deadline_s=36000.0,
                prompt=prompt,
                block_ids=block_ids(root, prompt),
                root_id=root,
                sampling=Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            ),
            lambda refused: None,
        )
        return name

    def _take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        for update in updates.get("", []):
            if update.error:
                raise RuntimeError(update.error)
            self._drawn[update.request_id] = self._drawn.get(update.request_id, 0) + len(update.tokens)
            if not self._drawn[update.request_id]:
                del self._drawn[update.request_id]


def wire_bytes(link: str) -> float:
    """Returns how many bytes have passed a network interface so far, both ways; 0 if none is given."""
    folder = Path("/sys/class/net") / link / "statistics"
    return float(sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))) if link else 0.0


class Follower:
    """A process whose group is on a thread of its own, so that it can be asked meanwhile.

    Args:
        given: arguments of the process.
        kind: its class.
    """

    def __init__(self, *given: Any, kind: type[Process] = Process) -> None:
        self._kind = kind
        self._made = threading.Event()
        self._follows = threading.Event()
        self._process: Any = None
        self._thread = threading.Thread(target=self._run, args=given)
        self._thread.start()
        self._made.wait()

    def _run(self, *given: Any) -> None:
        try:
            self._process = self._kind(*given)
        finally:
            self._made.set()
        self._follows.wait()
        self._process.follow()

    def ask(self, question: list[Any]) -> Any:
        name, *arguments = question
        if name == "follow":
            return self._follows.set()
        return getattr(self._process, name)(*arguments)


def main() -> None:
    folder, start, stop, layers, host = sys.argv[1:]
    given = folder, int(start), int(stop), int(layers), host
    if stop == layers:
        process = Process(*given)
        answer(methods_of(process))
        process.close()
    else:
        answer(Follower(*given).ask)


if __name__ == "__main__":
    main()
