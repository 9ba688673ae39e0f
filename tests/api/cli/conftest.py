"""A real server that the command line finds in a home."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from satchel.api.app import create_app
from satchel.api.cli.main import app
from satchel.api.http.server import HttpServer
from satchel.api.protocols.satchel import cluster_routes
from satchel.api.requests.backend import NodeState, ReplicaStats
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.connection import ClusterRecord
from satchel.cluster.errors import SatchelError
from satchel.cluster.home import Home, prepare_home, write_private_json
from satchel.cluster.keys import KeyRing
from satchel.cluster.processes import ProcessMark
from tests.worlds.api.homes import HomesStore
from tests.worlds.api.remembering import Remembering


class Served:
    """A server that the command line finds in a home."""

    def __init__(self, home: Home, endpoint: Remembering, store: HomesStore, url: str) -> None:
        self.home, self.endpoint, self.store = home, endpoint, store
        self.endpoint_url = url

    async def run(self, *arguments: str, input: str | None = None) -> Result:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        given = [*arguments[:end], "--home", str(self.home.root), *arguments[end:]]
        return await asyncio.to_thread(CliRunner().invoke, app, given, input=input, env={"COLUMNS": "100"})

    async def says(self, *arguments: str, input: str | None = None) -> str:
        result = await self.run(*arguments, input=input)
        assert result.exit_code == 0, result.output + str(result.exception)
        return result.output

    async def refuses(self, *arguments: str) -> str:
        """Returns the sentence that `main` would print."""
        result = await self.run(*arguments)
        assert result.exit_code == 1 and isinstance(result.exception, SatchelError), result.output
        assert result.output == ""
        return result.exception.message


@pytest.fixture
async def served(backend, config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    # Tests change the backend while the application takes samples of it.
    monkeypatch.setattr(cluster_routes, "FRESH_S", 0.0)
    backend.machines = [
        NodeState("mac0", "10.0.0.1", (("10.0.0.1", "ethernet"),), True, rates={"mac1": 1.5e9}, disk_bytes=2_500_000),
        NodeState("mac1", "10.0.0.2", (("10.0.0.2", "thunderbolt"),), False),
    ]
    backend.replicas = [ReplicaStats("m-0", "m", True, node="mac0")]
    backend.processes = {"m-0": 4711}
    store = HomesStore(config, tmp_path / "kv")
    endpoint = Remembering(backend, config, store)
    for agent in ("ann", "bob"):
        await endpoint.say("Hi", agent=agent)
    home = Home(tmp_path / "home")
    prepare_home(home)
    port = free_port()
    server = HttpServer(
        create_app(backend, config, generator=endpoint.generator, keys=KeyRing(home, required=False)), "127.0.0.1", port
    )
    await server.start()
    mark = ProcessMark.of(os.getpid())
    assert mark is not None
    url = f"http://127.0.0.1:{port}"
    record = ClusterRecord("127.0.0.1:1", "t", "satchel", "0", url, mark.pid, mark.created_s, "/tmp/x", 0)
    write_private_json(home.cluster_file, asdict(record))
    yield Served(home, endpoint, store, url)
    await server.close(5)
    await endpoint.client.aclose()
    store.actor.close()
