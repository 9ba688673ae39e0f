"""One Ray cluster for the whole test session, started when the first test asks for it.

Everything lives in a temporary home of its own, on ports that the system chose, and is gone at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from satchel.cluster import environment
from satchel.cluster.config import Home
from satchel.cluster.home import ensure_token, prepare_home
from satchel.cluster.runtime import LocalCluster

_HOME = pytest.StashKey[Home]()


def pytest_configure(config: pytest.Config) -> None:
    # Ray reads part of its settings while it is imported, which test modules do.
    home = Home(Path(tempfile.mkdtemp(prefix="satchel-test-")))
    prepare_home(home)
    environment.enter_ray_environment(ensure_token(home))
    config.stash[_HOME] = home


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_HOME].root, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Ray, running; this process is connected to it. `cluster.home` is its home."""
    running = LocalCluster(request.config.stash[_HOME], cpus=8)
    running.start()
    try:
        yield running
    finally:
        running.stop()
