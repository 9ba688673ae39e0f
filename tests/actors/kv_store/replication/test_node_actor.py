"""Agents' words on several nodes: moves, adoption after a loss, and that what was forgotten stays so."""

from __future__ import annotations

import asyncio

import pytest

from satchel.actors.kv_store import actor
from satchel.actors.kv_store.agents.roles import LIFE, Place, Role
from satchel.actors.kv_store.disk.io import DiskIO, Space
from satchel.actors.kv_store.services import disk, reports
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.store_messages import Commit, CommitOutcome, Content
from satchel.cluster.errors import (
    AgentBusy,
    AgentElsewhere,
    AgentNotFound,
    StaleEpoch,
    Unavailable,
)
from tests.worlds.kv_store.kv_files import MODEL, chain
from tests.worlds.kv_store.store_nodes import cluster

X = "t/x"


async def test_a_node_whose_disk_tier_opens_late_serves_its_kv_then_and_tells_the_router(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(disk, "OPEN_RETRY_S", 0.05)
    async with cluster(tmp_path) as world:
        entries = chain(2, owners=(X,))
        await world.put("a", entries)
        before = world.stores["a"]
        assert before.services.memory.disk.store is not None and before.services.fetching.blocks is not None
        before.services.memory.database.close()
        store = world.start("a")
        await world.at("a").stats()
        report = await world.report("a")
        assert "another process" in report.disk_error and report.disk_full and report.announced == []
        await asyncio.to_thread(before.services.fetching.blocks.close)
        before.services.memory.disk.store.close()
        async with asyncio.timeout(10):
            while store.services.fetching.blocks is None:
                await asyncio.sleep(0.01)
        report = await world.report("a", full=False)
        assert (report.disk_error, report.disk_full) == ("", False)
        assert set(report.announced) == {entry.id for entry in entries}
        assert (await world.report("a", full=False)).announced == []
        assert (await world.at("a").block_addresses()) != []


async def test_a_move_leaves_one_home_and_a_copy(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.speak("a", X, "two")
        moved = await world.at("a").move(X, "b")
        assert (moved.node, moved.epoch) == ("b", 2)
        assert world.homes(X) == ["b"] and world.said("b", X) == {"one", "two"}
        with pytest.raises(AgentElsewhere):
            await world.at("a").recall(X, MODEL, {})
        assert (await world.speak("b", X, "!", more=True)).kind == "replaced"
        assert world.said("a", X) == world.said("b", X)
        assert (await world.at("b").move(X, "a")).epoch == 3
        assert world.homes(X) == ["a"]
        again = await world.at("a").move(X, "a")
        assert (again.epoch, again.moved) == (3, False), "it is there already"


async def test_a_move_is_refused_with_the_reason(tmp_path):
    async with cluster(tmp_path, timeouts={"turn_wait_s": 0.1}) as world:
        with pytest.raises(AgentNotFound):
            await world.at("a").move(X, "b")
        await world.speak("a", X, "one")
        with pytest.raises(Unavailable, match="nowhere"):
            await world.at("a").move(X, "nowhere")
        with pytest.raises(AgentElsewhere):
            await world.at("b").move(X, "a")
        await world.at("a").begin(X, "turn", MODEL, {})
        with pytest.raises(AgentBusy):
            await world.at("a").move(X, "b")
        assert world.homes(X) == ["a"]
        await world.at("a").abandon(X, "turn")
        await world.at("a").move(X, "b")


@pytest.mark.parametrize("lost", ["call", "answer"])
@pytest.mark.parametrize("method", ["take_secondary", "fetch", "promote_here", "take_in"])
async def test_a_move_that_fails_at_any_step_loses_nothing_and_leaves_one_home(tmp_path, method, lost):
    async with cluster(tmp_path, replication=0) as world:
        await world.speak("a", X, "one")

        def fault(caller: str, node: str, called: str) -> None:
            if called == method:
                raise Unavailable("lost")

        if lost == "call":
            world.fault = fault
        else:
            world.unanswered.add(("a", "b", method))
        try:
            await world.at("a").move(X, "b")
        except Unavailable:
            assert method in ("take_secondary", "promote_here")
        world.fault = lambda caller, node, called: None
        world.unanswered.clear()
        await world.tend()
        (home,) = world.homes(X)
        assert world.said(home, X) == {"one"}
        assert (await world.speak(home, X, "!", more=True)).kind == "replaced"
        assert await world.at(home).begin(X, "turn", MODEL, {}), "nobody has its turn"


async def test_a_node_that_leaves_hands_over_an_agent_in_the_middle_of_its_turn(tmp_path):
    """Its row goes on elsewhere, and what it says is kept at the new home. Without copies nobody else has its words."""
    async with cluster(tmp_path, replication=0, timeouts={"turn_wait_s": 0.1}) as world:
        await world.speak("a", X, "one")
        await world.at("a").begin(X, "turn", MODEL, {})
        assert (await world.at("a").move(X, "b", at_once=True)).node == "b"
        assert world.homes(X) == ["b"] and world.said("b", X) == {"one"}
        with pytest.raises(AgentElsewhere):
            await world.speak("a", X, "two", turn="turn")
        await world.stop("a")
        assert (await world.speak("b", X, "two", turn="turn")).kept
        assert world.said("b", X) == {"one", "two"}
        assert await world.at("b").begin(X, "next", MODEL, {}), "nobody has its turn"


async def test_what_a_stateless_turn_says_during_a_move_moves_too(tmp_path, monkeypatch):
    async with cluster(tmp_path, replication=0) as world:
        await world.speak("a", X, "one")
        promote_here = world.stores["b"].promote_here

        async def after_a_turn(asked: bytes) -> bytes:
            assert await world.speak("a", X, "two")
            return await promote_here(asked)

        monkeypatch.setattr(world.stores["b"], "promote_here", after_a_turn)
        await world.at("a").move(X, "b")
        assert world.homes(X) == ["b"] and world.said("b", X) == {"one", "two"}


async def test_a_lost_home_is_replaced_by_its_copy_and_is_a_copy_when_it_comes_back(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.stop("a")
        epochs = await asyncio.gather(*(world.at("b").promote(X, 1) for _ in range(5)))
        assert set(epochs) == {2}, "asked by many, adopted once"
        await world.speak("b", X, "!", more=True)
        back = world.start("a")
        assert sorted(world.homes(X)) == ["a", "b"]
        await back.services.tending.learn()
        assert world.homes(X) == ["b"] and world.place("a", X).role is Role.SECONDARY
        await world.speak("b", X, "?", more=True)
        assert world.said("a", X) == {"?"}


async def test_who_did_not_say_what_was_forgotten_is_asked_again(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.stop("a")
        await world.at("b").forget(X)
        back = world.start("a")
        world.cut.add(frozenset("ab"))
        await back.services.tending.learn()
        assert world.said("a", X) == {"one"}, "nobody could tell"
        world.cut.clear()
        await back.services.tending.tend()
        assert not world.said("a", X)


async def test_no_turn_begins_at_a_node_that_has_not_asked_the_others_yet(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.stop("a")
        await world.at("b").promote(X, 1)
        back = world.start("a")
        back.services.tending.introduced.clear()
        asked = asyncio.ensure_future(world.at("a").recall(X, MODEL, {}))
        await asyncio.sleep(0.05)
        assert not asked.done()
        await back.services.tending.learn()
        with pytest.raises(AgentElsewhere):
            await asked


async def test_what_a_home_heard_that_was_cut_off_reaches_its_successor(tmp_path):
    """Both have answered their clients, so both answers are remembered: as branches of their own."""
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "begin")
        world.cut.add(frozenset("ab"))
        await world.at("b").promote(X, 1)
        await world.speak("b", X, "there", more=True)
        await world.speak("a", X, "here", more=True)
        assert sorted(world.homes(X)) == ["a", "b"], "each is reached by others"
        world.cut.clear()
        await world.tend()
        await world.tend()
        assert world.homes(X) == ["b"]
        assert world.said("b", X) == world.said("a", X) == {"here", "there"}
        await world.tend()
        assert len(world.agents("b").heads(X)) == 2, "handing over twice adds nothing"


async def test_a_home_learns_with_its_next_turn_that_it_is_none_and_the_turn_is_kept(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "begin")
        world.cut.add(frozenset("ab"))
        await world.at("b").promote(X, 1)
        world.cut.clear()
        assert (await world.speak("a", X, "here", more=True)).kind == "replaced"
        assert world.homes(X) == ["b"] and "here" in world.said("b", X)


async def test_a_turn_that_was_begun_at_a_former_home_is_over_when_it_is_home_again(tmp_path):
    """What is sent to a node that is cut off may arrive when nobody waits for it any more."""
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "begin")
        world.cut.add(frozenset("ab"))
        await world.at("b").promote(X, 1)
        assert await world.at("a").begin(X, "late", MODEL, {})
        world.cut.clear()
        await world.tend()
        assert world.homes(X) == ["b"]
        await world.at("b").move(X, "a")
        assert world.homes(X) == ["a"]
        await asyncio.wait_for(world.at("a").begin(X, "next", MODEL, {}), 20)


async def test_a_copy_does_not_overwrite_a_former_home_before_that_has_handed_over(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "begin")
        world.cut.add(frozenset("ab"))
        await world.at("b").promote(X, 1)
        await world.speak("a", X, "here", more=True)
        world.cut.clear()
        await world.speak("b", X, "there", more=True)
        assert world.said("a", X) == {"here"}
        await world.tend()
        assert world.homes(X) == ["b"] and world.said("b", X) == {"here", "there"} == world.said("a", X)


async def test_who_adopts_takes_the_latest_copy_that_answers(tmp_path):
    """One copy has missed a turn; whichever is asked, the turn is not lost."""
    async with cluster(tmp_path, "abc", replication=2) as world:
        await world.speak("a", X, "one")
        world.cut.add(frozenset("ab"))
        await world.speak("a", X, "two", more=True)
        assert world.said("b", X) == {"one"} and world.said("c", X) == {"two"}
        await world.stop("a")
        assert await world.at("b").promote(X, 1) == 2
        assert world.said("b", X) == {"two"}


async def test_who_adopts_from_a_home_that_only_seemed_lost_gets_all_and_replaces_it(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        world.fault = lambda caller, node, method: lose(method)

        def lose(method: str) -> None:
            if method == "take_secondary" and lost:
                lost.pop()
                raise Unavailable("lost")

        lost = [1]
        await world.speak("a", X, "two", more=True)
        assert world.said("b", X) == {"one"}
        await world.at("b").promote(X, 1)
        await world.tend()
        assert world.homes(X) == ["b"] and world.said("b", X) == {"two"}


async def test_two_homes_of_one_epoch_become_one(tmp_path):
    """Two sides of a cluster that fell apart may begin the same agent; the first by name is right, for the router
    as well, and has what both heard."""
    async with cluster(tmp_path) as world:
        world.cut.add(frozenset("ab"))
        await world.speak("a", X, "here")
        await world.speak("b", X, "there")
        world.cut.clear()
        await world.tend()
        assert world.homes(X) == ["a"] and world.said("a", X) == {"here", "there"}
        for name in "ba":
            await world.report(name)
        assert (place := world.places.where(X)) and place.node == "a"


async def test_of_two_homes_of_one_epoch_copies_follow_the_one_that_stays(tmp_path):
    """They may have taken what the other one had: that a copy is of the same epoch says nothing any more."""
    async with cluster(tmp_path, "abc", replication=2) as world:
        world.cut.update(map(frozenset, ("ab", "ac")))
        await world.speak("a", X, "here")
        await world.speak("b", X, "there")
        await world.speak("b", X, "and there")
        assert world.said("c", X) == {"there", "and there"}
        world.cut.clear()
        for name in ("b", "c", "b", "a", "b"):
            await world.stores[name].services.tending.learn()
            await world.stores[name].services.tending.tend()
        await world.tend()
        everything = {"here", "there", "and there"}
        assert world.homes(X) == ["a"] and all(world.said(name, X) == everything for name in "abc")


async def test_a_turn_at_a_former_home_is_refused_alone_and_not_given_back(tmp_path):
    """Turns of several agents share a transaction: one that is refused takes no other with it."""
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.at("a").move(X, "b")
        (moved, kept) = await asyncio.gather(
            world.at("a").commit(X, Commit(MODEL, Content(b"", "", b"[]"), 0, 1, turn="t")),
            world.speak("a", "t/y", "two", turn="u"),
            return_exceptions=True,
        )
        assert isinstance(moved, AgentElsewhere) and isinstance(kept, CommitOutcome) and kept.kind == "opened"
        assert world.agents("a").turn_ends(X) is None


async def test_a_turn_from_before_the_agent_was_forgotten_is_barred_wherever_it_ends(tmp_path):
    """Its home is lost meanwhile, and another node's count is behind what the turn began with."""
    async with cluster(tmp_path, replication=0) as world:
        world.agents("a")._sequence += 1 << 30
        since = (await world.at("a").recall(X, MODEL, {})).since
        assert since > world.agents("b").sequence
        await world.speak("a", X, "secret")
        await world.at("a").forget(X)
        await world.stop("a")
        late = Commit(MODEL, Content(b"", "secret", b"[]"), 0, since)
        assert (await world.at("b").commit(X, late)).kind == "forgotten"
        assert world.said("b", X) == set()


@pytest.mark.parametrize("how", ["buried", "standing"])
async def test_who_hears_later_of_a_burial_bars_the_same_turns(tmp_path, how):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "secret")
        world.agents("a")._sequence += 1 << 30
        world.cut.add(frozenset("ab"))
        since = (await world.at("a").recall(X, MODEL, {})).since
        await world.at("a").forget(X)
        world.stores["a"].services.tombstones._unburied.clear()
        world.cut.clear()
        if how == "buried":
            await world.stores["b"].services.tending.learn()
        else:
            await world.stores["b"].services.succession.settle_with(X)
        assert world.place("b", X).role is Role.FORGOTTEN
        assert world.agents("b").buried(X) > since


async def test_there_is_nothing_to_adopt_where_no_copy_is(tmp_path):
    async with cluster(tmp_path, replication=0) as world:
        await world.speak("a", X, "one")
        await world.stop("a")
        with pytest.raises(AgentNotFound):
            await world.at("b").promote(X, 1)


async def test_forgetting_reaches_all_nodes_and_a_later_life_is_above(tmp_path):
    async with cluster(tmp_path, "abc", replication=2) as world:
        await world.speak("a", X, "secret")
        assert await world.at("a").forget(X) is True
        for name in "abc":
            assert not world.said(name, X) and world.place(name, X) == Place(LIFE - 1, Role.FORGOTTEN)
            assert b"secret" not in b"".join(path.read_bytes() for path in (tmp_path / name).glob("agents*"))
        await world.speak("b", X, "anew")
        assert world.homes(X) == ["b"] and world.place("b", X) == Place(LIFE, Role.PRIMARY)
        assert world.said("a", X) == world.said("c", X) == {"anew"}
        for name in "abc":
            await world.report(name)
        place = world.places.where(X)
        assert place is not None and (place.node, place.epoch) == ("b", LIFE)


@pytest.mark.parametrize("again", [False, True])
async def test_a_node_that_was_away_forgets_before_it_announces(tmp_path, again):
    """Also where the agent speaks again meanwhile; and the node had been the agent's home."""
    async with cluster(tmp_path, "abc", replication=1) as world:
        home = "a"
        (other,) = world.copied(X, home)
        third = ({"b", "c"} - {other}).pop()
        await world.speak(home, X, "secret")
        await world.stop(home)
        await world.at(other).promote(X, 1)
        await world.at(other).forget(X)
        if again:
            await world.speak(third, X, "anew")
        back = world.start(home)
        assert world.said(home, X) == {"secret"} | ({"anew"} if "anew" in world.said(home, X) else set())
        await back.services.tending.learn()
        report = await world.report(home)
        assert [entry for entry in report.agents if entry[2]] == []
        await world.tend()
        for name in "abc":
            assert "secret" not in world.said(name, X)
        assert world.homes(X) == ([third] if again else [])


async def test_a_burial_that_did_not_arrive_is_told_again(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "secret")
        world.cut.add(frozenset("ab"))
        await world.at("a").forget(X)
        assert world.said("b", X) == {"secret"}
        world.cut.clear()
        await world.stores["a"].services.tending.tend()
        assert not world.said("b", X) and not world.stores["a"].services.tombstones._unburied


async def test_a_copy_of_a_life_that_is_over_is_refused_and_cannot_be_adopted(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "secret")
        (old, *_) = world.sent_copies()
        await world.at("a").forget(X)
        with pytest.raises(StaleEpoch):
            await world.at("b").take_secondary(old)
        for name in "ab":
            with pytest.raises(AgentNotFound):
                await world.at(name).promote(X, 1)
        assert not world.said("b", X)


async def test_reports_say_what_has_changed_and_full_ones_everything(tmp_path):
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "one")
        await world.speak("a", "t/y", "one")
        first = await world.report("a")
        assert sorted(first.agents) == [[X, 1, True], ["t/y", 1, True]]
        assert (await world.report("a", full=False)).agents == []
        await world.at("a").move(X, "b")
        await world.at("a").forget("t/y")
        changed = await world.report("a", full=False)
        assert changed.agents == [[X, 1, False]] and changed.tombstones == [["t/y", LIFE - 1]]
        await world.report("b")
        assert world.places.agents_on("b") == [X] and world.places.where("t/y") is None
        assert (await world.report("a")).tombstones == [["t/y", LIFE - 1]]


async def test_who_leaves_or_has_no_room_says_so(tmp_path, monkeypatch):
    async with cluster(tmp_path) as world:
        report = await world.report("a")
        assert not report.draining and not report.disk_full
        await world.at("a").drain()
        assert (await world.report("a")).draining and not (await world.report("b")).draining
        room = Space(free=reports.ROOM_BYTES_MIN - 1, total=2**40)
        monkeypatch.setattr(DiskIO, "space", lambda io, folder: room)
        assert (await world.report("b")).disk_full


async def test_changes_while_a_report_is_made_are_in_the_next(tmp_path):
    """The report is made on a thread of its own."""
    async with cluster(tmp_path, replication=0) as world:
        told: set[str] = set()
        done = asyncio.Event()

        async def report() -> None:
            while not done.is_set():
                told.update(agent for agent, *_ in (await world.report("a", full=False)).agents)

        reporting = asyncio.create_task(report())
        agents = [f"t/{number}" for number in range(150)]
        await asyncio.gather(*(world.speak("a", agent, "x") for agent in agents))
        done.set()
        await reporting
        told.update(agent for agent, *_ in (await world.report("a", full=False)).agents)
        assert told == set(agents)


async def test_tokens_are_the_same_on_all_nodes(tmp_path):
    tokens = list(range(BLOCK_TOKENS + 3))
    async with cluster(tmp_path) as world:
        await world.speak("a", X, "long", tokens)
        await world.at("a").move(X, "b")
        (branch,) = (await world.at("b").recall(X, MODEL, {})).branches
        (head,) = world.agents("a").heads(X)
        found = branch.head
        assert (found.branch, found.epoch, found.tokens) == (head.branch, head.epoch, len(tokens))


async def test_a_full_disk_is_written_down_when_it_begins_and_when_it_ends(tmp_path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(actor, "note_incident", lambda home, kind, text: told.append(f"{kind}: {text}"))
    async with cluster(tmp_path, "a") as world:
        reporting = world.stores["a"].services.reports
        reporting.on_full = actor._note_room
        least = reports.ROOM_BYTES_MIN
        for free_bytes in (2 * least, least - 1, 0, least, 2 * least - 1, 2 * least, 3 * least):
            reporting.note_room(free_bytes)
    full, room = told
    assert full.startswith("disk: the disk of ") and "is full" in full and "has room again" in room
