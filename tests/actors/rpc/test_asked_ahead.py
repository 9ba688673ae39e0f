"""Calls that are asked for ahead: the answers come in order from any thread, and no faster than they are taken."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
import uvloop

from satchel.actors.rpc import local
from satchel.actors.rpc.local import AHEAD, Answers, AskedAhead, LocalConnection, LocalServer


class Counting:
    """An actor with a method that is asked ahead. `asked` is what each message asked for."""

    def __init__(self) -> None:
        self.server = LocalServer(self, "ping", ahead={"frames": self.take})
        self.asked: list[bytes] = []
        self.to: Answers | None = None
        self.came = asyncio.Event()

    async def ping(self, call: bytes) -> bytes:
        return b"pong " + call

    def take(self, call: bytes, to: Answers) -> None:
        if call == b"fails":
            raise ZeroDivisionError
        self.asked.append(call)
        self.to = to
        self.came.set()

    def say(self, *answers: bytes) -> list[bool]:
        """Sends answers from a thread of its own."""
        assert self.to is not None
        sent: list[bool] = []
        to = self.to
        thread = threading.Thread(target=lambda: sent.extend(to.send(each) for each in answers))
        thread.start()
        thread.join(20)
        return sent


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(local, "this_machine", lambda: "here")
    return Counting()


@pytest.fixture
async def connection(actor: Counting) -> AsyncIterator[LocalConnection]:
    connection = await LocalConnection.open(await actor.server.address())
    yield connection
    connection.abort()


@pytest.fixture
def frames(connection: LocalConnection, monkeypatch: pytest.MonkeyPatch) -> AskedAhead:
    monkeypatch.setattr(local, "RENEWED_S", 60.0)
    return AskedAhead(connection, "frames")


async def test_one_message_asks_for_many_answers(actor: Counting, frames: AskedAhead):
    for number in range(AHEAD):
        answer = frames.remote(b"%d" % number)
        await actor.came.wait()
        actor.say(b"answer %d" % number)
        assert await answer == b"answer %d" % number
    await asyncio.sleep(0.05)
    assert actor.asked == [b"0", b"%d" % (AHEAD // 2)]


async def test_answers_that_came_before_their_calls_are_theirs_in_order(actor: Counting, frames: AskedAhead):
    first = frames.remote(b"0")
    await actor.came.wait()
    actor.say(b"a", b"b", b"c")
    assert [await first, await frames.remote(b"1"), await frames.remote(b"2")] == [b"a", b"b", b"c"]
    waiting = [frames.remote(b"3"), frames.remote(b"4")]
    actor.say(b"d", b"e")
    assert await asyncio.gather(*waiting) == [b"d", b"e"]


async def test_after_a_while_it_is_asked_again(actor: Counting, frames: AskedAhead, monkeypatch: pytest.MonkeyPatch):
    """So whoever answers knows that somebody still asks."""
    monkeypatch.setattr(local, "RENEWED_S", 0.0)
    for number in range(3):
        actor.came.clear()
        answer = frames.remote(b"%d" % number)
        await actor.came.wait()
        actor.say(b"x")
        assert await answer == b"x"
    assert actor.asked == [b"0", b"1", b"2"]


async def test_other_calls_go_on_meanwhile(actor: Counting, connection: LocalConnection, frames: AskedAhead):
    answer = frames.remote(b"0")
    await actor.came.wait()
    assert await connection.ask("ping", b"1") == b"pong 1"
    actor.say(b"x")
    assert await answer == b"x"


async def test_what_the_socket_does_not_take_comes_later_and_in_order(actor: Counting, frames: AskedAhead):
    await _overflows(actor, frames)


def test_so_it_does_on_the_event_loop_of_rays_actors(actor: Counting):
    async def overflows() -> None:
        connection = await LocalConnection.open(await actor.server.address())
        await _overflows(actor, AskedAhead(connection, "frames"))
        connection.abort()

    with closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(overflows())


async def _overflows(actor: Counting, frames: AskedAhead) -> None:
    answer = frames.remote(b"0")
    await actor.came.wait()
    large = [b"%03d" % number + bytes(400_000) for number in range(40)]
    # This event loop serves the connection, and reads nothing until all has been sent.
    assert actor.to is not None
    assert all(actor.to.send(each) for each in large)
    assert await answer == large[0]
    for number, each in enumerate(large[1:], 1):
        assert await frames.remote(b"%d" % number) == each
    writer = actor.to.connection._writer
    async with asyncio.timeout(20):
        while writer._behind:
            await asyncio.sleep(0.01)
    answer = frames.remote(b"last")
    actor.say(b"x")
    assert await answer == b"x" and not writer._behind


async def test_a_method_that_fails_is_told(actor: Counting, frames: AskedAhead):
    with pytest.raises(ValueError, match="failed"):
        await frames.remote(b"fails")


async def test_an_answer_that_cannot_be_written_ends_the_connection(actor: Counting, frames: AskedAhead):
    """Otherwise its caller would wait for it."""
    answer = frames.remote(b"0")
    await actor.came.wait()
    assert actor.to is not None
    writer = actor.to.connection._writer
    assert writer._socket is not None
    writer._socket.close()
    writer._socket = socket.socket()
    assert actor.say(b"x") == [False]
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(10):
            await answer
    assert writer._socket is None


async def test_a_connection_that_ends_is_known_on_both_sides(
    actor: Counting, connection: LocalConnection, frames: AskedAhead
):
    answer = frames.remote(b"0")
    await actor.came.wait()
    connection.abort()
    with pytest.raises(ConnectionError):
        await answer
    with pytest.raises(ConnectionError):
        frames.remote(b"1")
    async with asyncio.timeout(20):
        while actor.say(b"x") != [False]:
            await asyncio.sleep(0.01)
