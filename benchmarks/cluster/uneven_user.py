"""The user of two uneven nodes, on the first one's host, where Ray's driver has to be.

    python -m benchmarks.cluster.uneven_user HOME

Each question is an agent that is asked something: its `name`, the `text`, the `way`, and how many `rows` decode on the
first node meanwhile. The answer has the words with their times, and what the router decided. See `worker.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from satchel.actors.protocol.router_messages import Decision
from satchel.api.client.cluster import Cluster, connect

from .server import wait_for
from .splitting import FIRST, Forced
from .worker import answer

TOKENS = 128
"""Of an answer: as many as the router compares decode steps for."""

BUSY_TOKENS = 6000
"""Of the answers that keep a node busy: more than are written in a round."""

MEASURED_S = 2.0
"""How long the sequences decode alone, so that the router knows their pace."""


class Busy:
    """Sequences that decode on the first node; `tokens` is how many they have generated."""

    def __init__(self, forced: Forced, cluster: Cluster) -> None:
        self._forced, self._cluster = forced, cluster
        self._tasks: list[asyncio.Task[None]] = []
        self.tokens = 0

    async def _write(self, name: str, begun: asyncio.Event) -> None:
        self._forced.ways[name] = FIRST, ""
        agent = self._cluster.agent(name)
        async for _ in agent.chat("Count as far as you can.", temperature=0, max_tokens=BUSY_TOKENS, ignore_eos=True):
            self.tokens += 1
            begun.set()

    async def begin(self, name: str, rows: int) -> None:
        """Returns once all sequences have decoded for a while."""
        begun = [asyncio.Event() for _ in range(rows)]
        self._tasks = [
            asyncio.create_task(self._write(f"{name}-row{number}", event)) for number, event in enumerate(begun)
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.sleep(MEASURED_S if rows else 0.0)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def asked(forced: Forced, cluster: Cluster, question: dict[str, Any]) -> dict[str, Any]:
    busy, name = Busy(forced, cluster), question["name"]
    await busy.begin(name, question["rows"])
    try:
        began, before = time.perf_counter(), busy.tokens
        said = await forced.say(name, question["text"], question["way"], TOKENS)
        pace = (busy.tokens - before) / (time.perf_counter() - began)
    finally:
        await busy.end()
    decision = forced.decisions[name]
    return {"said": asdict(said), "others": pace, "why": decision.why, "costs_s": costs_of(decision)}


def costs_of(decision: Decision) -> dict[str, Any]:
    """The router's estimates in seconds: of the split, if it was one, and of each replica alone by term."""
    alone = {
        name: {term: seconds[place] for term, seconds in decision.costs_s.items()}
        for place, name in enumerate(decision.candidates)
    }
    return {"split": decision.split_costs_s, "alone": alone}


def main() -> None:
    try:
        with connect(Path(sys.argv[1])) as cluster:
            name = cluster.config.models[0].name
            wait_for(lambda: len(cluster.router.alive(name).wait()) == len(cluster.config.machines), "all answer")
            forced = Forced(cluster)

            def reply(question: Any) -> Any:
                return forced.counts() if question == "counts" else asyncio.run(asked(forced, cluster, question))

            answer(reply)
    finally:
        with suppress(Exception):
            ray.shutdown()


if __name__ == "__main__":
    main()
