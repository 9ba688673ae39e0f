"""What the endpoint shows of a cluster with several nodes, and moving agents between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from satchel.actors.protocol.router_messages import NodeEntry, NodeReport
from satchel.api.agents.memory import FOLLOWING_MAX
from satchel.api.cli.views import _replica_lines
from satchel.api.client.agent import Agent
from satchel.api.client.background import BackgroundLoop
from satchel.api.protocols.satchel import cluster_routes
from satchel.api.requests.backend import NodeState, ReplicaStats
from satchel.api.views import cluster as cluster_views
from satchel.api.views.cluster import SeenNodes, TokenRates, node_states, node_views
from satchel.cluster.audit import Audit
from satchel.cluster.config.nodes import Link, Node
from satchel.cluster.errors import DeadlineExceeded, InvalidRequest, Unavailable
from satchel.cluster.home import Home, prepare_home
from tests.worlds.api.homes import HomesStore
from tests.worlds.api.remembering import Remembering

from ..protocols.satchel.test_operations import samples

SLOTS = {"running": 0, "kept": 0, "free": 0}
PLAIN = {"decoding": None, "multiplying": None, "proving": None, "loading": None}
PLAIN |= {"folder": None, "weights_bytes": None, "idle_s": 0.0, "stages": [], "adapters": []}
MEMORY = {**PLAIN, "slots": SLOTS, "memory_bytes": 0, "memory_bytes_max": 0}

TWO = [
    NodeState(
        "mac0",
        "10.0.0.1",
        (("10.1.0.1", "thunderbolt"), ("10.0.0.1", "ethernet")),
        True,
        rates={"mac1": 9e7},
        memory_free_bytes=8_000,
        disk_bytes=77,
        disk_free_bytes=1_000,
        agents=3,
    ),
    NodeState("mac1", "10.0.0.2", (("10.0.0.2", "ethernet"),), False),
]


@pytest.fixture
async def endpoint(backend, config) -> AsyncIterator[Remembering]:
    backend.machines = TWO
    backend.replicas = [
        ReplicaStats("m-0", "m", True, 0, 2, node="mac0", prefix_bytes=100, generated_tokens_total=50),
        ReplicaStats("m-1", "m", False, node="mac1"),
    ]
    backend.processes = {"m-0": 4711}
    remembering = Remembering(backend, config, HomesStore(config))
    yield remembering
    await remembering.client.aclose()


@pytest.fixture(autouse=True)
def every_view_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_routes, "FRESH_S", -1.0)


def homes(endpoint: Remembering) -> HomesStore:
    assert isinstance(endpoint.store, HomesStore)
    return endpoint.store


async def look(endpoint: Remembering, **params: str) -> dict:
    response = await endpoint.client.get("/v1/cluster", params=params)
    assert response.status_code == 200, response.text
    return response.json()


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    """Returns status, code and param of an error in OpenAI's shape."""
    (body,) = response.json().values()
    assert set(body) == {"message", "type", "param", "code"} and body["message"]
    return response.status_code, body["code"], body["param"]


async def test_a_node_is_removed_and_shown_no_more(endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster_routes, "FRESH_S", 60.0)
    assert [node["name"] for node in (await look(endpoint))["nodes"]] == ["mac0", "mac1"]
    gone = await endpoint.client.delete("/v1/cluster/nodes/mac1")
    assert gone.json() == {"object": "node", "name": "mac1", "removed": True, "leaves": False}
    assert [node["name"] for node in (await look(endpoint))["nodes"]] == ["mac0"]
    assert error(await endpoint.client.delete("/v1/cluster/nodes/mac1"))[:2] == (404, "node_not_found")


async def test_a_replica_says_what_of_its_model_is_still_being_proven(endpoint, backend):
    backend.replicas[0] = replace(backend.replicas[0], proving="trying m", proving_since=1_700_000_000.5)
    first, second = (await look(endpoint))["replicas"]
    assert first["proving"] == {"what": "trying m", "since": 1_700_000_000} and second["proving"] is None
    (line,) = (line for line in _replica_lines(first) if "plain mode" in line)
    assert line.startswith("is served in plain mode since ") and line.endswith("until its self-test ends: trying m")
    assert not any("plain mode" in line for line in _replica_lines(second))


