"""Clients of all kinds at random: no committed turn of a surviving branch is lost or mixed, and epochs only grow."""

from __future__ import annotations

import random
from typing import Any

import pytest

from satchel.cluster.errors import AgentExists, AgentNotFound, InvalidRequest

from .test_agents import MODEL, Store, said_of


class _Simulation:
    """Agents' clients at random. Every line says what all its turns said, so a mixture would show."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = Store(branches_max=4, bytes_max=60_000)
        self.names = [f"t/{name}" for name in "abcd"]
        self.open: list[dict[str, Any]] = []
        self.serial = 0
        self.epochs: dict[tuple[str, int], int] = {}
        self.forgotten: set[str] = set()

    def step(self) -> None:
        self.store.now += self.random.choice([0.0, 1.0, 5.0, 40.0])
        kind = self.random.choices(
            ["stateless", "side", "take", "commit", "abandon", "forget", "fork"], [6, 2, 4, 14, 1, 1, 1]
        )[0]
        getattr(self, kind)(self.random.choice(self.names))
        self.check()

    def say(self) -> str:
        self.serial += 1
        return f"{self.serial} " + "." * self.random.randrange(200)

    def stateless(self, agent: str) -> None:
        since, found = self.store.agents.recall(agent, MODEL, {})
        base = self.random.choice(found) if found else None
        said = said_of(base[1]) if base and base[1] else []
        self.open.append({"agent": agent, "since": since, "base": base[0] if base else None, "said": said, "turn": ""})

    def side(self, agent: str) -> None:
        since, _ = self.store.agents.recall(agent, MODEL, {})
        self.open.append({"agent": agent, "since": since, "base": None, "said": [], "turn": ""})

    def take(self, agent: str) -> None:
        self.serial += 1
        turn = f"turn {self.serial}"
        begun = self.store.begin(agent, turn)
        if begun is not None:
            base, said = (begun[1][0], said_of(begun[1][1])) if begun[1] else (None, [])
            self.open.append({"agent": agent, "since": begun[0], "base": base, "said": said, "turn": turn})

    def commit(self, _: str) -> None:
        if not self.open:
            return
        turn = self.open.pop(self.random.randrange(len(self.open)))
        agent, base = turn["agent"], turn["base"]
        before = self.store.said(agent)
        heads = {head.branch: head.epoch for head in self.store.agents.heads(agent)}
        said = [*turn["said"], self.say()]
        outcome = self.store.commit(
            agent,
            *said,
            since=turn["since"],
            branch=base.branch if base else None,
            epoch=base.epoch if base else 0,
            turns=base.turns + 1 if base else 1,
            turn=turn["turn"],
        )
        after = self.store.said(agent)
        if not outcome.kept:
            assert after == before
            return
        assert turn["since"] >= self.forgotten_at(agent), "after forget nothing commits that began before"
        assert after[outcome.branch] == said
        unchanged = base is not None and heads.get(base.branch) == base.epoch
        assert (outcome.kind == "replaced") == unchanged
        others = {branch: lines for branch, lines in after.items() if branch != outcome.branch}
        assert others.items() <= before.items(), "no other branch is changed"

    def forgotten_at(self, agent: str) -> int:
        return self.store.database.buried(agent)

    def abandon(self, _: str) -> None:
        if self.open:
            turn = self.open.pop(self.random.randrange(len(self.open)))
            self.store.agents.abandon(turn["agent"], turn["turn"])

    def forget(self, agent: str) -> None:
        self.store.forget(agent)
        assert self.store.said(agent) == {}

    def fork(self, source: str) -> None:
        target = self.random.choice(self.names)
        try:
            self.store.fork(source, target)
        except (AgentNotFound, AgentExists, InvalidRequest):
            return
        assert list(self.store.said(source).values()) == list(self.store.said(target).values())

    def check(self) -> None:
        self.store.agents.check(self.names)
        sizes = 0
        for agent in self.names:
            for head in self.store.agents.heads(agent):
                sizes += head.nbytes
                assert self.epochs.get((agent, head.branch), 0) <= head.epoch, "epochs only grow"
                self.epochs[agent, head.branch] = head.epoch
            self.store.said(agent)
        assert sizes == self.store.agents.nbytes


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_together_no_turn_is_lost_or_mixed(seed):
    simulation = _Simulation(seed)
    for _ in range(250):
        simulation.step()
