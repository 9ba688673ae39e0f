"""Where the endpoint looks for agents' memory, with a fake router and fake stores."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from satchel.actors.protocol.clients import RouterClient
from satchel.actors.protocol.registry import ServedEntry
from satchel.actors.protocol.replica_messages import KVSelection
from satchel.actors.protocol.router_messages import (
    AgentPlace,
    NodeReport,
    Places,
)
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.protocol.store_messages import (
    AgentBranches,
    Begun,
    BranchKV,
    BranchMemory,
    Commit,
    CommitOutcome,
    Content,
    Head,
    Moved,
    Recalled,
)
from satchel.actors.rpc import client as calls
from satchel.actors.rpc.codec import encode, encode_error
from satchel.api.ray_backend import locator as agent_locator
from satchel.api.ray_backend import store as ray_store
from satchel.api.ray_backend.locator import KNOWN_MAX, AgentLocator
from satchel.api.ray_backend.store import RayStore
from satchel.cluster.config.config import parse_config
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import (
    AgentElsewhere,
    AgentExists,
    AgentNotFound,
    InvalidRequest,
    SatchelError,
    Unavailable,
)

X = "t/x"


class Method:
    def __init__(self, work: Any) -> None:
        self.remote = work


class Actors:
    """Handles by name. A `silent` node does not answer, and the router knows it. No process runs on an `ended` node:
    callers report it to the router (`lost`), and Ray reports it only if it `tells`. A `restarting` node has no store
    now."""

    def __init__(self, nodes: str = "abc") -> None:
        self.names = list(nodes)
        self.silent: set[str] = set()
        self.unlisted: set[str] = set()
        self.ended: set[str] = set()
        self.lost: list[str] = []
        self.restarting: set[str] = set()
        self.tells = True
        self.unheard: list[str] = []
        self.router_down = False
        self.homes: dict[str, tuple[str, int]] = {}
        self.copies: dict[str, list[str]] = {}
        self.elsewhere: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str, Any]] = []
        self.routed = 0
        self.delay_s = 0.0

    def handle(self, name: str) -> Any:
        if name == "router":
            return self
        return StoreHandle(self, name.removeprefix("kv_store:"))

    def __getattr__(self, name: str) -> Method:
        async def answer(asked: bytes) -> Any:
            self.routed += 1
            if self.router_down:
                raise ValueError("there is no router")
            return encode(getattr(self, f"_{name}")(asked, {*self.silent, *self.lost}))

        return Method(answer)

    def _nodes(self, asked: bytes, away: set[str]) -> list[NodeReport]:
        return [NodeReport(node, node not in away | self.unlisted) for node in self.names]

    def _lose_node(self, asked: bytes, away: set[str]) -> None:
        self.lost += RouterClient.lose_node.asked(asked)

    def _moved(self, asked: bytes, away: set[str]) -> None:
        agent, node, epoch = RouterClient.moved.asked(asked)
        self.homes[agent] = node, epoch

    def _places(self, asked: bytes, away: set[str]) -> Places:
        if self.unheard:
            return Places([], self.unheard)
        (named,) = RouterClient.places.asked(asked)
        agents = [agent for agent in named if agent in self.homes]
        return Places([self.place(agent, away) for agent in agents])

    def place(self, agent: str, away: set[str]) -> AgentPlace:
        home, epoch = self.homes[agent]
        copies = [node for node in self.copies.get(agent, []) if node not in away]
        return AgentPlace(agent, home, home in self.names and home not in away, epoch, copies)

    async def has_ended(self, node: str, timing: Timing) -> bool:
        return node in self.ended


class StoreHandle:
    def __init__(self, actors: Actors, node: str) -> None:
        self._actors, self._node = actors, node

    def __getattr__(self, method: str) -> Method:
        if method == "local_address":
            # All are on other machines.
            raise AttributeError(method)
        return Method(lambda asked: self._answer(method, asked))

    async def _answer(self, method: str, asked: bytes) -> bytes:
        actors, node = self._actors, self._node
        values = getattr(StoreClient, method).asked(asked)
        actors.asked.append((node, method, values))
        await asyncio.sleep(actors.delay_s)
        if node in actors.silent or (node in actors.ended and not actors.tells):
            await asyncio.Event().wait()
        if node in actors.ended | actors.restarting:
            raise ActorUnavailableError("the connection broke", None)
        try:
            return encode(self._result(method, values))
        except SatchelError as error:
            return encode_error(error)

    def _result(self, method: str, asked: list[Any]) -> Any:
        """Returns an answer that names the node, if the method's answer can."""
        actors, node = self._actors, self._node
        if method == "agents":
            found = sorted({*actors.homes} | {*actors.copies})
            here = [each for each in found if node == actors.homes.get(each, ("",))[0] or node in actors.copies[each]]
            told = [
                AgentBranches(each, None, [head_at(node, each)], actors.homes[each][1], node == actors.homes[each][0])
                for each in here
            ]
            _, after, limit = asked
            return [each for each in told if each.agent > after][:limit]
        agent = asked[0]
        if method == "promote":
            if node not in actors.copies.get(agent, []):
                raise AgentNotFound("there is no copy here")
            actors.homes[agent] = node, asked[1] + 1
            return asked[1] + 1
        if (node, agent) in actors.elsewhere:
            raise AgentElsewhere("it has moved")
        if method == "begin":
            return Begun(ord(node), None, False)
        if method == "move":
            return Moved(asked[1], actors.homes[agent][1] + 1)
        if method == "disk_kept":
            raise Unavailable("the disk is full")
        if method == "commit":
            return CommitOutcome(node)
        if method == "fork":
            return ord(node)
        if method == "info":
            return AgentBranches(agent, None, [head_at(node, agent)], 1, True)
        return Recalled(0, [BranchMemory(head_at(node, agent), None)], False)


