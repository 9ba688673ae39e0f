"""A soak: agents talk for an hour to a server that has room for a tenth of what they hold, while it is killed again and
again and its disk fills; afterwards the same is done undisturbed, and compared.

    python -m tests.soak.run [--minutes 60] [--disk roomy] [--agents 24] [--seed 1]

With `--disk roomy` only the memory is small: then each turn may compute its own new tokens and one block. With
`--disk tenth` the disk is as small, and what it has no room for is computed again. Exits with 1 where a law is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import kept, machine
from benchmarks.programs import RESULTS, ROOT

from .driver import Soak
from .plan import LIMITS, SlotPlan
from .reference import Compared, Reference
from .report import kv_bytes, markdown, passed, summary
from .server import KILLED, SoakServer, disk_of

TOKENIZER = ROOT / "actors" / "model_files" / "embedded" / "recall" / "tokenizer.json"
MODES = ("roomy", "tenth")
WORDS_BYTES = 24 * 2**20
"""Room for words, indexes and what is being written, beside the KV."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def positive(text: str) -> float:
        if not 0 < (found := float(text)) < float("inf"):
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    def count(text: str) -> int:
        if (found := int(text)) < 0:
            raise argparse.ArgumentTypeError("numbers are not negative")
        return found

    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in KILLED]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(KILLED)}")
        return chosen

    add = parser.add_argument
    add("--minutes", type=positive, default=60.0)
    add("--disk", choices=MODES, default="roomy", help="what the disk has room for: all, or a tenth as the memory has")
    add("--agents", type=count, default=24, help="that talk at a time, each a client of its own")
    add("--rows", type=count, default=6, help="requests at a time")
    add("--seed", type=count, default=1)
    add("--kill-every-s", type=positive, help="(else 20 times in the run, at least every 4 minutes)")
    add("--kill", type=names, default=list(KILLED), help=f"of {', '.join(KILLED)}; '' for nothing")
    add("--fills", type=count, default=2, help="times that the disk is full")
    add("--fill-s", type=positive, help="for how long (else a minute, or a sixtieth of the run if that is shorter)")
    add("--memory-bytes", type=count, help="for KV in memory (else a tenth of what the agents are expected to hold)")
    add("--numerics", choices=("reproducible", "fast"), default="reproducible")
    add("--no-reference", action="store_true", help="do not compare the answers")
    add("--beside", action="store_true", help="compare them meanwhile, on the same cores, and not afterwards")
    add("--spoil", type=count, default=0, help="so many expected answers, to see that it is noticed")
    add("--work", type=Path, help="where files are written (else a temporary folder)")
    add("--logs", type=Path, default=ROOT / "build" / "soak", help="where logs stay")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


