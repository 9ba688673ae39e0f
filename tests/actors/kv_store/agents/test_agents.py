"""Branches, epochs and turns: nothing that was committed is lost or mixed, and what was forgotten stays forgotten."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.kv_store.agents.branches import ROW_BYTES, AgentLimits, main_branch
from satchel.actors.kv_store.agents.database import AgentDatabase
from satchel.actors.protocol.store_messages import Commit, CommitOutcome, Content, Head
from satchel.cluster.errors import AgentExists, AgentNotFound, InvalidRequest

MODEL, OTHER = b"m" * 32, b"o" * 32
LEASE_S = 60.0


def content(*said: str) -> Content:
    """A branch that consists of these turns, every part of it telling which."""
    text = "|".join(said)
    return Content(
        array("I", list(text.encode())).tobytes(), text, json.dumps([{"content": part} for part in said]).encode()
    )


def said_of(found: Content) -> list[str]:
    said = [message["content"] for message in json.loads(found.messages)]
    assert found == content(*said), "its parts belong together"
    return said


class Store:
    """The state machine over a database in memory, with a clock."""

    def __init__(self, **limits: Any) -> None:
        self.database = AgentDatabase()
        self.gone: list[str] = []
        self.agents = Agents(
            self.database,
            AgentLimits(**limits),
            lambda agent, model: agent.encode() + model,
            on_let_go=self.gone.append,
        )
        self.now = 0.0

    def commit(self, agent: str, *said: str, since: int | None = None, **fields: Any) -> CommitOutcome:
        since = self.agents.sequence if since is None else since
        commit = Commit(fields.pop("model", MODEL), content(*said), messages=len(said), since=since, **fields)
        return self.agents.commit(agent, commit, self.now, 1e9 + self.now)

    def said(self, agent: str) -> dict[int, list[str]]:
        """Every branch, by its id."""
        out = {}
        for head in self.agents.heads(agent):
            found = self.agents.content(head)
            assert found is not None
            out[head.branch] = said_of(found)
        return out

    def begin(self, agent: str, turn: str) -> tuple[int, tuple[Head, Content] | None] | None:
        return self.agents.begin(agent, turn, self.now, LEASE_S)

    def forget(self, agent: str) -> bool:
        return self.agents.forget(agent, 1e9 + self.now)

    def fork(self, source: str, target: str) -> int:
        return self.agents.fork(source, target, self.now, 1e9 + self.now)


def test_a_turn_that_continues_a_branch_replaces_it_and_the_epoch_grows():
    store = Store()
    first = store.commit("x", "a")
    second = store.commit("x", "a", "b", branch=first.branch, epoch=first.epoch, turns=2)
    assert (first.kind, second.kind) == ("opened", "replaced")
    assert second.branch == first.branch and second.epoch > first.epoch
    assert store.said("x") == {first.branch: ["a", "b"]}
    (head,) = store.agents.heads("x")
    assert (head.turns, head.messages, head.tokens, head.root) == (2, 2, 3, b"x" + MODEL)
    third = store.commit("x", "a", "b", "longer", branch=second.branch, epoch=second.epoch, turns=3)
    assert [head.tokens for head in store.agents.heads("x")] == [len("a|b|longer")] and third.epoch > second.epoch


def test_of_two_turns_that_continue_one_epoch_the_second_opens_a_branch():
    store = Store()
    first = store.commit("x", "a")
    one = store.commit("x", "a", "b", branch=first.branch, epoch=first.epoch, turns=2)
    two = store.commit("x", "a", "c", branch=first.branch, epoch=first.epoch, turns=2)
    assert (one.kind, two.kind) == ("replaced", "opened")
    assert store.said("x") == {first.branch: ["a", "b"], two.branch: ["a", "c"]}


def test_recall_sends_what_is_not_known_in_its_epoch_and_only_of_the_model():
    store = Store()
    first = store.commit("x", "a")
    store.commit("x", "other", model=OTHER)
    since, ((head, found),) = store.agents.recall("x", MODEL, {})
    assert since == store.agents.sequence
    assert found is not None and said_of(found) == ["a"]
    ((again, none),) = store.agents.recall("x", MODEL, {head.branch: head.epoch})[1]
    assert (again, none) == (head, None)
    store.commit("x", "a", "b", branch=first.branch, epoch=first.epoch)
    ((_, found),) = store.agents.recall("x", MODEL, {head.branch: head.epoch})[1]
    assert found is not None and said_of(found) == ["a", "b"]
    assert store.agents.recall("nobody", MODEL, {})[1] == []


def test_past_the_limit_the_least_recently_used_branch_goes_and_never_the_conversation():
    store = Store(branches_max=3)
    talk = store.commit("x", "talk")
    talk = store.commit("x", "talk", "on", branch=talk.branch, epoch=talk.epoch, turns=2)
    titles = [store.commit("x", f"title {index}") for index in range(5)]
    assert store.said("x") == {
        talk.branch: ["talk", "on"],
        titles[3].branch: ["title 3"],
        titles[4].branch: ["title 4"],
    }
    alone = Store(branches_max=1)
    alone.commit("x", "a")
    assert list(alone.said("x").values()) == [["a"]]
    alone.commit("x", "b")
    assert list(alone.said("x").values()) == [["b"]]


def test_the_main_branch_is_the_conversation_continued_last_else_the_oldest():
    store = Store()
    assert main_branch([]) is None
    first = store.commit("x", "a")
    second = store.commit("x", "b")
    third = store.commit("x", "c")
    assert store.agents.transcript("x") == content("a").messages
    second = store.commit("x", "b", "b2", branch=second.branch, epoch=second.epoch, turns=2)
    assert store.agents.transcript("x") == content("b", "b2").messages
    store.commit("x", "c", branch=third.branch, epoch=third.epoch, injected=True)
    assert store.agents.transcript("x") == content("c").messages, "an injection makes it a conversation"
    store.commit("x", "b", "b2", "b3", branch=second.branch, epoch=second.epoch, turns=3)
    assert store.agents.transcript("x") == content("b", "b2", "b3").messages
    store.commit("x", "a", "a2", branch=first.branch, epoch=first.epoch, turns=2)
    assert store.agents.transcript("x") == content("a", "a2").messages
    textual = Commit(MODEL, content("text"), messages=0, since=store.agents.sequence)
    store.agents.commit("y", textual, 0.0, 0.0)
    assert store.begin("y", "t") == (store.agents.sequence, None), "a text without messages is no conversation"


def test_what_was_injected_stays_a_conversation_after_later_turns():
    """A turn of a text counts as the first one again; what was put in before it makes the branch the main one still."""
    store = Store()
    store.commit("x", "older")
    second = store.commit("x", "b")
    second = store.commit("x", "b", "put in", branch=second.branch, epoch=second.epoch, injected=True)
    store.commit("x", "b", "put in", "c", branch=second.branch, epoch=second.epoch)
    assert [head.injected for head in store.agents.heads("x")] == [False, True]
    assert store.agents.transcript("x") == content("b", "put in", "c").messages


def test_turns_of_one_agent_come_one_after_the_other_and_read_what_was_committed():
    store = Store()
    assert store.begin("x", "t1") == (0, None)
    assert store.begin("x", "t2") is None
    assert store.begin("y", "t3") is not None, "other agents' turns are their own"
    assert store.commit("x", "a", turn="t1").kind == "opened"
    begun = store.begin("x", "t2")
    assert begun is not None and begun[1] is not None
    head, found = begun[1]
    assert said_of(found) == ["a"]
    assert store.commit("x", "a", "b", branch=head.branch, epoch=head.epoch, turn="t2").kind == "replaced"


def test_a_turn_without_a_sign_of_life_is_lost_and_cannot_write():
    store = Store()
    store.begin("x", "t1")
    store.now = 59.0
    assert store.begin("x", "t2") is None
    assert store.agents.renew("x", "t1", store.now, LEASE_S)
    store.now = 118.0
    assert store.begin("x", "t2") is None
    store.now = 119.5
    assert store.begin("x", "t2") is not None
    assert not store.agents.renew("x", "t1", store.now, LEASE_S)
    assert store.commit("x", "lost", turn="t1") == CommitOutcome("lost")
    assert store.begin("x", "t3") is None, "the lost turn ends nobody else's"
    store.agents.abandon("x", "t1")
    assert store.begin("x", "t3") is None
    assert store.commit("x", "kept", turn="t2").kept
    assert list(store.said("x").values()) == [["kept"]]


def test_turns_that_nobody_ends_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch):
    """An endpoint that is killed ends none of its turns, and their agents may never come again."""
    monkeypatch.setattr("satchel.actors.kv_store.agents.agents._TURNS_MAX", 3)
    store = Store()
    for agent in "abc":
        store.begin(agent, "lost")
    store.now = LEASE_S - 1
    store.agents.renew("c", "lost", store.now, LEASE_S)
    store.now = LEASE_S
    store.begin("d", "t")
    assert [agent for agent in "abcd" if store.agents.turn_ends(agent) is not None] == ["c", "d"]
    assert store.commit("a", "late", turn="lost").kept, "nobody has taken it"


def test_a_turn_is_given_back_only_where_nobody_has_taken_the_agents_since():
    store = Store()
    store.begin("x", "t1")
    store.agents.end_turn("x")
    store.agents.retake("x", "t1", store.now, LEASE_S)
    assert store.begin("x", "t2") is None and store.agents.turn_ends("x") == LEASE_S
    store.agents.end_turn("x")
    store.begin("x", "t2")
    store.agents.retake("x", "t1", store.now, LEASE_S)
    assert store.agents.renew("x", "t2", store.now, LEASE_S) and not store.agents.renew("x", "t1", store.now, LEASE_S)


def test_a_turn_whose_lease_the_process_has_forgotten_may_commit():
    store = Store()
    assert store.commit("x", "a", since=store.agents.sequence, turn="of the last process").kept


def test_a_stateless_turn_waits_for_nobody_and_a_continuing_one_loses_nothing_to_it():
    store = Store()
    base = store.commit("x", "a")
    base = store.commit("x", "a", "b", branch=base.branch, epoch=base.epoch, turns=2)
    begun = store.begin("x", "t")
    assert begun is not None and begun[1] is not None
    head = begun[1][0]
    assert store.commit("x", "a", "b", "s", branch=base.branch, epoch=base.epoch, turns=3).kind == "replaced"
    outcome = store.commit("x", "a", "b", "c", branch=head.branch, epoch=head.epoch, turns=3, turn="t")
    assert outcome.kind == "opened"
    assert store.said("x") == {base.branch: ["a", "b", "s"], outcome.branch: ["a", "b", "c"]}
    assert store.agents.transcript("x") == content("a", "b", "c").messages, "it was continued last"


def test_an_abandoned_turn_leaves_everything_as_it_was():
    store = Store()
    store.begin("x", "t1")
    store.agents.abandon("x", "other")
    assert store.begin("x", "t2") is None, "only its own turn can be abandoned"
    store.agents.abandon("x", "t1")
    assert store.begin("x", "t2") is not None
    assert store.agents.heads("x") == []


@pytest.mark.parametrize("known", [True, False])
def test_a_turn_that_began_before_its_agent_was_forgotten_cannot_commit(known):
    store = Store()
    if known:
        store.commit("x", "secret")
    stateless, _ = store.agents.recall("x", MODEL, {})
    begun = store.begin("x", "t")
    assert begun is not None
    assert store.forget("x")
    assert store.commit("x", "secret", since=stateless) == CommitOutcome("forgotten")
    assert store.commit("x", "secret", since=begun[0], turn="t") == CommitOutcome("forgotten")
    assert store.commit("x", "secret", since=0) == CommitOutcome("forgotten"), "nobody knows when it began"
    assert store.agents.heads("x") == [] and store.agents.nbytes == 0
    assert not store.forget("x"), "nothing is known of it any more"
    assert store.commit("x", "new").kept, "whoever begins afterwards may use the name"
    assert list(store.said("x").values()) == [["new"]]


def test_what_began_where_it_was_forgotten_is_barred_on_other_nodes_too():
    """Nodes count on their own: the tombstone of one that is behind must be later than what began elsewhere before."""
    home, other = Store(), Store()
    for number in range(20):
        home.commit("y", str(number))
    since, _ = home.agents.recall("x", MODEL, {})
    home.forget("x")
    assert home.agents.buried("x") > since > other.agents.sequence
    other.agents.bury("x", 0.0, home.agents.buried("x"))
    assert other.commit("x", "secret", since=since) == CommitOutcome("forgotten")
    assert other.commit("x", "new", since=other.agents.sequence).kept


def test_a_first_turn_under_way_is_barred_though_nothing_is_known_yet():
    store = Store()
    since, _ = store.agents.recall("x", MODEL, {})
    assert not store.forget("x"), "there was nothing"
    assert store.commit("x", "secret", since=since) == CommitOutcome("forgotten")
    assert not store.forget("never heard of")
    assert store.agents.forgotten() == ["x"], "names that callers make up leave no tombstones"


def test_tombstones_are_bounded_and_one_that_went_still_bars():
    store = Store(tombstones_max=3)
    since = store.agents.sequence
    for index in range(6):
        store.commit(f"a{index}", "secret")
        assert store.forget(f"a{index}")
    assert len(store.agents.forgotten()) == 3
    for index in range(6):
        assert store.commit(f"a{index}", "secret", since=since) == CommitOutcome("forgotten"), index
    store.now = 31 * 86400.0
    store.commit("b", "x")
    store.forget("b")
    assert store.agents.forgotten() == ["b"]


def test_a_fork_has_the_same_branches_and_goes_its_own_way():
    store = Store()
    first = store.commit("x", "a")
    side = store.commit("x", "title")
    store.commit("x", "a", "b", branch=first.branch, epoch=first.epoch, turns=2)
    assert store.fork("x", "y") == 2
    assert list(store.said("y").values()) == [["a", "b"], ["title"]]
    assert {head.root for head in store.agents.heads("y")} == {b"y" + MODEL}
    assert store.agents.transcript("y") == content("a", "b").messages
    head = main_branch(store.agents.heads("y"))
    assert head is not None and head.branch not in (first.branch, side.branch)
    store.commit("y", "a", "b", "y's own", branch=head.branch, epoch=head.epoch, turns=3)
    assert list(store.said("x").values()) == [["a", "b"], ["title"]]
    assert store.forget("x")
    assert list(store.said("y").values()) == [["a", "b", "y's own"], ["title"]]
    with pytest.raises(AgentNotFound):
        store.fork("x", "z")
    with pytest.raises(AgentExists):
        store.fork("y", "y")
    store.begin("busy", "t")
    with pytest.raises(AgentExists):
        store.fork("y", "busy")


def test_the_quietest_agents_go_first_and_never_one_in_its_turn():
    size = len(content("x" * 300).tokens) + 300 + len(content("x" * 300).messages) + ROW_BYTES
    store = Store(bytes_max=3 * size)
    store.commit("turning", "x" * 300)
    store.begin("turning", "t")
    for index in range(4):
        assert store.commit(f"a{index}", "x" * 300).kept
    left = [agent for agent, _ in store.agents.list("", "", 100)]
    assert left == ["a2", "a3", "turning"]
    assert store.agents.evicted == 2 and store.gone == ["a0", "a1"]
    store.agents.check(left)


def test_who_had_to_make_room_is_known_until_it_speaks_again_or_is_forgotten_and_only_the_last_ones_are():
    size = len(content("x" * 300).tokens) + 300 + len(content("x" * 300).messages) + ROW_BYTES
    store = Store(bytes_max=2 * size, let_go_max=3)
    for index in range(8):
        assert store.commit(f"a{index}", "x" * 300).kept
    known = [agent for agent in (*store.gone, "a6", "a7", "nobody") if store.agents.let_go(agent)]
    assert known == ["a3", "a4", "a5"]
    store.commit("a4", "back")
    assert not store.agents.let_go("a4")
    store.agents.bury("a5", 1e9)
    assert not store.agents.let_go("a5"), "of who was forgotten nothing is known"


def test_an_agent_alone_gives_up_its_side_branches_and_what_cannot_fit_is_refused():
    store = Store(bytes_max=9000)
    first = store.commit("x", "x" * 300)
    for index in range(5):
        newest = store.commit("x", f"{index}" * 300)
        assert newest.kind == "opened"
    assert store.agents.nbytes <= 9000
    assert list(store.said("x")) == [first.branch, newest.branch - 1, newest.branch], "the conversation goes last"
    before = store.said("x")
    assert store.commit("x", "x" * 3000, branch=first.branch, epoch=first.epoch) == CommitOutcome("no room")
    assert store.said("x") == before, "nothing has changed"
    assert store.commit("y", "x" * 3000, turn="t") == CommitOutcome("no room")
    assert store.said("x") == before
    many = Store(bytes_max=9000)
    for index in range(3):
        many.commit("x", f"{index}" * 300)
    with pytest.raises(InvalidRequest):
        many.fork("x", "y")
    assert many.agents.heads("y") == [] and len(many.agents.heads("x")) == 3


def test_agents_are_listed_in_order_by_pages_and_by_tenant():
    store = Store()
    for agent in ("t/b", "t/a", "t/c", "u/a", "t2/a"):
        store.commit(agent, "x")
    assert [agent for agent, _ in store.agents.list("t/", "", 2)] == ["t/a", "t/b"]
    assert [agent for agent, _ in store.agents.list("t/", "t/b", 2)] == ["t/c"]
    assert store.agents.list("t/", "t/c", 2) == []
