"""Checks of this machine before anything is started. Each says what was found and, if needed, how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from ..config.config import Config, Drafting, Endpoint, Model
from ..config.nodes import Node
from ..connection import find_cluster
from ..devices.available_memory import available_bytes
from ..devices.cards import card_of, found_cards
from ..devices.devices import with_devices
from ..environment import is_macos, short_temporary_root
from ..errors import ClusterError, ConfigError, KeysDamaged, NotRunning, PortInUse
from ..home import Home, expanded
from ..incidents import Incident, incidents
from ..patches import ray_programs
from ..trust.endpoint_certificate import check_certificate
from ..trust.invitations import remembered
from . import mac
from .check import Check
from .facts import existing
from .launch import unresolved
from .ports import check_port_free, listens_to_strangers, valid_keys

_GIB = 2**30
_MEMORY_BYTES_MIN = 8 * _GIB
_DISK_BYTES_MIN = 10 * _GIB
_OPEN_FILES_MIN = 1024
_SOCKET_PATH_BYTES_MAX = 103
_RAY_SOCKET = "/satchel-12345678/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
_LATELY_S = 24 * 3600.0
_MENDS = {
    "stuck": "see its log; a GPU or a disk may be at fault",
    "silent": "check whether it was stopped (a debugger, SIGSTOP), or memory ran out",
    "died": "if nothing else here says why, check whether the system killed it for lack of memory",
    "node": "check that machine and the network to it",
    "disk": "make room, or lower disk_bytes_max",
    "given_up": "report the request with its model: it crashes every replica that computes it",
    "refused": "raise that limit, or send fewer requests at once",
    "slower": "answers are right; report it with the model and the device",
    "device": "everything that it may have affected was discarded; lower memory_bytes_max if it ran out of memory",
    "unfit": "use another model or another dtype; answers until then were the same as mlx-lm's",
    "certificate": "fix the files of endpoint.tls; the server reads them within seconds",
}
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
_PINNED = ("ray", "mlx", "mlx-lm", "mlx-vlm")


def examine(config: Config, home: Home) -> list[Check]:
    """Runs every check, in a few seconds. Starts no server and changes nothing but the home's folder."""
    # Only the server needs these: its address, its port, its keys and its certificate.
    head, node = config.machines[0], other_node(config, home)
    of_head: list[Callable[[], Check]] = [
        lambda: check_port(config, home),
        lambda: check_keys(config.endpoint, home),
        lambda: check_address(config),
    ]
    where = f"this machine is {node}, and the server runs on {head.name} ({head.address})"
    of_node = [lambda: Check("address", "ok", where)]
    checks: list[Callable[[], Check]] = [
        check_python,
        *[lambda name=name: check_version(name) for name in _PINNED],
        check_ray_binaries,
        check_mlx,
        check_memory,
        lambda: check_disk(home),
        check_open_files,
        lambda: check_home(home),
        check_sockets,
        lambda: check_run(home),
        lambda: check_last_start(home, time.time()),
        *(of_node if node else of_head),
        *[lambda model=model: check_source(model) for model in config.models],
        *[
            lambda model=model, name=name: check_adapter(model, name)
            for model in config.models
            for name in model.adapters
        ],
        *[lambda model=model: check_drafting(model) for model in config.models if isinstance(model.drafts, Drafting)],
    ]
    certificate = [] if node else check_tls(config.endpoint, datetime.now(UTC))
    hosts = [] if node else [*check_hosts(config.machines), *mac.reach(config.machines[1:])]
    here = next((each for each in config.machines if each.name == node), head)
    serves_others = not node and listens_to_strangers(config.endpoint)
    system = mac.checks(here, _largest_weights(config), open_to_others=serves_others) if is_macos() else []
    lately = check_lately(home, time.time())
    return [*(check() for check in checks), *check_cards(config), *system, *hosts, *certificate, *lately]


def _largest_weights(config: Config) -> int:
    """Returns the size of the largest model whose folder is here, in bytes."""
    folders = [_folder(model.source) for model in config.models]
    return max((sum(each.stat().st_size for each in folder.glob("*.safetensors")) for folder in folders), default=0)


