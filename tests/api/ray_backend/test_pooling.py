"""A request for vectors is sent again if its replica is lost, refuses or ends, but not for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import PooledTexts, PoolingRequest
from satchel.actors.protocol.router_messages import Decision, RouteRequest
from satchel.actors.rpc.codec import encode, encode_error
from satchel.api.ray_backend import sequences
from satchel.api.ray_backend.pooling import RayPooling
from satchel.api.requests.backend import Vectors
from satchel.cluster.config.timing import USUAL, Timing
from satchel.cluster.errors import (
    ContextLengthExceeded,
    Draining,
    GenerationFailed,
    NoReplica,
    QueueFull,
    ReplicaLost,
    SatchelError,
)
from tests.api.ray_backend import test_dispatch as worlds
from tests.worlds.direct import Direct

REQUEST = PoolingRequest("id/1", "m", [[1, 2], [3]], deadline_s=60.0)
ANSWER = PooledTexts(1, b"12345678")


class Replica(worlds.FakeLink):
    """Follows its script at each request: answers, refuses, "end"s its process, "wait"s for ever, or "break"s the
    connection."""

    def __init__(self, backend: Any, name: str, *script: Any) -> None:
        super().__init__(backend, name, *script)
        self.asked: list[PoolingRequest] = []
        self.open()

    def open(self) -> None:
        """Opens a new connection, as after a loss."""
        self.broken = asyncio.Event()
        self.client = ReplicaClient(self.replica, USUAL, Direct(lambda: SimpleNamespace(pool=self._pool)))

    async def _pool(self, data: bytes) -> bytes:
        self.asked += ReplicaClient.pool.asked(data)
        step = self.script.pop(0) if self.script else "answer"
        if isinstance(step, SatchelError):
            return encode_error(step)
        if step == "end":
            raise RayActorError
        if step == "break":
            self.broken.set()
        if step in ("wait", "break"):
            await asyncio.Event().wait()
        return encode(ANSWER)


class Cluster(worlds.FakeBackend):
    def __init__(self, timing: Timing = worlds.SOON, **scripts: list[Any]) -> None:
        super().__init__(timing, **scripts)
        self.replicas = {name: Replica(self, name, *script) for name, script in scripts.items()}
        self.routed: list[RouteRequest] = []
        self.silent: set[str] = set()
        """Replicas that the router avoids until they report again."""

    async def decide(self, message: RouteRequest) -> Decision:
        self.routed.append(message)
        if self.away:
            self.away -= 1
            self.silent.clear()
            raise NoReplica("none")
        names = [name for name in self.replicas if name not in self.silent]
        if not names:
            self.away = 1
            raise NoReplica("none")
        name = next((name for name in names if name not in message.exclude), names[0])
        self.loads[name] += 1
        return Decision(name, "why", node=f"node of {name}")

    def link(self, decision: Decision) -> Any:
        link = self.replicas[decision.replica]
        link.open()
        return link

    def lose(self, name: str) -> None:
        self.silent.add(name)

    async def pool(self, request: PoolingRequest = REQUEST) -> Vectors:
        async with asyncio.timeout(10):
            return await RayPooling(self, request).run()  # type: ignore[arg-type]

    def counts(self) -> dict[str, int]:
        return {name: len(replica.asked) for name, replica in self.replicas.items()}


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(sequences, "note_incident_aside", lambda home, kind, text: told.append(f"{kind}: {text}"))
    return told


async def test_the_router_chooses_and_the_load_is_taken_back():
    cluster = Cluster(a=[], b=[])
    answer = await cluster.pool()
    assert (answer.pooled, answer.replica, answer.node, answer.why) == (ANSWER, "a", "node of a", "why")
    (routed,) = cluster.routed
    assert (routed.request_id, routed.model, routed.agent, routed.prompt_tokens) == ("id/1", "m", "", 3)
    assert cluster.loads == {"a": 0, "b": 0}
    (asked,) = cluster.replicas["a"].asked
    assert asked.texts == REQUEST.texts and 0 < asked.deadline_s <= 60


@pytest.mark.parametrize("step", ["end", "break", QueueFull("full"), Draining("going")])
async def test_another_replica_is_asked(step: Any):
    cluster = Cluster(a=[step], b=[])
    assert (await cluster.pool()).replica == "b"
    assert cluster.counts() == {"a": 1, "b": 1} and cluster.loads == {"a": 0, "b": 0}


async def test_the_only_replica_is_asked_again_when_it_is_back():
    cluster = Cluster(a=["end"])
    assert (await cluster.pool()).replica == "a"
    assert cluster.counts() == {"a": 2}


@pytest.mark.parametrize(
    ("scripts", "error"),
    [
        ({"a": [QueueFull("a")], "b": [QueueFull("b")]}, QueueFull),
        ({"a": [ContextLengthExceeded("long")], "b": []}, ContextLengthExceeded),
        ({"a": [GenerationFailed("nan")], "b": []}, GenerationFailed),
    ],
)
async def test_what_all_refuse_and_what_is_wrong_is_told(scripts: dict[str, list[Any]], error: type[SatchelError]):
    cluster = Cluster(worlds.SOON, **scripts)
    with pytest.raises(error):
        await cluster.pool()
    assert max(cluster.counts().values()) == 1 and set(cluster.loads.values()) == {0}


async def test_no_replica_at_all_is_told_at_once():
    cluster = Cluster(a=[])
    cluster.away = 1
    with pytest.raises(NoReplica):
        await cluster.pool()


async def test_a_request_that_ends_two_replicas_is_given_up(noted: list[str]):
    cluster = Cluster(a=["end"], b=["end"], c=[])
    with pytest.raises(GenerationFailed, match="not retried"):
        await cluster.pool()
    assert cluster.counts() == {"a": 1, "b": 1, "c": 0}
    assert "given_up: " in noted[0] and "request id " in noted[0]
    spared = Cluster(a=["end"], b=["end"], c=[])
    spared.ended = {"node of b"}
    assert (await spared.pool()).replica == "c", "a whole node ended, which no request does"
    broken = Cluster(a=["break"], b=["break"], c=[])
    assert (await broken.pool()).replica == "c", "only links broke"


async def test_replicas_are_not_lost_without_end():
    cluster = Cluster(a=["break"] * 9)
    with pytest.raises(ReplicaLost):
        await cluster.pool()
    assert cluster.counts() == {"a": sequences.ATTEMPTS + 1}


async def test_a_suspect_waits_until_no_other_is_tried():
    cluster = Cluster(a=["end"], b=[])
    await cluster.replicas["b"].probation.acquire()
    asking = asyncio.create_task(cluster.pool())
    await asyncio.sleep(0.05)
    assert cluster.counts() == {"a": 1, "b": 0}
    cluster.replicas["b"].probation.release()
    assert (await asking).replica == "b"
    assert not cluster.replicas["b"].probation.locked()


async def test_a_caller_that_goes_takes_the_request_back():
    cluster = Cluster(a=["wait"])
    asking = asyncio.create_task(cluster.pool())
    while not cluster.replicas["a"].asked:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.gather(*cluster.tasks)
    assert cluster.replicas["a"].aborted == ["id/1"] and cluster.loads == {"a": 0}
