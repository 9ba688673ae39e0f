"""How other processes find a running cluster and connect to it: its record on this machine."""

from __future__ import annotations

import importlib.metadata
import logging
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from . import environment
from .config.config import Config, load_config
from .errors import ConfigError, NotRunning
from .home import Home, read_json
from .patches import init_ray, reread_ray_settings
from .processes import ProcessMark

NAMESPACE = "satchel"

_KNOCK_S = 3.0
_ADVICE = "start one with `satchel serve`"


def satchel_version() -> str:
    """Returns the installed version of Satchel."""
    return importlib.metadata.version("satchel")


def versions() -> str:
    """Returns the versions that must be equal on all machines of a cluster, as one text."""
    names = ("satchel", "ray", "mlx", "mlx-lm")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join([f"{name} {importlib.metadata.version(name)}" for name in names] + [f"Python {python}"])


@dataclass(frozen=True)
class ClusterRecord:
    """What `cluster.json` tells other processes about the running cluster, or this machine's part of one.

    Attributes:
        address: of Ray's control store, `HOST:PORT`.
        home: the folder with the secret for connecting and the certificate.
        endpoint_url: such as `http://127.0.0.1:8000`; None until the models answer.
        certificate: the file with the endpoint's certificate, None for HTTP.
        pid: the server's process id; `pid_created_s` (Unix time) tells it from a later process with this id.
        temp_dir: where Ray keeps its sockets and logs.
        ray_sid: the Unix session in which Ray runs.
        node: this machine's name in the cluster.
        join_server: the address of the join server, `HOST:PORT`.
        joined: whether this machine joined a cluster that another server leads.
    """

    address: str
    home: str
    namespace: str
    version: str
    endpoint_url: str | None
    pid: int
    pid_created_s: float
    temp_dir: str
    ray_sid: int
    node: str = "local"
    join_server: str = ""
    joined: bool = False
    certificate: str | None = None

    @property
    def process(self) -> ProcessMark:
        """The server's process, on this machine."""
        return ProcessMark(self.pid, self.pid_created_s)

    @property
    def log_dir(self) -> Path:
        """Where Ray's processes write their logs while the cluster runs."""
        return Path(self.temp_dir) / "session_latest" / "logs"


def find_cluster(home: Home) -> ClusterRecord:
    """Returns the record of the cluster that runs on this home.

    Raises:
        NotRunning: there is none; the message says how to start one.
    """
    record = last_cluster(home)
    if not record.process.is_alive():
        raise NotRunning(f"the server on {home.root} (process {record.pid}) has died; {_ADVICE}")
    return record


def last_cluster(home: Home) -> ClusterRecord:
    """As `find_cluster`, also if that cluster's server has died."""
    data = read_json(home.cluster_file)
    if data is None:
        raise NotRunning(f"no server runs on {home.root}; {_ADVICE}")
    # Earlier versions wrote `door`.
    former = {"join_server": data.pop("door")} if "door" in data else {}
    try:
        return ClusterRecord(**former, **data)
    except TypeError:
        raise NotRunning(f"{home.cluster_file} was written by another version of Satchel; {_ADVICE}") from None


def served_config(home: Home) -> Config | None:
    """Returns the config of the server that runs on this home; None if none runs, or another machine leads."""
    try:
        return None if find_cluster(home).joined else load_config(home.served_config_file)
    except (NotRunning, ConfigError):
        return None


def connect_ray(record: ClusterRecord, *, outlives: bool = False) -> None:
    """Makes this process a driver of the cluster. Does nothing if it is connected already, as an actor is.

    Args:
        outlives: whether this process lives on if the cluster ends. If not, Ray ends it a minute later.

    Raises:
        NotRunning: nothing answers at the recorded address.
    """
    connect_ray_address(record.address, Home(Path(record.home)), record.namespace, record.temp_dir, outlives=outlives)


def connect_ray_address(
    address: str, home: Home, namespace: str = NAMESPACE, temp_dir: str | None = None, *, outlives: bool = False
) -> None:
    """Connects as `connect_ray`, to a Ray address (`host:port`) with the token and certificates of a home.

    Args:
        temp_dir: Ray's folder of the node to connect through, if this machine has several.
        outlives: as for `connect_ray`.

    Raises:
        NotRunning: nothing answers there, or it does not take the token.
    """
    imported_before = "ray" in sys.modules
    environment.enter_ray_environment(home, one_machine=is_loopback(address), outlives=outlives)
    import ray

    if ray.is_initialized():
        return
    if outlives:
        # Ray would wait as long as for a lost control store.
        _knock(address)
    if imported_before:
        reread_ray_settings()
    try:
        init_ray(
            temp_dir=temp_dir,
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise NotRunning(f"cannot connect to Ray at {address}: {error}") from None


def _knock(address: str) -> None:
    """
    Raises:
        NotRunning: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise NotRunning(f"no control store of a cluster answers at {address}: {error}") from None


def is_loopback(address: str) -> bool:
    """Returns whether `host:port` is a loopback address."""
    return address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")
