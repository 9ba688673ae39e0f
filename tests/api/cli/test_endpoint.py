"""Which endpoint the command line uses on a machine that has joined a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from satchel.actors.protocol import control_store
from satchel.api.cli import endpoint
from satchel.api.cli.endpoint import ToldEndpoint, find_endpoint, tell_nodes
from satchel.cluster.connection import ClusterRecord
from satchel.cluster.errors import ClusterError, NotRunning
from satchel.cluster.home import Home, prepare_home, write_private_json
from satchel.cluster.processes import ProcessMark


@pytest.fixture
def head() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening


@pytest.fixture
def joined(tmp_path: Path, head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A node's home; this test stands in for the control store."""
    home, mark = Home(tmp_path), ProcessMark.of(os.getpid())
    assert mark is not None
    prepare_home(home)
    address = f"127.0.0.1:{head.getsockname()[1]}"
    record = ClusterRecord(
        address, str(tmp_path), "satchel", "0", None, mark.pid, mark.created_s, "/tmp/x", 0, node="mac1", joined=True
    )
    write_private_json(home.cluster_file, asdict(record))
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(endpoint, "connect_ray", lambda record, outlives: None)
    monkeypatch.setattr(control_store, "put", lambda key, value: kept.update({key: value.encode()}))
    monkeypatch.setattr(control_store, "get", kept.get)
    return home


def test_a_node_asks_the_endpoint_of_its_head(joined: Home):
    told = ToldEndpoint("https://10.0.0.1:8000", "sk-owner", "PEM", "mac0")
    tell_nodes(told)
    found = find_endpoint(joined)
    assert (found.url, found.key, found.certificate, found.head) == (told.url, "sk-owner", "PEM", "mac0")
    tell_nodes(ToldEndpoint("http://10.0.0.1:8000", "", "", "mac0"))
    assert find_endpoint(joined).certificate is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_node_says_whose_it_is_if_the_endpoint_answers_on_the_head_alone(joined: Home, host: str):
    tell_nodes(ToldEndpoint(f"http://{host}:8000", "", "", "mac0"))
    with pytest.raises(ClusterError, match=r"this machine is mac1, a node of the cluster at .* answers only on mac0"):
        find_endpoint(joined)


def test_a_node_says_whose_it_is_if_its_head_does_not_answer(joined: Home, head: socket.socket):
    with pytest.raises(NotRunning, match=r"this machine is mac1, a node of .* whose endpoint is still starting"):
        find_endpoint(joined)
    head.close()
    with pytest.raises(NotRunning, match=r"this machine is mac1, a node of .* whose head does not answer"):
        find_endpoint(joined)