def check_python() -> Check:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "use Python 3.11, 3.12 or 3.13")


def _pin(package: str) -> str | None:
    """Returns the exact version that Satchel's own metadata asks for."""
    for text in importlib.metadata.requires("satchel") or []:
        wanted = Requirement(text)
        if wanted.name != package or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        for specifier in wanted.specifier:
            if specifier.operator == "==":
                return specifier.version
    return None


def check_version(package: str) -> Check:
    wanted = _pin(package)
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Check(package, "fail", "not installed", f"install {package}=={wanted}")
    if wanted is not None and found != wanted:
        return Check(package, "fail", f"{found}, but {wanted} is needed", f"install {package}=={wanted}")
    return Check(package, "ok", found)


def check_ray_binaries() -> Check:
    programs = ray_programs()
    if not programs:
        return Check("ray binaries", "fail", "Ray is not installed", "install Satchel's requirements again")
    for program in programs:
        if not os.access(program, os.X_OK):
            return Check("ray binaries", "fail", f"{program} is missing or not executable", "install Ray again")
    return Check("ray binaries", "ok", os.path.commonpath(programs))


def check_mlx() -> Check:
    """Computes a small product on MLX's default device, in a process of its own: a broken driver can crash it."""
    program = "import mlx.core as mx; x = mx.ones((64, 64)); print((x @ x).sum().item(), mx.default_device())"
    try:
        run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return Check("mlx device", "fail", "a 64 x 64 product did not end within 90 s", "restart the machine")
    value, _, device = run.stdout.strip().partition(" ")
    if run.returncode != 0 or value != "262144.0":
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        return Check("mlx device", "fail", reason, "install MLX again; on macOS it needs Apple silicon and macOS 14")
    if is_macos() and "gpu" not in device:
        return Check("mlx device", "warn", device, "MLX does not see the GPU: use an arm64 Python, not one for Intel")
    return Check("mlx device", "ok", device)


def check_memory() -> Check:
    total, available = psutil.virtual_memory().total, available_bytes()
    found = f"{total / _GIB:.0f} GiB, {available / _GIB:.1f} GiB available"
    if total < _MEMORY_BYTES_MIN:
        return Check("memory", "warn", found, "choose small models; 16 GiB is comfortable")
    if available < 2 * _GIB:
        return Check("memory", "warn", found, "close other programs before serving")
    return Check("memory", "ok", found)


def check_cards(config: Config) -> list[Check]:
    """Says which node of this machine has which CUDA card; no check where there is no card and none is asked for."""
    cards = found_cards()
    own = [node.device for node in config.nodes if node.ssh is None and node.device is not None]
    if not cards and not own and config.devices in (None, "auto"):
        return []
    there = ", ".join(f"{card.describe()}, {card.memory_bytes / _GIB:.0f} GiB" for card in cards)
    try:
        nodes = [node for node in with_devices(config, cards).machines if node.ssh is None]
        used = [(node.name, card_of(node.device, cards)) for node in nodes if node.device is not None]
    except ConfigError as error:
        return [Check("cards", "fail", error.message, f"this machine has {there or 'none'}: correct the config")]
    if used:
        return [Check("cards", "ok", "; ".join(f"{name} has {card.describe()}" for name, card in used))]
    rest = "; one of them is used: `devices: auto` gives each a node" if len(cards) > 1 else ""
    return [Check("cards", "ok", there + rest)]


def check_disk(home: Home) -> Check:
    folder = existing(home.root)
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.0f} GiB free at {folder}"
    if free < _DISK_BYTES_MIN:
        return Check("disk", "warn", found, "make room: model weights take gigabytes")
    return Check("disk", "ok", found)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} open files"
    # The server raises the soft limit (`processes.raise_open_files`).
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES_MIN:
        return Check("open files", "warn", f"{found}, at most {hard}", "raise the hard limit (`ulimit -Hn 4096`)")
    return Check("open files", "ok", found)