def expected_bytes(agents: int) -> int:
    """What agents hold at any time: each is on its way to the limit of its life."""
    return sum(kv_bytes(LIMITS[slot % len(LIMITS)] // 2) for slot in range(agents))


def needles_of(tokenizer: Tokenizer) -> Callable[[str, str], list[bytes]]:
    """The forms of a mark as token ids: the word as it stands in a sentence."""

    def forms(name: str, code: str) -> list[bytes]:
        sentence = f"the code of {name} is {code}."
        encoded = tokenizer.encode(sentence, add_special_tokens=False)
        start = sentence.index(name)
        inside = [
            i for i, (a, b) in zip(encoded.ids, encoded.offsets, strict=True) if b > start and a < start + len(name)
        ]
        return [np.asarray(inside, dtype="<u4").tobytes()]

    return forms


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Budgets in bytes, and what is done to the server."""
    expected = expected_bytes(options.agents)
    memory = options.memory_bytes or expected // 10
    disk = memory if options.disk == "tenth" else 6 * expected
    seconds = 60 * options.minutes
    return {
        "minutes": options.minutes,
        "agents": options.agents,
        "requests at a time": options.rows,
        "seed": options.seed,
        "numerics": options.numerics,
        "prefix_bytes_max": memory,
        "disk_bytes_max": disk,
        "file system, bytes": (2 * disk if options.disk == "tenth" else disk) + WORDS_BYTES,
        "killed": ", ".join(options.kill),
        "a kill every, s": options.kill_every_s or min(240.0, seconds / 5),
        "times that the disk is full": options.fills,
        "full for, s": options.fill_s or min(60.0, seconds / 12),
    }


async def soak(options: argparse.Namespace, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    """The run, and the undisturbed one after it. What both say, as plain data."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))

    def size_of(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    plans = [SlotPlan(options.seed, slot, size_of) for slot in range(options.agents)]
    with disk_of(work / "disk", settings["file system, bytes"]) as disk:
        if disk.bytes_max is None:
            say("no file system of its own can be mounted here: the disk does not fill")
        budgets = {
            "scheduling": {"prefix_bytes_max": settings["prefix_bytes_max"], "sequences_max": max(4, options.rows)},
            "disk_bytes_max": settings["disk_bytes_max"],
        }
        server = SoakServer(disk.folder / "home", budgets, work / "server.log", options.numerics)
        say(f"starting, with {settings['prefix_bytes_max'] / 1e6:.1f} MB of memory")
        over, beside = asyncio.Event(), None
        try:
            await asyncio.to_thread(server.start)
            log = work / "attempts.jsonl"
            run = Soak(server, disk, plans, options.rows, options.seed, needles_of(tokenizer), log, say)
            if options.beside and not options.no_reference:
                beside = asyncio.create_task(undisturbed(options, run, work, over))
            await run.run(
                options.minutes,
                options.kill,
                settings["a kill every, s"],
                settings["times that the disk is full"],
                settings["full for, s"],
            )
        finally:
            over.set()
            await asyncio.to_thread(server.stop)
    compared = None
    if not options.no_reference:
        compared = await (beside or undisturbed(options, run, work, over))
    return summary(run.seen, compared, run.counters.sums, settings, options.disk == "roomy")


async def undisturbed(options: argparse.Namespace, run: Soak, work: Path, over: asyncio.Event) -> Compared:
    """The same again, with room for all and nobody killed. `over` says that the run is."""
    server = SoakServer(work / "undisturbed", {}, work / "undisturbed.log", options.numerics)
    say("the undisturbed run")
    try:
        await asyncio.to_thread(server.start)
        return await Reference(server.url, options.rows, say, options.spoil).run(run.seen.records, over)
    finally:
        await asyncio.to_thread(server.stop)


def main() -> None:
    options = read_options()
    # So that what was started and mounted is ended in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = machine.facts("cpu")
    result: dict[str, Any] = {"machine": facts, "versions": machine.versions(sys.executable), "parts": {}}
    path = options.out / f"soak-{options.machine or machine.name_of(facts)}"
    result["parts"] = kept.earlier(path, result, MODES)
    when, load = kept.now(), os.getloadavg()[0]
    settings = settings_of(options)
    with tempfile.TemporaryDirectory(prefix="satchel-soak-", dir=options.work) as folder:
        say(f"files are in {folder}; logs will be in {options.logs}")
        try:
            part = asyncio.run(soak(options, settings, Path(folder)))
        finally:
            keep_logs(Path(folder), options.logs)
    result["parts"][options.disk] = {"when": f"{when}, load of the machine before it {load:.2f}", **part}
    kept.save(path, result, markdown)
    print(markdown({**result, "parts": {options.disk: result["parts"][options.disk]}}))
    raise SystemExit(0 if passed(part) else 1)


def keep_logs(folder: Path, logs: Path) -> None:
    """What the servers printed, and every attempt, stay."""
    logs.mkdir(parents=True, exist_ok=True)
    for each in folder.glob("*"):
        if each.suffix in (".log", ".jsonl"):
            (logs / each.name).write_bytes(each.read_bytes())


if __name__ == "__main__":
    main()
