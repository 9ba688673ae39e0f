"""The connection of this process to a cluster, as a Ray driver that survives the end of the cluster."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import ray

from ...cluster.connection import ClusterRecord, connect_ray, connect_ray_address, find_cluster, last_cluster
from ...cluster.environment import default_home
from ...cluster.errors import ClusterError, NotRunning
from ...cluster.home import Home, expanded
from .watch import KNOCK_S, ServerWatch, host_and_port

_changing = threading.Lock()
"""One thread at a time makes or ends this process's connection: Ray allows only one per process."""


def connect_driver(home: str | os.PathLike[str] | None, address: str | None) -> ServerWatch | None:
    """Connects this process, unless it is already connected to a running cluster.

    Args:
        home, address: as for `connect`.

    Returns:
        The server's watch. None in a Ray task or actor, whose process ends with the cluster.

    Raises:
        NotRunning: no server runs there.
        ClusterError: this process is connected to another running cluster.
    """
    where = Home(expanded(home).absolute()) if home is not None else default_home()
    with _changing:
        if ray.is_initialized():
            context = ray.get_runtime_context()
            if context.worker.mode != ray.SCRIPT_MODE:
                return None
            watch = _watch_of(context.gcs_address, where, address, chosen=home is not None or address is not None)
            if watch is not None:
                return watch
            ray.shutdown()
        if address is not None:
            connect_ray_address(address, where, outlives=True)
            return ServerWatch(address)
        record = find_cluster(where)
        connect_ray(record, outlives=True)
        return _watch(record)


def _watch_of(present: str, home: Home, address: str | None, *, chosen: bool) -> ServerWatch | None:
    """Returns the watch of the cluster to which this process is connected, None if that cluster has ended.

    Args:
        present: the address of its control store.
        home, address: which cluster is wanted; `chosen` if the caller named it.

    Raises:
        NotRunning, ClusterError: as `connect_driver`.
    """
    record = None
    if address is None:
        with suppress(NotRunning):
            record = last_cluster(home)
    wanted = address if record is None else record.address
    if _has_ended(present, replaced=wanted not in (None, present)):
        return None
    if chosen and wanted not in (None, present):
        raise ClusterError(f"this process is connected to the cluster at {present}; leave that with `ray.shutdown()`")
    if record is None or record.address != present:
        return ServerWatch(present)
    return _watch(find_cluster(home))


def _watch(record: ClusterRecord) -> ServerWatch:
    return ServerWatch(record.address, record.process)


def _has_ended(address: str, *, replaced: bool) -> bool:
    """Returns whether the control store at this address has ended: it refuses connections, or it is silent and another
    server has taken its place."""
    try:
        socket.create_connection(host_and_port(address), timeout=KNOCK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return replaced
    return False
