"""The environment of the frameworks, and a server for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster.bring_up.ports import free_port
from tests.system.serving import serving

PYTHON = Path(__file__).parents[2] / "build" / "clients" / "venv" / "bin" / "python"
CONFIG = '{"models": [{"name": "satchel/script", "source": "embedded:script"}]}'


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not PYTHON.exists():
        pytest.skip("the frameworks are not installed: make test-clients")
    home = tmp_path_factory.mktemp("server")
    (home / "config.yaml").write_text(CONFIG)
    port = free_port()
    with serving(home, "--config", str(home / "config.yaml"), "--port", str(port)):
        yield f"http://127.0.0.1:{port}"
