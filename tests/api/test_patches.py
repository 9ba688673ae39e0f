"""The patches of uvicorn fit the installed version; tests of the server cover the rest."""

from __future__ import annotations

import asyncio
import signal
import socket

import uvicorn

from satchel.api import patches


async def nothing(scope, receive, send) -> None:
    """An application without an answer."""


async def test_a_server_leaves_this_process_its_signals():
    server = uvicorn.Server(uvicorn.Config(nothing, log_config=None, lifespan="off"))
    patches.without_signals(server)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        assert {each: signal.getsignal(each) for each in before} == before
        server.should_exit = True
        await serving
