"""The first token of an agent that has come to another node, beside computing what it remembers there."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import ReplicaReport, RouteRequest, StoreReport
from satchel.actors.router.policy import Policy
from satchel.cluster.home import Home
from satchel.cluster.keys import OWNER, create_key
from tests.system.hosts import hosts

from ..parts import Budget, ResultTable, Say, median
from .server import ClusterClient, ClusterStream, serving, wait_for

HEAD, OTHER, PORT = "mac0", "mac1", 8000
FAST_MBIT = 10_000
ANSWER_TOKENS = 8
OPENING_TOKENS = 40
"""About what the chat template adds, and the short answer."""


@dataclass(frozen=True)
class Rates:
    """What was measured. `restore_bytes_per_s` 0 is not measured."""

    prefill_tokens_per_s: float
    link_bytes_per_s: float
    kv_bytes_per_token: float
    restore_bytes_per_s: float = 0.0


def pulls(tokens: int, rates: Rates) -> tuple[bool, float]:
    """Whether the router lets a replica pull a prompt that only another node's disk holds, and by its own reckoning how
    many seconds there are to the first token."""
    policy = Policy(timeout_s=5.0, sticky_penalty_s_max=2.0)
    ids = [bytes([1]) * 24 + index.to_bytes(8, "big") for index in range(tokens // BLOCK_TOKENS)]
    for node in (HEAD, OTHER):
        blocks = ids if node == HEAD else []
        links = {HEAD: rates.link_bytes_per_s} if node == OTHER else {}
        policy.members.observe_store(StoreReport(node, "1", 0, blocks, [], True, links=links), 0.0)
        report = ReplicaReport(
            f"on {node}", "m", "1", 0, 0, 0, 0, 16, rates.prefill_tokens_per_s, [], [], [], True,
            node=node, restore_bytes_per_s=rates.restore_bytes_per_s, kv_bytes_per_token=rates.kv_bytes_per_token,
        )  # fmt: skip
        policy.members.observe(report, 0.0)
    decision = policy.route(RouteRequest("q", "m", "", ids, tokens, exclude=[f"on {HEAD}"]), 0.0)
    assert decision is not None and decision.node == OTHER
    here = decision.candidates.index(decision.replica)
    return decision.pull_from == HEAD, decision.costs_s["total"][here]


def break_even_bytes_per_s(tokens: int, rates: Rates) -> float:
    """The slowest link over which the router still has the prompt pulled, within a hundredth."""
    low, high = 1.0, 1e12
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        tried = Rates(rates.prefill_tokens_per_s, middle, rates.kv_bytes_per_token, rates.restore_bytes_per_s)
        low, high = (low, middle) if pulls(tokens, tried)[0] else (middle, high)
    return high


def text_of(count: Callable[[str], int], tokens: int, seed: str) -> str:
    """Sentences with random codes, of no more than `tokens` tokens."""
    rng, text = random.Random(seed), "Remember these codes."
    while True:
        name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)).capitalize()
        longer = f"{text} The code of {name} is {rng.randrange(1000, 10_000)}."
        if count(longer) > tokens:
            return text
        text = longer


@contextmanager
def two_hosts(work: Path) -> Iterator[tuple[ClusterClient, Any]]:
    """A cluster of two namespaces without copies of agents; its client, and the host of the second node."""
    with hosts.hosts(2) as (head, second):
        nodes = [
            {"name": HEAD, "address": head.address},
            {
                "name": OTHER,
                "address": second.address,
                "ssh": second.name,
                "home": str(work / OTHER),
                "command": f"{sys.executable} -P -m satchel.api.cli",
            },
        ]
        config = work / "config.yaml"
        models = [{"name": "satchel/recall", "source": "embedded:recall"}]
        endpoint = {"listen": head.address, "port": PORT}
        # JSON is YAML.
        config.write_text(json.dumps({"models": models, "nodes": nodes, "endpoint": endpoint, "replication": 0}))
        _, key = create_key(Home(work / HEAD), OWNER, admin=True)
        arguments, programs = ["--config", str(config)], hosts.stand_in_ssh(work)
        with (
            serving(arguments, work / HEAD, [work / OTHER], prefix=head.command(), path=programs),
            ClusterClient(f"http://{head.address}:{PORT}", key) as client,
        ):
            wait_for(lambda: client.replica_pid(OTHER), f"{OTHER} answers")
            yield client, second


def arriving(tokens: int, mbits: Sequence[int], rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """A line for each link."""
    part = ResultTable(f"First token of an agent of {tokens:,} tokens on a node to which it was moved, embedded:recall")
    if (reason := hosts.missing()) is not None:
        part.notes.append(f"Left out: {reason}.")
        return part
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "recall" / "tokenizer.json"))
    named = hosts.named

    def told(client: ClusterClient, name: str, home: str) -> tuple[str, float]:
        """A new agent that was told all on its home; seconds to its first token."""
        agent = named(name, home, [HEAD, OTHER])
        text = text_of(lambda text: len(tokenizer.encode(text).ids), tokens - OPENING_TOKENS, name)
        answer = client.say(agent, text, ANSWER_TOKENS)
        if answer.node != home:
            raise RuntimeError(f"{agent} was answered on {answer.node}")
        return agent, answer.first_s

    found: dict[int, list[dict[str, float]]] = {mbit: [] for mbit in mbits}
    elsewhere = list[str]()
    with two_hosts(work) as (client, second):
        for number in budget.rounds(rounds):
            second.slow(FAST_MBIT)
            _, computed_s = told(client, f"cold{number}x", OTHER)
            for mbit in mbits:
                second.slow(FAST_MBIT)
                agent, _ = told(client, f"moved{number}x{mbit}x", HEAD)
                second.slow(mbit)
                figures, answer = _moved(client, agent)
                if answer.node == OTHER:
                    found[mbit].append({"computed_s": computed_s, **figures})
                else:
                    elsewhere.append(f"{mbit:,} Mb/s ({answer.why})")
                say(f"  {mbit:,} Mb/s, {answer.node}: " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()))
    for mbit, each in found.items():
        if each:
            part.rows.append(row(mbit, each))
        else:
            part.notes.append(f"Nothing was measured at {mbit:,} Mb/s.")
    if elsewhere:
        part.notes.append(
            f"Not counted, for the router sent the agent back to where it came from: {', '.join(elsewhere)}."
        )
    note_policy(part, tokens)
    return part


def _moved(client: ClusterClient, agent: str) -> tuple[dict[str, float], ClusterStream]:
    """Move the agent and ask it. Returns what was measured, and the answer."""
    began = time.perf_counter()
    moved = client.json("POST", f"/v1/agents/{agent}/move", {"to": OTHER})
    move_s = time.perf_counter() - began
    answer = client.say(agent, "What is the first code?", ANSWER_TOKENS)
    if not moved["moved"]:
        raise RuntimeError(f"{agent} was not moved: {moved}")
    link = next(each for node in client.cluster()["nodes"] if node["name"] == OTHER for each in node["links"])
    figures = {
        "move_s": move_s,
        "first_s": answer.first_s,
        "prompt": answer.prompt,
        "computed": answer.prompt - answer.cached,
        "bytes": moved["bytes"],
        "link": link["bytes_per_s"] or float("nan"),
    }
    return figures, answer


def row(mbit: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """A line of medians, and what the router would choose at the measured rates."""

    def middle(key: str) -> float:
        return median([each[key] for each in rounds])

    ratios = [each["computed_s"] / (each["move_s"] + each["first_s"]) for each in rounds]
    tokens = round(middle("prompt"))
    rates = Rates(tokens / middle("computed_s"), mbit * 1e6 / 8, max(1.0, middle("bytes") / tokens))
    chosen, estimate_s = pulls(tokens, rates)
    return {
        "link, Mb/s": mbit,
        "computed there, s": middle("computed_s"),
        "move, s": middle("move_s"),
        "first token then, s": middle("first_s"),
        "computed / moved": median(ratios),
        "tokens computed": middle("computed"),
        "KV, MB": middle("bytes") / 1e6,
        "link as the router saw it, MB/s": middle("link") / 1e6,
        "router": "pull" if chosen else "compute",
        "its estimate, s": estimate_s,
        "break-even, Mb/s": break_even_bytes_per_s(tokens, rates) * 8 / 1e6,
        "rounds": len(rounds),
    }


def note_policy(part: ResultTable, tokens: int) -> None:
    part.notes.append(
        "Two nodes as network namespaces of this machine, over HTTP, without copies (`replication: 0`). A move is the "
        "whole call, words and KV; `computed there` is the first answer of another agent on that node, whose first "
        f"message has as many tokens ({tokens:,})."
    )
    part.notes.append(
        "`router` is what its rules say of the same prompt for a replica that must answer and a peer's disk that holds "
        "it, at the measured prefill and the link's speed; below the break-even it has the prompt computed."
    )
