"""A home: the folder with one cluster's state. Folders are 0700 and files 0600; one server uses it at a time."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import ClusterError, HomeInUse


@dataclass(frozen=True)
class Home:
    """Where one cluster keeps its state (SATCHEL_HOME)."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def cluster_file(self) -> Path:
        """Where others find the running cluster; absent while none runs."""
        return self.run / "cluster.json"

    @property
    def served_config_file(self) -> Path:
        """The config of the server that runs on this home; absent while none runs."""
        return self.run / "config.json"

    @property
    def lock_file(self) -> Path:
        """Locked (flock) by the server that uses this home; holds its process id."""
        return self.run / "lock"

    @property
    def session_file(self) -> Path:
        """The Ray processes of the last run, for cleaning up after a killed one."""
        return self.run / "session.json"

    @property
    def token_file(self) -> Path:
        """The secret that Ray's processes show each other."""
        return self.run / "ray_token"

    @property
    def keys_file(self) -> Path:
        """The endpoint's keys; absent if none was ever made."""
        return self.root / "keys.json"

    @property
    def owner_key_file(self) -> Path:
        """The secret by which the running endpoint recognizes this user's command line."""
        return self.run / "owner_key"

    @property
    def batches(self) -> Path:
        """Uploaded files and batches, a folder a tenant."""
        return self.root / "batches"

    @property
    def audit_file(self) -> Path:
        """The audit log: what administrators did, and whose keys were refused."""
        return self.root / "audit.log"

    @property
    def tls(self) -> Path:
        """Keys and certificates: the machines', and the endpoint's if it was made here."""
        return self.root / "tls"

    @property
    def key_file(self) -> Path:
        """This machine's own key."""
        return self.tls / "node.key"

    @property
    def certificate_file(self) -> Path:
        """This machine's certificate in its last cluster."""
        return self.tls / "node.pem"

    @property
    def authority_file(self) -> Path:
        """The certificate of that cluster's authority."""
        return self.tls / "authority.pem"

    @property
    def former_authorities_file(self) -> Path:
        """The authorities' certificates of earlier heads, if this machine took over from them."""
        return self.tls / "former-authorities.pem"

    @property
    def membership_file(self) -> Path:
        """The cluster that this machine joined last: the address of its join server, and this machine's name there."""
        return self.tls / "membership.json"

    @property
    def members_file(self) -> Path:
        """On a head: the machines that were admitted, and those that were removed."""
        return self.tls / "members.json"

    @property
    def join_server_file(self) -> Path:
        """On a head: the port of its join server, which stays the same after a restart."""
        return self.tls / "door.json"

    @property
    def takeover_state_file(self) -> Path:
        """On a joined machine: the takeover state, which it needs to replace the head."""
        return self.tls / "estate.json"

    @property
    def promoted_config_file(self) -> Path:
        """The config of a cluster whose head this machine has become."""
        return self.root / "promoted.yaml"

    @property
    def node_file(self) -> Path:
        """The process that keeps this machine in a cluster; absent while none does."""
        return self.run / "node.json"

    @property
    def node_lock_file(self) -> Path:
        """Locked by that process."""
        return self.run / "node.lock"

    @property
    def node_log_file(self) -> Path:
        """What the node's processes wrote last."""
        return self.run / "node.log"

    @property
    def endpoint_key_file(self) -> Path:
        """The key of the endpoint's certificate that `satchel cert` made."""
        return self.tls / "endpoint.key"

    @property
    def endpoint_certificate_file(self) -> Path:
        """The endpoint's certificate that `satchel cert` made."""
        return self.tls / "endpoint.pem"

    @property
    def shown_certificate_file(self) -> Path:
        """The certificate that the running endpoint shows, wherever it comes from."""
        return self.run / "endpoint.pem"

    @property
    def invitations(self) -> Path:
        """Hashes of the open invitations."""
        return self.tls / "invitations"

    @property
    def kv(self) -> Path:
        """Agents' memory: transcripts, manifests, and blocks of KV."""
        return self.root / "kv"

    @property
    def digests_file(self) -> Path:
        """Digests of models' files, so that each is read once."""
        return self.root / "digests.json"

    @property
    def trials_file(self) -> Path:
        """The results of models' self-tests."""
        return self.root / "trials.json"

    @property
    def kernels_folder(self) -> Path:
        """Compiled kernels, MLX's and Satchel's, for CUDA."""
        return self.root / "kernels"

    @property
    def memory_claims(self) -> Path:
        """How much of the node's memory each replica claims."""
        return self.run / "memory"

    @property
    def log_file(self) -> Path:
        """Ray's output during its start, and its later messages about the cluster's processes."""
        return self.run / "ray.log"

    @property
    def logs(self) -> Path:
        """The logs of Satchel's processes, one file each."""
        return self.run / "logs"

    @property
    def incidents_file(self) -> Path:
        """Recent incidents of this run and earlier ones."""
        return self.run / "incidents.jsonl"

    @property
    def ray_logs(self) -> Path:
        """The logs of Ray's processes from its last failed start or unexpected end."""
        return self.run / "ray-logs"


