"""Handles notice that their server is gone: real ports and processes, and simulated silence."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from satchel.api.client import watch as module
from satchel.api.client.background import BackgroundLoop
from satchel.api.client.watch import ServerWatch
from satchel.cluster.errors import NoReplica, NotRunning
from satchel.cluster.processes import ProcessMark

HOST = "127.0.0.1"
PATIENCE_S = 30.0


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """Something that listens, as the control store does."""
    with closing(socket.create_server((HOST, 0))) as listening:
        yield listening


def address(store: socket.socket) -> str:
    return f"{HOST}:{store.getsockname()[1]}"


async def test_a_closed_port_is_an_end_for_good(store: socket.socket):
    watch = ServerWatch(address(store))
    await watch.look()
    assert not watch.lost
    store.close()
    await watch.look()
    assert watch.ended and watch.lost and "has ended" in watch.refusal().message


async def test_a_process_that_has_died_is_an_end_though_its_port_is_open(store: socket.socket):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = ServerWatch(address(store), ProcessMark.of(process.pid))
    await watch.look()
    assert not watch.lost
    process.communicate(b"\n")
    await watch.look()
    assert watch.ended


async def test_silence_is_a_loss_until_something_answers(store: socket.socket, monkeypatch: pytest.MonkeyPatch):
    """Time alone is no loss, because the machine may have slept; neither are many checks within a moment."""
    watch = ServerWatch(address(store))
    seconds = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds)
    await watch.look()

    async def silent(host: str, port: int) -> None:
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "open_connection", silent)
        seconds = 1000.0
        await watch.look()
        assert not watch.lost, "one look"
        seconds = 5.0
        for _ in range(module.SILENT_LOOKS):
            await watch.look()
        assert not watch.lost, "a moment"
        seconds = 7.0
        assert watch.lost and not watch.ended and "may come back" in watch.refusal().message
    await watch.look()
    assert not watch.lost


def test_whoever_waits_hears_at_once_that_the_server_has_ended(store: socket.socket):
    """Even if the awaited work cannot be cancelled. Later calls raise the same error."""
    loop = BackgroundLoop(ServerWatch(address(store)))
    release, heard = threading.Event(), []

    async def stuck() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.shield(asyncio.sleep(1000))

    def wait() -> None:
        try:
            loop.run(stuck())
        except NotRunning as error:
            heard.append(error.message)
        release.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)
    store.close()
    assert release.wait(PATIENCE_S) and "has ended" in heard[0]
    with pytest.raises(NotRunning, match="has ended"):
        loop.run(asyncio.sleep(0))
    with pytest.raises(NotRunning, match="has ended"):
        asyncio.run(loop.wait(asyncio.sleep(0)))
    with pytest.raises(NotRunning, match="has ended"):
        loop.check()
    loop.close()


@pytest.mark.parametrize("awaited", [True, False])
def test_an_error_of_a_lost_server_is_that_it_does_not_run(
    store: socket.socket, monkeypatch: pytest.MonkeyPatch, awaited: bool
):
    """Calls to its actors may fail before the next check. While the server runs, their own errors are raised."""
    monkeypatch.setattr(module, "LOOK_S", 1000.0)
    loop = BackgroundLoop(ServerWatch(address(store)))

    async def fail() -> None:
        raise NoReplica("no replica answers")

    def ask() -> None:
        if awaited:
            asyncio.run(loop.wait(fail()))
        else:
            loop.run(fail())

    with pytest.raises(NoReplica):
        ask()
    store.close()
    with pytest.raises(NotRunning, match="has ended"):
        ask()
    loop.close()


def test_a_server_that_answers_again_is_asked_again(monkeypatch: pytest.MonkeyPatch, store: socket.socket):
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    monkeypatch.setattr(module, "SILENT_LOOKS", 1)
    watch = ServerWatch(address(store))
    loop = BackgroundLoop(watch)
    watch._silent_looks, watch._heard_at = 1, 0.0
    with pytest.raises(NotRunning, match="may come back"):
        loop.run(asyncio.sleep(0))
    ends = time.monotonic() + PATIENCE_S
    while watch.lost and time.monotonic() < ends:
        time.sleep(0.05)
    assert loop.run(asyncio.sleep(0, "answered")) == "answered"
    loop.close()
