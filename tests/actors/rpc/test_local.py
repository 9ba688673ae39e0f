"""Calls over a socket of the same machine: answers and errors are the method's, and strangers get nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import uvloop

from satchel.actors.protocol.clients import ReplicaClient
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from satchel.actors.rpc import client as calls
from satchel.actors.rpc import local
from satchel.actors.rpc.codec import encode_call
from satchel.actors.rpc.local import LocalAddress, LocalConnection, LocalServer, NearActor
from satchel.actors.rpc.shell import answers
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ActorLost, ActorSilent, NoAnswer, QueueFull
from tests.worlds.direct import Direct


class Replica:
    """Answers frames with the number and as many tokens."""

    def __init__(self) -> None:
        self.server = LocalServer(self, "next_frame")
        self.asked: list[int] = []
        self.answering: Callable[[int], Awaitable[object]] = lambda number: asyncio.sleep(0)

    @answers(ReplicaClient.next_frame)
    async def next_frame(self, consumer: str, number: int) -> list[SequenceUpdate] | None:
        self.asked.append(number)
        await self.answering(number)
        return [SequenceUpdate(consumer, list(range(number)))]

    @answers(ReplicaClient.go_on)
    async def go_on(self, request_ids: Sequence[str]) -> None:
        self.asked.append(-len(request_ids))

    @answers(ReplicaClient.prepare)
    async def prepare(self, request: GenerateRequest) -> None:
        self.asked.append(len(request.prompt))

    @answers(ReplicaClient.local_address)
    async def local_address(self) -> LocalAddress:
        return await self.server.address()


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(local, "this_machine", lambda: "here")
    return Replica()


class ByRay(Direct):
    """A handle of Ray, which counts the calls made on it."""

    def __init__(self, target: Replica) -> None:
        super().__init__(lambda: target)
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return super().__getattr__(name)


@pytest.fixture
async def ray(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ByRay]:
    handle = ByRay(replica)
    monkeypatch.setattr(calls, "actor_handle", lambda name: handle)
    yield handle


async def near() -> ReplicaClient:
    """Returns a client that has found the short way, if there is one."""
    client = ReplicaClient("m-0", USUAL, kind=NearActor)
    await client.go_on([])
    await found(client)
    return client


async def found(client: ReplicaClient) -> None:
    opening = client.actor._opening  # type: ignore[attr-defined]
    await asyncio.wait({opening}, timeout=20)


async def test_calls_take_the_short_way_and_the_other_methods_rays(replica: Replica, ray: ByRay):
    client = await near()
    assert await client.next_frame("c", 3) == [SequenceUpdate("c", [0, 1, 2])]
    many = await client.next_frame("c", 300_000)
    assert many is not None and many[0].tokens == list(range(300_000)), "it comes in many pieces"
    await client.go_on(["a"])
    assert ray.called == ["go_on", "local_address", "go_on"]
    assert replica.asked == [0, 3, 300_000, -1]


async def test_large_calls_take_it_too(replica: Replica, ray: ByRay):
    """They are made in another thread."""
    replica.server = LocalServer(replica, "prepare")
    client = await near()
    request = GenerateRequest("r", "c", "m", "", list(range(300_000)), [], b"", Sampling())
    await asyncio.gather(client.prepare(request), client.prepare(request))
    assert replica.asked == [0, 300_000, 300_000] and "prepare" not in ray.called
    client.actor._connection.abort()  # type: ignore[attr-defined]
    handle = client.actor._near  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError):
        await (await asyncio.to_thread(handle.prepare.remote, b""))


def test_it_works_on_the_event_loop_of_rays_actors(replica: Replica):
    async def asks() -> bytes:
        connection = await LocalConnection.open(await replica.server.address())
        return await connection.ask("next_frame", encode_call(["c", 2]))

    with closing(uvloop.new_event_loop()) as loop:
        answer = loop.run_until_complete(asks())
    assert ReplicaClient.next_frame.answered(answer) == [SequenceUpdate("c", [0, 1])]


async def test_an_actor_on_another_machine_is_called_through_ray(
    replica: Replica, ray: ByRay, monkeypatch: pytest.MonkeyPatch
):
    machines = iter(["there", "here"])
    monkeypatch.setattr(local, "this_machine", lambda: next(machines))
    client = await near()
    assert await client.next_frame("c", 1) == [SequenceUpdate("c", [0])]
    assert ray.called == ["go_on", "local_address", "next_frame"]


async def test_errors_are_the_methods_and_a_failure_is_no_answer(replica: Replica, ray: ByRay):
    client = await near()

    def fails(number: int) -> Awaitable[object]:
        raise QueueFull("full") if number == 1 else ZeroDivisionError

    replica.answering = fails
    with pytest.raises(QueueFull, match="full"):
        await client.next_frame("c", 1)
    with pytest.raises(NoAnswer):
        await client.next_frame("c", 2)


async def test_a_method_that_fails_cuts_nobody_off(replica: Replica, ray: ByRay):
    client, go_on = await near(), asyncio.Event()

    def answering(number: int) -> Awaitable[object]:
        if number == 2:
            raise ZeroDivisionError
        return go_on.wait() if number == 1 else asyncio.sleep(0)

    replica.answering = answering
    waiting = asyncio.ensure_future(client.next_frame("c", 1))
    while replica.asked != [0, 1]:
        await asyncio.sleep(0.01)
    with pytest.raises(NoAnswer):
        await client.next_frame("c", 2)
    assert await client.next_frame("c", 3) == [SequenceUpdate("c", [0, 1, 2])]
    go_on.set()
    assert await waiting == [SequenceUpdate("c", [0])]
    assert ray.called == ["go_on", "local_address"]


async def test_answers_come_in_any_order_and_a_late_one_is_nobodys(replica: Replica, ray: ByRay):
    client = await near()
    go_on = asyncio.Event()
    replica.answering = lambda number: go_on.wait() if number == 1 else asyncio.sleep(0)
    late = asyncio.ensure_future(client.next_frame("c", 1))
    with pytest.raises(ActorSilent):
        await client.next_frame("c", 1).within(0.05)
    assert await client.next_frame("c", 2) == [SequenceUpdate("c", [0, 1])]
    go_on.set()
    assert await late == [SequenceUpdate("c", [0])]
    assert await client.next_frame("c", 3) == [SequenceUpdate("c", [0, 1, 2])]


async def test_a_connection_that_ends_is_no_answer_and_ray_is_asked_again(replica: Replica, ray: ByRay):
    client = await near()
    replica.answering = lambda number: asyncio.Event().wait() if number == 1 else asyncio.sleep(0)
    waiting = asyncio.ensure_future(client.next_frame("c", 1))
    while replica.asked != [0, 1]:
        await asyncio.sleep(0.01)
    client.actor._connection.abort()  # type: ignore[attr-defined]
    with pytest.raises(NoAnswer) as failed:
        await waiting
    assert not isinstance(failed.value, ActorLost | ActorSilent), "only Ray knows whether the process has ended"
    assert await client.next_frame("c", 2) == [SequenceUpdate("c", [0, 1])]
    assert ray.called[2:] == ["next_frame", "local_address"]
    await found(client)
    assert await client.next_frame("c", 3) == [SequenceUpdate("c", [0, 1, 2])]
    assert ray.called[4:] == []
    client.actor._connection.abort()  # type: ignore[attr-defined]
    await asyncio.sleep(0.01)
    assert await client.next_frame("c", 4) == [SequenceUpdate("c", [0, 1, 2, 3])], "no call was lost with it"
    assert ray.called[4:] == ["next_frame", "local_address"]


@pytest.mark.parametrize("ends_calls", [True, False])
async def test_a_call_whose_connection_ends_is_cancelled_or_goes_on(replica: Replica, ray: ByRay, ends_calls: bool):
    """An endpoint that has sent a turn may end before it is kept."""
    replica.server = LocalServer(replica, "next_frame", ends_calls=ends_calls)
    client, begun, go_on, ended = await near(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    how: list[str] = []

    async def answering(number: int) -> None:
        begun.set()
        try:
            await go_on.wait()
            how.append("done")
        except asyncio.CancelledError:
            how.append("cancelled")
            raise
        finally:
            ended.set()

    replica.answering = answering
    waiting = asyncio.ensure_future(client.next_frame("c", 1))
    await begun.wait()
    client.actor.close()
    with pytest.raises(NoAnswer):
        await waiting
    await asyncio.sleep(0.01)
    go_on.set()
    await ended.wait()
    assert how == ["cancelled" if ends_calls else "done"]


async def test_calls_that_look_for_the_actor_at_once_share_a_connection(
    replica: Replica, ray: ByRay, monkeypatch: pytest.MonkeyPatch
):
    """One that finds it later than the others neither ends their connection nor goes back to Ray."""
    both, late, go_on = threading.Barrier(2), threading.Lock(), threading.Event()

    def found_slowly(name: str) -> ByRay:
        both.wait(20)
        if not late.acquire(blocking=False):
            go_on.wait(20)
        return ray

    monkeypatch.setattr(calls, "actor_handle", found_slowly)
    client = ReplicaClient("m-0", USUAL, kind=NearActor)
    asked = [asyncio.ensure_future(client.go_on([])) for _ in range(2)]
    _, (last,) = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    await found(client)
    connection = client.actor._connection  # type: ignore[attr-defined]
    go_on.set()
    await last
    assert await client.next_frame("c", 1) == [SequenceUpdate("c", [0])]
    assert client.actor._connection is connection and not connection.lost  # type: ignore[attr-defined]
    assert "next_frame" not in ray.called


async def test_after_its_end_calls_go_through_ray(replica: Replica, ray: ByRay):
    """A connection that they opened would be nobody's to close."""
    client = await near()
    client.actor.close()
    for number in (1, 2):
        assert len(await client.next_frame("c", number) or []) == 1
    assert ray.called == ["go_on", "local_address", "next_frame", "next_frame"]


