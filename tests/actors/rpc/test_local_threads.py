"""Calls of threads over a socket of the same machine: as those of event loops, and a slow one delays no other."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.rpc import client as calls
from satchel.actors.rpc import local, local_threads
from satchel.actors.rpc.local import LocalAddress, LocalServer
from satchel.actors.rpc.local_threads import NearActorOfThreads
from satchel.actors.rpc.messages import HEAD
from satchel.actors.rpc.shell import answers
from satchel.cluster.config.timing import USUAL
from satchel.cluster.errors import ActorLost, ActorSilent, DiskFull, NoAnswer


class Store:
    """Answers `disk_touch` with the chain, on an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = LocalServer(self, "disk_touch")
        self.by_ray: list[str] = []
        self.answering: Callable[[str], Awaitable[object]] = lambda owner: asyncio.sleep(0)

    @answers(StoreClient.disk_touch)
    async def disk_touch(self, model: bytes, chain: Sequence[bytes], owner: str) -> list[bytes] | None:
        await self.answering(owner)
        return list(chain)

    @answers(StoreClient.kv_models)
    async def kv_models(self, agent: str) -> list[bytes]:
        return [agent.encode()]

    @answers(StoreClient.local_address)
    async def local_address(self) -> LocalAddress:
        return await self.server.address()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class ByRay:
    """A handle of Ray: counts the calls made on it, which threads wait for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        store = self._store

        class Method:
            @staticmethod
            def remote(call: bytes) -> Any:
                store.by_ray.append(name)
                return Answer(asyncio.run_coroutine_threadsafe(getattr(store, name)(call), store.loop))

        return Method


class Answer:
    def __init__(self, future: Any) -> None:
        self._future = future

    def future(self) -> Any:
        return self._future


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for module in (local, local_threads):
        monkeypatch.setattr(module, "this_machine", lambda: "here")
    made = Store()
    monkeypatch.setattr(calls, "actor_handle", lambda name: ByRay(made))
    yield made
    made.end()


def near() -> StoreClient:
    """Returns a client that knows where the store listens."""
    client = StoreClient("mac0", USUAL, kind=NearActorOfThreads)
    client.actor.find()
    asked(client).result(20)
    return client


def asked(client: StoreClient) -> Future[bytes]:
    return client.actor._asked  # type: ignore[attr-defined]


def touch(client: StoreClient, *chain: bytes, owner: str = "") -> list[bytes] | None:
    return client.disk_touch(b"m", chain, owner).wait()


def test_calls_take_the_short_way_and_other_methods_rays(store: Store):
    client = near()
    for chain in ([], [b"a"], [bytes(32)] * 50_000):
        assert touch(client, *chain) == chain
    assert client.kv_models("t/a").wait() == [b"t/a"]
    assert store.by_ray == ["local_address", "kv_models"]
    client.actor.close()
    assert touch(client, b"b") == [b"b"], "it opens another one"


def test_threads_wait_for_their_own_answers(store: Store):
    client, go_on = near(), asyncio.Event()
    assert touch(client) == []
    store.answering = lambda owner: go_on.wait() if owner else asyncio.sleep(0)
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(touch, client, name, owner="t/a") for name in (b"1", b"2")]
        assert touch(client, b"3") == [b"3"]
        store.loop.call_soon_threadsafe(go_on.set)
        assert [each.result(20) for each in slow] == [[b"1"], [b"2"]]
    assert store.by_ray == ["local_address"]


def test_errors_are_the_methods_and_a_failure_is_no_answer(store: Store):
    client = near()

    def fails(owner: str) -> Awaitable[object]:
        raise DiskFull("full") if owner == "full" else ZeroDivisionError

    store.answering = fails
    with pytest.raises(DiskFull, match="full"):
        touch(client, owner="full")
    with pytest.raises(NoAnswer):
        touch(client, owner="failed")


def test_an_answer_that_is_late_is_nobodys(store: Store):
    client, go_on = near(), asyncio.Event()
    store.answering = lambda owner: go_on.wait() if owner else asyncio.sleep(0)
    assert touch(client) == []
    with pytest.raises(ActorSilent):
        client.disk_touch(b"m", [b"late"], "t/a").within(0.05).wait()
    store.loop.call_soon_threadsafe(go_on.set)
    assert touch(client, b"next") == [b"next"]


def test_an_actor_that_ended_is_looked_up_again(store: Store, monkeypatch: pytest.MonkeyPatch):
    """No call is lost if none was waiting."""
    client = near()
    assert touch(client) == []
    (connection,) = client.actor._connections._free  # type: ignore[attr-defined]
    connection.shutdown(socket.SHUT_RDWR)
    assert touch(client, b"a") == [b"a"]
    assert store.by_ray.count("local_address") == 2


def test_a_connection_that_ends_is_no_answer(store: Store):
    """Also if its port is somebody else's after a restart."""
    client = near()
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = LocalAddress("here", server.getsockname()[1], b"secret", ["disk_touch"])
        client.actor.find()
        client.actor._connections = local_threads.Connections(at)  # type: ignore[attr-defined]
        asked = threading.Thread(target=lambda: server.accept()[0].close())
        asked.start()
        with pytest.raises(NoAnswer) as failed:
            touch(client)
        asked.join()
    assert not isinstance(failed.value, ActorLost | ActorSilent), "only Ray knows whether the process has ended"
    assert touch(client, b"a") == [b"a"]
    assert store.by_ray.count("local_address") == 2


def test_on_another_machine_it_is_called_through_ray(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_threads, "this_machine", lambda: "there")
    client = near()
    assert touch(client, b"a") == touch(client, b"a") == [b"a"]
    assert store.by_ray == ["local_address", "disk_touch", "disk_touch"]


def test_no_call_waits_until_an_actor_says_where_it_listens(store: Store, monkeypatch: pytest.MonkeyPatch):
    """It is asked once."""
    listens, ready = store.server.address, asyncio.Event()

    async def address() -> LocalAddress:
        await ready.wait()
        return await listens()

    monkeypatch.setattr(store.server, "address", address)
    client = StoreClient("mac0", USUAL, kind=NearActorOfThreads)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda name: touch(client, name), [b"1", b"2", b"3"])] == [[b"1"], [b"2"], [b"3"]]
    store.loop.call_soon_threadsafe(ready.set)
    asked(client).result(20)
    assert touch(client, b"a") == [b"a"]
    assert sorted(store.by_ray) == ["disk_touch", "disk_touch", "disk_touch", "local_address"]


def test_an_actor_that_was_starting_is_asked_again(store: Store, monkeypatch: pytest.MonkeyPatch):
    starting: Future[bytes] = Future()
    starting.set_exception(ActorUnavailableError("starting", None))
    client = StoreClient("mac0", USUAL, kind=NearActorOfThreads)
    client.actor.find_handle()
    client.actor._asked = starting  # type: ignore[attr-defined]
    assert touch(client, b"a") == [b"a"]
    client.actor.find()
    asked(client).result(20)
    assert touch(client, b"b") == [b"b"]
    assert store.by_ray == ["disk_touch", "local_address"]


def test_an_answer_of_a_stranger_that_has_the_port_now_takes_no_memory(store: Store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = LocalAddress("here", server.getsockname()[1], b"secret", ["disk_touch"])

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(HEAD.pack(2**32 - 1, 0))
            connection.recv(1)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ConnectionError):
            local_threads.Connections(at).ask("disk_touch", b"", 20.0)
        answering.join()


async def test_event_loops_go_through_ray(store: Store):
    client = await asyncio.to_thread(near)
    handle = await client.actor.find_aside()
    assert type(handle) is ByRay
