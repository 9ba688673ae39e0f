"""Measures a model whose layers are divided between two processes, each on a core of its own, beside the whole model in
one process on one core; on one machine, and over links of 10 and 1 Gb/s between network namespaces.

    python -m benchmarks.group.run [--parts decoding,prefill] [--rows 1,4,16] [--rounds 3] [--budget-s 1800]

Figures are medians over the rounds, ratios are taken within a round. CPU time depends less on what else the machine
does than the rest. Nothing here is a test of speed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.system.hosts import hosts

from .. import kept, machine, parts
from ..options import names_among
from ..parts import Budget, ResultTable, median
from ..programs import RESULTS
from ..serve.folders import write_folder
from ..serve.shapes import SHAPES
from .clock import PrefillCost, prefill_s, whole_prefill_s
from .measured import Measured, measured
from .process import Call

PARTS = ("decoding", "steps", "prefill", "clock")
MODEL = "random-30m"
PROMPT_TOKENS = 300
"""With one sealed block, which all prompts have."""
PREFILL_RATIO_MIN = 1.6


def say(text: str) -> None:
    print(text, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def counts(text: str) -> list[int]:
        found = [int(word) for word in text.split(",") if word.strip()]
        if not all(number > 0 for number in found):
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    add = parser.add_argument
    add("--parts", type=names_among(PARTS), default=list(PARTS), help=", ".join(PARTS))
    add("--rows", type=counts, default=[1, 4, 16], help="sequences that decode")
    add("--steps", type=int, default=60, help="decode steps of a measurement")
    add("--prompts", type=counts, default=[4000, 16000], help="tokens of the prompts of prefill")
    add("--gbits", type=counts, default=[10, 1], help="links for decoding")
    add("--rounds", type=int, default=3)
    add("--budget-s", type=float, default=1800.0, help="after this many seconds nothing is begun")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


class Bench:
    """What is measured, and how often."""

    def __init__(self, options: argparse.Namespace, work: Path, budget: Budget) -> None:
        self._options, self._work, self._budget = options, work, budget
        self._folder = work / "model"
        write_folder(MODEL, self._folder, mx.float32)
        shape = SHAPES[MODEL]
        assert shape is not None
        self._layers = shape.layers

    def _whole(self) -> Any:
        return measured(self._folder, self._layers, [self._layers], self._work)

    def _two(self, host: Any = None) -> Any:
        return measured(self._folder, self._layers, [self._layers // 2, self._layers], self._work, host)

    @contextmanager
    def _links(self, part: ResultTable) -> Iterator[list[tuple[str, Measured, Any]]]:
        """Yields the links' names, the two processes that each connects, and the host, if there is one; all links but
        loopback are the same, which must be slowed first."""
        with ExitStack() as stack:
            found = [("loopback", stack.enter_context(self._two()), None)]
            if (reason := hosts.missing()) is not None:
                part.notes.append(f"Over loopback alone: {reason}.")
            else:
                (host,) = stack.enter_context(hosts.hosts(1))
                apart = stack.enter_context(self._two(host))
                found += [(f"{gbit} Gb/s", apart, (host, 1000 * gbit)) for gbit in self._options.gbits]
            yield found

    def decoding(self) -> ResultTable:
        """Decode steps of 1, 4 and 16 sequences."""
        part = ResultTable(f"Decoding: {MODEL} in two processes beside one, prompts of {PROMPT_TOKENS} tokens")
        steps = self._options.steps
        with self._whole() as whole, self._links(part) as links:
            for rows in self._options.rows:
                figures: dict[str, list[list[float]]] = {}
                for _ in self._budget.rounds(self._options.rounds):
                    one = whole.ask("decode", rows, PROMPT_TOKENS, steps)
                    for name, two, at in links:
                        link = ""
                        if at is not None:
                            host, mbit = at
                            host.slow(mbit)
                            link = host.link
                        found = two.ask("decode", rows, PROMPT_TOKENS, steps, link)
                        figures.setdefault(name, []).append(_decode_figures(one, found))
                for name, rounds in figures.items():
                    middle = [median(column) for column in zip(*rounds, strict=True)]
                    part.rows.append(_decode_row(name, rows, middle, len(rounds)))
                    say(f"  {name}, {rows} sequences: {middle[1]:.1f} tokens/s, one process {middle[0]:.1f}")
        part.notes.append(
            "One process is pinned to one core, of two each to its own. Both read sealed blocks as prefill does "
            "(`numerics: reproducible`). The wire's bytes are those of both ways, with heartbeats and what TCP adds. "
            "Where two micro-batches do not pay, one is used (`micro_batches.py`)."
        )
        return part

    def steps(self) -> ResultTable:
        """What of a step is not the model's."""
        part = ResultTable("A decode step in two processes, over loopback")
        with self._two() as two:
            for rows in self._options.rows:
                steps = self._options.steps
                found, calls = two.timed("decode", rows, PROMPT_TOKENS, steps)
                count = round(found["calls"])
                stages = [1e3 * sum(cpu_s for _, _, cpu_s in stage[-count:]) / steps for stage in calls]
                cpu_ms = 1e3 * found["cpu_s"] / steps
                row: dict[str, Any] = {"sequences": str(rows), "micro-batches": round(count / steps, 1)}
                row |= {"step, ms": 1e3 * found["s"] / steps, "step, CPU ms": cpu_ms}
                row |= {f"stage {number}, CPU ms": ms for number, ms in enumerate(stages, 1)}
                part.rows.append({**row, "rest, CPU ms": cpu_ms - sum(stages)})
                say(
                    f"  {rows} sequences: step {cpu_ms:.2f} ms of CPU, stages {', '.join(f'{ms:.2f}' for ms in stages)}"
                )
        part.notes.append(
            "Stages wait for their results here, so that these can be timed. The rest is all that is not the model's, "
            "in both processes: the engine, sampling, calls, and the way of the hidden states with its encryption."
        )
        return part

    def prefill(self) -> ResultTable:
        """Prompts until their first token."""
        part = ResultTable(f"Prefill: {MODEL} in two processes beside one, over loopback")
        with self._whole() as whole, self._two() as two:
            for process in (whole, two):
                # The engine knows its speed then.
                process.ask("prefill", 1000)
            for tokens in self._options.prompts:
                times: list[list[float]] = []
                for _ in self._budget.rounds(self._options.rounds):
                    one, both = whole.ask("prefill", tokens), two.ask("prefill", tokens)
                    times.append([one["s"], both["s"], one["s"] / both["s"], one["cpu_s"], both["cpu_s"]])
                    say(f"  {tokens} tokens: {both['s']:.1f} s, one process {one['s']:.1f} s")
                if times:
                    one_s, both_s, ratio, one_cpu_s, both_cpu_s = (median(each) for each in zip(*times, strict=True))
                    part.rows.append(
                        {
                            "tokens": f"{tokens:,}",
                            "one process, s": one_s,
                            "two, s": both_s,
                            "one / two": ratio,
                            "CPU, s: one": one_cpu_s,
                            "two": both_cpu_s,
                            "rounds": len(times),
                        }
                    )
                    part.at_least(f"{tokens:,} tokens, one process's time of that of two", ratio, PREFILL_RATIO_MIN)
        return part

    def clock(self) -> ResultTable:
        """The schedule by a simulated clock, with measured parts."""
        part = ResultTable("Prefill by a simulated clock, from the CPU time of the stages' calls")
        with self._two() as two:
            two.ask("prefill", 1000)
            _, calls = two.timed("prefill", 2000)
        costs = [fitted(stage) for stage in calls]
        chunk_tokens = max(tokens for stage in calls for tokens, *_ in stage)
        for tokens in self._options.prompts:
            one_s = whole_prefill_s(costs, tokens, chunk_tokens)
            two_s = prefill_s(costs, tokens, chunk_tokens, None)
            part.rows.append(
                {"tokens": f"{tokens:,}", "one process, s": one_s, "two, s": two_s, "one / two": one_s / two_s}
            )
            part.at_least(f"{tokens:,} tokens, one process's time of that of two", one_s / two_s, PREFILL_RATIO_MIN)
        each = "; ".join(
            f"{1e3 * cost.fixed_s:.1f} ms and {1e3 * cost.token_s:.2f} ms a token before any others" for cost in costs
        )
        part.notes.append(f"Chunks of {chunk_tokens} tokens, as the engine chose them. Stages: {each}.")
        return part


