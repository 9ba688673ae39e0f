"""Finds the endpoint for the command line: that of this machine's server, or of the head of the cluster that it joined.

The head gives its nodes the address and the owner's key in Ray's control store. Everything that can read that store can
run code in the cluster anyway.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass

from ...cluster.connection import ClusterRecord, connect_ray, find_cluster, is_loopback
from ...cluster.errors import ClusterError, NotRunning
from ...cluster.home import Home
from ...cluster.keys import owner_key

_TOLD = "endpoint"
_KNOCK_S = 3.0


@dataclass(frozen=True)
class ToldEndpoint:
    """What the head tells its nodes of its endpoint.

    Attributes:
        url: the one for other machines, if they can reach it.
        key: the owner's.
        certificate: the endpoint's, as PEM; "" for HTTP.
        head: the head's node.
    """

    url: str
    key: str
    certificate: str
    head: str


@dataclass(frozen=True)
class FoundEndpoint:
    """A running endpoint, as this machine's owner reaches it.

    Attributes:
        record: of this machine's server or node.
        url: without a slash at its end.
        key: "" if there is none.
        certificate: the file with it, or its PEM; None for HTTP.
        head: the head's node if that is another machine, else "".
    """

    record: ClusterRecord
    url: str
    key: str
    certificate: str | None
    head: str = ""


def tell_nodes(told: ToldEndpoint) -> None:
    """Tells the nodes of the cluster to which this process is connected where its endpoint is.

    Raises:
        RayError: the control store does not answer.
    """
    from ...actors.protocol import control_store

    control_store.put(_TOLD, json.dumps(asdict(told)))


def find_endpoint(home: Home) -> FoundEndpoint:
    """Returns the endpoint of the cluster of which this home is a part.

    Raises:
        NotRunning: no server or node runs on the home, its models are still loading, or the head does not answer.
        ClusterError: the endpoint answers only on its own machine.
    """
    record = find_cluster(home)
    if record.joined:
        return _of_head(record)
    if record.endpoint_url is None:
        raise NotRunning("the server is still starting; try again in a moment")
    return FoundEndpoint(record, record.endpoint_url.rstrip("/"), owner_key(home), record.certificate)


def _of_head(record: ClusterRecord) -> FoundEndpoint:
    address, _, port = record.address.rpartition(":")
    whose = f"this machine is {record.node}, a node of the cluster at {address}"
    try:
        socket.create_connection((address.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise NotRunning(f"{whose}, whose head does not answer ({error})") from None
    connect_ray(record, outlives=True)
    from ray.exceptions import RayError

    from ...actors.protocol import control_store

    try:
        found = control_store.get(_TOLD)
    except RayError:
        raise NotRunning(f"{whose}, whose head does not answer now") from None
    if found is None:
        raise NotRunning(f"{whose}, whose endpoint is still starting; try again in a moment")
    told = ToldEndpoint(**json.loads(found))
    if is_loopback(told.url.partition("://")[2]):
        raise ClusterError(
            f"{whose}; its endpoint, {told.url}, answers only on {told.head}: ask there, or let it listen on that "
            "machine's address (endpoint.listen)"
        )
    return FoundEndpoint(record, told.url, told.key, told.certificate or None, told.head)
