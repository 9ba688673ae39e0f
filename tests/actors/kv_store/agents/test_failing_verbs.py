"""A verb that fails at any of its statements has changed nothing, in memory either: turns, tombstones, evictions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest

from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.kv_store.agents.branches import AgentLimits
from satchel.actors.kv_store.agents.database import AgentDatabase
from satchel.actors.kv_store.agents.roles import Place, Role, RoleTable
from satchel.actors.protocol.store_messages import Commit, Content
from satchel.cluster.errors import MemoryFull, Unavailable

MODEL = b"m" * 32
WRITES = ("INSERT", "DELETE", "UPDATE", "BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")
LEASE_S = 60.0


class Connection(sqlite3.Connection):
    """Fails at the statement number `fails_at` of those that write."""

    fails_at: int | None = None
    seen = 0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.fails_at is not None and sql.lstrip().upper().startswith(WRITES):
            self.seen += 1
            if self.seen == self.fails_at:
                raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, parameters)


class World:
    """A node with an agent in its turn, one that two turns have only recalled, a quiet one and a copy of another's."""

    def __init__(self) -> None:
        self.database = AgentDatabase(connect=partial(sqlite3.connect, factory=Connection))
        self.gone: list[str] = []
        limits = AgentLimits(branches_max=2, bytes_max=3000, tombstones_max=1)
        self.agents = Agents(self.database, limits, lambda agent, model: b"", on_let_go=self.gone.append)
        self.roles = RoleTable(self.database, self.agents.end_turn)
        self.commit("t/quiet", "quiet")
        self.commit("t/busy", "busy")
        self.agents.forget("t/nobody", 1.0)
        self.bury("t/gone")
        self.agents.recall("t/recalled", MODEL, {})
        self.since, main = self.agents.begin("t/busy", "turn", 0.0, LEASE_S) or (0, None)
        assert main is not None
        self.main = main
        self.agents.begin("t/first", "turn", 0.0, LEASE_S)

    def commit(self, agent: str, text: str, **fields: Any) -> None:
        fields = {"since": self.agents.sequence, **fields}
        outcome = self.agents.commit(agent, Commit(MODEL, content(text), 1, **fields), 0.0, 1.0)
        assert outcome.kept
        self.roles.settle(agent)

    def bury(self, agent: str, number: int = 0) -> None:
        self.agents.bury(agent, 1.0, number)
        self.roles.bury(agent, 0)

    def state(self) -> Any:
        agents, known = self.agents, ["t/quiet", "t/busy", "t/recalled", "t/first", "t/gone", "t/new"]
        stored = {agent: [(head, agents.content(head)) for head in agents.heads(agent)] for agent in known}
        places = {agent: self.roles.place(agent) for agent in known}
        barred = {agent: agents.buried(agent) for agent in known}
        turns = {agent: (lease.name, lease.ends) for agent, lease in agents._turns.items()}
        return (
            stored,
            places,
            barred,
            turns,
            list(agents._seen),
            agents._floor,
            agents.evicted,
            [*self.gone],
            [*agents._gone],
        )

    @contextmanager
    def fails_at(self, number: int) -> Iterator[None]:
        connection = self.database._db
        assert isinstance(connection, Connection)
        connection.fails_at, connection.seen = number, 0
        try:
            yield
        finally:
            connection.fails_at = None


def content(text: str) -> Content:
    return Content(b"\0\0\0\0" * len(text), text, b"[]")


def take_over(world: World) -> None:
    head = replace(world.main[0], agent="t/new")
    world.roles.take_secondary("t/new", 1, [head], {head.branch: content("n" * 200)})
    world.agents.make_room("t/new", 0.0)
    world.roles.promote("t/new", 1)


VERBS: dict[str, Callable[[World], object]] = {
    "a turn that goes on": lambda world: world.commit(
        "t/busy", "more", turn="turn", since=world.since, branch=world.main[0].branch, epoch=world.main[0].epoch
    ),
    "a turn for which others make room": lambda world: world.commit("t/first", "f" * 300, turn="turn"),
    "a turn of a recalled agent": lambda world: world.commit("t/recalled", "known now"),
    "fork": lambda world: world.agents.fork("t/quiet", "t/new", 0.0, 1.0),
    "bring": lambda world: world.agents.bring("t/recalled", [world.main], 0.0),
    "forget": lambda world: world.agents.forget("t/busy", 2.0) and world.roles.bury("t/busy", 0),
    "bury": lambda world: world.bury("t/first", world.agents.sequence + 5),
    "replace": lambda world: (world.bury("t/busy"), world.agents.bring("t/busy", [world.main], 0.0)),
    "take in": lambda world: world.agents.take_in("t/busy", [world.main], 0.0),
    "take over": take_over,
    "promote": lambda world: world.roles.promote("t/busy", 7),
    "demote": lambda world: world.roles.demote("t/busy", 9),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_fails_has_changed_nothing(verb: str) -> None:
    usual = World()
    before = usual.state()
    with usual.database.transaction():
        VERBS[verb](usual)
    assert usual.state() != before
    for number in count(1):
        world = World()
        before = world.state()
        try:
            with world.fails_at(number), world.database.transaction():
                VERBS[verb](world)
        except Unavailable:
            assert world.state() == before, f"it failed at statement {number}"
        else:
            assert number > 3, "nothing was written"
            assert world.state() == usual.state(), "all that it does is done at the end"
            break


def test_what_a_verb_does_inside_another_that_fails_is_taken_back_with_it() -> None:
    world = World()
    before = world.state()
    with pytest.raises(MemoryFull), world.database.transaction():
        world.bury("t/busy")
        raise MemoryFull("the disk is full")
    assert world.state() == before
    with world.database.transaction():
        with pytest.raises(MemoryFull), world.database.transaction():
            world.bury("t/busy")
            raise MemoryFull("the disk is full")
        assert world.agents.busy("t/busy", "", 1.0)
        world.bury("t/first")
        assert world.agents.busy("t/first", "", 1.0), "not before all of it is on the disk"
    assert world.agents.busy("t/busy", "", 1.0) and not world.agents.busy("t/first", "", 1.0)
    assert world.roles.place("t/busy") == Place(1, Role.PRIMARY)