def check_home(home: Home) -> Check:
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home.root):
            pass
        status = home.root.stat()
    except OSError as error:
        return Check("home", "fail", f"cannot write to {home.root}: {error.strerror}", "choose another with --home")
    if status.st_uid != os.getuid():
        return Check("home", "fail", f"{home.root} belongs to another user", "choose another with --home")
    if status.st_mode & 0o077:
        return Check("home", "warn", f"others may enter {home.root}", f"chmod 700 {home.root}")
    return Check("home", "ok", str(home.root))


def check_sockets() -> Check:
    root = short_temporary_root()
    length = len(os.fsencode(str(root) + _RAY_SOCKET))
    if length > _SOCKET_PATH_BYTES_MAX:
        return Check("sockets", "fail", f"paths below {root} take {length} bytes of 103", "make /tmp writable")
    try:
        with tempfile.TemporaryDirectory(dir=root) as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/s")
    except OSError as error:
        return Check("sockets", "fail", f"cannot make a socket below {root}: {error.strerror}", "make /tmp writable")
    return Check("sockets", "ok", f"paths below {root} take {length} bytes of 103")


def check_run(home: Home) -> Check:
    try:
        record = find_cluster(home)
    except NotRunning as error:
        if home.cluster_file.exists() or home.session_file.exists():
            return Check("run", "warn", error.message, "nothing to do: the next `satchel serve` cleans up")
        return Check("run", "ok", "no server runs on this home")
    return Check("run", "ok", f"a server runs (process {record.pid}) at {record.endpoint_url or 'no address yet'}")


def check_port(config: Config, home: Home) -> Check:
    listen, port = config.endpoint.listen, config.endpoint.port
    try:
        check_port_free(listen, port)
    except PortInUse as error:
        try:
            if (find_cluster(home).endpoint_url or "").endswith(f":{port}"):
                return Check("port", "ok", f"{listen}:{port} is in use by the server on this home")
        except NotRunning:
            pass
        return Check("port", "fail", f"{listen}:{port} is in use", error.message.partition("; ")[2])
    except ClusterError as error:
        return Check("port", "fail", error.message, "choose another with --listen or --port")
    return Check("port", "ok", f"{listen}:{port} is free")


def check_keys(endpoint: Endpoint, home: Home) -> Check:
    """Checks whether the endpoint may listen at its address: if other machines can reach it, there must be keys."""
    try:
        keys = valid_keys(home)
    except KeysDamaged as error:
        return Check("keys", "fail", error.message, "`satchel keys remove --all`, then make new ones")
    if keys or not listens_to_strangers(endpoint):
        return Check("keys", "ok", f"{len(keys)} valid keys" if keys else "none, and none is needed")
    found = f"none, and the endpoint would listen on {endpoint.listen}, where everybody could use it"
    return Check("keys", "fail", found, "`satchel keys create NAME`, or listen on 127.0.0.1")


def other_node(config: Config, home: Home) -> str:
    """Returns which node besides the head this machine is; "" if it is the head, or none that is known.

    It is another one if the head's address is not this machine's, but another node's is, or if it has joined a cluster.
    """
    head, *others = config.machines
    if _is_ours(head.address):
        return ""
    for node in others:
        if _is_ours(node.address):
            return node.name
    membership = remembered(home)
    return "" if membership is None else membership.name or "a node that has joined"


def _is_ours(address: str) -> bool:
    """Returns whether an IP address is this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check_address(config: Config) -> Check:
    """Checks whether the head's address is this machine's."""
    address = config.machines[0].address
    try:
        check_port_free(address, config.control_port)
    except PortInUse:
        # In use by the running server; otherwise `check_port` says more.
        pass
    except ClusterError as error:
        mend = "the first of `nodes` is the machine that runs `satchel serve`: give its own address"
        return Check("address", "fail", error.message, mend)
    return Check("address", "ok", f"{address} is this machine's")


def check_hosts(nodes: Sequence[Node]) -> list[Check]:
    """Checks whether the hosts of the other nodes have addresses now; no checks for one machine alone."""
    if len(nodes) < 2:
        return []
    mend = "fix `ssh` of that node, or switch the machine on: the server starts without it, and tries again"
    missing = [Check("hosts", "warn", found, mend) for found in unresolved(nodes)]
    return missing or [Check("hosts", "ok", "every other node's host is known")]


def check_source(model: Model) -> Check:
    """Checks whether a model's folder exists. A Hub id is only looked up when the model is loaded."""
    return _check_folder(f"source of {model.name}", model.source, "source", "fail")


