"""Measures a replica's prefix cache with 100,000 blocks: finding a prompt's prefix, keeping blocks, telling the router.

python -m benchmarks.prefix [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV

from . import machine
from .parts import percentile
from .programs import RESULTS

BLOCKS = 100_000
CHAIN = 400
ROOT = b"root".ljust(32, b".")


def chain(name: str, length: int) -> list[bytes]:
    """Made-up ids of 32 bytes; fresh objects at every call, as they come off the wire."""
    return [name.encode().ljust(24, b".") + index.to_bytes(8, "big") for index in range(length)]


def full_cache() -> PrefixCache[None]:
    """250 conversations of 400 blocks, which fill it to the last byte. All blocks have the same tokens."""
    cache: PrefixCache[None] = PrefixCache(BLOCKS)
    for index in range(BLOCKS // CHAIN):
        keep(cache, f"talk {index}", CHAIN)
    return cache


def keep(cache: PrefixCache[None], name: str, length: int) -> None:
    tokens = range(1000, 1000 + BLOCK_TOKENS)
    cache.put_blocks(chain(name, length), [(index, tokens, PrefixKV(None, 1)) for index in range(length)])


def operations(cache: PrefixCache[None]) -> dict[str, Callable[[int], tuple[Callable[[], object], int]]]:
    """By name, how to prepare the n-th call: what is timed, and how many times it is called in all."""
    prompt = list(range(1000, 1000 + BLOCK_TOKENS)) * CHAIN + [1]

    def match(name: str, blocks: int) -> Callable[[], object]:
        ids, asked = chain(name, blocks), [*prompt[: blocks * BLOCK_TOKENS], 1]
        return lambda: cache.match(ROOT, ids, asked, len(asked) - 1)

    return {
        "match, nothing of 400 blocks": lambda n: (match(f"unknown {n}", CHAIN), 1000),
        "match, 16 blocks": lambda n: (match(f"talk {n % 200}", 16), 1000),
        "match, 400 blocks": lambda n: (match(f"talk {n % 200}", CHAIN), 1000),
        "keep 8 new blocks, and drop 8": lambda n: (lambda: keep(cache, f"new {n}", 8), 1000),
        "events since the last report": lambda n: (cache.drain_events, 1),
        "all ids, for a full report": lambda n: (cache.block_ids, 20),
    }


def measure() -> Iterator[dict[str, Any]]:
    cache = full_cache()
    for name, prepare in operations(cache).items():
        times: list[float] = []
        while not times or len(times) < prepare(0)[1]:
            call, _ = prepare(len(times))
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1000)
        yield {"operation": name, "p50_us": percentile(times, 0.5), "p99_us": percentile(times, 0.99)}
    cache.check()


def print_table(rows: list[dict[str, Any]]) -> None:
    """As Markdown."""
    names = list(rows[0])
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = (f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        print("| " + " | ".join(cells) + " |")


def save(path: Path, results: dict[str, Any]) -> None:
    """As JSON, with three decimals."""
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "prefix.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine.facts("cpu"), "blocks": BLOCKS}
    print(json.dumps(results, indent=2))
    results["operations"] = list(measure())
    print_table(results["operations"])
    save(arguments.json, results)


if __name__ == "__main__":
    main()