def fitted(calls: Sequence[Call]) -> PrefillCost:
    """Returns the CPU time that explains a stage's calls for one prompt best, in least squares; no part is negative."""
    before, rows = 0, []
    for tokens, *_ in calls:
        rows.append([1.0, tokens, tokens * (before + tokens / 2)])
        before += tokens
    features, seconds = np.array(rows), np.array([cpu_s for _, _, cpu_s in calls])
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(features[:, used], seconds, rcond=None)
        if (found >= 0).all():
            break
        used = [each for each, value in zip(used, found, strict=True) if value >= 0]
    values = dict(zip(used, map(float, found), strict=True))
    return PrefillCost(values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))


def _decode_figures(one: dict[str, float], two: dict[str, float]) -> list[float]:
    rates = [each["tokens"] / each["s"] for each in (one, two)]
    cpu = [1e3 * each["cpu_s"] / each["tokens"] for each in (one, two)]
    return [*rates, rates[1] / rates[0], *cpu, two["wire"] / two["tokens"]]


def _decode_row(name: str, rows: int, figures: Sequence[float], rounds: int) -> dict[str, Any]:
    one, two, ratio, one_cpu, two_cpu, sent = figures
    return {
        "link": name,
        "sequences": rows,
        "one process, tokens/s": one,
        "two": two,
        "two / one": ratio,
        "CPU, ms a token: one": one_cpu,
        "two ": two_cpu,
        "wire, bytes a token": sent or None,
        "rounds": rounds,
    }


def main() -> None:
    options = read_options()
    facts = machine.facts("gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu")
    result = kept.begun(facts, options, title="A model divided between two processes")
    path = options.out / f"group-{options.machine or machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, PARTS)
    budget = Budget(options.budget_s)
    with tempfile.TemporaryDirectory(prefix="satchel-group-") as work:
        bench = Bench(options, Path(work), budget)
        measures = {name: getattr(bench, name) for name in dict.fromkeys(options.parts)}
        kept.measure_all(measures, budget, path, result, parts.markdown)


if __name__ == "__main__":
    main()
