"""Where Satchel's time outside the model goes: py-spy on the endpoint and the replica, under load."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..programs import ROOT
from .measures import level
from .processes import short_name
from .prompts import Prompts
from .protocol import Burst
from .targets import RunFolder, Target

RATE_HZ = 200
RECORD_S = 6
WARM_UP_TOKENS = 8
TIMEOUT_S = 180.0
TABLE_ROWS = 12
PROCESSES = {"ServeReplica": "endpoint", "ReplicaActor": "replica"}
"""What Ray calls the processes that a token passes; the replica is the one with the model."""

Stack = tuple[str, ...]


@dataclass(frozen=True)
class BurstLoad:
    """Bursts of this many answers at once, of so many tokens."""

    streams: int
    tokens: int
    prompt_tokens: int


def profile(folder: Path, place: RunFolder, load: BurstLoad, say: Callable[[str], None]) -> dict[str, Any]:
    """What py-spy and the system's own counts say of Satchel under a load.

    Returns:
        `streams` and `tokens_per_s` of the load; `cpu_share`, by process, in cores; `processes`, see `_table`: one that
        cannot be looked into has `error` instead.

    Raises:
        CannotStart: Satchel does not start.
        TargetFailed: the load failed.
    """
    target = Target("satchel", folder, place)
    try:
        assert target.server is not None
        with _under(load, target, Prompts(folder)) as rates:
            tables: dict[str, Any] = {}
            before, began = target.server.cpu_s(), time.perf_counter()
            for title, name in PROCESSES.items():
                say(f"  profiling the {name}")
                tables[name] = _look_into(target, title, place.work)
            took, after = time.perf_counter() - began, target.server.cpu_s()
        shares = {name: (cpu - before.get(name, 0.0)) / took for name, cpu in after.items()}
        return {
            "streams": load.streams,
            "tokens_per_s": statistics.median(rates),
            "cpu_share": dict(sorted(shares.items(), key=lambda item: -item[1])),
            "processes": tables,
        }
    finally:
        target.stop()


@contextmanager
def _under(load: BurstLoad, target: Target, prompts: Prompts) -> Iterator[list[float]]:
    """Bursts without a pause until the block ends. Yields their tokens a second, whole after the block."""
    stop = threading.Event()
    rates: list[float] = []

    def burst(turn: int, tokens: int) -> float:
        trace = target.run(
            Burst(prompts.some([load.prompt_tokens] * load.streams, f"profile/{turn}", as_ids=False), tokens, TIMEOUT_S)
        )
        return level(trace, str(load.prompt_tokens), tokens, {}).tokens_per_s

    def run() -> None:
        while not stop.is_set():
            rates.append(burst(len(rates) + 1, load.tokens))

    burst(0, WARM_UP_TOKENS)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        try:
            yield rates
        finally:
            stop.set()
            done.result()


def _look_into(target: Target, title: str, work: Path) -> dict[str, Any]:
    assert target.server is not None
    found = [process for process in target.server.members() if _title(process).startswith(title)]
    if not found:
        return {"error": f"there is no process called {title}"}
    try:
        return _table(_record(found[0].pid, work))
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"py-spy: {getattr(error, 'stderr', None) or error}"}


def _title(process: psutil.Process) -> str:
    try:
        return short_name(process)
    except psutil.Error:
        return ""


def _record(pid: int, work: Path) -> Counter[Stack]:
    """Stacks of whoever held the interpreter's lock, from the outermost function to the innermost, with the number of
    samples that had them."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = [spy] if spy else [shutil.which("uv") or str(ROOT / ".uv/bin/uv"), "tool", "run", "py-spy"]
    output = work / f"stacks-{pid}.txt"
    command += ["record", "--pid", str(pid), "--duration", str(RECORD_S), "--rate", str(RATE_HZ), "--format", "raw"]
    command += ["--gil", "--nonblocking", "--function", "--full-filenames", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=RECORD_S + 60)
    stacks: Counter[Stack] = Counter()
    for line in output.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        stacks[tuple(stack.split(";"))] += int(count)
    return stacks


def _table(holding: Counter[Stack]) -> dict[str, Any]:
    """`gil_share`: the part of the time in which some thread held the interpreter's lock, which is what a process can
    do only one at a time. The rest tells who held it, in parts of that."""
    samples = max(1, sum(holding.values()))
    packages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    under: Counter[str] = Counter()
    for stack, count in holding.items():
        frames = [_frame(frame) for frame in stack]
        package, function = frames[-1]
        packages[package] += count
        functions[f"{package}: {function}"] += count
        for name in {f"{package}: {function}" for package, function in frames if package.startswith("satchel/")}:
            under[name] += count

    def shares(counts: Counter[str]) -> dict[str, float]:
        return {name: count / samples for name, count in counts.most_common(TABLE_ROWS)}

    return {
        "gil_share": sum(holding.values()) / (RATE_HZ * RECORD_S),
        "by_package": shares(packages),
        "by_function": shares(functions),
        "under_ours": shares(under),
    }


def _frame(frame: str) -> tuple[str, str]:
    """Package and function of a frame such as `run (/…/site-packages/ray/actor.py:12)`."""
    match = re.fullmatch(r"(.*) \((.*?)(?::\d+)?\)", frame)
    if match is None:
        return "(no Python function)", ""
    function, file = match[1], match[2]
    if "site-packages/" in file:
        return file.split("site-packages/", 1)[1].split("/")[0].removesuffix(".py"), function
    for root in {str(ROOT), os.path.realpath(ROOT)}:
        if file.startswith(root + "/"):
            return f"satchel/{file[len(root) + 1 :]}", function
    # Compiled modules have a name instead of a path; the rest is the standard library.
    return (f"python/{Path(file).name}" if "/" in file and "python" in file else file.split("/")[0]), function
