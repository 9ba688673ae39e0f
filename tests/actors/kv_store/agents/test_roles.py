"""The laws of one node's places: epochs only grow, one role follows another, and damage never makes a home."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.kv_store.agents.branches import AgentLimits
from satchel.actors.kv_store.agents.database import NAME, AgentDatabase
from satchel.actors.kv_store.agents.roles import (
    LIFE,
    NOWHERE,
    Memory,
    Place,
    Role,
    RoleTable,
    life_end,
    newest,
    outranks,
    tombstone_epoch,
)
from satchel.actors.kv_store.agents.schema import SCHEMA_VERSION
from satchel.actors.protocol.store_messages import Commit, Content, Head
from satchel.cluster.errors import AgentElsewhere, AgentNotFound, StaleEpoch, Unavailable

X = "t/x"
MODEL = b"m" * 32


class Node:
    """One node's memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.database = AgentDatabase(folder)
        self.agents = Agents(self.database, AgentLimits(), lambda agent, model: b"")
        self.roles = RoleTable(self.database, self.agents.end_turn)

    def speak(self, text: str, agent: str = X) -> Head:
        commit = Commit(MODEL, content(text), 1, self.agents.sequence)
        outcome = self.agents.commit(agent, commit, 0.0, 0.0)
        assert outcome.kept
        self.roles.settle(agent)
        return next(head for head in self.agents.heads(agent) if head.branch == outcome.branch)

    def forget(self, agent: str = X) -> None:
        with self.database.transaction():
            self.agents.bury(agent, 0.0)
            self.roles.bury(agent, 0)

    def copy(self, memory: Memory, *, send: bool = True) -> list[int]:
        heads = [head for head, _ in memory.branches]
        contents = {head.branch: found for head, found in memory.branches} if send else {}
        return self.roles.take_secondary(memory.agent, memory.epoch, heads, contents)

    def said(self, agent: str = X) -> list[str]:
        return sorted(found.text for head in self.agents.heads(agent) if (found := self.agents.content(head)))


def content(text: str) -> Content:
    return Content(b"".join(ord(letter).to_bytes(4, "little") for letter in text), text, b"[]")


def test_an_agent_is_at_home_where_it_first_spoke_and_nowhere_else():
    node = Node()
    assert node.roles.place(X) == NOWHERE and node.roles.claims([X]) == []
    node.roles.check(X)
    node.speak("one")
    assert node.roles.place(X) == Place(1, Role.PRIMARY) and node.roles.every() == [X]


def test_a_copy_is_no_home_until_it_is_adopted():
    home, copy = Node(), Node()
    home.speak("one")
    assert copy.copy(home.roles.memory(X)) == []
    assert copy.roles.place(X) == Place(1, Role.SECONDARY) and copy.said() == ["one"]
    with pytest.raises(AgentElsewhere):
        copy.roles.check(X)
    assert copy.roles.promote(X, 1) == copy.roles.promote(X, 1) == Place(2, Role.PRIMARY), "asked twice it happens once"
    copy.roles.check(X)
    assert copy.roles.promote(X, 7) == Place(8, Role.PRIMARY), "above what anybody has heard of"
    with pytest.raises(AgentNotFound):
        Node().roles.promote(X, 1)


def test_contents_that_are_missing_are_asked_for_and_nothing_changes_meanwhile():
    home, copy = Node(), Node()
    first = home.speak("one")
    assert copy.copy(home.roles.memory(X), send=False) == [first.branch]
    assert copy.roles.place(X) == NOWHERE and copy.said() == []
    copy.copy(home.roles.memory(X))
    assert copy.copy(home.roles.memory(X), send=False) == [], "what is there needs not come again"
    home.agents.forget(X, 0.0)
    home.speak("two")
    copy.copy(home.roles.memory(X))
    assert copy.said() == ["two"], "what the home dropped goes"


