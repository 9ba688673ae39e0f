"""The machines that a cluster's head has admitted, and those that it has removed.

A machine is identified by the fingerprint of its key: its name may change, and two may want the same name. A removed
machine still has a valid certificate, so the join server asks here; a new invitation admits it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from filelock import FileLock, Timeout

from ..errors import ClusterError
from ..home import Home, prepare_home, write_private_json

LOCK_S = 5.0
"""How long to wait for another process that changes them."""


@dataclass(frozen=True)
class Member:
    """One machine: its node's name and address, and the fingerprint of its key."""

    name: str
    address: str
    fingerprint: str


@dataclass
class Members:
    """All machines of a cluster.

    Attributes:
        admitted: by fingerprint, without the head.
        removed: the names of those that were removed, by fingerprint.
    """

    admitted: dict[str, Member] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Members:
        """Reads what `asdict` made.

        Raises:
            ValueError: the data is something else.
        """
        try:
            admitted = [Member(**each) for each in data["admitted"].values()]
            removed = {str(key): str(name) for key, name in data["removed"].items()}
            return Members({each.fingerprint: each for each in admitted}, removed)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no members of a cluster: {error}") from None


def members(home: Home) -> Members:
    """Returns the members of the cluster that this home leads; none if nothing was stored yet.

    Raises:
        ClusterError: the stored list cannot be read. It does not count as empty, because it says who was removed.
    """
    try:
        return Members.from_dict(json.loads(home.members_file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Members()
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError(f"{home.members_file} cannot be read: {error}; restore it from a backup") from None


def admit(home: Home, member: Member) -> None:
    """Stores an admitted machine. If it was removed before, it no longer is.

    Raises:
        ClusterError: the members cannot be read or written.
    """
    known = members(home)
    if known.admitted.get(member.fingerprint) == member and member.fingerprint not in known.removed:
        return
    with _changing(home) as found:
        found.admitted[member.fingerprint] = member
        found.removed.pop(member.fingerprint, None)


def remove(home: Home, name: str) -> list[Member]:
    """Removes the machines of that name, which are refused from now on. Returns them.

    Raises:
        ClusterError: the members cannot be read or written.
    """
    with _changing(home) as found:
        gone = [each for each in found.admitted.values() if each.name == name]
        for member in gone:
            del found.admitted[member.fingerprint]
            found.removed[member.fingerprint] = name
    return gone


def keep_members(home: Home, known: Members) -> None:
    """Stores all members."""
    write_private_json(home.members_file, asdict(known))


@contextmanager
def _changing(home: Home) -> Iterator[Members]:
    """Yields the members for changes; writes them back if the block ends without an error. One process at a time.

    Raises:
        ClusterError: another process holds the lock for too long, or they cannot be read or written.
    """
    prepare_home(home)
    lock = FileLock(home.run / "members.lock", LOCK_S, mode=0o600, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ClusterError(f"another process is changing {home.members_file}") from None
    try:
        found = members(home)
        yield found
        keep_members(home, found)
    finally:
        lock.release()
