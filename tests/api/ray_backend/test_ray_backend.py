"""What the backend asks the router, replicas and control store about the cluster, with fake actors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from satchel.actors.protocol import registry
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.protocol.clients import PoolClient, ReplicaClient, RouterClient
from satchel.actors.protocol.names import POOL, ROUTER
from satchel.actors.protocol.pool_messages import LOADED, PooledModel
from satchel.actors.protocol.registry import ServedEntry
from satchel.actors.protocol.replica_messages import (
    AdapterInfo,
    GenerateRequest,
    ReplicaStats,
    Sampling,
    SequenceUpdate,
)
from satchel.actors.protocol.router_messages import (
    Chain,
    Decision,
    Explanation,
    NodeReport,
    RouteRequest,
)
from satchel.actors.rpc import client as calls
from satchel.actors.rpc import local
from satchel.actors.rpc.codec import encode
from satchel.actors.rpc.local import LocalServer
from satchel.api.ray_backend import dispatch
from satchel.api.ray_backend.dispatch import RayBackend
from satchel.api.requests.loading import Loading
from satchel.api.views.cluster import SeenNodes
from satchel.cluster.config.config import Model, parse_config
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import InvalidRequest, NodeNotFound, NoReplica, Unavailable
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.trust.members import Member, admit, members
from tests.worlds.direct import answer_of, model_info

MODEL = Model(name="m", source="s")
REQUEST = GenerateRequest("r", "c", "m", "", [1], [], b"r" * 32, Sampling())


class Method:
    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    async def remote(self, *arguments: Any) -> Any:
        answer = self._answer(*arguments)
        if isinstance(answer, Never):
            await asyncio.Event().wait()
        if inspect.isawaitable(answer):
            answer = await answer
        return await answer_of(answer)


class Never:
    """An answer that does not come."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class Actor:
    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, answer in methods.items():
            setattr(self, name, Method(answer))


