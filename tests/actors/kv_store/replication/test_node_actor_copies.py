"""Copies of agents' words on other nodes: where they are, when they are made, and what they cost a turn."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from satchel.actors.kv_store.agents.roles import LIFE, Place, Role
from satchel.actors.kv_store.replication.peers import RayPeers
from satchel.actors.protocol.store_messages import BranchMemory, Content, TakeIn
from satchel.actors.rpc import client as calls
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import (
    AgentElsewhere,
    AgentNotFound,
    Unavailable,
)
from tests.worlds.kv_store.kv_files import MODEL
from tests.worlds.kv_store.store_nodes import cluster

X = "t/x"


@pytest.mark.parametrize(("count", "names"), [(0, "ab"), (1, "ab"), (2, "abcd"), (2, "ab"), (1, "a"), (3, "abc")])
async def test_a_turn_is_copied_before_its_commit_returns(tmp_path, count, names):
    """To as many nodes as the config says, and as there are."""
    async with cluster(tmp_path, names, replication=count) as world:
        await world.speak("a", X, "hello")
        having = [name for name in names[1:] if world.said(name, X)]
        assert having == sorted(world.copied(X, "a")) and len(having) == min(count, len(names) - 1)
        for name in having:
            assert world.place(name, X) == Place(1, Role.SECONDARY)
            with pytest.raises(AgentElsewhere):
                await world.at(name).recall(X, MODEL, {})
            with pytest.raises(AgentElsewhere):
                await world.at(name).begin(X, "turn", MODEL, {})


async def test_only_what_changed_travels(tmp_path):
    async with cluster(tmp_path) as world:
        for text in ("one", "two", "three"):
            await world.speak("a", X, text)
        world.calls.clear()
        await world.speak("a", X, "and more", more=True)
        (sent,) = world.sent_copies()
        assert len(world.calls) == 1 and len(sent.heads) == 3 and len(sent.contents) == 1
        assert world.said("b", X) == world.said("a", X) == {"one", "two", "and more"}
        # Here the copy lacks what came before: two calls, the second with everything.
        world.agents("b").forget(X, 0.0)
        world.calls.clear()
        await world.speak("a", X, "four")
        assert [len(sent.contents) for sent in world.sent_copies()] == [1, 4] and len(world.calls) == 2
        assert world.said("b", X) == world.said("a", X)


async def test_an_earlier_copy_that_comes_late_changes_nothing(tmp_path):
    """A caller that gave up cannot take its call back."""
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        (old, *_) = world.sent_copies()
        await world.speak("a", X, "two", more=True)
        assert await world.at("b").take_secondary(old) == []
        assert world.said("b", X) == {"two"}


async def test_copies_of_turns_that_end_together_arrive_in_order(tmp_path):
    async with cluster(tmp_path, branches_max=20) as world:
        world.delay_s = 0.002
        await asyncio.gather(*(world.speak("a", X, str(number)) for number in range(15)))
        assert world.said("b", X) == world.said("a", X) == {str(number) for number in range(15)}


async def test_a_node_that_is_cut_off_costs_a_turn_a_second_at_most_and_gets_its_copy_later(tmp_path):
    async with cluster(tmp_path, replication_wait="0.1s") as world:
        world.delay_s = 30.0
        async with asyncio.timeout(20):
            assert (await world.speak("a", X, "hello")).kind == "opened"
        world.delay_s = 0.0
        world.cut.add(frozenset("ab"))
        await world.speak("a", X, "again")
        assert (await world.at("a").stats()).copies_failed_total == 2
        await world.stores["a"].services.tending.tend()
        assert not world.said("b", X)
        world.cut.clear()
        await world.stores["a"].services.tending.tend()
        assert world.said("b", X) == {"hello", "again"}
        assert (await world.at("a").stats()).copies_late == 0


async def test_a_strict_turn_waits_for_its_copy_and_says_where_it_was_not_made_in_time(tmp_path):
    async with cluster(tmp_path, replication_wait="strict", timeouts={"replication_s": 5}) as world:
        assert (await world.speak("a", X, "hello")).copied is True
        world.cut.add(frozenset("ab"))
        turn = asyncio.create_task(world.speak("a", X, "again"))
        await asyncio.sleep(1.2)
        assert not turn.done()
        world.cut.clear()
        assert (await turn).copied is True and world.said("b", X) == {"hello", "again"}
        assert (await world.at("a").stats()).copies_failed_total == 0
        world.cut.add(frozenset("ab"))
        began = time.monotonic()
        assert (await world.speak("a", X, "third")).copied is False
        assert time.monotonic() - began > 4.0
        assert (await world.at("a").stats()).copies_failed_total == 1
        world.cut.clear()
        await world.stores["a"].services.tending.tend()
        assert world.said("b", X) == {"hello", "again", "third"}


async def test_a_node_that_should_be_there_and_is_not_has_no_copy(tmp_path):
    """By default its turns go on at once, and say so; where no further node was ever asked for, nothing is missing."""
    nodes = [{"name": "a"}, {"name": "b"}]
    async with cluster(tmp_path / "two", ["a"], nodes=nodes) as world:
        assert (await world.speak("a", X, "hello")).copied is False
        world.start("b")
        assert (await world.speak("a", X, "again")).copied is True
    async with cluster(tmp_path / "strict", ["a"], nodes=nodes, replication_wait="strict") as world:
        turn = asyncio.create_task(world.speak("a", X, "hello"))
        await asyncio.sleep(0.3)
        assert not turn.done()
        world.start("b")
        assert (await turn).copied is True and world.said("b", X) == {"hello"}
    async with cluster(tmp_path / "one", ["a"], replication_wait="strict") as world:
        assert (await world.speak("a", X, "hello")).copied is True
    async with cluster(tmp_path / "none", replication=0, nodes=nodes) as world:
        assert (await world.speak("a", X, "hello")).copied is True


async def test_copies_follow_where_nodes_come_and_go(tmp_path):
    async with cluster(tmp_path, "ab") as world:
        agents = [f"t/{number}" for number in range(12)]
        for agent in agents:
            await world.speak("a", agent, "hello")
        await world.tend()
        world.start("c")
        await world.stores["a"].services.tending.tend()
        belong = {agent: world.copied(agent, "a") for agent in agents}
        assert {tuple(nodes) for nodes in belong.values()} == {("b",), ("c",)}, "both get some"
        assert all(world.said(nodes[0], agent) for agent, nodes in belong.items())
        await world.stop("b")
        await world.stores["a"].services.tending.tend()
        assert all(world.said("c", agent) for agent in agents)
        world.calls.clear()
        await world.stores["a"].services.tending.tend()
        assert "take_secondary" not in world.methods(), "and then it is quiet"


async def test_a_copy_that_has_to_make_room_is_none(tmp_path):
    """Copies count as everything does; whose memory went is not told to be there."""
    async with cluster(tmp_path, transcripts_bytes_max=15_000) as world:
        for number in range(4):
            await world.speak("a", f"t/{number}", "x" * 500)
        assert world.said("b", "t/0")
        await world.report("b")
        for number in range(4, 8):
            await world.speak("b", f"t/{number}", "y" * 500)
        assert world.agents("b").nbytes <= 15_000
        gone = [f"t/{number}" for number in range(8) if not world.said("b", f"t/{number}")]
        report = await world.report("b", full=False)
        assert gone and set(gone) <= set(report.agents_retracted)
        with pytest.raises(AgentNotFound):
            await world.stores["b"].services.succession.promote("t/nobody", 1)
        assert all("b" not in (place.copies if (place := world.places.where(agent)) else ()) for agent in gone)


async def test_there_is_no_room_for_a_copy_of_more_than_a_node_may_keep(tmp_path):
    async with cluster(tmp_path, transcripts_bytes_max=60_000) as world:
        await world.speak("b", "t/own", "mine")
        world.agents("b")._limits = type(world.agents("b")._limits)(bytes_max=3_000)
        await world.speak("a", X, "z" * 4_000)
        assert not world.said("b", X) and world.said("b", "t/own") == {"mine"}, "nothing has changed"
        assert (await world.at("a").stats()).copies_failed_total == 1


async def test_a_fork_has_its_copies_too(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        assert await world.at("a").fork(X, "t/y") == 1
        assert world.said("b", "t/y") == {"one"} and world.place("b", "t/y") == Place(1, Role.SECONDARY)
        with pytest.raises(AgentElsewhere):
            await world.at("b").fork(X, "t/z")
        await world.at("a").forget("t/y")
        assert await world.at("a").fork(X, "t/y") == 1
        assert world.place("a", "t/y") == Place(LIFE, Role.PRIMARY) and world.said("b", "t/y") == {"one"}


async def test_an_earlier_copy_changes_nothing_even_where_nothing_was_said_since(tmp_path):
    """What a home took in from a former one has that one's numbers."""
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.speak("a", "t/y", "two")
        (taken,) = world.agents("a").heads("t/y")
        sent = [copy for copy in world.sent_copies() if copy.agent == X]
        head = replace(taken, agent=X, branch=5, epoch=7)
        assert await world.at("a").take_in(TakeIn(X, 1, [BranchMemory(head, Content(bytes(4), "old", b"[]"))])) == 1
        await world.stores["a"].services.tending.tend()
        assert world.said("b", X) == {"one", "old"}
        assert await world.at("b").take_secondary(sent[0]) == []
        assert world.said("b", X) == {"one", "old"}


async def test_a_node_that_was_gone_for_one_turn_only_gets_its_copy(tmp_path):
    """Also where nobody looked which nodes there were meanwhile."""
    async with cluster(tmp_path) as world:
        await world.tend()
        world.listed.remove("b")
        await world.speak("a", X, "one")
        world.listed.append("b")
        await world.stores["a"].services.tending.tend()
        assert world.said("b", X) == {"one"}


async def test_who_does_not_answer_is_not_asked_again_by_an_old_list(monkeypatch):
    """A turn's copy does not wait for a node that the router knows to be gone."""
    there = [["b", "c"]]

    def gone(name: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(calls, "actor_handle", gone)
    peers = RayPeers("a", USUAL)
    monkeypatch.setattr(peers, "_ask_router", lambda: there[-1])
    assert await peers.others() == ["b", "c"]
    there.append(["c"])
    assert await peers.others() == ["b", "c"], "a list is good for a while"
    with pytest.raises(Unavailable):
        await peers.client("b").standing([X]).within(1.0)
    assert await peers.others() == ["c"]