async def test_an_actor_that_was_busy_is_asked_again_where_it_listens(
    replica: Replica, ray: ByRay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "ADDRESS_S", 0.05)
    listens, ready = replica.server.address, asyncio.Event()

    async def address() -> LocalAddress:
        await ready.wait()
        return await listens()

    monkeypatch.setattr(replica.server, "address", address)
    client = await near()
    assert client.actor._connection is None  # type: ignore[attr-defined]
    ready.set()
    await client.go_on([])
    await found(client)
    assert await client.next_frame("c", 1) == [SequenceUpdate("c", [0])]
    assert "next_frame" not in ray.called


async def test_an_address_is_shown_without_its_secret(replica: Replica):
    at = await replica.server.address()
    assert str(at.port) in repr(at) and "secret" not in repr(at)


@pytest.mark.parametrize("secret", [bytes(local.SECRET_BYTES), b"", bytes(local.SECRET_BYTES + 1)])
async def test_who_does_not_know_the_secret_gets_no_answer(replica: Replica, secret: bytes):
    at = await replica.server.address()
    connection = await LocalConnection.open(LocalAddress(at.machine, at.port, secret, at.methods))
    with pytest.raises(ConnectionError):
        await connection.ask("next_frame", encode_call(["c", 1]))
    assert not replica.asked and not len(replica.server.strangers)


