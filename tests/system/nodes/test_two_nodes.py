"""Two nodes on one machine, as `configs/two-nodes-local.yaml` has them: each with a replica and a memory of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.connection import ClusterRecord, find_cluster
from satchel.cluster.home import Home
from satchel.cluster.processes import ProcessMark, session_members

from ..hosts import hosts
from ..hosts.hosts import Talk, holders, named, wait_until
from ..serving import listens_at, serving

# `test_hosts.py` tells the same of nodes that have addresses of their own, where a machine can have such.
pytestmark = [pytest.mark.slow] if hosts.likely() else []

NODES = ["mac0", "mac1"]
CONFIG = Path(__file__).parents[3] / "configs" / "two-nodes-local.yaml"
RETURN_S = 90.0
NUMBERS = "Say the numbers from one to sixty."


class World:
    def __init__(self, home: Path, port: int) -> None:
        self.homes = {"mac0": Home(home), "mac1": Home(home / "nodes" / "mac1")}
        self.talk = Talk(f"http://127.0.0.1:{port}")

    def second(self) -> ClusterRecord:
        """What runs as mac1."""
        return find_cluster(self.homes["mac1"])

    def whole(self) -> None:
        wait_until(lambda: self.talk.answering() == set(NODES), RETURN_S)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home, port = tmp_path_factory.mktemp("two"), free_port()
    with serving(home, "--config", str(CONFIG), "--port", str(port)):
        found = World(home, port)
        found.whole()
        yield found
        left = found.second()
    assert not ProcessMark(left.pid, left.pid_created_s).is_alive(), "nothing stays behind"
    assert not Path(left.temp_dir).exists()


def test_each_node_answers_its_own_agents(world: World):
    data = world.talk.http.get("/v1/cluster").json()
    assert {node["name"]: len(node["replicas"]) for node in data["nodes"]} == {"mac0": 1, "mac1": 1}
    assert {replica["node"] for replica in data["replicas"]} == set(NODES)
    for node in NODES:
        agent = named("ann", node, NODES)
        assert world.talk.ask(agent, f"Remember: the code of {node} is 1234.").node == node
        said = world.talk.ask(agent, f"What is the code of {node}?")
        assert said.node == node and said.prompt - said.cached < 30 and "1234" in said.text


def test_nothing_on_loopback_is_reached_from_elsewhere(world: World):
    """Neither Ray's processes, nor Serve's, nor stores, nor the join server."""
    for record in (find_cluster(world.homes["mac0"]), world.second()):
        assert listens_at(record) == {"127.0.0.1"}


def test_a_move_stops_nobodys_stream(world: World):
    """While an agent with some memory moves, sequences on both nodes go on decoding; their steps are counted."""
    world.whole()
    talk, moving = world.talk, named("gus", "mac0", NODES)
    for number in range(6):
        talk.ask(moving, f"Repeat after me: {' '.join(f'word{number}{word}' for word in range(60))}")
    # Where a machine is slow for a moment an agent is answered elsewhere; its memory follows, maybe a turn later.
    wait_until(lambda: talk.ask(moving, "Hello.").node == talk.where(moving)["home"], 60)
    home = talk.where(moving)["home"]
    (other,) = {*NODES} - {home}
    steps = dict.fromkeys(NODES, 0)
    texts: dict[str, str] = {}

    def stream(node: str) -> None:
        def count(pieces: int) -> None:
            steps[node] = pieces

        texts[node] = talk.stream(named("hal", node, NODES), NUMBERS, count, max_tokens=400)

    with ThreadPoolExecutor(len(NODES)) as pool:
        streams = [pool.submit(stream, node) for node in NODES]
        wait_until(lambda: all(count >= 5 for count in steps.values()), 30)
        before = dict(steps)
        moved = talk.http.post(f"/v1/agents/{moving}/move", json={"to": other}, timeout=60)
        after = dict(steps)
        for done in streams:
            done.result(60)
    # Of its KV only what has not been copied behind its turns travels now.
    assert moved.status_code == 200 and moved.json()["tokens"] > 1000, moved.text
    assert all(after[node] > before[node] for node in NODES), (before, after)
    assert texts["mac0"] == texts["mac1"] and texts["mac0"].endswith("fifty-nine, sixty.")
    assert talk.where(moving)["home"] == other


def test_a_store_and_the_router_die_and_nobody_changes_homes(world: World):
    """They are started again within seconds: a turn waits for them, an answer goes on, and no copy takes over."""
    world.whole()
    talk, dora = world.talk, named("dora", "mac1", NODES)
    talk.ask(dora, "Remember: the code of ibis is 7077.")
    before = talk.settled(dora, "mac1", ["mac0"])
    os.kill(actor_process(world.second(), "KVStoreActor"), signal.SIGKILL)
    said = talk.ask(dora, "What is the code of ibis?")
    assert said.node == "mac1" and "7077" in said.text
    router = actor_process(find_cluster(world.homes["mac0"]), "RouterActor")

    def kill(pieces: int) -> None:
        if pieces == 5:
            os.kill(router, signal.SIGKILL)

    numbers = "Say the numbers from one to fifty."
    assert talk.stream(dora, numbers, kill).startswith("one, two, three")
    wait_until(lambda: talk.post(dora, "What is the code of ibis?").status_code == 200, 20)
    wait_until(lambda: talk.http.get(f"/v1/cluster/agents/{dora}").json() == before, 20)
    said = talk.ask(dora, "What is the code of ibis?")
    assert said.cached and "7077" in said.text


def actor_process(cluster: ClusterRecord, name: str) -> int:
    """The process of an actor class of that cluster, whose processes are one Unix session's."""
    found = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0].startswith(f"ray::{name}") and os.getsid(process.pid) == cluster.ray_sid
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.slow
def test_a_killed_node_comes_back_without_what_was_deleted_meanwhile(world: World):
    world.whole()
    talk = world.talk
    bert, cleo = named("bert", "mac1", NODES), named("cleo", "mac1", NODES)
    talk.ask(bert, "Remember: the code of quokka is 5813.")
    talk.ask(cleo, "Remember: the code of heron is 2002.")
    for agent in (bert, cleo):
        talk.settled(agent, "mac1", ["mac0"])
    killed = world.second()
    os.killpg(os.getpgid(killed.pid), signal.SIGKILL)
    # Its keeper ends Ray there, which may still answer until then.
    wait_until(lambda: not session_members(killed.ray_sid), 10)
    said = talk.ask(cleo, "What is the code of heron?")
    assert said.node == "mac0" and "2002" in said.text
    wait_until(lambda: talk.http.delete(f"/v1/agents/{bert}").status_code in (200, 404), 20)
    wait_until(lambda: not Path(killed.temp_dir).exists(), 20)
    # It is up as soon as its store answers, and from then on nothing deleted may be seen.
    wait_until(lambda: talk.nodes()["mac1"], RETURN_S)
    assert bert not in talk.agents()
    assert talk.http.get(f"/v1/agents/{bert}").status_code == 404
    assert world.second().pid != killed.pid
    ends = time.monotonic() + 60
    while files := [path for home in world.homes.values() for path in holders(home.kv, "quokka")]:
        assert time.monotonic() < ends, f"its words are still in {files}"
        time.sleep(0.5)
    after = talk.where(cleo)
    assert after["home"] == "mac0"
    world.whole()
    wait_until(lambda: talk.where(cleo)["copies"] == ["mac1"], 20)
    wait_until(lambda: talk.http.post(f"/v1/agents/{cleo}/move", json={"to": "mac1"}).status_code == 200, 20)
    # The router hears of it from the stores.
    wait_until(lambda: talk.where(cleo)["home"] == "mac1", 20)
    said = talk.ask(cleo, "What is the code of heron?")
    assert said.node == "mac1" and "2002" in said.text