def test_no_copy_replaces_a_later_state():
    """A later home's, this node's own, or a life's that is over."""
    home, node = Node(), Node()
    home.speak("old")
    old = home.roles.memory(X)
    home.speak("new")
    node.copy(home.roles.memory(X))
    assert node.copy(old) == [] and node.said() == ["new", "old"], "sent earlier, it came later"
    node.roles.promote(X, 1)
    for epoch in (1, 2):
        with pytest.raises(StaleEpoch):
            node.copy(replace(old, epoch=epoch))
    with pytest.raises(Unavailable):
        node.copy(replace(old, epoch=3))
    node.forget()
    with pytest.raises(StaleEpoch):
        node.copy(replace(old, epoch=LIFE - 1))
    assert node.said() == []


def test_a_copy_of_a_later_home_is_taken_whatever_numbers_it_has():
    """Numbers count at one home; which home is right its epoch alone says."""
    former, later, node = Node(), Node(), Node()
    former.agents.witness([replace(former.speak("x", "t/other"), epoch=1000)])
    former.speak("of the former")
    node.copy(former.roles.memory(X))
    later.speak("of the later")
    later.roles.promote(X, 1)
    memory = later.roles.memory(X)
    assert newest(head for head, _ in memory.branches) < newest(node.agents.heads(X))
    assert (
        node.copy(memory) == [] and node.said() == ["of the later"] and node.roles.place(X) == Place(2, Role.SECONDARY)
    )


def test_who_had_the_turn_at_a_home_that_another_one_replaced_has_it_no_more():
    """Nobody would give it back: the agent would be busy until its lease is over."""
    for replace_it, ends in (
        (lambda node: node.roles.demote(X, 2), True),
        (lambda node: node.roles.promote(X, 5), True),
        (lambda node: node.roles.promote(X, 0), False),
    ):
        node = Node()
        node.speak("one")
        node.agents.begin(X, "turn", 0.0, 60.0)
        replace_it(node)
        assert (node.agents.turn_ends(X) is None) == ends
    copy = Node()
    copy.copy(node.roles.memory(X))
    copy.agents.begin(X, "turn", 0.0, 60.0)
    copy.roles.promote(X, 0)
    assert copy.agents.turn_ends(X) is None


def test_a_home_that_is_replaced_becomes_a_copy_once_its_words_are_handed_over():
    home, other = Node(), Node()
    one = home.speak("one")
    other.copy(home.roles.memory(X))
    other.roles.promote(X, 1)
    home.speak("two")
    assert not home.roles.demote(X, 2, frozenset({(one.branch, one.epoch)})), "it has spoken since"
    lacking = other.roles.lacking(home.roles.memory(X))
    assert [found.text for _, found in lacking] == ["two"]
    other.agents.take_in(X, lacking, 0.0)
    assert other.said() == ["one", "two"] and other.roles.lacking(home.roles.memory(X)) == []
    handed = frozenset((head.branch, head.epoch) for head in home.agents.heads(X))
    assert home.roles.demote(X, 2, handed) and home.roles.place(X) == Place(1, Role.SECONDARY)
    assert home.roles.demote(X, 2), "it is none any more"
    assert not other.roles.demote(X, 1), "a lower epoch says nothing"
    with pytest.raises(AgentElsewhere):
        home.roles.lacking(other.roles.memory(X))


def test_what_goes_on_with_a_branch_has_it_already():
    home = Node()
    home.speak("hello")
    head = home.agents.heads(X)[0]
    longer = Commit(MODEL, content("hello you"), 1, home.agents.sequence, head.branch, head.epoch)
    home.agents.commit(X, longer, 0.0, 0.0)
    for text, lacks in (("hello", False), ("hello you", False), ("hello me", True), ("hello you too", True)):
        assert bool(home.roles.lacking(Memory(X, 1, [(head, content(text))]))) == lacks
    assert home.roles.lacking(Memory(X, 1, [(replace(head, model=b"o" * 32), content("hello"))]))
    assert home.roles.lacking(Memory(X, 1, [(head, replace(content(""), messages=b"[1]"))])), "no tokens are no proof"