async def test_only_the_named_methods_are_answered(replica: Replica):
    connection = await LocalConnection.open(await replica.server.address())
    with pytest.raises(ConnectionError):
        await connection.ask("go_on", encode_call([["a"]]))
    assert not replica.asked


async def ended(port: int, sent: bytes = b"") -> bool:
    """Whether the server ends a connection on which this was sent."""
    reader, writer = await asyncio.open_connection(local.LOOPBACK, port)
    writer.write(sent)
    try:
        async with asyncio.timeout(20):
            return await reader.read() == b""
    except ConnectionResetError:
        return True
    finally:
        writer.close()


async def test_who_says_nothing_or_too_much_is_sent_away(replica: Replica, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "SECRET_S", 0.05)
    port = (await replica.server.address()).port
    assert await ended(port)
    monkeypatch.setattr(local, "SECRET_S", 60.0)
    assert await ended(port, (local.SECRET_BYTES + 1).to_bytes(4, "big") + bytes(4))
    assert not len(replica.server.strangers)


async def test_strangers_keep_nobody_out(replica: Replica, ray: ByRay):
    port = (await replica.server.address()).port
    strangers = [await asyncio.open_connection(local.LOOPBACK, port) for _ in range(local.STRANGERS_MAX + 3)]
    client = await near()
    assert await client.next_frame("c", 1) == [SequenceUpdate("c", [0])]
    assert len(replica.server.strangers) <= local.STRANGERS_MAX and "next_frame" not in ray.called
    for _, writer in strangers:
        writer.close()
