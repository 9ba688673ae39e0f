"""Why an endpoint does not start."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from satchel.api import serve
from satchel.cluster.config.config import Endpoint
from satchel.cluster.errors import ClusterError, PortInUse


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve has given the endpoint up."""
    application = SimpleNamespace(status="DEPLOY_FAILED", message="no reason")
    status = SimpleNamespace(applications={serve.APPLICATION: application})
    monkeypatch.setattr(serve.serve, "status", lambda: status)


@pytest.mark.usefixtures("failed")
def test_a_port_that_was_taken_meanwhile_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            serve._await_health(f"http://127.0.0.1:{port}", Endpoint(port=port))
    with pytest.raises(ClusterError, match="no reason"):
        serve._await_health(f"http://127.0.0.1:{port}", Endpoint(port=port))