async def test_nodes_and_replicas_are_shown_with_what_is_known_and_null_for_what_is_not(endpoint):
    found = await look(endpoint)
    first, second = found["nodes"]
    assert first == {
        "name": "mac0",
        "address": "10.0.0.1",
        "addresses": [
            {"address": "10.1.0.1", "kind": "thunderbolt"},
            {"address": "10.0.0.1", "kind": "ethernet"},
        ],
        "up": True,
        "waits_for": [],
        "draining": False,
        "replicas": ["m-0"],
        "links": [{"from": "mac1", "kind": "ethernet", "bytes_per_s": 9e7}],
        "card": None,
        "memory_free_bytes": 8000,
        "disk_free_bytes": 1000,
        "disk_full": False,
        "disk_error": None,
        "agents_let_go": None,
        "joules": {},
        "tiers": {"memory_bytes": 100, "disk_bytes": 77},
        "agents": 3,
    }
    assert second["waits_for"] == second["replicas"] == ["m-1"]
    assert (second["up"], second["memory_free_bytes"], second["tiers"]["disk_bytes"]) == (False, None, None)
    assert second["links"] == [{"from": "mac0", "kind": "thunderbolt", "bytes_per_s": None}]
    assert found["replicas"] == [
        {
            "id": "m-0",
            "node": "mac0",
            "pid": 4711,
            "model": "m",
            "model_id": None,
            "differs": {},
            "up": True,
            "running": 0,
            "waiting": 2,
            "tokens_per_s": 0.0,
            "totals": {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 50},
            **MEMORY,
        },
        {
            "id": "m-1",
            "node": "mac1",
            "pid": None,
            "model": "m",
            "model_id": None,
            "differs": {},
            "up": False,
            "running": 0,
            "waiting": 0,
            "tokens_per_s": None,
            "totals": None,
            **MEMORY,
        },
    ]


async def test_a_node_of_which_a_replica_answers_is_up_whatever_others_say(endpoint, backend):
    backend.replicas = [ReplicaStats("m-1", "m", True, node="mac1")]
    assert [node["up"] for node in (await look(endpoint))["nodes"]] == [True, True]


async def test_agents_are_shown_with_their_homes(endpoint):
    for agent in ("ann", "bob"):
        await endpoint.say("Hi", agent=agent)
    homes(endpoint).homes["default/bob"] = "mac1"
    found = await look(endpoint)
    assert found["agents"] == [
        {"id": "ann", "home": "mac0", "copies": ["mac1"]},
        {"id": "bob", "home": "mac1", "copies": []},
    ]
    assert (found["agents_count"], found["agents_has_more"]) == (2, False)
    one = await look(endpoint, agents="1")
    assert ([each["id"] for each in one["agents"]], one["agents_count"], one["agents_has_more"]) == (["ann"], 1, True)
    none = await look(endpoint, agents="0")
    assert (none["agents"], none["agents_count"]) == ([], None)


async def test_agents_are_bounded_and_their_places_are_asked_together(endpoint, monkeypatch):
    monkeypatch.setattr(cluster_views, "AGENTS_MAX", 5)
    for index in range(7):
        await endpoint.say("Hi", agent=f"a{index}")
    homes(endpoint).untold.add("default/a3")
    found = await look(endpoint)
    assert [each["id"] for each in found["agents"]] == ["a0", "a1", "a2", "a3", "a4"]
    assert (found["agents_count"], found["agents_has_more"]) == (5, True)
    assert [each["home"] for each in found["agents"]] == ["mac0", "mac0", "mac0", None, "mac0"]
    assert homes(endpoint).placings == 1


async def test_nodes_are_shown_while_the_store_is_silent(endpoint):
    homes(endpoint).down.add("agents")
    found = await look(endpoint)
    assert (len(found["nodes"]), found["agents"], found["agents_count"]) == (2, [], None)


async def test_one_machine_is_a_cluster_of_one_node(backend, config):
    endpoint = Remembering(backend, config)
    await endpoint.say("Hi")
    found = await look(endpoint)
    assert [(node["name"], node["links"]) for node in found["nodes"]] == [("local", [])]
    assert found["agents"] == [{"id": "ann", "home": "local", "copies": []}]


@pytest.mark.parametrize("given", ["-1", "1001", "x", "", "١", "9" * 30])
async def test_a_wrong_number_of_agents_is_named(endpoint, given):
    response = await endpoint.client.get("/v1/cluster", params={"agents": given})
    assert error(response) == (400, "invalid_request", "agents")


async def test_many_who_look_ask_once(endpoint, backend, monkeypatch):
    monkeypatch.setattr(cluster_routes, "FRESH_S", 60.0)
    await asyncio.gather(*(look(endpoint) for _ in range(20)))
    await look(endpoint)
    assert backend.asked == 1
    await look(endpoint, agents="0")
    assert backend.asked == 2, "those who want no agents wait for none"


