"""Measures a model whose layers are divided between two GPUs of one host, beside one GPU with all of it, and where each
stage's time goes. Before that: how long arrays take from one GPU to the other.

    python -m benchmarks.group.stages [--model qwen3-8b-4bit] [--rows 1,16,32] [--prompts 16000]

Each process has a GPU of its own (CUDA_VISIBLE_DEVICES); on a machine without one all compute on its cores. Figures are
medians over the rounds, ratios are taken within a round. What a stage does is of all rounds; things may be parts of
others, and threads do them at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.cluster.environment import default_home, mlx_settings

from .. import kept, machine, parts
from ..cluster.worker import Worker
from ..options import names_among
from ..parts import Budget, ResultTable, median
from ..programs import RESULTS, program
from ..serve.shapes import SHAPES
from .measured import ANSWER_S, Measured

PARTS = ("passing", "decoding", "prefill")
LOG_CHARACTERS = 6000
RING_LOGS = ("device_ring", "ring_memory", "SATCHEL_RINGS")
"""What lines of logs have that say whether cards pass arrays on, and why not."""

PASSED = ((2**14, 500), (2**18, 200), (2**24, 20))
"""Bytes of arrays, and how often they pass there and back: one sequence's hidden states, those of 32, and a piece's."""

PASSED_S = 30.0
"""The time limit of that."""
LEAST_SHARE = 0.005
"""What takes less of the time is left out."""


def say(text: str) -> None:
    print(text, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def counts(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    add = parser.add_argument
    add("--parts", type=names_among(PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--model", default="qwen3-8b-4bit", choices=[name for name, shape in SHAPES.items() if shape])
    add("--rows", type=counts, default=[1, 16, 32], help="sequences that decode")
    add("--tokens", type=int, default=1500, help="tokens of their prompts")
    add("--steps", type=int, default=100, help="decode steps of a measurement")
    add("--prompts", type=counts, default=[16000], help="tokens of the prompts of prefill")
    add("--rounds", type=int, default=3)
    add("--budget-s", type=float, default=420.0, help="after this many seconds nothing is begun")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


def environment_of(number: int) -> dict[str, str]:
    """Returns the environment of the process that has this GPU."""
    return {**os.environ, **mlx_settings(default_home()), "CUDA_VISIBLE_DEVICES": str(number)}


def say_log(log: Path, what: str, only: Sequence[str] = ()) -> None:
    """Prints the last lines of a process's log, or all lines that have one of some words."""
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if any(word in line for word in only)]
    say(f"--- {what}\n" + ("\n".join(lines) if only else text[-LOG_CHARACTERS:]))


