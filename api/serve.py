"""The endpoint on Ray Serve, and bringing a configured cluster up to its first answer. The only file on `ray.serve`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.config import HTTPOptions

from ..actors.start import start_actors
from ..cluster.config import Config, Home
from ..cluster.errors import ClusterError, ModelLoadError, from_wire
from .app import create_app
from .dispatch import RayBackend

APPLICATION = "satchel"
POLL_S = 0.1
ENDPOINT_START_S = 120.0
FLUSH_S = 0.3
"""After the last row has ended: time for its last chunk to leave."""

Report = Callable[[str, float | None], None]


@serve.ingress()
class Endpoint:
    """The ingress: the FastAPI application over the cluster's actors, one process on the head node."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(RayBackend(self._config), self._config, server_echoes_request_id=True)


class Deployment:
    """A running endpoint. `models` are the served names, the default first."""

    def __init__(self, config: Config, replicas: dict[str, Any]) -> None:
        host = config.endpoint.listen
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        self.url = f"http://[{host}]:{config.endpoint.port}" if ":" in host else f"http://{host}:{config.endpoint.port}"
        self.models = [model.name for model in config.models]
        self._replicas = replicas

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the running ones, at most `timeout_s`; what still runs then is ended."""
        ends = time.monotonic() + timeout_s
        self._call("drain")
        while time.monotonic() < ends - FLUSH_S:
            answers = self._call("stats")
            # One that does not answer in time may still be busy.
            if not any(answer is None or answer.get("running") or answer.get("waiting") for answer in answers):
                break
            time.sleep(POLL_S)
        else:
            self._call("drain", True)
        time.sleep(FLUSH_S)

    def stop(self) -> None:
        """Nothing to give back: every process belongs to the cluster's Ray, which its owner ends."""

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of the replicas that live; None from one that does not answer within two seconds."""
        references = [getattr(handle, method).remote(*arguments) for handle in self._replicas.values()]
        ray.wait(references, num_returns=len(references), timeout=2.0)
        answers: list[Any] = []
        for reference in references:
            try:
                answers.append(ray.get(reference, timeout=0.1))
            except GetTimeoutError:
                answers.append(None)
            except RayError:
                # A replica that died has nothing left to drain.
                continue
        return answers


def deploy(config: Config, home: Home, *, report: Report) -> Deployment:
    """Start actors and endpoint in the Ray cluster this process is connected to, and wait for every model.

    Args:
        report: called with what is going on and the fraction done, None where unknown.

    Raises:
        ModelLoadError: a model cannot be loaded, or not within `timeouts.model_load_s`.
        ClusterError: the endpoint does not come up.
    """
    replicas = start_actors(config)
    report("Starting the endpoint and loading models", None)
    _start_endpoint(config)
    _await_models(config, replicas, report)
    deployment = Deployment(config, replicas)
    report("Waiting for the endpoint", None)
    _await_health(deployment.url)
    return deployment


def _start_endpoint(config: Config) -> None:
    # Serve tells every step at INFO; `report` tells the user what matters.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = HTTPOptions(host=config.endpoint.listen, port=config.endpoint.port, keep_alive_timeout_s=60)
    serve.start(proxy_location="HeadOnly", http_options=options)
    ingress = serve.deployment(
        Endpoint,
        name="endpoint",
        num_replicas=1,
        # The replicas' queues are the limit, with an error that says so; Serve's own would only wait.
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=1,
        ray_actor_options={"num_cpus": 0},
    )
    target = serve.RunTarget(ingress.bind(config), name=APPLICATION, route_prefix="/")
    # Not awaited here but by `_await_health`: it comes up while the models load.
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _await_models(config: Config, replicas: dict[str, Any], report: Report) -> None:
    ends = time.monotonic() + config.timeouts.model_load_s
    waiting = dict(replicas)
    while waiting:
        for name, handle in list(waiting.items()):
            progress: dict[str, Any] = ray.get(handle.progress.remote(), timeout=60)
            if progress["error"]:
                raise from_wire(progress["error"])
            if progress["ready"]:
                del waiting[name]
            else:
                report(f"{name}: {progress['what']}", progress["fraction"])
        if waiting and time.monotonic() > ends:
            raise ModelLoadError(f"{', '.join(waiting)} did not load within {config.timeouts.model_load_s:.0f} s")
        time.sleep(POLL_S)


def _await_health(url: str) -> None:
    ends = time.monotonic() + ENDPOINT_START_S
    last = "no answer"
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < ends:
            try:
                answer = client.get(f"{url}/health")
            except httpx.HTTPError as error:
                last = str(error)
            else:
                if answer.status_code == 200:
                    return
                last = answer.text
            time.sleep(POLL_S)
    raise ClusterError(f"the endpoint at {url} did not come up within {ENDPOINT_START_S:.0f} s: {last}")