def head_at(node: str, agent: str) -> Head:
    """Returns a branch whose model has the name of the node that answers."""
    return Head(agent, 1, 1, node.encode(), b"", 1, False, 1, 1, 1, 0.0, 0.0)


def recall(store: Any) -> Any:
    return store.recall(X, b"", {})


async def recalled(store: RayStore, agent: str = X) -> str:
    """The node that answers."""
    (branch,) = (await store.recall(agent, b"", {})).branches
    return branch.head.model.decode()


async def committed(store: RayStore, agent: str = X) -> str:
    """The node that answers."""
    return (await store.commit(agent, Commit(b"", Content(b"", "", b"[]"), 0, 0))).kind


CONFIG = parse_config({"models": [{"name": "x", "source": "x"}]})
TIMING = Timing(nodes_s=0.01, answer_s=0.2, report_s=0.02)


@pytest.fixture(name="actors")
def played(monkeypatch: pytest.MonkeyPatch) -> Actors:
    actors = Actors()
    monkeypatch.setattr(calls, "actor_handle", actors.handle)
    monkeypatch.setattr(agent_locator, "has_ended", actors.has_ended)
    monkeypatch.setattr(agent_locator, "FIRST_LOOK_S", 0.02)
    return actors


def homes() -> AgentLocator:
    return AgentLocator(replace(CONFIG, timing=TIMING))


async def test_agents_that_nobody_knows_go_to_the_same_node_for_everybody(actors):
    agents = [f"t/{number}" for number in range(30)]
    chosen = [[await each.locate(agent) for agent in agents] for each in (homes(), homes())]
    assert chosen[0] == chosen[1] and set(chosen[0]) == {"a", "b", "c"}
    actors.unlisted.add("b")
    fewer = [await each.locate(agent) for each in [homes()] for agent in agents]
    assert "b" not in fewer
    assert all(new == old for new, old in zip(fewer, chosen[0], strict=True) if old != "b"), "only those move"


async def test_where_an_agent_is_is_asked_once(actors):
    actors.homes[X] = "b", 1
    found = homes()
    assert await found.locate(X) == "b"
    routed = actors.routed
    assert await found.locate(X) == found.known(X) == "b" and actors.routed == routed
    found.forget(X)
    actors.homes[X] = "c", 2
    assert await found.locate(X) == "c"


