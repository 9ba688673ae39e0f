"""Environment variables: this is the only file that reads them, and it sets those of Ray's processes.

Ray takes most of its settings from environment variables, some of them while `import ray` runs, so
`enter_ray_environment` comes before the first import of Ray in a process.
"""

from __future__ import annotations

import hmac
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .errors import ClusterError
from .home import Home, expanded

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
"""Variables of other clusters that would break this one."""


def default_home() -> Home:
    """Returns SATCHEL_HOME, or `~/.satchel`.

    Raises:
        ClusterError: this user has no home folder, and SATCHEL_HOME does not name another one.
    """
    return Home(expanded(os.environ.get("SATCHEL_HOME") or "~/.satchel").absolute())


def ray_settings(home: Home, *, one_machine: bool = True) -> dict[str, str]:
    """Returns the variables that every process of a cluster gets."""
    return {
        "RAY_AUTH_MODE": "token",
        # A call that is made after its process has left the cluster fails; Ray would start a cluster of its own for it.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_AUTH_TOKEN_PATH": str(home.token_file),
        **({} if one_machine else _tls_settings(home)),
        # Without a network it only causes delays.
        "RAY_USAGE_STATS_ENABLED": "0",
        # Off on one machine, on Linux too: Ray then stays on 127.0.0.1 instead of listening on every interface,
        # survives a change of network, and macOS shows no firewall dialog. With several machines macOS needs it.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if one_machine else "1",
        # On Linux Ray brings jemalloc for its own processes; with this its workers have it too. A decode step makes and
        # frees thousands of small objects: of a 0.6B model on an H200 it took 3.1 ms instead of 5.5.
        "RAY_LD_PRELOAD_ON_WORKERS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DISABLE_DASHBOARD_LOG_INFO": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ray would start an idle worker of 90 MB for every CPU.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Ray's 30 s are too short for a raylet's agent if several nodes start on a busy machine.
        "RAY_agent_register_timeout_ms": "90000",
        # A connection ends if nothing that was sent on it is confirmed for this long (Linux; Ray's default: 120 s), and
        # the next call opens another one. After a host was cut off for 10 to 25 s, calls to it took as long again with
        # the old connection, which tries ever more rarely. A process that stood still for a while keeps its own.
        "RAY_grpc_client_keepalive_timeout_ms": "8000",
        # Larger arguments go through Ray's object store, which takes milliseconds. A prompt of 30,000 tokens is larger
        # than Ray's default of 100 KB.
        "RAY_max_direct_call_object_size": str(4 * 2**20),
        # Ray's metrics exporter is not started.
        "RAY_enable_metrics_collection": "0",
        # For Ray's dashboard, which is not started either, the control store would keep the last 100,000 calls (about
        # 3 KB each), and every process would write a page of statistics a minute to its log.
        "RAY_task_events_report_interval_ms": "0",
        "RAY_event_stats_print_interval_ms": "0",
        **mlx_settings(home),
        # Transformers would import torch only to say that it is missing.
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def ray_client_settings(home: Home, address: str, *, one_machine: bool) -> dict[str, str]:
    """Returns the variables with which a program that knows only Ray reaches a cluster.

    Args:
        address: of its control store, `host:port`.
    """
    needed = ray_settings(home, one_machine=one_machine)
    return {
        "RAY_ADDRESS": address,
        **{name: needed[name] for name in needed if name.startswith(("RAY_AUTH_", "RAY_TLS_", "RAY_USE_TLS"))},
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": needed["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"],
        # `ray status` then asks the control store: the process that writes a status for it is not started.
        "RAY_enable_autoscaler_v2": "1",
    }


_OUTLIVING = {
    # Ray ends a process that has not reached the head for this long (Ray's default: 60 s).
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(10 * 365 * 24 * 3600),
    # A thread that waits for the head keeps its process from ending (Ray's default: 60 s).
    "RAY_gcs_server_request_timeout_seconds": "5",
    # How long a process that ends waits for a lost head (Ray's default: 5 s).
    "RAY_task_events_shutdown_flush_timeout_ms": "500",
}
"""For a process that is no part of the cluster and outlives it."""


def _breaks_ray(name: str, value: str) -> bool:
    """Returns whether a variable belongs to another cluster, or to a parent process that is independent of this
    cluster."""
    return name in _FORBIDDEN_TO_RAY or _OUTLIVING.get(name) == value


def _tls_settings(home: Home) -> dict[str, str]:
    """Returns the settings by which Ray encrypts calls between machines; both sides show a certificate of the
    cluster."""
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(home.certificate_file),
        "RAY_TLS_SERVER_KEY": str(home.key_file),
        "RAY_TLS_CA_CERT": str(home.authority_file),
    }


