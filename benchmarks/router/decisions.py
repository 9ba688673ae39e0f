"""Times the router's pure core: one decision, one report.

Decisions are timed with 64 replicas, 8 requests on each, and 100,000 blocks in the directory, without disks and with
one beside each replica that holds the same. `wire` adds unpacking the request and packing the answer, as the actor
does; `after` is what is left to do once it has answered. `time_large` does it with 1,000 nodes and 1,000,000 blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psutil

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import ReplicaReport, RouteRequest, StoreReport
from satchel.actors.router.policy import Policy
from satchel.actors.rpc.codec import decode, encode

from ..parts import percentile

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
        "sequences_max": 32,
        "prefill_tokens_per_s": 1000.0,
        "active": [],
        "retracted": [],
        "full": True,
    }
    return ReplicaReport(replica=replica, model="m", announced=announced, **{**values, **fields})  # type: ignore[arg-type]


def full_cluster(disks: bool = False) -> Policy:
    """Every replica holds the system prompt and its own blocks; `held by all` and `held by one` are there too. With
    `disks` each is on a node of its own, whose disk holds the same and 400 blocks more."""
    policy = Policy(timeout_s=1e9, sticky_penalty_s_max=2.0)
    everywhere = chain("system", 16) + chain("everywhere", CHAIN)
    own = (BLOCKS - len(everywhere) - CHAIN) // REPLICAS
    for index in range(REPLICAS):
        blocks = everywhere + chain(f"own {index}", own)
        if index == 7:
            blocks += chain("one", CHAIN)
        policy.members.observe(report(f"replica-{index}", blocks, node=f"node-{index}" if disks else ""), 0.0)
        if disks:
            blocks += chain(f"disk {index}", CHAIN)
            policy.members.observe_store(StoreReport(f"node-{index}", "1", 0, blocks, [], True), 0.0)
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


def time_decisions(calls: int, disks: bool = False) -> Iterator[dict[str, Any]]:
    policy, kinds = full_cluster(disks), requests()
    if disks:
        kinds["one disk holds all of 400"] = lambda n: ("", chain(f"disk {n % REPLICAS}", CHAIN))
    for name, make in kinds.items():
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
            policy.members.settle()
            after.append((time.perf_counter_ns() - answered) / 1000)
            wire.append((answered - start) / 1000)
            pure.append((routed - unpacked) / 1000)
            policy.members.release(decision.replica, message.request_id)
            # What was expected of it does not come: the directory stays as it is.
            policy.members.directory.expire(decision.replica, float("inf"))
        yield {
            "request": name,
            **{f"{what}_us": percentile(pure, share) for what, share in (("p50", 0.5), ("p99", 0.99))},
            **{f"wire_{what}_us": percentile(wire, share) for what, share in (("p50", 0.5), ("p99", 0.99))},
            "after_p50_us": percentile(after, 0.5),
        }
    policy.members.check()


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
        for _ in policy.members.observe_in_parts(message, 0.0):
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        yield {
            "report": name,
            "unpack_ms": 1000 * (unpacked - start),
            "take_ms": 1000 * (time.perf_counter() - unpacked),
            "longest_part_ms": 1000 * max(longest, time.perf_counter() - last),
        }
    policy.members.check()


def time_large(nodes: int, blocks: int, calls: int) -> Iterator[dict[str, Any]]:
    """A replica and a disk on each node; an eighth of what a disk holds is on the next one's too."""
    policy, own = Policy(timeout_s=1e9, sticky_penalty_s_max=2.0), blocks // nodes
    system = chain("system", 16)
    for index in range(nodes):
        policy.members.observe(report(f"replica-{index}", [], node=f"node-{index}"), 0.0)
        policy.members.observe_store(StoreReport(f"node-{index}", "1", 0, [], [], True), 0.0)
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    for index in range(nodes):
        disk = chain(f"own {index}", own)
        policy.members.observe(
            report(f"replica-{index}", system + disk[: own // 4], sequence=1, node=f"node-{index}"), 0.0
        )
        disk += system + chain(f"own {(index + 1) % nodes}", own // 8)
        policy.members.observe_store(StoreReport(f"node-{index}", "1", 1, disk, [], True), 0.0)
    taken = {
        "nodes": nodes,
        "blocks": policy.members.directory.blocks,
        "fill_s": time.perf_counter() - start,
        "bytes_a_block": (psutil.Process().memory_info().rss - before) / policy.members.directory.blocks,
    }
    length = min(400, own)
    kinds: dict[str, Callable[[int], list[bytes]]] = {
        "nobody holds any of 400 blocks": lambda n: chain(f"new {n}", length),
        "all hold all of 16": lambda n: system,
        "one holds 400, half in memory": lambda n: chain(f"own {n % nodes}", length),
    }
    for name, make in kinds.items():
        spent = []
        for n in range(calls):
            chosen = make(n)
            request = RouteRequest(f"q{n}", "m", "", chosen, len(chosen) * BLOCK_TOKENS + 50)
            start = time.perf_counter_ns()
            decision = policy.route(request, 10.0 * n)
            spent.append((time.perf_counter_ns() - start) / 1000)
            assert decision is not None
            policy.members.settle()
            policy.members.release(decision.replica, request.request_id)
            policy.members.directory.expire(decision.replica, float("inf"))
        rate = 1e6 * len(spent) / sum(spent)
        figures = {"p50_us": percentile(spent, 0.5), "p99_us": percentile(spent, 0.99), "decisions_a_s": rate}
        yield {"request": name, **figures, **taken}