async def test_what_is_remembered_is_bounded(actors):
    found = homes()
    for number in range(KNOWN_MAX + 10):
        found.note(f"t/{number}", "a")
    assert len(found._known) == KNOWN_MAX and not found.known("t/0") and found.known(f"t/{KNOWN_MAX}")


async def test_a_lost_home_is_adopted_once_whoever_asks_at_the_same_time(actors):
    actors.homes[X], actors.copies[X] = ("a", 3), ["b", "c"]
    actors.silent.add("a")
    actors.delay_s = 0.05
    found = homes()
    assert set(await asyncio.gather(*(found.locate(X) for _ in range(20)))) == {"b"}
    assert [call for call in actors.asked if call[1] == "promote"] == [("b", "promote", [X, 3])]


async def test_one_who_gives_up_does_not_end_the_adoption_for_the_others(actors):
    actors.homes[X], actors.copies[X] = ("a", 3), ["b"]
    actors.silent.add("a")
    actors.delay_s = 0.05
    found = homes()
    first, second = (asyncio.create_task(found.locate(X)) for _ in range(2))
    await asyncio.sleep(0.02)
    first.cancel()
    assert await second == "b"


async def test_a_copy_that_cannot_adopt_is_followed_by_the_next(actors):
    actors.homes[X], actors.copies[X] = ("a", 1), ["b", "c"]
    actors.silent |= {"a"}
    handle = actors.handle("kv_store:b")
    assert handle
    actors.elsewhere.clear()
    original = StoreHandle._result

    def refuse(self: StoreHandle, method: str, asked: Any) -> Any:
        if (self._node, method) == ("b", "promote"):
            raise Unavailable("it starts again")
        return original(self, method, asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreHandle, "_result", refuse)
        assert await homes().locate(X) == "c"


@pytest.mark.parametrize("copies", [[], ["b"]])
async def test_without_a_copy_that_answers_the_error_is_clear_and_soon(actors, copies):
    actors.homes[X], actors.copies[X] = ("a", 1), copies
    actors.silent |= {"a", "b"}
    began = time.monotonic()
    with pytest.raises(Unavailable, match="'x'"):
        await homes().locate(X)
    assert time.monotonic() - began < 15.0


async def test_who_asks_a_node_that_dies_is_told_soon(actors):
    actors.homes[X] = "a", 1
    found = homes()
    actors.delay_s = 30.0
    asking = asyncio.create_task(found.ask("a", recall))
    await asyncio.sleep(0.05)
    actors.silent.add("a")
    began = time.monotonic()
    with pytest.raises(Unavailable):
        await asking
    assert time.monotonic() - began < 15.0


async def test_a_store_that_lives_and_never_answers_is_not_waited_for_for_ever(actors):
    actors.delay_s = 30.0
    found = homes()
    found._answer_s = 0.1
    began = time.monotonic()
    with pytest.raises(Unavailable):
        await found.ask("a", lambda store: store.info(X))
    with pytest.raises(Unavailable):
        await found.ask("a", lambda store: store.info(X), timeout_s=0.05)
    assert time.monotonic() - began < 15.0


async def test_without_a_router_several_nodes_are_an_error_and_one_is_enough(actors):
    actors.router_down = True
    found = homes()
    assert await found.locate(X) == found._head, "one node knows where everything is"
    actors.router_down = False
    await found.alive()
    actors.router_down = True
    with pytest.raises(Unavailable):
        await found.locate("t/y")


async def test_the_list_of_nodes_outlives_the_router(actors):
    found = homes()
    assert await found.alive() == ["a", "b", "c"]
    actors.router_down = True
    await asyncio.sleep(0.02)
    assert await found.alive() == ["a", "b", "c"]


# The store that uses the locator.


async def test_an_agent_that_has_moved_is_followed(actors):
    actors.homes[X] = "a", 1
    store = RayStore(homes(), TIMING)
    assert await recalled(store, X) == "a"
    actors.elsewhere.add(("a", X))
    actors.homes[X] = "b", 2
    assert await recalled(store, X) == "b"
    assert await recalled(store, X) == "b"