def say_stacks(pids: Sequence[int]) -> None:
    """Lets processes write their stacks into their logs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)


def passing(work: Path) -> ResultTable:
    """Arrays between two processes that have a GPU each, and the same over TCP."""
    part = ResultTable("Arrays from one process to the other, one way")
    if shutil.which("nvidia-smi"):
        say(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30).stdout)
    logs = [work / f"passing-{number}.log" for number in range(2)]
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(Worker(program("group.ring"), log, environment_of(number)))
            for number, log in enumerate(logs)
        )
        pids = [side.ask(["pid"], ANSWER_S) for side in (one, other)]
        try:
            address = other.ask(["address"], ANSWER_S)
            other.ask(["follow"])
            ways = ["cards", "TCP"] if one.ask(["lead", address], 2 * PASSED_S) else ["TCP"]
            for nbytes, rounds in PASSED:
                for way in ways:
                    # The first time kernels are compiled.
                    for _ in range(2):
                        seconds = one.ask(["one_way_s", way, nbytes, rounds], PASSED_S)
                    row = {"bytes": nbytes, "way": way, "microseconds": 1e6 * seconds, "GB/s": nbytes / seconds / 1e9}
                    part.rows.append(row)
                    say(f"  {nbytes:,} bytes by {way}: {1e6 * seconds:,.1f} microseconds, {row['GB/s']:.2f} GB/s")
        except RuntimeError as error:
            # What was measured is worth having, and the logs say where they stood.
            say(f"  it failed: {error}")
            part.notes.append(f"failed: {error}")
            say_stacks(pids)
        for number, log in enumerate(logs):
            say_log(log, f"process {number}")
    return part


class Bench:
    """The whole model in a process, and its stages in two."""

    def __init__(self, options: argparse.Namespace, work: Path, budget: Budget, stack: ExitStack) -> None:
        self._options, self._budget, self._work = options, budget, work
        # What the stages do in a measurement, how often and for how long, and how long that took.
        self._done: list[dict[str, tuple[int, float]]] = []
        self._passed_s = 0.0
        self._folder, shape = work / "model", SHAPES[options.model]
        assert shape is not None
        dtype = "bfloat16" if mx.cuda.is_available() else "float32"
        # In a process of its own, which gives its memory back.
        with Worker(program("group.written", self._folder, options.model, dtype), work / "written.log") as writer:
            writer.ask([], ANSWER_S)
        layers = shape.layers
        say("  written")
        self.whole, _ = stack.enter_context(self._processes([layers]))
        self.stages, self._workers = stack.enter_context(self._processes([layers // 2, layers]))
        for name in ("whole", "stages"):
            began = time.monotonic()
            # What is compiled at the first use is compiled here.
            for question in [
                *(("prefill", tokens) for tokens in (1000, *options.prompts)),
                *(("decode", rows, options.tokens, 60) for rows in options.rows),
            ]:
                say(f"  {name}: {question[0]} of {question[1]}")
                self._ask(name, *question)
            way = getattr(self, name).leader.ask(["way"])
            say(f"  {name} warmed up in {time.monotonic() - began:.0f} s; decodes {way}")

    def _log(self, number: int, count: int) -> Path:
        return self._work / f"stage-{number}-of-{count}.log"

    @contextmanager
    def _processes(self, stops: Sequence[int]) -> Iterator[tuple[Measured, list[Worker]]]:
        with ExitStack() as stack:
            workers: list[Worker] = []
            pids: list[int] = []
            for number, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
                command = program("group.stage", self._folder, start, stop, stops[-1], "127.0.0.1")
                log = self._log(number, len(stops))
                workers.append(stack.enter_context(Worker(command, log, environment_of(number))))
            try:
                pids = [worker.ask(["pid"], ANSWER_S) for worker in workers[:-1]]
                measured = Measured(workers)
                for number in range(len(stops)):
                    say_log(self._log(number, len(stops)), f"rings of stage {number} of {len(stops)}", RING_LOGS)
                yield measured, workers
            except RuntimeError:
                # One has ended, and its log says where it stood. The others compute on threads of their own.
                say_stacks(pids)
                for number in range(len(stops)):
                    say_log(self._log(number, len(stops)), f"stage {number} of {len(stops)}")
                raise

    def _ask(self, name: str, *question: Any) -> dict[str, float]:
        """Raises `RuntimeError` if there is no answer within `stage.LIMIT_S`."""
        return getattr(self, name).ask(*question)

    def _beside(self, measure: Callable[[str], float]) -> list[tuple[float, float]]:
        """Measures the whole model and the stages in turns."""
        self._done, self._passed_s = [{} for _ in self._workers], 0.0
        return [(measure("whole"), self._noted(measure)) for _ in self._budget.rounds(self._options.rounds)]

    def _noted(self, measure: Callable[[str], float]) -> float:
        """Measures the stages, and notes what they do."""
        # So that they do not wait for calls since their last measurement.
        self._ask("stages", "prefill", 64)
        for worker in self._workers:
            worker.ask(["times"], ANSWER_S)
        began = time.monotonic()
        found = measure("stages")
        self._passed_s += time.monotonic() - began
        for done, worker in zip(self._done, self._workers, strict=True):
            for doing, (count, seconds) in worker.ask(["times"], ANSWER_S).items():
                before = done.get(doing, (0, 0.0))
                done[doing] = before[0] + count, before[1] + seconds
        return found

    def _doing(self, part: ResultTable, what: str) -> None:
        """Adds what the stages have done in the last measurements."""
        for number, done in enumerate(self._done):
            for doing, (count, seconds) in sorted(done.items(), key=lambda each: -each[1][1]):
                if (share := seconds / self._passed_s) < LEAST_SHARE:
                    continue
                each_ms = 1e3 * seconds / count
                part.rows.append(
                    {
                        "measured": what,
                        "stage": number,
                        "doing": doing,
                        "times": count,
                        "ms each": each_ms,
                        "share of the time": share,
                    }
                )
                say(f"    stage {number}: {doing}: {count} x {each_ms:.2f} ms, {share:.0%}")

    def decoding(self) -> ResultTable:
        """Decode steps of several sequences, and what the stages do meanwhile; prefilling their prompts counts too."""
        options = self._options
        part = ResultTable(f"Decoding: {options.model}, prompts of {options.tokens:,} tokens")
        for rows in options.rows:

            def rate(name: str, rows: int = rows) -> float:
                found = self._ask(name, "decode", rows, options.tokens, options.steps)
                return found["tokens"] / found["s"]

            if rounds := self._beside(rate):
                whole, stages, ratio = (median(each) for each in zip(*((a, b, b / a) for a, b in rounds), strict=True))
                what = f"{rows} sequences: one card {whole:.0f} tokens/s, two stages {stages:.0f}, {ratio:.2f} times"
                say(f"  {what}")
                self._doing(part, what)
        return part

    def prefill(self) -> ResultTable:
        """Prompts until their first token, and what the stages do meanwhile."""
        options = self._options
        part = ResultTable(f"Prefill: {options.model}")
        for tokens in options.prompts:
            if rounds := self._beside(lambda name, tokens=tokens: self._ask(name, "prefill", tokens)["s"]):
                whole, stages, ratio = (median(each) for each in zip(*((a, b, a / b) for a, b in rounds), strict=True))
                what = f"{tokens:,} tokens: one card {whole:.2f} s, two stages {stages:.2f} s ({ratio:.2f} times)"
                say(f"  {what}")
                self._doing(part, what)
        return part


def main() -> None:
    options = read_options()
    facts = machine.facts("gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu")
    result = kept.begun(facts, options, title="A model divided between two GPUs of one host")
    path = options.out / f"stages-{options.machine or machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, PARTS)
    budget = Budget(options.budget_s)
    with tempfile.TemporaryDirectory(prefix="satchel-stages-") as work, ExitStack() as stack:
        bench = cache(lambda: Bench(options, Path(work), budget, stack))
        measures: dict[str, Callable[[], ResultTable]] = {
            "passing": lambda: passing(Path(work)),
            "decoding": lambda: bench().decoding(),
            "prefill": lambda: bench().prefill(),
        }
        measures = {name: measures[name] for name in dict.fromkeys(options.parts)}
        kept.measure_all(measures, budget, path, result, parts.markdown)


if __name__ == "__main__":
    main()
