"""Measures the router's pure core: one decision, one report, and the rules against each other.

    python benchmarks/router.py [--policies] [--traces DIR] [--json FILE]

Decisions are timed with 64 replicas, 8 requests on each, and 100,000 blocks in the directory. `wire` adds unpacking the
request and packing the answer, as the actor does; `after` is what is left to do once it has answered. With `--policies`
simulated replicas answer conversations under every rule; `--traces` names a folder with recorded ones
(`claude_code_agents.jsonl.gz`, `mooncake_conversation.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from figures import machine_facts, percentile, print_table, save
from router_replay import Machine, Session, bursts, chat_service, coding_agents, replay, synthetic

from satchel.actors.kv_store.blocks import BLOCK_TOKENS
from satchel.actors.messages import ReplicaReport, RouteRequest, decode, encode
from satchel.actors.router.policy import RULES, Policy

REPLICAS = 64
BLOCKS = 100_000
CHAIN = 400
REPORTED = 100_000
ROWS = 8


def chain(name: str, length: int) -> list[bytes]:
    """Made-up ids of 32 bytes."""
    return [name.encode().ljust(24, b".") + index.to_bytes(8, "big") for index in range(length)]


def report(replica: str, announced: list[bytes], **fields: Any) -> ReplicaReport:
    values = {
        "incarnation": "1",
        "sequence": 0,
        "running": 0,
        "waiting": 0,
        "pending_tokens": 0,
        "rows_max": 32,
        "prefill_tokens_per_s": 1000.0,
        "active": [],
        "retracted": [],
        "full": True,
    }
    return ReplicaReport(replica=replica, model="m", announced=announced, **{**values, **fields})  # type: ignore[arg-type]


def full_cluster() -> Policy:
    """Every replica holds the system prompt and its own blocks; `held by all` and `held by one` are there too."""
    policy = Policy(timeout_s=1e9, sticky_penalty_s_max=2.0)
    everywhere = chain("system", 16) + chain("everywhere", CHAIN)
    own = (BLOCKS - len(everywhere) - CHAIN) // REPLICAS
    for index in range(REPLICAS):
        blocks = everywhere + chain(f"own {index}", own)
        if index == 7:
            blocks += chain("one", CHAIN)
        policy.observe(report(f"replica-{index}", blocks), 0.0)
    for index in range(REPLICAS * ROWS):
        policy.route(RouteRequest(f"row {index}", "m", "", [], 500), 0.0)
    return policy


def requests() -> dict[str, Callable[[int], tuple[str, list[bytes]]]]:
    """By name, the agent and block ids of a scenario's n-th request."""
    system, one, everywhere = chain("system", 16), chain("one", CHAIN), chain("everywhere", CHAIN)
    return {
        "no blocks, no agent": lambda n: ("", []),
        "nobody holds any of 400 blocks": lambda n: ("", chain(f"new {n}", CHAIN)),
        "new agent, all hold 16 of 400": lambda n: (f"agent {n}", system + chain(f"rest {n}", CHAIN - 16)),
        "one holds all of 400": lambda n: ("", one),
        "known agent, home holds all of 400": lambda n: ("agent", one),
        "all hold all of 400": lambda n: ("", everywhere),
    }


def time_decisions(calls: int) -> Iterator[dict[str, Any]]:
    policy = full_cluster()
    for name, make in requests().items():
        pure, wire, after = [], [], []
        for n in range(calls):
            agent, blocks = make(n)
            raw = encode(RouteRequest(f"q{n}", "m", agent, blocks, len(blocks) * BLOCK_TOKENS + 50))
            now = 10.0 * n
            start = time.perf_counter_ns()
            message = decode(RouteRequest, raw)
            unpacked = time.perf_counter_ns()
            decision = policy.route(message, now)
            routed = time.perf_counter_ns()
            assert decision is not None
            encode(decision)
            answered = time.perf_counter_ns()
            policy.settle()
            after.append((time.perf_counter_ns() - answered) / 1000)
            wire.append((answered - start) / 1000)
            pure.append((routed - unpacked) / 1000)
            policy.release(decision.replica, message.request_id)
            # What was expected of it does not come: the directory stays as it is.
            policy.directory.expire(decision.replica, float("inf"))
        yield {
            "request": name,
            **{f"{what}_us": percentile(pure, share) for what, share in (("p50", 0.5), ("p99", 0.99))},
            **{f"wire_{what}_us": percentile(wire, share) for what, share in (("p50", 0.5), ("p99", 0.99))},
            "after_p50_us": percentile(after, 0.5),
        }
    policy.check()


def time_reports() -> Iterator[dict[str, Any]]:
    policy, sequence = full_cluster(), count(1)
    first = chain("reported", REPORTED)
    other = first[REPORTED // 2 :] + chain("others", REPORTED // 2)
    cases = {
        "full, 100,000 new blocks": {"announced": first},
        "full, the same 100,000": {"announced": first},
        "full, half of 100,000 others": {"announced": other},
        "200 came and 200 went": {"announced": chain("few", 200), "retracted": other[:200], "full": False},
        "restarted with none": {"announced": [], "incarnation": "2"},
    }
    for name, fields in cases.items():
        raw = encode(report("replica-0", **{"sequence": next(sequence), **fields}))
        start = time.perf_counter()
        message = decode(ReplicaReport, raw)
        unpacked = last = time.perf_counter()
        longest = 0.0
        for _ in policy.observe_in_parts(message, 0.0):
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        yield {
            "report": name,
            "unpack_ms": 1000 * (unpacked - start),
            "take_ms": 1000 * (time.perf_counter() - unpacked),
            "longest_part_ms": 1000 * max(longest, time.perf_counter() - last),
        }
    policy.check()


def compare_rules(traces: Path | None) -> Iterator[dict[str, Any]]:
    workloads: dict[str, tuple[list[Session], Machine]] = {
        "64 agents, one system prompt": (synthetic(0), Machine()),
        "128 agents, one system prompt": (synthetic(0, agents=128), Machine()),
        "bursts of 64 on one's prefix": (bursts(0), Machine()),
    }
    if traces and (file := traces / "claude_code_agents.jsonl.gz").exists():
        workloads["coding agents (recorded)"] = (
            coding_agents(file),
            Machine(prefill_tokens_per_s=6000.0, blocks_max=8000),
        )
    if traces and (file := traces / "mooncake_conversation.jsonl").exists():
        workloads["chat service (recorded)"] = (chat_service(file), Machine())
    for name, (sessions, machine) in workloads.items():
        for rule in RULES:
            yield {"workload": name, "rule": rule, **replay(sessions, rule, machine=machine).figures()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="decisions timed of each kind")
    parser.add_argument("--policies", action="store_true", help="also compare the rules")
    parser.add_argument("--traces", type=Path, help="a folder with recorded conversations")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "router.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine_facts(), "replicas": REPLICAS, "blocks": BLOCKS}
    print(json.dumps(results, indent=2))
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "decisions": lambda: time_decisions(arguments.calls),
        "reports": time_reports,
    }
    if arguments.policies:
        parts["rules"] = lambda: compare_rules(arguments.traces)
    for name, measure in parts.items():
        results[name] = list(measure())
        print_table(results[name])
    save(arguments.json, results)


if __name__ == "__main__":
    main()