async def test_the_router_may_hear_of_a_move_a_moment_later(actors):
    actors.homes[X] = "a", 1
    actors.elsewhere.add(("a", X))
    store = RayStore(homes(), TIMING)
    asking = asyncio.create_task(recalled(store, X))
    await asyncio.sleep(0.03)
    actors.homes[X] = "b", 2
    assert await asking == "b"


async def test_an_agent_that_is_nowhere_to_be_found_is_an_error_after_a_few_tries(actors):
    actors.homes[X] = "a", 1
    actors.elsewhere.add(("a", X))
    with pytest.raises(AgentElsewhere):
        await recalled(RayStore(homes(), TIMING), X)
    assert len(actors.asked) == ray_store.MOVES_MAX


async def test_a_home_that_dies_is_replaced_while_it_is_asked(actors):
    actors.homes[X], actors.copies[X] = ("a", 1), ["c"]
    store = RayStore(homes(), TIMING)
    await recalled(store, X)
    actors.silent.add("a")
    assert await committed(store, X) == "c"


async def test_a_turn_that_a_node_does_not_begin_in_time_is_ended_there(actors):
    """The message may arrive after a network partition, when the agent is back at that node. Then the agent would be
    busy for a whole lease with a turn that no client waits for."""
    actors.homes[X], actors.copies[X] = ("a", 1), ["c"]
    store = RayStore(homes(), TIMING)
    await recalled(store, X)
    actors.silent.add("a")
    assert (await store.begin(X, "turn", b"", {})).since == ord("c")
    await asyncio.sleep(0.01)
    began = [(node, method, asked[1]) for node, method, asked in actors.asked if method in ("begin", "abandon")]
    assert sorted(began) == [("a", "abandon", "turn"), ("a", "begin", "turn"), ("c", "begin", "turn")]
    assert began.index(("a", "begin", "turn")) < began.index(("a", "abandon", "turn"))


@pytest.mark.parametrize("tells", [False, True])
async def test_a_node_that_was_killed_is_replaced_at_once(actors, tells):
    """Though the router has not missed its reports yet, and Ray may not report it either. The router is told once."""
    agents = [f"t/{number}" for number in range(20)]
    for agent in agents:
        actors.homes[agent], actors.copies[agent] = ("a", 1), ["c"]
    store = RayStore(homes(), TIMING)
    await asyncio.gather(*(recalled(store, agent) for agent in agents))
    actors.ended.add("a")
    actors.tells = tells
    async with asyncio.timeout(10):
        assert set(await asyncio.gather(*(committed(store, agent) for agent in agents))) == {"c"}
    assert set(actors.lost) == {"a"} and len(actors.lost) <= 2
    adopted = [call for call in actors.asked if call[1] == "promote"]
    assert sorted(adopted, key=str) == sorted((("c", "promote", [agent, 1]) for agent in agents), key=str)


async def test_a_store_that_restarts_alone_keeps_its_agents(actors):
    actors.homes[X], actors.copies[X] = ("a", 1), ["c"]
    store = RayStore(homes(), TIMING)
    await recalled(store, X)
    actors.restarting.add("a")
    with pytest.raises(Unavailable):
        await recalled(store, X)
    actors.restarting.clear()
    assert await recalled(store, X) == "a"
    assert not actors.lost and "promote" not in [method for _, method, _ in actors.asked]


async def test_while_the_router_learns_nobody_is_taken_for_new_or_lost(actors):
    actors.unheard = ["b"]
    found = homes()
    with pytest.raises(Unavailable, match="node b") as refusal:
        await found.locate(X)
    assert refusal.value.retry_after_s
    with pytest.raises(Unavailable):
        await RayStore(found, TIMING).fork("t/y", X)
    assert await found.places([X]) == {} and not found.known(X)
    actors.unheard, actors.homes[X] = [], ("b", 4)
    assert await found.locate(X) == "b"


async def test_a_store_that_lives_and_fails_is_not_asked_again(actors):
    actors.homes[X] = "a", 1
    with pytest.raises(Unavailable, match="full"):
        await RayStore(homes(), TIMING).disk_kept(X)
    assert len(actors.asked) == 1


