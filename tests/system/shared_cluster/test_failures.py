"""A replica, the router or the store dies: streams fail over, nothing is lost, and the process comes back by itself."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import ray

from satchel.actors.protocol.names import ROUTER, store_actor_name
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling
from satchel.actors.rpc.client import actor_handle
from satchel.api.client.cluster import Cluster, Reply
from satchel.api.ray_backend.dispatch import RayBackend
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.config.config import Config
from satchel.cluster.errors import NoAnswer
from satchel.cluster.incidents import incidents
from tests.worlds.collector import Collector

from .test_endpoint import ENDLESS, running, user, wait_until

LISTED = {"type": "array", "minItems": 50, "items": {"type": "string", "maxLength": 12}}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "listed", "schema": LISTED}}}


@pytest.mark.parametrize("form", [pytest.param({}, marks=pytest.mark.slow, id="free"), pytest.param(FORM, id="bound")])
def test_streams_survive_the_death_of_their_replica(
    handles: Cluster, http: httpx.Client, collector: Collector, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
):
    """Sampled, not greedy: noise belongs to seed and position, so the text is exactly the same. Also if the caller gave
    no seed and one was drawn, and if the answer is constrained. Its trace shows both replicas."""
    drawn: list[int] = []
    draw = secrets.randbits
    monkeypatch.setattr(secrets, "randbits", lambda bits: drawn.append(draw(bits)) or drawn[-1])
    said = [user("Say the numbers from one to fifty.")]
    sampled: dict[str, Any] = {"temperature": 1.2, "ignore_eos": True}
    body = {"messages": said, **sampled, "seed": 11, "agent_id": "survivor", "max_tokens": 120, **form}
    undisturbed = http.post("/v1/chat/completions", json=body)
    expected = undisturbed.json()["choices"][0]["message"]["content"]
    home = undisturbed.headers["x-satchel-replica"]
    pid, went_on = process_id(handles, home), handles._backend.failovers

    def without_seed() -> Reply:
        return handles.generate_sync(said, agent="survivor", max_tokens=300, **sampled)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(without_seed)
        wait_until(lambda: running(http) == 1)
        traced = f"{home}-{secrets.token_hex(4)}"
        text = streamed(http, body, lambda pieces: os.kill(pid, signal.SIGKILL) if pieces == 20 else None, traced)
        reply = other.result(timeout=60)
    assert text == expected and (not form or text.startswith("["))
    assert reply.replica == home and handles._backend.failovers == went_on + 1, "both were disturbed"
    again = handles.generate_sync(said, max_tokens=300, seed=drawn[0], **sampled)
    assert again.text == reply.text and again.completion_tokens == 300
    wait_until(lambda: answering(http) == 2, timeout_s=60)
    assert process_id(handles, home) != pid
    ended = {"POST /v1/chat/completions", "sequence"}
    spans = collector.of(traced, lambda spans: ended <= {one.name for one in spans})
    assert [event for one in spans for event in one.events if one.process == "endpoint"] == ["failover"]
    (second,) = [one for one in spans if one.name == "sequence"]
    assert second.process != f"replica:{home}" and second.attributes["satchel.generated_before"] >= 19


@pytest.mark.slow
def test_a_replica_whose_engine_hangs_is_replaced_and_its_stream_goes_on(
    handles: Cluster, http: httpx.Client, cluster: LocalCluster
):
    """The call that never returns lets other threads run, as a call into a device does."""
    body = {"messages": [user("Say the numbers from one to fifty.")], "agent_id": "hung", "max_tokens": 120, "seed": 5}
    undisturbed = http.post("/v1/chat/completions", json=body)
    name = undisturbed.headers["x-satchel-replica"]
    pid = process_id(handles, name)

    def hang(actor: Any) -> None:
        (part,) = [part for part in actor._watchdog._parts if part.name == "engine"]
        part.limit_s = lambda: 3.0
        actor._engine.call(lambda: time.sleep(600))

    def at(pieces: int) -> None:
        if pieces == 20:
            ray.get(handles.replicas()[name].actor.find().__ray_call__.remote(hang), timeout=30)

    assert streamed(http, body, during=at) == undisturbed.json()["choices"][0]["message"]["content"]

    def replaced() -> bool:
        try:
            return process_id(handles, name) != pid
        except NoAnswer:
            return False

    wait_until(lambda: answering(http) == 2 and replaced(), timeout_s=60)
    noted = [one.text for one in incidents(cluster.home, 0.0) if one.kind == "stuck"]
    assert any(f"(process {pid}): its engine has stood still for 3 s" in text for text in noted)


@pytest.mark.slow
def test_a_request_that_ends_its_replica_is_tried_once_more_and_given_up(
    handles: Cluster, http: httpx.Client, cluster: LocalCluster
):
    """With three tries it would end three processes. Another waiting request is answered."""

    def poison(actor: Any) -> None:
        opened = actor._engine.executor.open

        def open_sequence(sequence_id: str, *arguments: Any) -> Any:
            if sequence_id.startswith("poison/"):
                os._exit(1)
            return opened(sequence_id, *arguments)

        actor._engine.executor.open = open_sequence

    wait_until(lambda: answering(http) == 2, timeout_s=60)
    replicas = handles.replicas()
    for replica in replicas.values():
        ray.get(replica.actor.find().__ray_call__.remote(poison), timeout=30)
    before = {name: process_id(handles, name) for name in replicas}
    body = {"messages": [user("Say the numbers from one to five.")], "max_tokens": 40}
    expected = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(streamed, http, {**body, "max_tokens": 600, "ignore_eos": True}, lambda pieces: None)
        wait_until(lambda: running(http) == 1)
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "poison"})
        assert other.result(timeout=60).startswith(expected)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed"), answer.text
    wait_until(lambda: answering(http) == 2, timeout_s=60)
    after = {name: process_id(handles, name) for name in replicas}
    assert all(before[name] != after[name] for name in before)
    (noted,) = [one.text for one in incidents(cluster.home, 0.0) if one.kind == "given_up"]
    assert "request poison for satchel/recall" in noted


def streamed(
    http: httpx.Client, body: dict[str, Any], during: Callable[[int], object], request_id: str = "streamed"
) -> str:
    """The text of a streamed answer; `during` is called after each piece with their number."""
    text, pieces, named = "", 0, {"x-request-id": request_id}
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=named) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += response_chunk(line)["choices"][0]["delta"].get("content") or ""
                pieces += 1
                during(pieces)
    return text


class Talker:
    """An agent that is told codes and asked for them, each turn appended to its stored transcript."""

    def __init__(self, http: httpx.Client, name: str) -> None:
        self._http, self.name, self.tokens, self.computed = http, name, 0, 0

    def body(self, text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [user(text)], "agent_id": self.name, "agent_continue": True, "temperature": 0, **more}

    def say(self, text: str) -> str:
        """Retries while a part of the cluster is away; the error must say so."""
        ends = time.monotonic() + 30
        while (answer := self._http.post("/v1/chat/completions", json=self.body(text))).status_code != 200:
            assert answer.status_code == 503 and time.monotonic() < ends, answer.text
            time.sleep(0.2)
        usage = answer.json()["usage"]
        self.computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        return answer.json()["choices"][0]["message"]["content"]


def kill_actor(name: str) -> None:
    """As a crash does: its process ends at once, and another one starts."""
    ray.kill(actor_handle(name), no_restart=False)


def test_a_router_that_dies_is_missed_by_no_stream_and_learns_everything_again(handles: Cluster, http: httpx.Client):
    """The router is killed in the middle of an answer. It learns again from the reports where the agent lives, and
    which replica has its KV."""
    ann = Talker(http, "routed")
    ann.say("Remember: the code of quokka is 5813.")
    body = ann.body("Say the numbers from one to fifty.", agent_continue=False, seed=3, temperature=1.0, max_tokens=200)
    expected = streamed(http, body, lambda pieces: None)
    before = http.get("/v1/cluster/agents/routed").json()
    killed = streamed(http, body, lambda pieces: kill_actor(ROUTER) if pieces == 10 else None)
    assert killed == expected
    assert ann.say("What is the code of quokka?") == "The code of quokka is 5813."
    wait_until(lambda: http.get("/v1/cluster/agents/routed").json() == before)
    said = ann.say("What is the code of quokka?")
    assert said == "The code of quokka is 5813." and ann.computed < 30, "it was routed to where its KV is"


@pytest.mark.parametrize("when", ["between turns", "mid-answer"])
def test_a_store_that_dies_loses_no_turn(http: httpx.Client, when: str):
    """Completely answered turns are remembered, and earlier memory stays."""
    ann = Talker(http, f"stored-{when[:3]}")
    store = store_actor_name("local")
    ann.say("Remember: the code of heron is 2002.")
    if when == "between turns":
        kill_actor(store)
    else:
        numbers = ann.body("Say the numbers from one to fifty.", max_tokens=120)
        assert "three" in streamed(http, numbers, lambda pieces: kill_actor(store) if pieces == 1 else None)
        assert http.get(f"/v1/agents/{ann.name}").json()["messages"] == 4, "its second turn is there"
    assert ann.say("What is the code of heron?") == "The code of heron is 2002."


def process_id(handles: Cluster, replica: str) -> int:
    info = handles.replicas()[replica].info().within(30).wait()
    assert info is not None
    return info.pid


def response_chunk(line: str) -> dict:
    chunk = json.loads(line.removeprefix("data: "))
    assert "error" not in chunk, chunk
    return chunk


def answering(http: httpx.Client) -> int:
    return sum(
        line.endswith(" 1.0")
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("satchel_replica_up{")
    )


@pytest.mark.slow
def test_a_reader_that_stands_still_holds_up_no_other(handles: Cluster, http: httpx.Client, config: Config):
    """Like a reader that was cut off: it neither reads nor disconnects, and its lease ends meanwhile."""
    said = [user("Say the numbers from one to five.")]
    expected = {name: handles.generate_sync(said, agent=f"beside-{name}").text for name in handles.replicas()}
    assert http.post("/v1/chat/completions", json={"messages": said}).status_code == 200
    port, sockets = config.endpoint.port, psutil.net_connections("tcp")
    listening = [each for each in sockets if each.status == psutil.CONN_LISTEN]
    (endpoint,) = {psutil.Process(each.pid) for each in listening if each.laddr and each.laddr.port == port}
    endpoint.suspend()
    try:
        ends = time.monotonic() + config.timing.consumer_lease_s + 2
        while time.monotonic() < ends:
            for replica in handles.replicas().values():
                assert replica.stats().wait().answers
            time.sleep(0.5)
        for name, text in expected.items():
            assert handles.generate_sync(said, agent=f"beside-{name}").text == text
    finally:
        endpoint.resume()
    after = http.post("/v1/chat/completions", json={"messages": said})
    assert after.status_code == 200, after.text


async def test_sequences_of_a_consumer_that_vanishes_are_taken_out(
    handles: Cluster, http: httpx.Client, config: Config
):
    """A driver that dies cannot abort its sequences; its lease at the replica ends instead."""
    wait_until(lambda: running(http) == 0)
    backend = RayBackend(handles.config)
    (model,) = await backend.models()
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=ENDLESS["max_tokens"], ignore_eos=True)
    await backend.generate(model, GenerateRequest("orphan", "", model.info.name, "", [1, 2, 3], [], b"", sampling))
    assert running(http) == 1
    for link in backend.routing._links.values():
        link.close()
    started = time.monotonic()
    wait_until(lambda: running(http) == 0, timeout_s=config.timing.consumer_lease_s * 4)
    assert time.monotonic() - started > 1, "it was the lease that ended it"