class World:
    """Actors by name; a look-up of any other name finds none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Actor] = {}
        self.entries = (ServedEntry(1, MODEL, {"m-0": "mac0", "m-1": "mac1"}),)
        self.seen = SeenNodes((), frozenset({"satchel-node-mac0"}), "satchel-node-mac0", 555)
        monkeypatch.setattr(registry, "entries", lambda: self.entries)
        monkeypatch.setattr(calls, "actor_handle", self.handle)
        monkeypatch.setattr(dispatch, "_seen_nodes", lambda: self.seen)
        config = {"models": [{"name": "m", "source": "s"}], "nodes": [{"name": "mac0"}, {"name": "mac1"}]}
        self.backend = RayBackend(parse_config(config))

    def handle(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def route(self, **decided: Any) -> None:
        self.restart(route=lambda request: Decision("m-1", "why", **decided))

    def restart(self, **methods: Callable[..., Any]) -> None:
        """Starts another router, which the backend finds."""
        self.actors[ROUTER] = Actor(**methods)
        self.backend.routing.router = RouterClient(self.backend.config.timing)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_the_node_is_the_decisions_else_the_registrys(world: World) -> None:
    world.route(node="mac7")
    assert (await world.backend.routing.route(REQUEST, [], "")).node == "mac7"
    world.route()
    assert (await world.backend.routing.route(REQUEST, [], "")).node == "mac1"


async def test_the_ids_that_replicas_have_are_learnt_from_decisions(world: World) -> None:
    """So the endpoint need not ask every replica, and it does not matter which one answers first."""
    assert world.backend.routing.model_ids(REQUEST) == ()
    asked: list[RouteRequest] = []

    def route(request: bytes) -> Decision:
        asked.extend(RouterClient.route.asked(request))
        return Decision("m-1", "why", node="mac1", model_id=b"b", model_ids=[b"a", b"b"])

    world.restart(route=route)
    other = replace(REQUEST, model_id=b"b", block_ids=[b"y"])
    await world.backend.routing.route(replace(REQUEST, model_id=b"a", block_ids=[b"x"]), [], "", [other])
    assert world.backend.routing.model_ids(REQUEST) == [b"a", b"b"]
    assert (asked[0].model_id, asked[0].block_ids) == (b"a", [b"x"])
    assert asked[0].others == [Chain(b"b", [b"y"])]
    adapted = replace(REQUEST, adapter=b"d" * 32)
    assert world.backend.routing.model_ids(adapted) == (), "an adapter has ids of its own"
    await world.backend.routing.route(adapted, [], "")
    assert asked[1].adapter == adapted.adapter and asked[1].model == "m"


async def test_adapters_are_listed_loaded_and_healthy_with_their_model(world: World) -> None:
    adapted = replace(MODEL, adapters={"one": "folder", "two": "a/b"}, aliases=("other",), load="request")
    world.entries = (ServedEntry(1, adapted, {"m-0": "mac0"}),)
    listed = await world.backend.listed()
    assert [(each.name, each.parent, each.replicas_of) for each in listed] == [
        ("m", "", "m"),
        ("one", "m", "m"),
        ("two", "m", "m"),
    ]
    assert [each.aliases for each in listed] == [("other",), (), ()] and all(each.comes_and_goes for each in listed)
    info = model_info(adapters=[AdapterInfo(name, name.encode() * 10, {}, 4) for name in ("one", "two")])
    stats = ReplicaStats("m-0", "m", answers=True, node="mac0")
    world.actors["replica:m-0"] = Actor(stats=lambda _: stats, info=lambda _: info)
    assert await world.backend.health() == {"m": True, "one": True, "two": True}
    own, one, two = [model.info for model in await world.backend.models()]
    assert (one.name, one.parent, one.adapter, one.files_id) == ("one", "m", b"one" * 10, own.files_id)
    assert len({own.model_id, one.model_id, two.model_id}) == 3
    asked: list[str] = []

    def ensure(request: bytes) -> PooledModel:
        asked.append(PoolClient.ensure.asked(request)[0])
        return PooledModel("m", LOADED)

    world.actors[POOL] = Actor(ensure=ensure)
    world.entries = (ServedEntry(1, adapted, {}),)
    world.backend.routing.served.refresh()
    await world.backend.load("two", Loading())
    assert asked == ["m"], "the model is loaded for its adapter"


async def test_a_request_is_routed_though_nobody_knows_the_node(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unread() -> Any:
        raise NoReplica("the control store does not answer")

    monkeypatch.setattr(world.backend.routing, "placed", unread)
    world.route()
    decision = await world.backend.routing.route(REQUEST, [], "")
    assert (decision.replica, decision.node) == ("m-1", "")


async def test_a_silent_replica_is_shown_where_it_belongs(world: World) -> None:
    answer = ReplicaStats("m-0", "m", answers=True, running=2, node="mac0")
    world.actors["replica:m-0"] = Actor(stats=lambda _: answer, info=lambda _: model_info(pid=12))
    first, second = await world.backend.stats()
    assert (first.running, first.node, first.answers) == (2, "mac0", True)
    assert (second.replica, second.model, second.node, second.answers) == ("m-1", "m", "mac1", False)
    assert await world.backend.pids() == {"m-0": 12}


@pytest.mark.parametrize("share", ["tenant", "none"])
async def test_a_prompt_is_prepared_at_the_replica_that_is_named(world: World, share: str) -> None:
    """Under the ids that its requests will have there; not if no request could find it."""
    asked: list[GenerateRequest] = []
    world.actors["replica:m-1"] = Actor(prepare=lambda request: asked.extend(ReplicaClient.prepare.asked(request)))
    world.backend.config = replace(world.backend.config, share=share)
    prompt = list(range(BLOCK_TOKENS + 3))
    await world.backend.prepare("m-1", b"b", replace(REQUEST, agent="t/ann", tenant="t", prompt=prompt))
    if share == "none":
        assert not asked
        return
    root = root_id(b"b", "tenant:t")
    assert [(each.model_id, each.root_id, each.block_ids) for each in asked] == [(b"b", root, block_ids(root, prompt))]


async def test_a_replica_that_loads_has_its_node_and_no_process(world: World) -> None:
    loading = ReplicaStats("m-0", "m", answers=False)
    world.actors["replica:m-0"] = Actor(stats=lambda _: loading, info=lambda _: None)
    assert (await world.backend.stats())[0].node == "mac0"
    assert await world.backend.pids() == {}


async def test_nodes_are_shown_while_the_router_restarts(world: World) -> None:
    assert [(node.name, node.up) for node in await world.backend.nodes()] == [("mac0", True), ("mac1", False)]
    described = NodeReport("mac1", True, used_bytes=5, links={"mac0": 2.0})
    world.restart(nodes=lambda _: [described])
    assert [(node.name, node.up) for node in await world.backend.nodes()] == [("mac0", True), ("mac1", True)]


async def test_a_control_store_that_hangs_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> SeenNodes:
        raise RuntimeError("no connection")

    monkeypatch.setattr(dispatch, "_seen_nodes", fails)
    with pytest.raises(NoReplica):
        await world.backend.nodes()


async def test_a_decision_is_explained_with_its_node(world: World) -> None:
    with pytest.raises(Unavailable):
        await world.backend.explain("r")
    found = {"r": Explanation("m-1", "why"), "s": Explanation("m-1", "why", node="mac7")}
    world.restart(explain=lambda asked: found.get(*RouterClient.explain.asked(asked)))
    assert await world.backend.explain("r") == {**asdict(found["r"]), "replica": "m-1", "node": "mac1"}
    assert await world.backend.explain("s") == {**asdict(found["s"]), "replica": "m-1", "node": "mac7"}
    assert await world.backend.explain("t") is None


async def test_a_request_waits_for_a_router_that_starts_again(world: World) -> None:
    """Until it has heard of the replicas, and for as long as two reports take also if it was not away."""
    timing = Timing(retry_s=0.01, report_s=0.05)
    world.backend.config = world.backend.routing.config = replace(world.backend.config, timing=timing)
    answers: list[Any] = [NoReplica("no replica answers now"), Decision("m-1", "why", node="mac1")]
    world.restart(route=lambda request: answers.pop(0))
    assert (await world.backend.routing.route(REQUEST, [], "")).replica == "m-1"
    asked: list[bytes] = []
    world.restart(route=lambda request: asked.append(request) or NoReplica("no replica answers now"))
    with pytest.raises(NoReplica):
        await world.backend.routing.route(REQUEST, [], "")
    assert len(asked) > 2
    gone = RayActorError()

    def route(request: bytes) -> Any:
        answer = answers.pop(0)
        if answer is gone:
            raise gone
        return answer

    answers += [gone, gone, NoReplica("no replica answers now"), Decision("m-1", "why", node="mac1")]
    world.restart(route=route)
    assert (await world.backend.routing.route(REQUEST, [], "")).replica == "m-1" and not answers


async def test_a_router_that_stays_away_is_an_error_in_time(world: World) -> None:
    timing = Timing(retry_s=0.01, answer_s=0.1)
    world.backend.config = world.backend.routing.config = replace(world.backend.config, timing=timing)
    with pytest.raises(NoReplica, match="the router does not answer now"):
        await world.backend.routing.route(REQUEST, [], "")


async def test_a_router_that_hangs_is_an_error_in_time(world: World) -> None:
    world.backend.config = replace(world.backend.config, timing=Timing(answer_s=0.5))
    world.restart(explain=Never, nodes=Never)
    with pytest.raises(Unavailable):
        await world.backend.explain("r")
    assert [node.name for node in await world.backend.nodes()] == ["mac0", "mac1"]


async def test_a_link_that_breaks_has_its_node_looked_at(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the whole node has ended, no call waits for another process on it."""
    checked: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(world.backend.routing._locator, "check", checked.put)

    def breaks(asked: bytes) -> Any:
        raise RuntimeError("the connection broke")

    world.actors["replica:m-1"] = Actor(next_frame=breaks, abort=lambda ids: None)
    world.restart(lose=lambda replica: None)
    link = world.backend.routing.link(Decision("m-1", "why", node="mac7"))
    async with asyncio.timeout(20):
        assert await checked.get() == link.node == "mac7"
        await link.broken.wait()
    await world.backend.close()


