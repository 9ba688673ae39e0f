"""How the command line asks the running endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ..cluster.config import Home
from ..cluster.connection import ClusterRecord, find_cluster
from ..cluster.errors import NotRunning, SatchelError


def running_endpoint(home: Home) -> tuple[ClusterRecord, str]:
    """The running cluster and its endpoint's URL.

    Raises:
        NotRunning: no server runs, or its models are still loading.
    """
    record = find_cluster(home)
    if record.endpoint_url is None:
        raise NotRunning("the server is still starting; try again in a moment")
    return record, record.endpoint_url.rstrip("/")


@contextmanager
def client(url: str, *, timeout_s: float) -> Iterator[httpx.Client]:
    """An HTTP client of the endpoint that turns connection failures into sentences. Proxies are for other hosts.

    Raises:
        NotRunning: nothing answers at the URL.
    """
    try:
        with httpx.Client(base_url=url, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False) as session:
            yield session
    except httpx.TimeoutException:
        raise NotRunning(f"the endpoint at {url} does not answer in time") from None
    except httpx.TransportError as error:
        raise NotRunning(f"cannot reach the endpoint at {url}: {error}") from None


def error_of(response: httpx.Response) -> SatchelError:
    """What a failed response says, as an error. The body must have been read."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or "no reason given"
    return SatchelError(f"the endpoint answered {response.status_code}: {message}")


def get_json(session: httpx.Client, path: str, *, also: tuple[int, ...] = ()) -> Any:
    """The JSON at a path.

    Raises:
        SatchelError: the status is not 2xx nor one of `also`, or the body is not JSON.
    """
    response = session.get(path)
    if not response.is_success and response.status_code not in also:
        raise error_of(response)
    try:
        return response.json()
    except ValueError:
        raise SatchelError(f"the endpoint's answer to {path} is not JSON") from None