def test_branches_that_are_taken_in_keep_apart_from_those_that_are_there():
    """Two nodes may have gone on with the same branch."""
    home = Node()
    head = home.speak("here")
    home.agents.take_in(X, [(head, content("there")), (replace(head, branch=5, epoch=7), content("else"))], 0.0)
    heads = home.agents.heads(X)
    assert home.said() == ["else", "here", "there"]
    assert len({head.branch for head in heads}) == len({head.epoch for head in heads}) == 3
    home.agents.check([X])


def test_branches_that_are_taken_in_are_a_newer_version():
    """Copies are sent again only if the sequence has grown, here with numbers that were free."""
    home = Node()
    home.speak("here")
    home.speak("more")
    (head, *_), before = home.agents.heads(X), home.agents.sequence
    home.forget("t/other")
    free = replace(head, branch=0, epoch=0)
    home.agents.take_in(X, [(free, content("there"))], 0.0)
    assert home.agents.sequence > before + 1


def test_a_life_that_is_over_ends_every_home_of_it_and_the_next_is_above():
    home = Node()
    home.speak("one")
    home.roles.promote(X, 5)
    home.forget()
    assert home.roles.place(X) == Place(LIFE - 1, Role.FORGOTTEN) and tombstone_epoch(home.roles.place(X)) == LIFE - 1
    with pytest.raises(AgentNotFound):
        home.roles.promote(X, LIFE + 3)
    home.speak("two")
    assert home.roles.place(X) == Place(LIFE, Role.PRIMARY) and tombstone_epoch(home.roles.place(X)) == LIFE - 1
    assert home.roles.lacking(Memory(X, LIFE - 1, [(home.agents.heads(X)[0], content("one"))])) == []
    home.forget()
    assert home.roles.place(X).epoch == 2 * LIFE - 1
    with pytest.raises(AgentNotFound):
        Node().roles.memory(X)


def test_a_copy_of_a_life_that_is_over_is_not_adopted():
    """Somebody knows of a later life, so the agent was forgotten since: what it said before must not come back."""
    home, copy = Node(), Node()
    home.speak("one")
    copy.copy(home.roles.memory(X))
    for above in (LIFE, 2 * LIFE + 3):
        with pytest.raises(AgentNotFound):
            copy.roles.promote(X, above)
    assert copy.roles.place(X) == Place(1, Role.SECONDARY)
    assert copy.roles.promote(X, 3) == Place(4, Role.PRIMARY), "of its own life it is"


def test_what_was_buried_elsewhere_is_news_only_where_it_changes_something():
    node = Node()
    assert node.roles.to_bury([(X, LIFE - 1)]) == [(X, LIFE - 1)], "KV may be here"
    node.speak("one")
    assert node.roles.to_bury([(X, LIFE - 1)]) and not node.roles.to_bury([(X, 0)])
    node.forget()
    assert not node.roles.to_bury([(X, LIFE - 1)])
    node.speak("two")
    assert not node.roles.to_bury([(X, LIFE - 1)]) and node.roles.to_bury([(X, life_end(LIFE))])
    assert tombstone_epoch(NOWHERE) == -1


def test_of_two_homes_exactly_one_is_right():
    rng = random.Random(3)
    for _ in range(500):
        one, other = ((rng.randrange(3), rng.choice("ab")) for _ in range(2))
        assert outranks(*one, *other) + outranks(*other, *one) == (one != other)
    assert outranks(2, "b", 1, "a") and outranks(1, "a", 1, "b")


def test_a_copy_whose_memory_had_to_make_room_claims_nothing():
    home, copy = Node(), Node()
    home.speak("one")
    copy.copy(home.roles.memory(X))
    copy.database.erase(X)
    assert copy.roles.claims([X]) == [] and copy.roles.every() == [X]
    assert copy.copy(home.roles.memory(X)) == [] and copy.roles.claims([X])


