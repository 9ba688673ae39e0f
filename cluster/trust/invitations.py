"""Invitations: what a machine needs to join. Each is valid once, for one machine, and for an hour.

It is one word, `HOST:PORT#SECRET.FINGERPRINT`: the join server's address, the secret to send there, and the fingerprint
of the head's key, which is checked first. The head's home keeps only a hash of the secret. A machine that was admitted
before needs no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..config.nodes import Node
from ..home import Home, read_json, write_private, write_private_json
from .certificates import own_fingerprint

LIFE_S = 3600.0
_TEXT = re.compile(r"(?P<join_server>[^\s#]+)#(?P<secret>[\w-]{32}|)\.(?P<fingerprint>[\w-]{43})", re.ASCII)


@dataclass(frozen=True)
class Invitation:
    """One invitation. For a machine that was admitted before it has no secret.

    Attributes:
        join_server: the join server's address, `HOST:PORT`.
        fingerprint: of the head's key.
        secret: valid once; "" for a machine that was admitted before and shows its certificate.
    """

    join_server: str
    fingerprint: str
    secret: str = field(default="", repr=False)

    def to_text(self) -> str:
        return f"{self.join_server}#{self.secret}.{self.fingerprint}"

    @staticmethod
    def from_text(text: str) -> Invitation:
        """Reads what `to_text` wrote.

        Raises:
            ValueError: the text is no invitation.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError("no invitation, which is HOST:PORT#… as `satchel invite` on the head prints it")
        return Invitation(**found.groupdict())


def invite(home: Home, join_server: str) -> Invitation:
    """Makes an invitation to the cluster that this home leads."""
    home.invitations.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Removes expired ones.
    for path in _all(home):
        if not _good(path):
            path.unlink(missing_ok=True)
    secret = secrets.token_urlsafe(24)
    write_private(home.invitations / _hash(secret), str(int(time.time() + LIFE_S)))
    return Invitation(join_server, own_fingerprint(home), secret)


def find_invitation(home: Home, secret: str) -> Path | None:
    """Returns the file of a valid invitation, for `use_up`; None if there is none."""
    wanted = _hash(secret)
    found = [path for path in _all(home) if hmac.compare_digest(path.name, wanted)]
    return found[0] if found and _good(found[0]) else None


def use_up(invitation: Path) -> bool:
    """Invalidates an invitation. Returns False if another machine has used it."""
    try:
        invitation.unlink()
    except FileNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Membership:
    """The cluster that admitted a machine last, and the machine's name there ("" if that was not stored)."""

    join_server: str
    fingerprint: str
    name: str = ""
    address: str = ""

    @property
    def way_back(self) -> Invitation:
        return Invitation(self.join_server, self.fingerprint)


def remember(home: Home, invitation: Invitation, node: Node) -> None:
    """Stores the cluster that has admitted this machine as `node`."""
    where = {"door": invitation.join_server, "fingerprint": invitation.fingerprint}
    write_private_json(home.membership_file, where | {"name": node.name, "address": node.address})


def remembered(home: Home) -> Membership | None:
    """Returns the cluster that this machine joined last; None if there is none."""
    data = read_json(home.membership_file) or {}
    with suppress(KeyError, TypeError):
        return Membership(data.pop("door"), **data)
    return None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _all(home: Home) -> Iterator[Path]:
    """All invitations; files that are being written have other names."""
    return home.invitations.glob("[0-9a-f]*")


def _good(path: Path) -> bool:
    try:
        return 0 < float(path.read_text(encoding="ascii")) - time.time() <= LIFE_S
    except (OSError, ValueError):
        return False
