"""The endpoint on Ray Serve, and the start of a configured cluster's actors. Only this file calls `ray.serve`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
from ray import serve
from ray.serve.exceptions import RayServeException

from ..actors.patches import without_torch
from ..actors.planner.actor import start_planner
from ..actors.pool.actor import start_pool
from ..actors.protocol import registry
from ..actors.protocol.clients import ReplicaClient
from ..actors.protocol.group_clients import PlannerClient
from ..actors.rpc.client import ActorRef
from ..actors.rpc.shell import answers
from ..actors.rpc.spec import Client, method
from ..actors.start import Report, drain, find_replicas, located, start_actors, wait_until_ready
from ..actors.supervision.watchdog import Watchdog
from ..cluster.audit import Audit
from ..cluster.bring_up.ports import check_port_free, listens_to_strangers
from ..cluster.config.config import Config, Endpoint
from ..cluster.config.timing import Timing
from ..cluster.environment import default_home
from ..cluster.errors import ClusterError, NoAnswer, SatchelError
from ..cluster.incidents import note_incident_aside
from ..cluster.keys import KeyRing
from ..cluster.patches import keep_ray_serve_on_this_machine
from ..cluster.processes import give_freed_memory_back, keep_from_collection
from ..cluster.telemetry.context import TRACING
from ..cluster.telemetry.process import begin_telemetry, with_collector
from ..cluster.trust.endpoint_certificate import client_context
from ..cluster.trust.shown_certificate import ShownCertificate
from .agents.memory import AgentMemory
from .app import create_app
from .http.server import HttpServer
from .pipeline.generation import Generator
from .ray_backend.dispatch import RayBackend
from .ray_backend.locator import AgentLocator
from .ray_backend.store import RayStore
from .text.ahead import TextsAhead
from .text.model import import_libraries

APPLICATION = "satchel"
POLL_S = 0.1
ENDPOINT_START_S = 120.0
NODES_WAIT_S = 150.0
"""How long a start waits for nodes of a model that may be divided. The model may still come later."""
THREADS = 32
HEALTH_S = 2.0
HEALTH_TIMEOUT_S = 30.0


MINUTE_S = 60.0

FLOOD_MIN = 10
"""Refusals are reported only if there are at least this many in a minute."""


class _Endpoint(ActorRef):
    """A reference to the running endpoint, found through Serve. Use it in a thread."""

    unanswered_by = (*ActorRef.unanswered_by, RayServeException)

    def find(self) -> Any:
        return serve.get_app_handle(APPLICATION)

    def answer(self, sent: Any, timeout_s: float) -> Any:
        return sent.result(timeout_s=timeout_s)


class EndpointClient(Client):
    """The running endpoint, for use from a thread."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(_Endpoint("the endpoint", "the endpoint does not answer now"), timing)

    @method()
    def warm(self) -> None:
        """Loads the tokenizers of all models, so that the first requests need not wait for them.

        Raises:
            SatchelError: one cannot be loaded.
        """
        ...

    @method(lambda timing, timeout_s: timeout_s + timing.brief_answer_s)
    def close(self, timeout_s: float) -> None:
        """Stops accepting connections, and lets clients read the rest of their answers for at most `timeout_s`."""
        ...


class HttpEndpoint:
    """The HTTP endpoint: one Serve replica on the head node, with the server in its event loop.

    Clients connect to it directly. Serve restarts it if it dies. Serve's own proxy is not used, because every piece of
    every answer would pass through a second Python process, without backpressure.
    """

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        keep_ray_serve_on_this_machine()
        begin_telemetry("endpoint", config.logs, config.traces)
        # Bodies may be large.
        give_freed_memory_back()
        # Ray gives a process without reserved CPUs five threads, too few for tokenizing and everything else.
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS, "work"))
        without_torch()
        # This import takes seconds; meanwhile replicas load their models. In another thread, imports have deadlocked.
        import_libraries()
        self._watchdog = Watchdog("endpoint", poll_s=config.timing.heartbeat_s)
        self._watchdog.watch("event loop", loop.call_soon_threadsafe)
        self._watchdog.start()
        locator, texts = AgentLocator(config), TextsAhead()
        self._generator = Generator(
            RayBackend(config, locator),
            config,
            load_text=texts.load,
            memory=AgentMemory(RayStore(locator, config.timing), copy_wait_s=config.copy_wait_s, timing=config.timing),
        )
        at, home = config.endpoint, default_home()
        certificate = None if at.tls is None else ShownCertificate(at.tls, home)
        refused = Refusals(lambda text: note_incident_aside(home, "refused", text)).count
        app = create_app(
            self._generator.backend,
            config,
            generator=self._generator,
            keys=KeyRing(home, required=listens_to_strangers(at)),
            audit=Audit(home),
            certified=lambda: () if certificate is None else certificate.certificate.host_names,
            refused=refused,
            batches=home.batches,
        )
        self._server = HttpServer(
            app,
            at.listen,
            at.port,
            connections_max=at.connections_max,
            certificate=certificate,
            refused=refused,
            closing=app.state.end_streams,
        )
        keep_from_collection()
        texts.begin(config.models)
        await self._server.start()
        await self.check_health()

    async def check_health(self) -> None:
        """Serve calls this, and starts another endpoint if it raises.

        Raises:
            ClusterError: the server has ended.
        """
        if (failure := self._server.failure) is not None:
            raise ClusterError("the HTTP server has ended") from failure

    @answers(EndpointClient.warm)
    async def warm(self) -> None:
        for model in await self._generator.backend.models():
            if model.info.makes_text:
                await self._generator.text_model(model)

    @answers(EndpointClient.close)
    async def close(self, timeout_s: float) -> None:
        await self._server.close(timeout_s)
        await asyncio.to_thread(TRACING.close)


