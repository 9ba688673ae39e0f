"""One Ray cluster for all tests that share it, started when the first one asks for it.

Everything lives in a temporary home of its own, on ports that the system chose, and is gone at the end.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import fastapi.dependencies.models
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from satchel.actors.replica.device import blas
from satchel.actors.replica.device.device import on_gpu
from satchel.cluster import environment
from satchel.cluster.bring_up.runtime import LocalCluster
from satchel.cluster.home import Home, ensure_token, prepare_home
from satchel.cluster.processes import keep_to_the_end
from tests.worlds.replica.failed_tasks import forget_failed_tasks

# How long an example takes depends on what else runs.
hypothesis.settings.register_profile("satchel", deadline=None)
hypothesis.settings.load_profile("satchel")

if on_gpu():
    # Float32 of its own precision, in this process and in servers: read at MLX's first product.
    os.environ["MLX_ENABLE_TF32"] = "0"

SHARE_CLUSTER = (
    # First, for it measures with nothing remembered there.
    "system/shared_cluster/test_stories.py",
    "system/shared_cluster/test_endpoint.py",
    "system/shared_cluster/test_telemetry.py",
    "system/shared_cluster/test_failures.py",
    "system/shared_cluster/test_handles.py",
    "bring_up/test_runtime.py",
    "cluster/test_patches.py",
)
START_SERVERS = (
    "system/hosts/test_hosts.py",
    "system/test_installed.py",
    "system/models/test_models.py",
    "system/models/test_model_pool.py",
    "system/nodes/test_two_nodes.py",
    "system/test_serve.py",
    "bring_up/test_server.py",
    "system/test_tls.py",
    "docs/test_commands.py",
)
LONG = (
    "execution/test_families.py",
    "simulations/test_cluster_simulation.py",
    "execution/recorded/test_compiled_step.py",
    "kernels/test_metal_text.py",
    "kernels/test_decode_kernel.py",
    "protocols/all_protocols/test_constrained_answers.py",
    "benchmarks/test_memory.py",
    "media/test_video.py",
    "zoo/test_zoo.py",
)
FIRST = (*SHARE_CLUSTER, *START_SERVERS, *LONG)

THREADS_MANY = 30

_HOME = pytest.StashKey[Home]()
_CLUSTER = pytest.StashKey[tuple[pytest.FixtureDef[Any], pytest.FixtureRequest]]()


def pytest_configure(config: pytest.Config) -> None:
    if (number := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")).isdigit():
        _keep_to_one_processor(int(number))
    # Ray reads part of its settings while it is imported, which test modules do.
    home = Home(Path(tempfile.mkdtemp(prefix="satchel-test-")))
    prepare_home(home)
    ensure_token(home)
    environment.enter_ray_environment(home)
    # Before tests of pictures load OpenBLAS for something else. Products of this process take less time and have the
    # same bits; servers that tests start multiply as by default.
    with environment.set_during(SATCHEL_OPENBLAS=os.environ.get("SATCHEL_OPENBLAS", "1")):
        blas.chosen()
    config.stash[_HOME] = home
    config.pluginmanager.register(_Noting())


def _keep_to_one_processor(worker: int) -> None:
    """Linux: a test process, and all that it starts, stay on one processor, where no thread preempts another. The first
    one, which has the tests that start servers, takes what the others leave.

    MLX computes on a CPU in a second thread, which gets single operations. Each one would wake it on another processor,
    or preempt the thread that prepares the next one. That took a third of the processors' time.
    """
    if sys.platform == "linux" and worker:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[worker % len(processors)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Ten thousand tests and all that they import stay to the end: each pass of the garbage collector over them would
    take seconds. What tests make is looked through more seldom than by default (every 700 objects)."""
    gc.disable()
    try:
        return (yield)
    finally:
        keep_to_the_end()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_variants(items)
    items.sort(key=_place)


def _leave_variants(items: list[pytest.Item]) -> None:
    """Of a test with the mark `variants(n)`, n stay in `make test`, always the same ones; the others are slow."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("variants") and not item.get_closest_marker("slow"):
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in found.values():
        mark = variants[0].get_closest_marker("variants")
        assert mark is not None
        # Neighbours are alike.
        variants.sort(key=lambda item: sha256(item.nodeid.encode()).digest())
        for item in variants[mark.args[0] :]:
            item.add_marker("slow")


def _place(item: pytest.Item) -> int:
    """The longest files go first, so that none is left to one process at the end."""
    path = item.path.as_posix()
    return next((place for place, name in enumerate(FIRST) if path.endswith(name)), len(FIRST))


class _Noting:
    """Notes the shared cluster when it is set up. A hook of this file is not called for what belongs to the session."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        if fixturedef.argname == "cluster":
            request.config.stash[_CLUSTER] = fixturedef, request
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """The shared cluster ends after the last test that uses it: idle it takes a sixth of a processor."""
    try:
        return (yield)
    finally:
        if (
            nextitem is not None
            and not nextitem.path.as_posix().endswith(SHARE_CLUSTER)
            and _CLUSTER in item.config.stash
        ):
            fixture, request = item.config.stash[_CLUSTER]
            del item.config.stash[_CLUSTER]
            # Those that depend on it end before it.
            fixture.finish(request)  # type: ignore[arg-type]
        forget_failed_tasks()
        if nextitem is None or nextitem.path != item.path:
            _let_go()


def _let_go() -> None:
    """Ends the threads of engines and stores that no test has any more. Otherwise there are hundreds of them, and as
    many of MLX's, and where a test hangs is not shown for all."""
    # FastAPI remembers each route's method, and so all that is behind it.
    for cached in vars(fastapi.dependencies.models).values():
        if isinstance(cached, functools._lru_cache_wrapper):
            cached.cache_clear()
    if threading.active_count() > THREADS_MANY:
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that hangs fails after half of `faulthandler_timeout`, and shows where its threads are. The other half is
    for those that hang in a library, whose process then ends."""
    limit_s = float(item.config.getini("faulthandler_timeout")) / 2

    def hangs(*_: Any) -> None:
        faulthandler.dump_traceback(2)
        with suppress(RuntimeError):
            for task in asyncio.all_tasks():
                task.print_stack()
        pytest.fail(f"hangs: it has taken {limit_s:.0f} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class WholeFiles(LoadScopeScheduling):
    """A file goes to one process as a whole, and all files that share the cluster go to the same one.

    The first process begins with the tests that start servers, which wait half of the time, and the others with those
    that only compute: so all processors are busy, and no two servers at the same time make each other late.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "cluster" if file.endswith(SHARE_CLUSTER) else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Of a process that ended in a test, others get the files with tests left. A file that is done would leave who
        gets it without the next test, and it waits for that one before it runs its last."""
        work = self.assigned_work[node]
        for file in [file for file, tests in work.items() if all(tests.values())]:
            del work[file]
        return super().remove_node(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = node is self.nodes[0]
        wanted = (scope for scope in self.workqueue if scope.endswith(("cluster", *START_SERVERS)) == first)
        if (scope := next(wanted, None)) is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles:
    # Else files with many tests go first, however short these are.
    config.option.loadscopereorder = False
    return WholeFiles(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A report names lone surrogates as escapes: as they are they cannot go to the main process, and end the run."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_sendable, value))
    return value


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
