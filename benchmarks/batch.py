"""Measures what a batch of many short items costs the streams that run meanwhile.

    python -m benchmarks.batch [--model embedded:recall] [--rounds 3] [--items 1000]

A round begins with streams that run alone. Then a batch of short items is made, and the same streams run beside it.
Ratios are taken within a round. Nothing here is a test of speed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx

from satchel.cluster.bring_up.ports import free_port

from . import kept, machine, parts
from .parts import Budget, ResultTable, median, percentile
from .programs import RESULTS, ROOT

STREAMS = 16
PROMPT_WORDS = 32
ITEM_TOKENS = 8
GAPS_MAX = 1.05
"""Of the streams' gaps beside the batch, and alone."""

START_S = 600.0
ANSWER_S = 600.0
POLL_S = 0.2
WORDS = ("ada", "byron", "code", "eight", "five", "gull", "heron", "lima", "nine", "oslo", "robot", "seven", "story")


@dataclass(frozen=True)
class Burst:
    """Streams that ran at the same time: seconds between two pieces of one stream, and to each stream's first."""

    gaps: list[float]
    firsts: list[float]

    @property
    def mean(self) -> float:
        return sum(self.gaps) / len(self.gaps)


@contextmanager
def serving(model: str) -> Iterator[httpx.Client]:
    """A server of one model on this machine, and a client of it."""
    command = [sys.executable, "-m", "satchel.api.cli"]
    with tempfile.TemporaryDirectory(prefix="satchel-batch-") as home:
        where, port = ["--home", home], free_port()
        up = [*command, "up", model, "--port", str(port), *where]
        subprocess.run(up, check=True, cwd=ROOT, timeout=START_S, stdout=sys.stderr)
        try:
            limits = httpx.Limits(max_connections=2 * STREAMS)
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, limits=limits) as client:
                until_proven(client)
                yield client
        finally:
            subprocess.run([*command, "down", "--now", *where], check=True, timeout=START_S, stdout=sys.stderr)


def until_proven(client: httpx.Client) -> None:
    """Waits for the self-test: until then sequences are computed one after the other."""
    ends = time.monotonic() + START_S
    while client.get("/v1/models").json()["data"][0]["proving"]:
        if time.monotonic() > ends:
            raise SystemExit("the model's self-test has not ended")
        time.sleep(POLL_S)


def burst(client: httpx.Client, tokens: int, seed: str) -> Burst:
    """Runs the streams to their ends."""
    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(WORDS, k=PROMPT_WORDS)) for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        times = list(threads.map(lambda prompt: stream(client, prompt, tokens), prompts))
    gaps = [later - sooner for each in times for sooner, later in pairwise(each[1:])]
    return Burst(gaps, [each[1] - each[0] for each in times])


def stream(client: httpx.Client, prompt: str, tokens: int) -> list[float]:
    """Returns when the request was sent, and when each piece of its answer came."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times = [time.perf_counter()]
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


def begin_batch(client: httpx.Client, items: int, seed: str) -> str:
    """Makes a batch of short items, waits until some are answered, and returns its id."""
    rng = random.Random(seed)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": " ".join(rng.choices(WORDS, k=PROMPT_WORDS)),
                "max_tokens": ITEM_TOKENS,
                "ignore_eos": True,
            },
        }
        for number in range(items)
    ]
    file = ("items.jsonl", "\n".join(map(json.dumps, lines)).encode())
    uploaded = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"}).raise_for_status().json()
    asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).raise_for_status().json()["id"]
    while done(client, batch) == 0:
        time.sleep(POLL_S)
    return batch


def done(client: httpx.Client, batch: str) -> int:
    """Returns how many items are answered."""
    shown = client.get(f"/v1/batches/{batch}").raise_for_status().json()
    if shown["status"] == "failed":
        raise SystemExit(f"the batch failed: {shown['errors']}")
    return shown["request_counts"]["completed"]


def end_batch(client: httpx.Client, batch: str) -> None:
    """Cancels the batch, and waits until none of its items runs."""
    client.post(f"/v1/batches/{batch}/cancel")
    while client.get(f"/v1/batches/{batch}").json()["status"] not in ("cancelled", "completed"):
        time.sleep(POLL_S)
    while client.get("/v1/requests").json()["data"]:
        time.sleep(POLL_S)


def beside(model: str, items: int, tokens: int, rounds: int, budget: Budget) -> ResultTable:
    """A row for the streams alone, and one beside the batch."""
    part = ResultTable(f"{STREAMS} streams alone, and beside a batch of {items:,} short items ({model})")
    found: list[tuple[Burst, Burst, int]] = []
    with serving(model) as client:
        burst(client, tokens // 4, "warm")
        for number in budget.rounds(rounds):
            alone = burst(client, tokens, f"{number}/alone")
            batch = begin_batch(client, items, f"{number}/batch")
            before = done(client, batch)
            with_batch = burst(client, tokens, f"{number}/beside")
            after = done(client, batch)
            if after >= items:
                raise SystemExit(f"the batch ended before the streams; give it more than {items} items")
            end_batch(client, batch)
            found.append((alone, with_batch, after - before))
            print(f"  gaps {1e3 * alone.mean:.2f} ms alone, {1e3 * with_batch.mean:.2f} beside", flush=True)
    part.rows = [row("alone", [each[0] for each in found]), row("beside the batch", [each[1] for each in found])]
    ratios = [with_batch.mean / alone.mean for alone, with_batch, _ in found]
    part.at_most("mean gap beside the batch / alone (median of the rounds)", median(ratios), GAPS_MAX)
    part.notes += [
        f"Ratios of the rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)}.",
        f"Items answered while the streams ran: {', '.join(str(each[2]) for each in found)}. The first of them run "
        "until the streams come.",
        f"Streams: {PROMPT_WORDS} words in, {tokens} tokens out, greedy. Items: {PROMPT_WORDS} words in, {ITEM_TOKENS} "
        "tokens out. The client shares the machine's cores.",
    ]
    return part


def row(name: str, bursts: Sequence[Burst]) -> dict[str, Any]:
    """Medians over the rounds, in milliseconds."""
    figures = {
        "mean gap, ms": lambda each: each.mean,
        "median": lambda each: median(each.gaps),
        "95%": lambda each: percentile(each.gaps, 0.95),
        "99%": lambda each: percentile(each.gaps, 0.99),
        "longest": lambda each: max(each.gaps),
        "first token, ms": lambda each: median(each.firsts),
    }
    return {
        "streams": name,
        **{title: 1e3 * median([figure(each) for each in bursts]) for title, figure in figures.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="embedded:recall", help="a folder, a Hub id or embedded:NAME")
    add("--items", type=int, default=1000)
    add("--tokens", type=int, default=400, help="of a stream's answer")
    add("--rounds", type=int, default=3)
    add("--budget-s", type=float, default=900.0, help="after this many seconds nothing is begun")
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    facts = machine.facts("gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu")
    result: dict[str, Any] = {
        "title": "Streams beside a batch",
        "machine": facts,
        "versions": machine.versions(sys.executable),
        "when": kept.now(),
        "parts": {},
    }
    budget = Budget(options.budget_s)
    model = options.model if ":" in options.model else Path(options.model).name

    def measure() -> ResultTable:
        part = beside(options.model, options.items, options.tokens, options.rounds, budget)
        part.title = part.title.replace(options.model, model)
        return part

    path = options.out / f"batch-{machine.name_of(facts)}"
    kept.measure_all({"beside": measure}, budget, path, result, parts.markdown)


if __name__ == "__main__":
    main()
