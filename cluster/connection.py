"""A running cluster as others find it: its record on this machine, the way in, and what a machine must know to join."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

from . import environment
from .config import Home
from .errors import ClusterError, NotRunning
from .home import read_json, write_private
from .processes import ProcessMark

NAMESPACE = "satchel"


def satchel_version() -> str:
    """The installed version of Satchel."""
    return importlib.metadata.version("satchel")


VERSION_KEY = b"versions"
"""Where the cluster's control store says what runs there, in the namespace `NAMESPACE`."""


def versions() -> str:
    """What two machines of one cluster must have the same of."""
    names = ("satchel", "ray", "mlx", "mlx-lm")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join([f"{name} {importlib.metadata.version(name)}" for name in names] + [f"Python {python}"])


@dataclass(frozen=True)
class ClusterRecord:
    """What `cluster.json` tells others about the running cluster, or this machine's part of one.

    Attributes:
        address: of Ray's control store, `HOST:PORT`.
        token_path: the file with the secret for connecting.
        endpoint_url: such as `http://127.0.0.1:8000`; None until the models answer.
        certificate: the file with the endpoint's certificate, None for HTTP.
        pid: the server's process id, with `pid_created_s` (Unix time) against confusion with a later process.
        temp_dir: where Ray keeps its sockets and logs.
        ray_sid: the Unix session in which Ray runs.
        node: this machine's name in the cluster.
        joined: whether the cluster is led by another server.
    """

    address: str
    token_path: str
    namespace: str
    version: str
    endpoint_url: str | None
    pid: int
    pid_created_s: float
    temp_dir: str
    ray_sid: int
    node: str = "local"
    joined: bool = False
    certificate: str | None = None

    @property
    def log_dir(self) -> Path:
        """Where Ray's processes write their logs while the cluster runs."""
        return Path(self.temp_dir) / "session_latest" / "logs"


def find_cluster(home: Home) -> ClusterRecord:
    """The cluster that runs on this home.

    Raises:
        NotRunning: there is none; the message says how to start one.
    """
    advice = "start one with `satchel serve`"
    data = read_json(home.cluster_file)
    if data is None:
        raise NotRunning(f"no server runs on {home.root}; {advice}")
    try:
        record = ClusterRecord(**data)
    except TypeError:
        raise NotRunning(f"{home.cluster_file} was written by another version of Satchel; {advice}") from None
    if not ProcessMark(record.pid, record.pid_created_s).is_alive():
        raise NotRunning(f"the server on {home.root} (process {record.pid}) has died; {advice}")
    return record


def connect_ray(record: ClusterRecord) -> None:
    """Makes this process a driver of the cluster. Does nothing in a process that already is one, such as an actor.

    Raises:
        NotRunning: nothing answers at the recorded address.
    """
    connect_ray_address(record.address, Path(record.token_path), record.namespace, record.temp_dir)


def connect_ray_address(
    address: str, token_path: Path, namespace: str = NAMESPACE, temp_dir: str | None = None
) -> None:
    """As `connect_ray`, for a Ray address (`host:port`) and the file with the cluster's token.

    Args:
        temp_dir: of the node to be connected through, where this machine has several.

    Raises:
        NotRunning: nothing answers there, or it does not take the token.
    """
    imported_before = "ray" in sys.modules
    environment.enter_ray_environment(token_path, one_machine=is_loopback(address))
    import ray

    if ray.is_initialized():
        return
    if imported_before:
        _reread_ray_settings()
    try:
        ray.init(
            address=address,
            namespace=namespace,
            _temp_dir=temp_dir,
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise NotRunning(f"cannot connect to Ray at {address}: {error}") from None


def is_loopback(address: str) -> bool:
    """Whether `host:port` is on this machine alone."""
    return address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")


def _reread_ray_settings() -> None:
    """Makes an imported, uninitialized Ray see the environment as it is now; it reads most of it while imported."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    importlib.reload(ray_constants)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@dataclass(frozen=True)
class Invitation:
    """What a machine must know to join a cluster: the address of its control store (`host:port`), and its secret."""

    address: str
    token: str = field(repr=False)


def check_version(invitation: Invitation, home: Home) -> None:
    """Whether the cluster runs this version of Satchel and Ray. Nothing is started for it.

    Raises:
        NotRunning: no cluster answers there, or it does not take the secret.
        ClusterError: it runs another version.
    """
    write_private(home.token_file, invitation.token)
    environment.enter_ray_environment(home.token_file, one_machine=is_loopback(invitation.address))
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    try:
        found = GcsClient(address=invitation.address).internal_kv_get(VERSION_KEY, NAMESPACE.encode(), timeout=10)
    except Exception as error:
        # Ray's errors have no common class here.
        raise NotRunning(f"no cluster answers at {invitation.address}: {error}") from None
    own = versions()
    if found is None or found.decode() != own:
        theirs = found.decode() if found is not None else "no Satchel"
        raise ClusterError(f"the cluster at {invitation.address} runs {theirs}, this machine {own}; install the same")