def expanded(given: str | os.PathLike[str]) -> Path:
    """Returns the path that somebody gave, with `~` and `~user` replaced by that user's home folder.

    Raises:
        ClusterError: there is no such user, or the user of this process has no home folder.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        if str(given).partition("/")[0] != "~":
            raise ClusterError(f"{str(given)!r} names the home of a user who does not exist") from None
        raise ClusterError(
            f"{given}: the user with id {os.getuid()} has no home folder, and HOME is not set; name a folder for "
            "Satchel's state with SATCHEL_HOME or --home"
        ) from None


_LOCK_WAIT_S = 1.0
"""The kernel frees a killed server's lock once the process is gone, which takes a moment."""


def prepare_home(home: Home) -> None:
    """Makes the folders of the home, for this user alone.

    Raises:
        ClusterError: they cannot be made, or belong to somebody else.
    """
    for folder in (home.root, home.run, home.tls):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise ClusterError(f"cannot use {folder}: {error.strerror or error}") from None


def write_private(path: Path, text: str) -> None:
    """Replaces the file in one step; only this user may read it.

    Raises:
        ClusterError: it cannot be written.
    """
    try:
        replace_private(path, text)
    except OSError as error:
        raise ClusterError(f"cannot write {path}: {error.strerror or error}") from None


def replace_private(path: Path, text: str) -> None:
    """As `write_private`.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_private_json(path: Path, data: dict[str, Any]) -> None:
    """Replaces the file with JSON in one step; only this user may read it.

    Raises:
        ClusterError: it cannot be written.
    """
    write_private(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in the file; None if it is absent or holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def ensure_token(home: Home) -> Path:
    """Returns the file with the cluster's secret; makes it at the first call.

    Raises:
        ClusterError: it cannot be written.
    """
    if not home.token_file.exists() or home.token_file.stat().st_size < 32:
        write_private(home.token_file, secrets.token_hex(32))
    home.token_file.chmod(0o600)
    return home.token_file


class HomeLock:
    """The lock of a home, held by its server. The kernel frees it when the process ends, however it ends.

    Args:
        path: of the lock; None is the home's own.
    """

    def __init__(self, home: Home, path: Path | None = None) -> None:
        self._path = path or home.lock_file
        self._root = home.root
        self._lock = FileLock(self._path, _LOCK_WAIT_S, mode=0o600, thread_local=False, fallback_to_soft=False)

    @property
    def is_held(self) -> bool:
        return self._lock.is_locked

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            HomeInUse: another server has it; the message names its process id.
        """
        try:
            self._lock.acquire()
        except Timeout:
            holder = self._path.read_text("ascii", "replace").strip() or "unknown"
            raise HomeInUse(
                f"{self._root} is in use by the server with process id {holder}; stop it, or choose another "
                "folder with --home"
            ) from None
        self._path.write_text(f"{os.getpid()}\n", "ascii")

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self.is_held:
            self._path.write_text("", "ascii")
            self._lock.release()
