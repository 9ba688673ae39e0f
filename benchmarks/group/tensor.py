"""Measures a model of which two GPUs of one host each have a share of every layer, beside one GPU with all of it.

    python -m benchmarks.group.tensor [--model qwen3-8b-4bit] [--ranks 2] [--backend nccl] [--rows 1,4,16,32]

Each process has a GPU of its own (CUDA_VISIBLE_DEVICES); on a machine without one all compute on its cores, over MLX's
ring. Figures are medians over the rounds, ratios are taken within a round. At last one rank is stopped in the middle of
an answer, and it is measured how long the processes live on.
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
import psutil

from satchel.cluster.environment import default_home, mlx_settings

from .. import kept, machine, parts
from ..cluster.worker import Worker
from ..options import names_among
from ..parts import Budget, ResultTable, median
from ..programs import RESULTS, program
from ..serve.shapes import SHAPES
from .measured import ANSWER_S, Measured
from .share import TIMES

PARTS = ("loading", "agreement", "decoding", "prefill", "watchdog")
ENDED_S_MAX = 30.0


def say(text: str) -> None:
    print(text, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def counts(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    add = parser.add_argument
    add("--parts", type=names_among(PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--model", default="qwen3-8b-4bit", choices=[name for name, shape in SHAPES.items() if shape])
    add("--ranks", type=int, default=2)
    add("--backend", default="nccl" if mx.cuda.is_available() else "ring", choices=["nccl", "ring"])
    add("--rows", type=counts, default=[1, 4, 16, 32], help="sequences that decode")
    add("--tokens", type=int, default=1500, help="tokens of their prompts")
    add("--steps", type=int, default=100, help="decode steps of a measurement")
    add("--prompts", type=counts, default=[16000], help="tokens of the prompts of prefill")
    add("--rounds", type=int, default=3)
    add("--budget-s", type=float, default=420.0, help="after this many seconds nothing is begun")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


class Bench:
    """What is measured, in which processes: the whole model as it is served, the whole model as a single share, and the
    shares of all ranks."""

    def __init__(self, options: argparse.Namespace, work: Path, budget: Budget, stack: ExitStack) -> None:
        self._options, self._budget = options, budget
        folder = work / "model"
        # In a process of its own, which gives its memory back.
        began = time.monotonic()
        dtype = "bfloat16" if mx.cuda.is_available() else "float32"
        with Worker(program("group.written", folder, options.model, dtype), work / "written.log") as writer:
            writer.ask([], ANSWER_S)
        say(f"  written in {time.monotonic() - began:.0f} s")
        self._folder, self._work = folder, work
        self.whole, _ = stack.enter_context(self._processes(0))
        self.single, _ = stack.enter_context(self._processes(1))
        self.shares, self._workers = stack.enter_context(self._processes(options.ranks))
        for name in ("whole", "single", "shares"):
            began = time.monotonic()
            # What is compiled at the first use is compiled here.
            self._ask(name, "prefill", min(1000, *options.prompts))
            for rows in options.rows:
                self._ask(name, "decode", rows, 300, 8)
            say(f"  {name} warmed up in {time.monotonic() - began:.0f} s")

    @contextmanager
    def _processes(self, ranks: int) -> Iterator[tuple[Measured, list[Worker]]]:
        with ExitStack() as stack:
            workers = []
            for rank in range(max(1, ranks)):
                command = program("group.share", self._folder, rank, ranks, "127.0.0.1", self._options.backend)
                environment = {**os.environ, **mlx_settings(default_home()), "CUDA_VISIBLE_DEVICES": str(rank)}
                log = self._work / f"share-{rank}-of-{ranks}.log"
                workers.append(stack.enter_context(Worker(command, log, environment)))
            yield Measured(workers), workers

    def _ask(self, name: str, *question: Any) -> dict[str, float]:
        return getattr(self, name).ask(*question)

    def _beside(
        self, measure: Callable[[str], float], ratio: Callable[[float, float], float]
    ) -> tuple[float, float, float, float, int] | None:
        """Measures the whole model, the single share and the shares in turns.

        Args:
            ratio: given the measures of the whole model and of the shares.

        Returns:
            The medians of the three and of the ratio, and the number of rounds; None if there is no time for one.
        """
        rounds: list[tuple[float, float, float, float]] = []
        for _ in self._budget.rounds(self._options.rounds):
            whole, single, shares = (measure(name) for name in ("whole", "single", "shares"))
            rounds.append((whole, single, shares, ratio(whole, shares)))
        if not rounds:
            return None
        whole, single, shares, compared = (median(column) for column in zip(*rounds, strict=True))
        return whole, single, shares, compared, len(rounds)

    def loading(self) -> ResultTable:
        """What each process has in memory."""
        part = ResultTable(f"Loading: {self._options.model}")
        found = [("whole", self.whole.leader), ("single share", self.single.leader)]
        found += [(f"rank {number}", worker) for number, worker in enumerate(self._workers)]
        for name, worker in found:
            facts = worker.ask(["facts"], ANSWER_S)
            say(f"  {name}: {facts}")
            part.rows.append(
                {
                    "process": name,
                    "in memory, GiB": facts["gib"],
                    "most while it loaded, GiB": facts["peak_gib"],
                    "decodes": facts["way"],
                    "weights": facts["weights"],
                }
            )
        return part

    def agreement(self) -> ResultTable:
        """How far the shares' logits are from the single share's."""
        part = ResultTable("Agreement: logarithms of probabilities after a prompt of 600 tokens")
        one, two, again = (
            worker.ask(["logits"], ANSWER_S) for worker in (self.single.leader, *[self.shares.leader] * 2)
        )
        scale = max(one) - min(one)
        off = max(abs(a - b) for a, b in zip(one, two, strict=True))
        part.rows.append({"largest difference": off, "their range": scale, "the same again": str(two == again)})
        say(f"  off by {off:.4f} of {scale:.2f}; the same again: {two == again}")
        return part

    def decoding(self) -> ResultTable:
        """Decode steps of several sequences."""
        options = self._options
        part = ResultTable(f"Decoding: {options.model}, prompts of {options.tokens:,} tokens, {options.backend}")
        for rows in options.rows:

            def rate(name: str, rows: int = rows) -> float:
                found = self._ask(name, "decode", rows, options.tokens, options.steps)
                return found["tokens"] / found["s"]

            if (found := self._beside(rate, lambda whole, shares: shares / whole)) is None:
                continue
            whole, single, shares, ratio, rounds = found
            say(f"  {rows} sequences: whole {whole:.0f} tokens/s, single share {single:.0f}, shares {shares:.0f}")
            part.rows.append(
                {
                    "sequences": rows,
                    "one card, tokens/s": whole,
                    "one card as a single share": single,
                    f"{options.ranks} cards": shares,
                    f"{options.ranks} cards / one": ratio,
                    "rounds": rounds,
                }
            )
        return part

    def prefill(self) -> ResultTable:
        """Prompts until their first token."""
        options = self._options
        part = ResultTable(f"Prefill: {options.model}, {options.backend}")
        for tokens in options.prompts:

            def time_of(name: str, tokens: int = tokens) -> float:
                return self._ask(name, "prefill", tokens)["s"]

            if (found := self._beside(time_of, lambda whole, shares: whole / shares)) is None:
                continue
            whole, single, shares, ratio, rounds = found
            say(f"  {tokens} tokens: whole {whole:.2f} s, single share {single:.2f} s, shares {shares:.2f} s")
            part.rows.append(
                {
                    "tokens": f"{tokens:,}",
                    "one card, s": whole,
                    "one card as a single share": single,
                    f"{options.ranks} cards": shares,
                    f"one / {options.ranks} cards": ratio,
                    "rounds": rounds,
                }
            )
        return part

    def watchdog(self) -> ResultTable:
        """Stops the first rank while the last one decodes. Both must end, though neither is asked to."""
        part = ResultTable("A rank that is stopped in a collective")
        pids = [worker.ask(["pid"]) for worker in self._workers]
        self.shares.leader.tell(["hang"])
        time.sleep(2.0)
        os.kill(pids[0], signal.SIGSTOP)
        began = time.monotonic()
        ended: list[float | None] = [None for _ in pids]
        try:
            while None in ended and time.monotonic() - began < ENDED_S_MAX:
                for number, pid in enumerate(pids):
                    if ended[number] is None and not _runs(pid):
                        ended[number] = time.monotonic() - began
                time.sleep(0.02)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        say(f"  ended after {ended} s")
        part.rows.append({f"rank {number}, s": seconds for number, seconds in enumerate(ended)})
        part.notes.append(f"Seconds until each process had ended. A rank may be silent for {TIMES.silent_s:g} s.")
        return part


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main() -> None:
    options = read_options()
    facts = machine.facts("gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu")
    result = kept.begun(facts, options, title="A model of which several processes have a share of every layer")
    path = options.out / f"tensor-{options.machine or machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, PARTS)
    budget = Budget(options.budget_s)
    with tempfile.TemporaryDirectory(prefix="satchel-tensor-") as work, ExitStack() as stack:
        bench = Bench(options, Path(work), budget, stack)
        measures = {name: getattr(bench, name) for name in dict.fromkeys(options.parts)}
        kept.measure_all(measures, budget, path, result, parts.markdown)


if __name__ == "__main__":
    main()
