"""One Ray cluster for the whole test session, started when the first test asks for it.

Everything lives in a temporary home of its own, on ports that the system chose, and is gone at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from satchel.cluster import environment
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.config import Home
from satchel.cluster.home import ensure_token, prepare_home

LONGEST_FIRST = (
    "system/test_hosts.py",
    "system/test_endpoint.py",
    "system/test_models.py",
    "bring_up/test_server.py",
    "benchmarks/test_scenarios.py",
)
SHARE_CLUSTER = (
    "system/test_endpoint.py",
    "system/test_failures.py",
    "system/test_handles.py",
    "bring_up/test_runtime.py",
)

_HOME = pytest.StashKey[Home]()


def pytest_configure(config: pytest.Config) -> None:
    # Ray reads part of its settings while it is imported, which test modules do.
    home = Home(Path(tempfile.mkdtemp(prefix="satchel-test-")))
    prepare_home(home)
    ensure_token(home)
    environment.enter_ray_environment(home)
    config.stash[_HOME] = home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Those that start servers go first, so that none is left to one process at the end."""
    path = item.path.as_posix()
    longest = (place for place, name in enumerate(LONGEST_FIRST) if path.endswith(name))
    return next(longest, len(LONGEST_FIRST) + ("/system/" not in path))


class WholeFiles(LoadScopeScheduling):
    """A file goes to one process as a whole, and all files that share the cluster go to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "cluster" if file.endswith(SHARE_CLUSTER) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles:
    # Else files with many tests go first, however short these are.
    config.option.loadscopereorder = False
    return WholeFiles(config, log)


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