class Deployment:
    """A running endpoint. `models` are the names it was started with, the default first."""

    def __init__(self, config: Config) -> None:
        self.url = config.endpoint.url(everywhere="127.0.0.1")
        self.models = [model.name for model in config.models]
        self._timing = config.timing

    def drain(self, timeout_s: float) -> None:
        """Refuses new requests of every served model, waits at most `timeout_s` for the running ones, and ends what
        still runs then."""
        replicas = find_replicas(registry.entries(), self._timing)
        asyncio.run(drain(replicas, timeout_s, self._timing))

    def stop(self, timeout_s: float) -> None:
        """Stops accepting connections, and lets clients read their answers for at most `timeout_s`. The processes
        belong to the cluster's Ray, which its owner ends."""
        EndpointClient(self._timing).close(timeout_s).wait()


def deploy(config: Config, *, report: Report) -> Deployment:
    """Starts actors and endpoint in the Ray cluster this process is connected to, and waits for every model.

    Args:
        report: called with the current step and the fraction done, None if unknown.

    Raises:
        ModelLoadError: a model cannot be loaded, or not within `timeouts.model_load_s`.
        ClusterError: the endpoint does not come up, or this Ray cluster serves something else; nothing is changed then.
        ConfigError: the environment names a collector of traces, but not by a URL.
    """
    config = with_collector(config)
    _check_alone()
    replicas = start_actors(config)
    start_pool(config)
    start_planner(config)
    report("Starting the endpoint and loading models", None)
    _start_endpoint(replace(config, models=tuple(map(located, config.models))))
    asyncio.run(wait_until_ready(replicas, config.timeouts.model_load_s, report))
    planned = asyncio.run(_planned(config, report))
    asyncio.run(wait_until_ready(planned, config.timeouts.model_load_s, report))
    deployment = Deployment(config)
    report("Waiting for the endpoint", None)
    _await_health(deployment.url, config.endpoint)
    EndpointClient(config.timing).warm().within(config.timeouts.model_load_s).wait()
    return deployment


async def _planned(config: Config, report: Report) -> dict[str, ReplicaClient]:
    """Waits until the models that may be divided have their places, but not for nodes that do not come.

    Raises:
        SatchelError: one does not fit.
    """
    planner, ends, found = PlannerClient(config.timing), time.monotonic() + NODES_WAIT_S, {}
    waiting = [model.name for model in config.models if model.split is not None]
    while waiting and time.monotonic() < ends:
        for name in list(waiting):
            with suppress(NoAnswer):
                planned = await planner.planned(name)
                if planned.replica:
                    waiting.remove(name)
                    found[planned.replica] = ReplicaClient(planned.replica, config.timing)
                report(f"{name}: {planned.what}", None)
        await asyncio.sleep(POLL_S)
    return found


def _check_alone() -> None:
    """
    Raises:
        ClusterError: Ray Serve runs other applications here, to which its proxies and limits belong.
    """
    if others := sorted(serve.status().applications.keys() - {APPLICATION}):
        raise ClusterError(
            f"Ray Serve runs {', '.join(others)} in this Ray cluster: Satchel needs a cluster of its own, as `satchel "
            "serve` starts it. Nothing was changed"
        )


def _start_endpoint(config: Config) -> None:
    # Serve logs every step at INFO; `report` tells the user what matters.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    ingress = serve.deployment(
        HttpEndpoint,
        name="endpoint",
        num_replicas=1,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=1,
        ray_actor_options={"num_cpus": 0, "resources": {config.machines[0].resource: 1}},
    )
    target = serve.RunTarget(ingress.bind(config), name=APPLICATION, route_prefix="/")
    # `_await_health` waits for it: the endpoint starts while the models load.
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _await_health(url: str, endpoint: Endpoint) -> None:
    ends = time.monotonic() + ENDPOINT_START_S
    last = "no answer"
    while time.monotonic() < ends:
        try:
            # Read again each time: the certificate may be replaced while models load.
            verify = True if endpoint.tls is None else client_context(endpoint.tls.certificate)
            answer = httpx.get(f"{url}/health", timeout=5.0, trust_env=False, verify=verify)
        except (httpx.HTTPError, SatchelError) as error:
            healthy, last = False, str(error)
        else:
            healthy, last = answer.status_code == 200, answer.text
        application = serve.status().applications.get(APPLICATION)
        status = application.status if application is not None else None
        # Another program may have taken the port meanwhile and may answer there.
        if healthy and status == "RUNNING":
            return
        if application is not None and status == "DEPLOY_FAILED":
            check_port_free(endpoint.listen, endpoint.port)
            raise ClusterError(f"the endpoint does not start: {application.message}")
        time.sleep(POLL_S)
    raise ClusterError(f"the endpoint at {url} did not come up within {ENDPOINT_START_S:.0f} s: {last}")


class Refusals:
    """Counts refused requests by reason, and reports once a minute those that came often.

    Args:
        tell: called with one sentence for each reason.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._counts: Counter[str] = Counter()

    def count(self, why: str) -> None:
        """Counts one refused request. Call it on an event loop."""
        if not self._counts:
            asyncio.get_running_loop().call_later(MINUTE_S, self.end_minute)
        self._counts[why] += 1

    def end_minute(self) -> None:
        counts, self._counts = self._counts, Counter()
        for why, count in counts.items():
            if count >= FLOOD_MIN:
                self._tell(f"{count} requests were refused within a minute: {why}")