def test_numbers_of_two_nodes_never_meet():
    nodes = [Node(), Node()]
    for residue, node in enumerate(nodes):
        node.agents.count_apart(residue, 16)
        node.agents.witness([replace(nodes[0].speak("x"), epoch=1000)])
    numbers = [{node.speak(str(count)).epoch for count in range(50)} for node in nodes]
    assert not numbers[0] & numbers[1] and min(*numbers[0], *numbers[1]) > 1000
    assert newest(nodes[0].agents.heads(X)) == max(numbers[0])


def test_places_last_and_one_that_was_tampered_with_is_a_copy_to_be_adopted(tmp_path):
    """Neither a home, which could be a second one, nor forgotten."""
    node = Node(tmp_path)
    for agent in (X, "t/y"):
        node.speak("one", agent)
        node.roles.promote(agent, 4)
    node.database.close()
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as raw:
        raw.execute("UPDATE homes SET epoch = 99 WHERE agent = ?", (X,))
    again = Node(tmp_path)
    assert again.roles.place("t/y") == Place(5, Role.PRIMARY)
    assert again.roles.place(X) == Place(0, Role.SECONDARY) and again.database.damaged_total
    with pytest.raises(AgentElsewhere):
        again.roles.check(X)
    assert again.roles.promote(X, 5) == Place(6, Role.PRIMARY)
    for epoch, role, mac in (("text", 1, b""), (1, 9, b""), (1, 1, None), (2**70 // 2**8, None, b"x")):
        again.database._db.execute("UPDATE homes SET epoch=?, role=?, mac=? WHERE agent=?", (epoch, role, mac, X))
        assert again.roles.place(X) == Place(0, Role.SECONDARY)
    again.database.close()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_an_earlier_schema_is_taken_over(tmp_path, version):
    """Contents went by branch alone in the first; now they go by agent too, as branches of two nodes may have one
    number. The second knew no evicted agents, the third no programs."""
    node = Node(tmp_path)
    heads = [node.speak("one"), node.speak("two"), node.speak("three", "t/y")]
    node.database.close()
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as raw:
        raw.execute("ALTER TABLE branches DROP COLUMN program")
        raw.execute("ALTER TABLE branches DROP COLUMN parent")
        if version < 3:
            raw.execute("DROP TABLE let_go")
        if version == 1:
            raw.execute("ALTER TABLE contents RENAME TO newer")
            raw.execute("CREATE TABLE contents (branch INTEGER PRIMARY KEY, tokens BLOB, text BLOB, messages BLOB)")
            raw.execute("INSERT INTO contents SELECT branch, tokens, text, messages FROM newer")
            raw.execute("DROP TABLE newer")
            raw.execute("DROP TABLE homes")
        raw.execute(f"PRAGMA user_version = {version}")
    again = Node(tmp_path)
    assert again.said() == ["one", "two"] and again.said("t/y") == ["three"]
    assert again.roles.place(X) == Place(1, Role.PRIMARY) and again.agents.sequence >= max(head.epoch for head in heads)
    assert again.database._one("PRAGMA user_version") == SCHEMA_VERSION and again.database.set_aside_total == 0
    with again.database.transaction():
        again.database.put(replace(heads[0], agent="t/z"), content("of another node"))
    assert again.said() == ["one", "two"] and again.said("t/z") == ["of another node"]
    again.speak("four")
    again.database.close()
    assert Node(tmp_path).said() == ["four", "one", "two"]


def test_all_agents_are_heard_of_in_pages(monkeypatch):
    monkeypatch.setattr("satchel.actors.kv_store.agents.roles._PAGE", 3)
    node = Node()
    agents = sorted(f"t/{number}" for number in range(10))
    for agent in agents[:7]:
        node.speak("x", agent)
    for agent in agents[5:]:
        node.forget(agent)
    assert node.roles.every() == agents
    assert [place.role for _, place in node.roles.claims(agents)] == [Role.PRIMARY] * 5 + [Role.FORGOTTEN] * 5
