"""Measures a model whose layers are divided between two GPUs of one host, beside one GPU with all of it, and where each
stage's time goes.

    python -m benchmarks.group.stages [--model qwen3-8b-4bit] [--rows 1,16,32] [--prompts 16000]

Each process has a GPU of its own (CUDA_VISIBLE_DEVICES); on a machine without one all compute on its cores. Figures are
medians over the rounds, ratios are taken within a round. What a stage does is of all rounds; things may be parts of
others, and threads do them at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

PARTS = ("decoding", "prefill")
LOG_CHARACTERS = 6000
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
                environment = {**os.environ, **mlx_settings(default_home()), "CUDA_VISIBLE_DEVICES": str(number)}
                workers.append(stack.enter_context(Worker(command, self._log(number, len(stops)), environment)))
            try:
                pids = [worker.ask(["pid"], ANSWER_S) for worker in workers[:-1]]
                yield Measured(workers), workers
            except RuntimeError:
                # One has ended, and its log says where it stood. The others compute on threads of their own.
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
                time.sleep(1.0)
                for number in range(len(stops)):
                    log = self._log(number, len(stops)).read_text(errors="replace")
                    say(f"--- stage {number} of {len(stops)}\n{log[-LOG_CHARACTERS:]}")
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
        bench = Bench(options, Path(work), budget, stack)
        measures = {name: getattr(bench, name) for name in dict.fromkeys(options.parts)}
        kept.measure_all(measures, budget, path, result, parts.markdown)


if __name__ == "__main__":
    main()