@pytest.mark.parametrize(("error", "died"), [(RayActorError(), True), (RuntimeError("broke"), False)])
async def test_a_replica_whose_process_ends_is_told_from_one_that_is_cut_off(
    world: World, error: Exception, died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that is lost with a process may have crashed it."""

    async def check(node: str) -> bool:
        return True

    def breaks(asked: bytes) -> Any:
        raise error

    monkeypatch.setattr(world.backend.routing._locator, "check", check)
    world.actors["replica:m-1"] = Actor(next_frame=breaks, abort=lambda ids: None)
    world.restart(lose=lambda replica: None)
    link = world.backend.routing.link(Decision("m-1", "why", node="mac7"))
    async with asyncio.timeout(20):
        await link.broken.wait()
    assert link.died is died and not link.heard
    await world.backend.close()


async def test_frames_come_without_ray_until_their_connection_breaks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then Ray is asked for the same frame, and knows what became of the replica."""
    monkeypatch.setattr(local, "this_machine", lambda: "here")
    near: list[int] = []
    by_ray: list[int] = []
    more = asyncio.Event()

    class Served:
        async def next_frame(self, asked: bytes) -> bytes:
            near.append(ReplicaClient.next_frame.asked(asked)[1])
            await (asyncio.Event().wait() if len(near) == 3 else asyncio.sleep(0))
            return encode([SequenceUpdate("r", [near[-1]])])

    async def through_ray(asked: bytes) -> list[SequenceUpdate]:
        by_ray.append(ReplicaClient.next_frame.asked(asked)[1])
        if len(by_ray) == 2:
            raise RayActorError()
        await more.wait()
        return [SequenceUpdate("r", [100 + by_ray[-1]])]

    server = LocalServer(Served(), "next_frame")
    world.actors["replica:m-1"] = Actor(
        next_frame=through_ray, abort=lambda ids: None, local_address=lambda _: server.address()
    )
    world.restart(lose=lambda replica: None)
    link = world.backend.routing.link(Decision("m-1", "why"))
    said: list[int] = []
    link.sequences["r"] = lambda update: said.extend(update.tokens if isinstance(update, SequenceUpdate) else [])
    actor: Any = link.client.actor
    async with asyncio.timeout(20):
        while actor._connection is None:
            await asyncio.sleep(0.01)
        more.set()
        while near != [1, 2, 3]:
            await asyncio.sleep(0.01)
        actor._connection.abort()
        await link.broken.wait()
        await asyncio.gather(*world.backend.routing._background)
    assert link.died and (said, by_ray) == ([100, 1, 2], [0, 3])
    assert actor._opening is None and actor._connection is None, "nobody would close it"
    await world.backend.close()


class Removals(World):
    """A cluster whose mac2 has joined by an invitation, and a record of removals."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
        super().__init__(monkeypatch)
        prepare_home(home)
        self.home = home
        self.forgotten: list[str] = []
        self.lost: list[str] = []
        admit(home, Member("mac2", "10.0.0.3", "f" * 43))
        monkeypatch.setattr(dispatch, "default_home", lambda: home)
        monkeypatch.setattr(dispatch, "forget_node", self.forgotten.append)
        entry = registry.NodeEntry("mac2", "10.0.0.3", (), "1", "/home", 0.0)
        self.seen = SeenNodes((entry,), frozenset({"satchel-node-mac0"}), "satchel-node-mac0", 555)

    def reports(self, up: bool) -> None:
        self.restart(
            nodes=lambda _: [NodeReport("mac0", True), NodeReport("mac2", up)],
            lose_node=lambda which: self.lost.extend(RouterClient.lose_node.asked(which)),
        )


async def test_a_node_that_is_down_is_removed_with_all_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = Removals(monkeypatch, Home(tmp_path))
    world.reports(up=False)
    assert await world.backend.remove_node("mac2") is False
    await asyncio.sleep(0.01)
    assert world.forgotten == ["mac2"] and world.lost == ["mac2"]
    assert members(world.home).removed == {"f" * 43: "mac2"}
    world.seen = replace(world.seen, joined=())
    world.reports(up=True)
    with pytest.raises(NodeNotFound):
        await world.backend.remove_node("mac2")


async def test_a_node_that_is_up_is_told_at_the_join_server_and_leaves_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = Removals(monkeypatch, Home(tmp_path))
    world.reports(up=True)
    assert await world.backend.remove_node("mac2") is True
    assert not world.forgotten and not world.lost and members(world.home).removed
    # It was killed at this moment.
    world.reports(up=False)
    assert await world.backend.remove_node("mac2") is False
    assert world.forgotten == ["mac2"]


async def test_nodes_of_the_config_and_unknown_ones_are_not_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = Removals(monkeypatch, Home(tmp_path))
    world.reports(up=True)
    for name in ("mac0", "mac1"):
        with pytest.raises(InvalidRequest, match="config"):
            await world.backend.remove_node(name)
    with pytest.raises(NodeNotFound, match="mac7"):
        await world.backend.remove_node("mac7")
    assert not world.forgotten and members(world.home).admitted