async def test_a_fork_is_where_its_original_is_and_never_over_another_agent(actors):
    actors.homes[X], actors.homes["t/y"] = ("b", 1), ("c", 1)
    found = homes()
    store = RayStore(found, TIMING)
    with pytest.raises(AgentExists):
        await store.fork(X, "t/y")
    assert await store.fork(X, "t/z") == ord("b") and found.known("t/z") == "b"


async def test_a_list_has_every_agent_once_as_its_home_has_it(actors):
    for number in range(10):
        actors.homes[f"t/{number}"] = "abc"[number % 3], 1
        actors.copies[f"t/{number}"] = ["abc"[(number + 1) % 3]]
    store = RayStore(homes(), TIMING)
    listed = await store.agents("t", "t/2", 5)
    assert [each.agent for each in listed] == [f"t/{number}" for number in range(3, 8)]
    assert all(each.branches[0].model.decode() == actors.homes[each.agent][0] for each in listed)


async def test_a_move_is_asked_of_the_home_and_the_router_told_at_once(actors):
    actors.homes[X] = "a", 1
    found = homes()
    store = RayStore(found, TIMING)
    assert await store.move(X, "b") == Moved("b", 2)
    assert [call[:2] for call in actors.asked] == [("a", "info"), ("a", "move")]
    assert found.known(X) == "b" and actors.homes[X] == ("b", 2)
    with pytest.raises(AgentNotFound):
        await store.where("t/nobody")
    assert (await store.where(X)).home == "b"
    assert await store.places([X, "t/nobody"]) == {X: await store.where(X)}
    with pytest.raises(InvalidRequest, match="nowhere"):
        await store.move(X, "nowhere")
    actors.unlisted.add("a")
    await asyncio.sleep(0.02)
    assert (await store.move(X, "a")).epoch == 3, "whether one that is silent has come back the home knows best"


async def test_a_lone_store_that_reports_no_more_is_not_waited_for(actors, monkeypatch: pytest.MonkeyPatch):
    """Its process is stopped, or its disk hangs. The first caller waits a while, as for a slow disk; others do not."""
    monkeypatch.setattr(agent_locator, "SILENT_READS", 5)
    actors.names = ["local"]
    actors.silent.add("local")
    found = homes()
    found.note(X, "local")
    with pytest.raises(Unavailable, match="does not answer now"):
        async with asyncio.timeout(10):
            await found.ask("local", lambda store: store.disk_kept(X))
    reads = found._silent_reads["local"]
    with pytest.raises(Unavailable, match="does not answer now"):
        await found.ask("local", recall)
    assert found._silent_reads["local"] <= reads + 2
    actors.silent.clear()
    assert (await found.ask("local", recall)).branches[0].head.model == b"local"
    await asyncio.sleep(0.02)
    await found.nodes()
    assert not found._silent_reads


class SilentReplica:
    """A replica that never answers."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.actor = calls.ActorRef("replica", "it does not answer now", handle=self)

    def info(self) -> calls.Call[Any]:
        begun = time.monotonic()

        async def answer() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.asked_s.append(time.monotonic() - begun)

        return self.actor.call(lambda handle: answer(), lambda raw: raw, 0.4)


async def test_a_replica_on_a_lost_node_is_not_waited_for_as_long_as_another(actors, monkeypatch: pytest.MonkeyPatch):
    """Deleting an agent is fast while a node is away. The replica is still asked, because perhaps only the node's store
    is gone."""
    replicas = {"x-0": SilentReplica(), "x-1": SilentReplica()}
    entry = ServedEntry(0, CONFIG.models[0], dict(zip(replicas, "ab", strict=True)))
    monkeypatch.setattr(ray_store.registry, "entries", lambda: (entry,))
    monkeypatch.setattr(ray_store, "find_replicas", lambda entries, timing: replicas)
    actors.unlisted.add("b")
    assert await RayStore(homes(), replace(TIMING, ask_s=0.05)).held(BranchKV(b"", KVSelection(b"", [], b""))) == 0
    (patient,), (brief,) = (replica.asked_s for replica in replicas.values())
    assert brief < 0.3 < patient
