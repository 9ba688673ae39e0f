"""What a pull costs the sequences that decode on the machine meanwhile."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from satchel.actors.kv_store.transfer.priority import give_way
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from tests.system.hosts import hosts

from ..parts import Budget, ResultTable, Say, median
from ..programs import program
from .moving import ServedChain, chain_on
from .worker import Worker

ROWS, ROW_TOKENS = 16, 400
PACE_MIN = 0.95
WINDOW_S = 2.0
"""A faster pull is repeated for so long: steps are counted whole."""


@dataclass(frozen=True)
class Window:
    """Some seconds of decoding: steps a second, processor milliseconds of a step, and the longest step."""

    steps_per_s: float
    step_cpu_ms: float
    longest_ms: float


@dataclass(frozen=True)
class Beside:
    """A window with pulls between two without, and what the pulls took: bytes a second, and processor seconds of a
    gigabyte on both sides."""

    before: Window
    during: Window
    after: Window
    bytes_per_s: float
    source_s: float
    target_s: float

    @property
    def pace(self) -> float:
        """What decoding kept of its pace."""
        return 2 * self.during.steps_per_s / (self.before.steps_per_s + self.after.steps_per_s)

    @property
    def cpu(self) -> float:
        """The processor time of a step, of what it is without a pull."""
        return 2 * self.during.step_cpu_ms / (self.before.step_cpu_ms + self.after.step_cpu_ms)


def window(decoder: Worker, work: Callable[[], object]) -> Window:
    """Counts while `work` is done."""
    first, began = decoder.ask("count"), time.perf_counter()
    work()
    last, seconds = decoder.ask("count"), time.perf_counter() - began
    steps = last["steps"] - first["steps"]
    cpu_ms = 1e3 * (last["cpu_s"] - first["cpu_s"]) / max(1, steps)
    return Window(steps / seconds, cpu_ms, last["longest_ms"])


def measured(decoder: Worker, chain: ServedChain, folder: Path) -> Beside:
    found: list[tuple[float, float, float]] = []

    def pull() -> None:
        ends = time.perf_counter() + WINDOW_S
        while not found or time.perf_counter() < ends:
            found.append(chain.pull_s(folder))

    before = window(decoder, lambda: time.sleep(WINDOW_S))
    # As a store's pulls do.
    with ThreadPoolExecutor(1, initializer=give_way) as threads:
        during = window(decoder, lambda: threads.submit(pull).result())
    after = window(decoder, lambda: time.sleep(WINDOW_S))
    seconds, source_s, target_s = (sum(each) for each in zip(*found, strict=True))
    gigabytes = len(found) * chain.nbytes / 1e9
    return Beside(before, during, after, 1e9 * gigabytes / seconds, source_s / gigabytes, target_s / gigabytes)


def beside(tokens: int, gbits: Sequence[float], rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """A line for each link in `gbits`."""
    blocks = max(1, tokens // BLOCK_TOKENS)
    part = ResultTable(f"Decoding {ROWS} rows while KV of {blocks * BLOCK_TOKENS:,} tokens of an 8B model is pulled")
    if (reason := hosts.missing()) is not None:
        part.notes.append(f"Left out: {reason}.")
        return part
    with (
        hosts.hosts(1) as (host,),
        Worker(program("cluster.decoder", ROWS, ROW_TOKENS), work / "decoder.log") as decoder,
        chain_on(host, blocks, work) as chain,
    ):
        # What is read first comes from the disk.
        chain.pull_s(work)
        for gbit in gbits:
            host.slow(round(1000 * gbit))
            found = []
            for _ in budget.rounds(rounds):
                found.append(each := measured(decoder, chain, work))
                steps = f"{each.before.steps_per_s:.1f}, {each.during.steps_per_s:.1f}, {each.after.steps_per_s:.1f}"
                say(f"  {gbit:g} Gb/s: {steps} steps/s, {each.bytes_per_s / 1e6:.0f} MB/s")
            if found:
                name = f"{gbit:g} Gb/s"
                part.rows.append(row(name, chain.nbytes, found))
                part.at_least(f"{name}: what decoding keeps of its pace", median([e.pace for e in found]), PACE_MIN)
    shutil.rmtree(work / "source", ignore_errors=True)
    part.notes.append(
        f"embedded:recall, {ROWS} rows of {ROW_TOKENS} tokens and more, in a process of its own. Windows of "
        f"{WINDOW_S:g} s without, with and without pulls onto disk; ratios are taken within a round, and the table has "
        "their medians. Both nodes, a pair of network namespaces, and the rows share this machine's cores."
    )
    return part


def row(link: str, nbytes: int, rounds: list[Beside]) -> dict[str, Any]:
    def middle(figure: Callable[[Beside], float]) -> float:
        return median([figure(each) for each in rounds])

    return {
        "link": link,
        "MB": nbytes / 1e6,
        "pull, MB/s": middle(lambda each: each.bytes_per_s / 1e6),
        "steps/s without": middle(lambda each: (each.before.steps_per_s + each.after.steps_per_s) / 2),
        "with": middle(lambda each: each.during.steps_per_s),
        "pace": middle(lambda each: each.pace),
        "worst": min(each.pace for each in rounds),
        "longest step, ms: without": middle(lambda each: max(each.before.longest_ms, each.after.longest_ms)),
        "with ": middle(lambda each: each.during.longest_ms),
        "CPU of a step, with / without": middle(lambda each: each.cpu),
        "CPU, s/GB: source": middle(lambda each: each.source_s),
        "target": middle(lambda each: each.target_s),
        "rounds": len(rounds),
    }
