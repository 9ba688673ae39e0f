"""Clients of all kinds at random: no committed turn of a surviving branch is lost or mixed, and epochs only grow."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from satchel.actors.protocol.store_messages import CommitOutcome
from satchel.cluster.errors import AgentExists, AgentNotFound, InvalidRequest, Unavailable

from .test_agents import LEASE_S, MODEL, Store, said_of


class _Simulation:
    """Agents' clients at random. Every line says what all its turns said, so a mixture would show."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = Store(branches_max=4, bytes_max=60_000, tombstones_max=1)
        self.names = [f"t/{name}" for name in "abcd"]
        self.open: list[dict[str, Any]] = []
        self.serial = 0
        self.epochs: dict[tuple[str, int], int] = {}
        # When each was forgotten last, of which the store may have let the tombstone go.
        self.forgotten: dict[str, int] = {}
        # Branches that something was put into, and who has each agent's turn until when.
        self.injected: set[tuple[str, int]] = set()
        self.holders: dict[str, tuple[str, float]] = {}

    def step(self) -> None:
        self.store.now += self.random.choice([0.0, 1.0, 5.0, 40.0])
        kind = self.random.choices(
            ["stateless", "side", "take", "commit", "fail", "abandon", "forget", "fork"], [6, 2, 4, 14, 2, 1, 2, 1]
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
            self.holders[agent] = turn, self.store.now + LEASE_S

    def write(self, turn: dict[str, Any], said: list[str], injected: bool) -> CommitOutcome:
        base = turn["base"]
        return self.store.commit(
            turn["agent"],
            *said,
            since=turn["since"],
            branch=base.branch if base else None,
            epoch=base.epoch if base else 0,
            turns=base.turns + 1 if base else 1,
            injected=injected,
            turn=turn["turn"],
        )

    def commit(self, _: str) -> None:
        if not self.open:
            return
        turn = self.open.pop(self.random.randrange(len(self.open)))
        agent, base = turn["agent"], turn["base"]
        before = self.store.said(agent)
        heads = {head.branch: head.epoch for head in self.store.agents.heads(agent)}
        said, injected = [*turn["said"], self.say()], self.random.random() < 0.2
        outcome = self.write(turn, said, injected)
        if outcome.kind != "lost" and self.holders.get(agent, (None,))[0] == turn["turn"]:
            del self.holders[agent]
        after = self.store.said(agent)
        if not outcome.kept:
            assert after == before
            return
        assert turn["since"] >= self.forgotten.get(agent, 0), "after forget nothing commits that began before"
        if injected:
            self.injected.add((agent, outcome.branch))
        assert after[outcome.branch] == said
        unchanged = base is not None and heads.get(base.branch) == base.epoch
        assert (outcome.kind == "replaced") == unchanged
        others = {branch: lines for branch, lines in after.items() if branch != outcome.branch}
        assert others.items() <= before.items(), "no other branch is changed"

    def fail(self, _: str) -> None:
        """The disk does not take a turn's end: it is given back, as the store does, to be ended once more."""
        if not self.open:
            return
        turn = self.random.choice(self.open)
        agent, before = turn["agent"], self.store.said(turn["agent"])
        with suppress(Unavailable), self.store.database.transaction():
            self.write(turn, [*turn["said"], "not kept"], injected=True)
            raise Unavailable("the disk is full")
        assert self.store.said(agent) == before
        if turn["turn"]:
            self.store.agents.retake(agent, turn["turn"], self.store.now, LEASE_S)
            held = self.holders.get(agent)
            if held is None or held[0] == turn["turn"]:
                self.holders[agent] = turn["turn"], self.store.now + LEASE_S

    def abandon(self, _: str) -> None:
        if self.open:
            turn = self.open.pop(self.random.randrange(len(self.open)))
            self.store.agents.abandon(turn["agent"], turn["turn"])
            if self.holders.get(turn["agent"], (None,))[0] == turn["turn"]:
                del self.holders[turn["agent"]]

    def forget(self, agent: str) -> None:
        known = self.store.forget(agent)
        if known:
            self.forgotten[agent] = self.store.agents.sequence
            self.holders.pop(agent, None)
        assert self.store.said(agent) == {}

    def fork(self, source: str) -> None:
        target = self.random.choice(self.names)
        try:
            self.store.fork(source, target)
        except (AgentNotFound, AgentExists, InvalidRequest):
            return
        assert list(self.store.said(source).values()) == list(self.store.said(target).values())
        pairs = zip(self.store.agents.heads(source), self.store.agents.heads(target), strict=True)
        self.injected |= {(target, copy.branch) for head, copy in pairs if (source, head.branch) in self.injected}

    def check(self) -> None:
        self.store.agents.check(self.names)
        sizes = 0
        for agent in self.names:
            for head in self.store.agents.heads(agent):
                sizes += head.nbytes
                assert self.epochs.get((agent, head.branch), 0) <= head.epoch, "epochs only grow"
                self.epochs[agent, head.branch] = head.epoch
                assert head.injected == ((agent, head.branch) in self.injected), "what was put in stays known"
            self.store.said(agent)
            turn, ends = self.holders.get(agent, ("", 0.0))
            if self.store.now < ends:
                assert self.store.agents.busy(agent, "another", self.store.now), "a turn is its owner's until it ends"
                assert not self.store.agents.busy(agent, turn, self.store.now), "and nobody else's"
        assert sizes == self.store.agents.nbytes


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_together_no_turn_is_lost_or_mixed(seed):
    simulation = _Simulation(seed)
    for _ in range(250):
        simulation.step()