async def test_one_who_leaves_takes_the_view_from_nobody(endpoint, backend, monkeypatch):
    going = asyncio.Event()

    async def nodes():
        await going.wait()
        return TWO

    monkeypatch.setattr(backend, "nodes", nodes)
    first, second = asyncio.create_task(look(endpoint)), asyncio.create_task(look(endpoint))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.05)
    going.set()
    assert len((await asyncio.wait_for(second, 20))["nodes"]) == 2


async def test_a_control_store_that_is_silent_is_an_error_in_time(endpoint, backend, monkeypatch):
    async def refused():
        raise Unavailable("the control store does not answer")

    monkeypatch.setattr(backend, "nodes", refused)
    assert error(await endpoint.client.get("/v1/cluster")) == (503, "unavailable", None)
    monkeypatch.setattr(backend, "nodes", asyncio.Event().wait)
    monkeypatch.setattr(cluster_routes, "VIEW_S", 0.1)
    assert error(await endpoint.client.get("/v1/cluster")) == (503, "unavailable", None)


class Ticking:
    """A replica's total, with a clock that the tests set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.total = 1000
        self.running = 1
        self.reads = 0
        self.rates = TokenRates(lambda: self.now)

    async def read(self) -> list[ReplicaStats]:
        self.reads += 1
        return [ReplicaStats("r", "m", True, self.running, generated_tokens_total=self.total)]

    async def rate(self) -> float:
        _, rates = await self.rates.read(self.read)
        return rates["r"]


async def test_tokens_a_second_are_of_the_last_seconds(monkeypatch):
    world = Ticking()

    async def sleep(seconds: float) -> None:
        world.now += seconds
        world.total += 20

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert (await world.rate(), world.reads) == (20 / cluster_views.RATE_OVER_S, 2), "the first look takes its time"
    world.now, world.total = world.now + 2.0, world.total + 30
    assert (await world.rate(), world.reads) == (15.0, 3), "the next one need not"
    world.now, world.total = world.now + 3600.0, world.total + 10**6
    assert await world.rate() == 20 / cluster_views.RATE_OVER_S, "an old reading says nothing about now"
    world.running = 0
    world.now += 3600.0
    assert await world.rate() == 0.0
    world.now, world.total = world.now + 1.0, 5
    assert await world.rate() == 0.0, "a replica that was started anew counts from 0"


def seen(*joined: NodeEntry, resources: tuple[str, ...] = (), here: str = "") -> SeenNodes:
    return SeenNodes(joined, frozenset(resources), here, 555)


def entry(name: str, address: str, card: str = "") -> NodeEntry:
    return NodeEntry(name, address, ((address, "wifi"),), "0", "/h", 0.0, card)


def described(name: str, *, alive: bool = True, **more: Any) -> NodeReport:
    return NodeReport(name, alive, used_bytes=1, **more)


def test_nodes_are_those_of_the_config_and_those_that_have_joined_and_not_left():
    machines = (
        Node(name="mac0", address="10.0.0.1", links=(Link(address="10.1.0.1", kind="thunderbolt"),)),
        Node(name="mac1", address="10.0.0.2", ssh="mac1"),
    )
    found = node_states(
        machines,
        seen(entry("mac1", "10.0.0.9"), entry("guest", "10.0.0.7"), here="satchel-node-mac0"),
        [
            described("left"),
            described("guest", memory_free_bytes=7),
            described("mac0", links={"mac1": 5.0}, free_bytes=0, draining=True),
        ],
    )
    assert [each.name for each in found] == ["mac0", "mac1", "guest"]
    assert [each.address for each in found] == ["10.0.0.1", "10.0.0.9", "10.0.0.7"]
    assert [each.links for each in found][:2] == [(("10.1.0.1", "thunderbolt"),), (("10.0.0.9", "wifi"),)]
    assert [each.memory_free_bytes for each in found] == [555, None, 7]
    mac0, mac1 = found[:2]
    assert (mac0.rates, mac0.disk_bytes, mac0.disk_free_bytes, mac0.draining) == ({"mac1": 5.0}, 1, 0, True)
    assert (mac1.rates, mac1.disk_bytes, mac1.disk_free_bytes, mac1.agents) == ({}, None, None, None)


def test_a_node_is_up_as_the_router_hears_it_else_as_ray_sees_it():
    machines = tuple(Node(name=name) for name in ("heard", "silent", "there", "gone"))
    resources = ("satchel-node-silent", "satchel-node-there", "CPU")
    states = node_states(machines, seen(resources=resources), [described("heard"), described("silent", alive=False)])
    assert [each.up for each in states] == [True, False, True, False]


def test_a_node_says_which_card_it_has():
    machines = (Node(name="local"), Node(name="local-1"))
    joined = seen(entry("local", "127.0.0.1", "card 0 (NVIDIA H200)"), entry("local-1", "127.0.0.1"))
    assert [view["card"] for view in node_views(node_states(machines, joined, []), [])] == [
        "card 0 (NVIDIA H200)",
        None,
    ]


async def test_an_answer_says_on_which_node_it_was_made(endpoint, backend, api):
    backend.placed = {"satchel/tiny#0": "mac0", "satchel/tiny#1": "mac1"}
    response = await api.chat()
    assert (response.headers["x-satchel-node"], response.headers["x-satchel-replica"]) == ("mac0", "satchel/tiny#0")
    streamed = await api.chat(stream=True)
    assert streamed.headers["x-satchel-node"] == "mac1"
    both = await api.complete(["a", "b"])
    assert set(both.headers["x-satchel-node"].split(", ")) == {"mac0", "mac1"}
    backend.placed = {}
    assert "x-satchel-node" not in (await api.chat()).headers


async def move(endpoint: Remembering, body: object, agent: str = "ann") -> httpx.Response:
    return await endpoint.client.post(f"/v1/agents/{agent}/move", json=body)


async def test_an_agent_is_moved_and_that_is_counted(endpoint):
    await endpoint.say("Hi")
    response = await move(endpoint, {"to": "mac1"})
    assert response.json() == {
        "id": "ann",
        "object": "agent.move",
        "from": "mac0",
        "to": "mac1",
        "moved": True,
        "tokens": 300,
        "blocks": 1,
        "bytes": 5000,
        "seconds": 0.25,
    }
    place = (await endpoint.client.get("/v1/cluster/agents/ann")).json()
    assert place == {"id": "ann", "object": "agent.place", "home": "mac1", "alive": True, "epoch": 1, "copies": []}
    found = samples((await endpoint.client.get("/metrics")).text)
    assert (found["satchel_moves_total", ()], found["satchel_moved_bytes_total", ()]) == (1, 5000)


async def test_an_agent_that_is_there_already_is_left_alone(endpoint):
    await endpoint.say("Hi")
    response = await move(endpoint, {"to": "mac0"})
    assert (response.status_code, response.json()["moved"], response.json()["bytes"]) == (200, False, 0)
    assert homes(endpoint).moves == []
    assert samples((await endpoint.client.get("/metrics")).text)["satchel_moves_total", ()] == 0


async def test_a_move_that_cannot_be_says_why(endpoint):
    await endpoint.say("Hi")
    assert error(await move(endpoint, {"to": "mac7"})) == (400, "invalid_request", "to")
    assert error(await move(endpoint, {"to": "mac1"}, agent="nobody"))[:2] == (404, "agent_not_found")
    homes(endpoint).busy.add("default/ann")
    assert error(await move(endpoint, {"to": "mac1"}))[:2] == (409, "agent_busy")
    assert homes(endpoint).homes == {}
    assert samples((await endpoint.client.get("/metrics")).text)["satchel_moves_total", ()] == 0
    assert error(await endpoint.client.get("/v1/cluster/agents/nobody"))[:2] == (404, "agent_not_found")


@pytest.mark.parametrize(
    "body", [{}, {"to": ""}, {"to": 5}, {"to": None}, {"to": "No Node"}, {"to": "a\n"}, {"to": ["mac1"]}, []]
)
async def test_a_wrong_node_is_named_and_the_store_not_asked(endpoint, body):
    await endpoint.say("Hi")
    status, code, param = error(await move(endpoint, body))
    assert (status, code) == (400, "invalid_request") and (param == "to" or body == [])
    assert homes(endpoint).moves == []


async def test_a_wrong_agent_is_named(endpoint):
    assert error(await move(endpoint, {"to": "mac1"}, agent="no spaces"))[:2] == (400, "invalid_request")
    assert error(await endpoint.client.get("/v1/cluster/agents/no spaces"))[:2] == (400, "invalid_request")


async def test_a_move_that_takes_too_long_is_an_error(endpoint, backend, config):
    await endpoint.say("Hi")
    homes(endpoint).stuck_agents.add("default/ann")
    hurried = Remembering(backend, replace(config, timeouts=replace(config.timeouts, request_s=0.1)), endpoint.store)
    response = await move(hurried, {"to": "mac1"})
    assert error(response)[:2] == (DeadlineExceeded.status, DeadlineExceeded.code)


async def test_a_handle_moves_its_agent(endpoint):
    await endpoint.say("Hi")
    loop = BackgroundLoop()
    try:
        ann = Agent(endpoint.generator, loop, "ann", "", None)
        assert (await ann.move("mac1"))["bytes"] == 5000
        assert (await asyncio.to_thread(ann.move_sync, "mac1"))["moved"] is False
        with pytest.raises(InvalidRequest, match="no node"):
            await ann.move("mac7")
    finally:
        loop.close()


async def test_only_a_move_that_moves_something_is_in_the_audit(backend, config, tmp_path):
    home = Home(tmp_path / "home")
    prepare_home(home)
    audited = Remembering(backend, config, HomesStore(config, tmp_path / "kv"), audit=Audit(home))
    await audited.say("Hi")
    assert (await move(audited, {"to": "mac0"})).json()["moved"] is False
    assert not home.audit_file.exists() or "agent moved" not in home.audit_file.read_text()
    assert (await move(audited, {"to": "mac1"})).json()["moved"] is True
    assert home.audit_file.read_text().count("agent moved") == 1


async def test_an_agent_of_which_nobody_has_told_is_moved_all_the_same(endpoint):
    await endpoint.say("Hi")
    homes(endpoint).untold.add("default/ann")
    moved = (await move(endpoint, {"to": "mac1"})).json()
    assert (moved["from"], moved["to"], moved["moved"]) == ("", "mac1", True)
    again = (await move(endpoint, {"to": "mac1"})).json()
    assert (again["from"], again["to"], again["moved"]) == ("mac1", "mac1", False), "it is there already"
    assert samples((await endpoint.client.get("/metrics")).text)["satchel_moves_total", ()] == 1
    nobody = await move(endpoint, {"to": "mac0"}, agent="nobody")
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "agent_not_found")


async def test_an_agent_follows_to_where_it_is_answered_behind_its_turn(endpoint, backend):
    """It moves if the router advises it, one move at a time."""
    await endpoint.say("Hi")
    backend.move_to = "mac1"
    store = homes(endpoint)
    store.going.clear()
    await endpoint.say("Hi", "Hello", "Again")
    await endpoint.say("Hi", "Hello", "Again", "Yes", "And again")
    assert store.homes == {}, "its answers wait for no move"
    store.going.set()
    await settled(endpoint)
    assert (store.homes, store.moves) == ({"default/ann": "mac1"}, [("default/ann", "mac1")])
    found = samples((await endpoint.client.get("/metrics")).text)
    assert (found["satchel_moves_total", ()], found["satchel_moved_bytes_total", ()]) == (1, 5000)


@pytest.mark.parametrize("obstacle", ["busy", "gone", "there"])
async def test_a_move_behind_a_turn_that_fails_harms_nobody(endpoint, backend, obstacle, caplog):
    await endpoint.say("Hi")
    store = homes(endpoint)
    backend.move_to = {"busy": "mac1", "gone": "mac7", "there": "mac0"}[obstacle]
    store.busy.add("default/ann")
    await endpoint.say("Hi", "Hello", "Again")
    await settled(endpoint)
    assert ("does not move" in caplog.text) == (obstacle != "there")
    assert store.homes == {} and endpoint.memory.moves.total == 0
    store.busy.clear()
    backend.move_to = "mac1"
    await endpoint.say("Hi", "Hello", "Again", "Yes", "And again")
    await settled(endpoint)
    assert store.homes == {"default/ann": "mac1"}, "it may follow later"


async def test_few_agents_follow_at_one_time(endpoint, backend):
    backend.move_to = "mac1"
    store = homes(endpoint)
    store.going.clear()
    for index in range(FOLLOWING_MAX + 3):
        await endpoint.say("Hi", agent=f"a{index}")
    store.going.set()
    await settled(endpoint)
    assert len(store.moves) == FOLLOWING_MAX


async def settled(endpoint: Remembering) -> None:
    """Waits until all background work of the requests has ended."""
    while tasks := list(endpoint.memory._tasks):
        await asyncio.wait(tasks)


async def test_a_decision_is_explained(endpoint, backend):
    decision = {"replica": "m-0", "node": "mac0", "why": "hot", "costs_s": {"m-0": {"total": 0.1}}}
    backend.explained = {"r/1": decision}
    response = await endpoint.client.get("/v1/cluster/decisions/r/1")
    assert response.json() == {"object": "decision", "id": "r/1", **decision}
    assert error(await endpoint.client.get("/v1/cluster/decisions/other")) == (404, "decision_not_found", "request_id")


async def test_answers_that_went_on_elsewhere_are_counted(endpoint, backend):
    backend.failovers = 3
    assert samples((await endpoint.client.get("/metrics")).text)["satchel_failovers_total", ()] == 3
