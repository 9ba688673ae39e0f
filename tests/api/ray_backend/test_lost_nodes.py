"""Whether a node has ended: real ports, and a fake table of Ray's nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from satchel.actors.protocol.control_store import RayNode
from satchel.api.ray_backend import locator
from satchel.api.ray_backend.locator import has_ended
from satchel.cluster.config.timing import USUAL, Timing

HOST = "127.0.0.1"


@pytest.fixture
def open_port() -> Iterator[int]:
    with closing(socket.create_server((HOST, 0))) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound but refuses connections, so that no other program gets it."""
    with closing(socket.socket()) as taken:
        taken.bind((HOST, 0))
        yield taken.getsockname()[1]


def table(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, int, bool]) -> None:
    """Fakes Ray's nodes: each with its resource, its port, and whether Ray counts it as alive."""
    nodes = [
        RayNode(f"{port}", HOST, port, frozenset({f"satchel-node-{name}", "CPU"}))
        for name, port, lives in rows
        if lives
    ]
    monkeypatch.setattr(locator.control_store, "ray_nodes", lambda: nodes)


async def test_a_port_that_is_closed_is_a_process_that_has_ended(monkeypatch, open_port, closed_port):
    """Ray may count a killed node as alive for a while; a node that came back listens at another port."""
    table(monkeypatch, ("mac0", open_port, True), ("mac1", closed_port, True))
    assert (await has_ended("mac0", USUAL), await has_ended("mac1", USUAL)) == (False, True)
    table(monkeypatch, ("mac1", closed_port, True), ("mac1", open_port, True))
    assert not await has_ended("mac1", USUAL)
    table(monkeypatch, ("mac1", open_port, False))
    assert await has_ended("mac1", USUAL), "Ray knows it"


async def test_silence_is_no_end(monkeypatch, open_port):
    """Neither if the machine is silent, nor if Ray's table does not answer."""
    monkeypatch.setattr(locator, "CONNECT_S", 0.05)
    table(monkeypatch, ("mac1", open_port, True))

    async def silent(host: str, port: int) -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "open_connection", silent)
        assert not await has_ended("mac1", Timing(brief_answer_s=0.05))

    def fails() -> Any:
        raise RuntimeError("the control store is not there")

    monkeypatch.setattr(locator.control_store, "ray_nodes", fails)
    assert not await has_ended("mac1", USUAL)
