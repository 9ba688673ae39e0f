"""The environment: the only file that reads it, and what Ray's processes find in it.

Ray takes most of its settings from environment variables, some of them while `import ray` runs, so
`enter_ray_environment` comes before the first import of Ray in a process.
"""

from __future__ import annotations

import hmac
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .config import Home
from .errors import ClusterError

_FORBIDDEN_TO_RAY = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_GCS_SERVER_PORT",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RAY_REDIS_ADDRESS",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_START_HOOK",
    "RAY_TLS_CA_CERT",
    "RAY_TLS_SERVER_CERT",
    "RAY_TLS_SERVER_KEY",
    "RAY_TMPDIR",
    "RAY_USE_TLS",
)
"""Settings of some other cluster that would lead ours astray."""


def default_home() -> Home:
    """SATCHEL_HOME, or `~/.satchel`."""
    given = os.environ.get("SATCHEL_HOME")
    return Home(Path(given).expanduser().absolute() if given else Path.home() / ".satchel")


def ray_settings(home: Home, *, one_machine: bool = True) -> dict[str, str]:
    """The variables by which every process of a cluster is told how to behave."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home.token_file),
        **({} if one_machine else _tls_settings(home)),
        # Offline it only delays.
        "RAY_USAGE_STATS_ENABLED": "0",
        # Off on one machine, on Linux too: Ray then stays on 127.0.0.1 instead of listening on every interface,
        # survives a change of network, and macOS asks nobody about its firewall. On several, macOS wants it.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if one_machine else "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DISABLE_DASHBOARD_LOG_INFO": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ray would start an idle worker of 90 MB for every CPU.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Ray's 30 s are too few for the agent beside a raylet where several nodes start on a busy machine.
        "RAY_agent_register_timeout_ms": "90000",
        # Its exporter is not started.
        "RAY_enable_metrics_collection": "0",
        **mlx_settings(),
        # Importing torch-like extras only to say that they are missing.
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _tls_settings(home: Home) -> dict[str, str]:
    """Between machines every call of Ray's is encrypted, and both sides show a certificate of the cluster."""
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(home.certificate_file),
        "RAY_TLS_SERVER_KEY": str(home.key_file),
        "RAY_TLS_CA_CERT": str(home.authority_file),
    }


def mlx_settings() -> dict[str, str]:
    """How MLX is told to use CUDA, before it computes anything in a process. What somebody has set already stays."""
    if is_macos():
        # Metal listens to two of these too, and has values of its own for every chip.
        return {}
    settings = {
        # It takes it for a mistake that more graphs are met than it keeps, and raises from then on. Servers do.
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
        # Operations launched as one graph: with its 20 or 30 a decode step of 4B took 9.7 ms on an H200, so 8.2.
        "MLX_MAX_OPS_PER_BUFFER": "100",
        "MLX_MAX_MB_PER_BUFFER": "1000",
    }
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def mlx_rounding() -> dict[str, str]:
    """What somebody may have set by which MLX rounds products otherwise, on a GPU: its float32 is TF32 by default."""
    return {"MLX_ENABLE_TF32": os.environ.get("MLX_ENABLE_TF32", "1")}


def child_environment(home: Home, *, one_machine: bool = True, heartbeats: Path | None = None) -> dict[str, str]:
    """A whole environment for starting Ray in a process of its own; its actors find `home` by `default_home`, and
    `heartbeats` by `heartbeats_path`."""
    kept = {name: value for name, value in os.environ.items() if name not in _FORBIDDEN_TO_RAY}
    where = {"SATCHEL_HOME": str(home.root), "SATCHEL_HEARTBEATS": str(heartbeats or "")}
    return {**kept, **ray_settings(home, one_machine=one_machine), **where}


def heartbeats_path() -> Path | None:
    """The socket on which this process's server hears signs of life; None where it belongs to no server."""
    given = os.environ.get("SATCHEL_HEARTBEATS")
    return Path(given) if given else None


def cluster_key() -> bytes:
    """What the nodes of this process's cluster prove themselves with when they move KV: made of Ray's secret.

    Raises:
        ClusterError: this process belongs to no cluster.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ClusterError(f"the cluster's secret cannot be read: {error}") from None
    return hmac.digest(secret, b"satchel: blocks of KV between nodes", "sha256")


def enter_ray_environment(home: Home, *, one_machine: bool = True) -> None:
    """Makes this process one of the cluster of that home. Call it before Ray is imported for the first time."""
    for name in _FORBIDDEN_TO_RAY:
        os.environ.pop(name, None)
    os.environ.update(ray_settings(home, one_machine=one_machine))


def snapshot() -> Mapping[str, str]:
    """A copy of the environment, for those who must put it back."""
    return dict(os.environ)


def restore(saved: Mapping[str, str]) -> None:
    """Puts the environment back to what `snapshot` saw."""
    os.environ.clear()
    os.environ.update(saved)


def short_temporary_root() -> Path:
    """Where Ray's sockets can live: `/tmp`, because macOS's own choice is too long for a socket's name (103 bytes)."""
    common = Path("/tmp")
    return common if os.access(common, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def is_macos() -> bool:
    return sys.platform == "darwin"