def mlx_settings(home: Home) -> dict[str, str]:
    """Returns MLX's settings for CUDA; it reads them before it computes anything. A variable that is set stays."""
    if is_macos():
        # Metal reads two of these too, and has its own values for every chip.
        return {}
    settings = {
        # MLX raises once a process has used more graphs than its cache holds, which is normal for a server.
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
        # Operations launched as one graph. On an H200 a decode step of a 4B model took 9.7 ms with MLX's default of 20
        # or 30, and 8.2 ms with this.
        "MLX_MAX_OPS_PER_BUFFER": "100",
        # Plans of attention by shape, each of which takes 50 ms to make.
        "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
        # By default in a folder that a restart of the machine empties.
        "MLX_PTX_CACHE_DIR": str(home.kernels_folder),
    }
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def mlx_rounding() -> dict[str, str]:
    """Returns the setting that changes how MLX rounds products on a GPU: its float32 is TF32 by default."""
    return {"MLX_ENABLE_TF32": os.environ.get("MLX_ENABLE_TF32", "1")}


def wants_openblas() -> bool:
    """Returns whether products on a CPU may be OpenBLAS's: if SATCHEL_OPENBLAS is 1."""
    return os.environ.get("SATCHEL_OPENBLAS") == "1"


def kernels_wanted() -> bool | None:
    """Returns what SATCHEL_KERNELS says of GPU kernels of Satchel's own: False for 0, True for 1, None otherwise."""
    return {"0": False, "1": True}.get(os.environ.get("SATCHEL_KERNELS", ""))


def rings_wanted() -> bool:
    """Returns whether cards of one machine may pass arrays on by themselves: unless SATCHEL_RINGS is 0."""
    return os.environ.get("SATCHEL_RINGS") != "0"


def trace_collector() -> str | None:
    """Returns the URL of OpenTelemetry's collector that OTEL_EXPORTER_OTLP_ENDPOINT names; None for none."""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None


def set_unless_set(name: str, value: str) -> None:
    """Sets a variable of this process that a library reads later, unless it is set."""
    os.environ.setdefault(name, value)


@contextmanager
def set_during(**variables: str) -> Iterator[None]:
    """Sets variables while a library that reads them is loaded."""
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment(
    home: Home, *, one_machine: bool = True, heartbeats: Path | None = None, card: str = ""
) -> dict[str, str]:
    """Returns the whole environment for starting Ray in a process of its own; its actors find `home` by `default_home`,
    `heartbeats` by `heartbeats_path` and `card` by `own_card`.

    Args:
        card: the UUID of the only card that CUDA shows these processes; "" leaves that as it is here.
    """
    kept = {name: value for name, value in os.environ.items() if not _breaks_ray(name, value)}
    where = {"SATCHEL_HOME": str(home.root), "SATCHEL_HEARTBEATS": str(heartbeats or ""), "SATCHEL_CARD": card}
    # Ray leaves it alone in processes that ask for no GPU (RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO).
    shown = {"CUDA_VISIBLE_DEVICES": card} if card else {}
    return {**kept, **ray_settings(home, one_machine=one_machine), **where, **shown}


def visible_cuda_devices() -> str | None:
    """Returns CUDA_VISIBLE_DEVICES: which cards CUDA programs that this process starts see; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def own_card() -> str:
    """Returns the UUID of the card of the node to which this process belongs; "" if it has none of its own."""
    return os.environ.get("SATCHEL_CARD", "")


def heartbeats_path() -> Path | None:
    """Returns the socket on which this process's server receives heartbeats; None if it belongs to no server."""
    given = os.environ.get("SATCHEL_HEARTBEATS")
    return Path(given) if given else None


def cluster_key() -> bytes:
    """Returns the key by which the cluster's nodes authenticate when they move KV, derived from Ray's secret.

    Raises:
        ClusterError: this process belongs to no cluster.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ClusterError(f"the cluster's secret cannot be read: {error}") from None
    return hmac.digest(secret, b"satchel: blocks of KV between nodes", "sha256")


def enter_ray_environment(home: Home, *, one_machine: bool = True, outlives: bool = False) -> None:
    """Sets the variables of that home's cluster in this process. Call it before Ray is imported for the first time.

    Args:
        outlives: whether this process lives on if the cluster ends.
    """
    for name, value in [*os.environ.items()]:
        if _breaks_ray(name, value):
            del os.environ[name]
    os.environ.update(ray_settings(home, one_machine=one_machine) | (_OUTLIVING if outlives else {}))


def snapshot() -> Mapping[str, str]:
    """Returns a copy of the environment, for `restore`."""
    return dict(os.environ)


def restore(saved: Mapping[str, str]) -> None:
    """Sets the environment back to what `snapshot` returned."""
    os.environ.clear()
    os.environ.update(saved)


def short_temporary_root() -> Path:
    """Returns the folder for Ray's sockets: `/tmp`, as macOS's default is too long for a socket path (103 bytes)."""
    common = Path("/tmp")
    return common if os.access(common, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def is_macos() -> bool:
    return sys.platform == "darwin"
