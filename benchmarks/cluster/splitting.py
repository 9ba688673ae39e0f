"""The first token of a prompt that one node prefills and another decodes, beside each node alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from tokenizers import Tokenizer

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.protocol.router_messages import Decision, RouteRequest
from satchel.api.client.cluster import Cluster, connect
from satchel.api.pipeline.generation import Generator
from satchel.api.ray_backend.dispatch import RayBackend
from satchel.cluster.bring_up.ports import free_port

from ..parts import Budget, ResultTable, Say, median
from .arriving import OPENING_TOKENS, text_of
from .server import serving, wait_for

FIRST, SECOND = "mac0", "mac1"
"""The node that prefills, and the one that decodes."""

WAYS = {"first alone": (FIRST, ""), "second alone": (SECOND, ""), "split": (SECOND, FIRST)}
"""Where the answer is decoded, and where the prompt is prefilled if elsewhere. `forced.say` knows `ROUTER` besides."""

ROUTER = "router"
"""Where the router wants it."""

ANSWER_TOKENS = 16
AHEAD_S = 0.3
"""How long before the measured prompt the one comes that keeps the second node busy."""

Route = Callable[[RouteRequest], Awaitable[Decision]]


@dataclass(frozen=True)
class Said:
    """An answer: its words, and the seconds to its first token and to its end."""

    text: str
    first_s: float
    whole_s: float


class Forced:
    """A running cluster whose requests go where the measurement wants them.

    On one node alone they go by the router's own decision among that node's replicas. A split is forced on it, unless
    the way is `ROUTER`.

    Attributes:
        ways: the node that answers, and the one that prefills if it is another, by agent.
        decisions: the router's by agent, or what became of them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.decisions: dict[str, Decision] = {}
        self._cluster = cluster
        generator: Generator = vars(cluster)["_generator"]
        backend = generator.backend
        assert isinstance(backend, RayBackend)
        self._route: Route = backend.routing.decide
        self.ways: dict[str, tuple[str, str]] = {}
        backend.routing.decide = self._decide
        self._replicas = {stats.node: stats.replica for stats in self.stats()}

    def stats(self) -> list[Any]:
        """Of all replicas."""
        return [replica.stats().wait() for replica in self._cluster.replicas().values()]

    async def _decide(self, message: RouteRequest) -> Decision:
        name = message.agent.partition("/")[2]
        node, prefilled = self.ways.get(name, ("", ""))
        if node:
            others = [replica for where, replica in self._replicas.items() if where != node]
            message = replace(message, exclude=[*message.exclude, *others])
        decision = await self._route(message)
        if prefilled:
            tokens = message.prompt_tokens - 1
            decision = replace(
                decision, pull_from=prefilled, pull_tokens=tokens, prefill_on=self._replicas[prefilled], wait_s=120.0
            )
        self.decisions[name] = decision
        return decision

    async def say(self, name: str, text: str, way: str, tokens_max: int = ANSWER_TOKENS) -> Said:
        """Asks a new agent."""
        if way != ROUTER:
            self.ways[name] = WAYS[way]
        began, first_s, pieces = time.perf_counter(), 0.0, list[str]()
        agent = self._cluster.agent(name)
        async for piece in agent.chat(text, temperature=0, max_tokens=tokens_max, ignore_eos=True):
            first_s = first_s or time.perf_counter() - began
            pieces.append(piece)
        return Said("".join(pieces), first_s, time.perf_counter() - began)

    def counts(self) -> tuple[int, int]:
        """Returns how many requests were split, and how many of them fell back."""
        found = self.stats()
        return sum(one.split_requests_total for one in found), sum(one.split_fallbacks_total for one in found)


def splitting(tokens: int, rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """A line for an idle second node, and one for a busy one."""
    part = ResultTable(
        f"First token of {tokens:,} new tokens, prefilled on one node and decoded on another, embedded:recall"
    )
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "recall" / "tokenizer.json"))
    models = [{"name": "satchel/recall", "source": "embedded:recall"}]
    nodes = [{"name": FIRST}, {"name": SECOND}]
    # Agents share no KV, so that all may be told the same.
    config = {"models": models, "nodes": nodes, "replication": 0, "share": "agent", "endpoint": {"port": free_port()}}
    (work / "config.yaml").write_text(json.dumps(config))
    found: dict[str, list[dict[str, Said]]] = {"idle": [], "busy": []}
    home = work / FIRST
    with serving(["--config", str(work / "config.yaml")], home, [home / "nodes" / SECOND]):
        try:
            with connect(home) as cluster:
                wait_for(lambda: len(cluster.router.alive(models[0]["name"]).wait()) == len(nodes), "both answer")
                forced = Forced(cluster)
                asyncio.run(_warm_up(forced))
                before = forced.counts()
                for number in budget.rounds(rounds):
                    text = text_of(lambda text: len(tokenizer.encode(text).ids), tokens - OPENING_TOKENS, str(number))
                    for state, each in found.items():
                        each.append(asyncio.run(_round(forced, f"{state}{number}", text, busy=state == "busy")))
                        told = ", ".join(f"{way} {said.first_s:.2f} s" for way, said in each[-1].items())
                        say(f"  second node {state}: {told}")
                after = forced.counts()
        finally:
            with suppress(Exception):
                ray.shutdown()
    for state, each in found.items():
        if each:
            part.rows.append(row(state, each))
    done, fell_back = after[0] - before[0], after[1] - before[1]
    part.notes.append(
        f"Of {done} split requests {fell_back} fell back to computing. All ways of a round said the same words: "
        f"{'yes' if all(same(one) for each in found.values() for one in each) else 'NO'}."
    )
    part.notes.append(
        "Two nodes of this machine, on loopback, that share its cores; each request is sent where the line says, "
        "whatever the router would do. `busy`: the second node has begun to prefill another prompt of that length "
        f"{AHEAD_S} s before. Equal idle nodes gain nothing from each other, and the router does not split there."
    )
    return part


async def _warm_up(forced: Forced) -> None:
    for way in WAYS:
        await forced.say(f"warm-{way.replace(' ', '-')}", "Hello. " * 200, way)


async def _round(forced: Forced, name: str, text: str, *, busy: bool) -> dict[str, Said]:
    """Asks in every way, one after the other."""
    answers = {}
    for number, way in enumerate(WAYS):
        other = None
        if busy:
            other = asyncio.create_task(forced.say(f"{name}-other{number}", f"Others say: {text}", "second alone"))
            await asyncio.sleep(AHEAD_S)
        answers[way] = await forced.say(f"{name}-{number}", text, way)
        if other is not None:
            await other
    return answers


def same(answers: dict[str, Said]) -> bool:
    return len({said.text for said in answers.values()}) == 1


def row(state: str, rounds: list[dict[str, Said]]) -> dict[str, Any]:
    """A line of medians; ratios are taken within a round."""

    def ratio(way: str) -> float:
        return median([each["split"].first_s / each[way].first_s for each in rounds])

    firsts = {f"{way}, s": median([each[way].first_s for each in rounds]) for way in WAYS}
    return {
        "second node": state,
        **firsts,
        "split / first alone": ratio("first alone"),
        "split / second alone": ratio("second alone"),
        "same words": all(map(same, rounds)),
        "rounds": len(rounds),
    }