def check_drafting(model: Model) -> Check:
    """As `check_source`, for the model that drafts for it. Without that one it is served all the same."""
    source = model.drafts.model if isinstance(model.drafts, Drafting) else ""
    return _check_folder(f"drafting model of {model.name}", source, "drafts", "warn")


def _folder(source: str) -> Path:
    """Returns the folder that a source names, if it names one; `~user` of an unknown user is none that exists."""
    try:
        return expanded(source)
    except ClusterError:
        return Path(source)


def _check_folder(name: str, source: str, key: str, otherwise: Literal["warn", "fail"]) -> Check:
    if not source.startswith(("/", "./", "../", "~")) or _folder(source).is_dir():
        return Check(name, "ok", source)
    return Check(name, otherwise, f"there is no folder {source}", f"correct `{key}` in the config")


def check_adapter(model: Model, name: str) -> Check:
    """Checks whether the folder of an adapter has its files. Whether it fits the model is seen when that is loaded."""
    what, source = f"adapter {name} of {model.name}", model.adapters[name]
    if not source.startswith(("/", "./", "../", "~")):
        return Check(what, "ok", source)
    missing = [file for file in _ADAPTER_FILES if not (_folder(source) / file).is_file()]
    if not missing:
        return Check(what, "ok", source)
    mend = "correct `adapters` in the config; only adapters that mlx-lm wrote are read"
    return Check(what, "fail", f"{source} has no {missing[0]}", mend)


def check_last_start(home: Home, now_s: float) -> Check:
    """Reports a server that did not start or ended with an error in the last 24 hours, from the last lines of its logs.

    Args:
        now_s: Unix time.
    """
    found: list[tuple[float, str, Path]] = []
    # The logs of unexpected errors, and of servers in the background.
    for log, begins in ((home.run / "serve.log", ""), (home.run / "server.log", "satchel: ")):
        try:
            at_s = log.stat().st_mtime
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            continue
        if now_s - at_s <= _LATELY_S and lines and lines[-1].startswith(begins):
            found.append((at_s, lines[-1].removeprefix(begins), log))
    if not found:
        return Check("last end", "ok", "no server has failed here in the last 24 h")
    at_s, line, log = max(found)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    return Check("last end", "warn", f"a server failed at {at}: {line}", f"{log} says more")


def check_tls(endpoint: Endpoint, now: datetime) -> list[Check]:
    """Checks the endpoint's certificate; returns nothing if it has none."""
    if endpoint.tls is None:
        return []
    try:
        found, advice = check_certificate(endpoint.tls, now)
    except ClusterError as error:
        what, _, mend = error.message.partition("; ")
        return [Check("certificate", "fail", what, mend)]
    if advice:
        return [Check("certificate", "warn", each.found, each.mend) for each in advice]
    return [Check("certificate", "ok", f"{found.days_left(now)} days left, for {', '.join(found.names)}")]


def check_lately(home: Home, now_s: float) -> list[Check]:
    """Returns what went wrong in the last 24 hours, one check for each kind: how often, and the last time.

    Args:
        now_s: Unix time.
    """
    kinds: dict[str, list[Incident]] = defaultdict(list)
    for incident in incidents(home, now_s - _LATELY_S):
        kinds[incident.kind].append(incident)
    if not kinds:
        return [Check("last 24 h", "ok", "nothing went wrong here")]
    checks = []
    for kind, found in sorted(kinds.items(), key=lambda item: item[1][-1].at_s):
        last = found[-1]
        times = "once" if len(found) == 1 else f"{len(found)} times, last"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at_s))
        checks.append(Check(f"last 24 h: {kind}", "warn", f"{times} at {at}: {last.text}", _MENDS.get(kind, "")))
    return checks
