"""How the command line asks the running endpoint."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ..cluster.config import Home
from ..cluster.connection import ClusterRecord, find_cluster
from ..cluster.errors import ClusterError, NotRunning, SatchelError
from ..cluster.keys import owner_key


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
def client(home: Home, *, timeout_s: float) -> Iterator[httpx.Client]:
    """An HTTP client of the endpoint that runs on the home, with its owner's key. It turns connection failures into
    sentences. Proxies are for other hosts.

    Raises:
        NotRunning: nothing runs there, or does not answer.
    """
    record, url = running_endpoint(home)
    options: dict[str, Any] = {"timeout": httpx.Timeout(timeout_s, connect=5.0), "trust_env": False}
    if key := owner_key(home):
        options["headers"] = {"Authorization": f"Bearer {key}"}
    if record.certificate is not None:
        options["verify"] = trusting(record.certificate)
    try:
        with httpx.Client(base_url=url, **options) as session:
            yield session
    except httpx.TimeoutException:
        raise NotRunning(f"the endpoint at {url} does not answer in time") from None
    except httpx.TransportError as error:
        raise NotRunning(f"cannot reach the endpoint at {url}: {error}") from None


def trusting(certificate: str) -> ssl.SSLContext:
    """Trusts the certificate in this file and no other, whoever signed it and for whatever name: it is this machine's
    own. Of several only the first: those that signed it may have signed others'.

    Raises:
        NotRunning: it cannot be read.
    """
    from ..cluster.endpoint_certificate import read_certificate

    try:
        own = read_certificate(certificate).pem
    except ClusterError as error:
        raise NotRunning(f"cannot read the endpoint's certificate: {error.message}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=own)
    return context


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
