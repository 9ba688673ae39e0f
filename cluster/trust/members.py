"""The machines of a cluster, as its head has admitted them, and those that it has removed.

A machine is known by the fingerprint of its key. One that was removed shows a certificate that is still valid, so the
door asks here; a new invitation admits it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from filelock import FileLock

from ..config import Home
from ..home import prepare_home, read_json, write_private_json


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
        admitted: by the name of the node, without the head.
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
            admitted = {str(name): Member(**each) for name, each in data.get("admitted", {}).items()}
            return Members(admitted, {str(key): str(name) for key, name in data.get("removed", {}).items()})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"no members of a cluster: {error}") from None


def members(home: Home) -> Members:
    """Returns the members of the cluster that this home leads; none if the file is not what was written."""
    try:
        return Members.from_dict(read_json(home.members_file) or {})
    except ValueError:
        return Members()


def admit(home: Home, member: Member) -> None:
    """Stores an admitted machine; one that was removed is no longer."""
    if members(home).admitted.get(member.name) == member and not is_removed(home, member.fingerprint):
        return
    with _changing(home) as found:
        found.admitted[member.name] = member
        found.removed.pop(member.fingerprint, None)


def remove(home: Home, name: str) -> Member | None:
    """Removes the machine of that name, which is refused from now on. Returns it; None if there is none."""
    with _changing(home) as found:
        member = found.admitted.pop(name, None)
        if member is not None:
            found.removed[member.fingerprint] = name
    return member


def is_removed(home: Home, fingerprint: str) -> bool:
    """Returns whether the machine with that key was removed."""
    return fingerprint in members(home).removed


@contextmanager
def _changing(home: Home) -> Iterator[Members]:
    """The members for changing; written back if the block ends without an error. One process at a time."""
    prepare_home(home)
    with FileLock(home.run / "members.lock", mode=0o600, fallback_to_soft=False):
        found = members(home)
        yield found
        write_private_json(home.members_file, asdict(found))
