"""Invitations: what a machine must be told before it can join. Each is good once, for one machine, and for an hour.

It is one word, `HOST:PORT#SECRET.FINGERPRINT`: where the door is, what to say there, and by which key the head is known
before anything is said. Of the secret the head's home keeps only a hash.
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

from ..config import Home
from ..home import read_json, write_private, write_private_json
from .certificates import own_fingerprint

LIFE_S = 3600.0
_TEXT = re.compile(r"(?P<door>[^\s#]+)#(?P<secret>[\w-]{32})\.(?P<fingerprint>[\w-]{43})", re.ASCII)


@dataclass(frozen=True)
class Invitation:
    """How to get in.

    Attributes:
        door: where, `HOST:PORT`.
        fingerprint: of the head's key.
        secret: to be said once; "" for a machine that has been in before and shows its certificate.
    """

    door: str
    fingerprint: str
    secret: str = field(default="", repr=False)

    def to_text(self) -> str:
        return f"{self.door}#{self.secret}.{self.fingerprint}"

    @staticmethod
    def from_text(text: str) -> Invitation:
        """
        Raises:
            ValueError: it is none.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError("no invitation, which is HOST:PORT#… as `satchel invite` on the head prints it")
        return Invitation(**found.groupdict())


def invite(home: Home, door: str) -> Invitation:
    """A new one, for the cluster that this home leads."""
    home.invitations.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Those that nobody has used.
    for path in _all(home):
        if not _good(path):
            path.unlink(missing_ok=True)
    secret = secrets.token_urlsafe(24)
    write_private(home.invitations / _hash(secret), str(int(time.time() + LIFE_S)))
    return Invitation(door, own_fingerprint(home), secret)


def find_invitation(home: Home, secret: str) -> Path | None:
    """The file of an invitation that is still good, to be given to `use_up`."""
    wanted = _hash(secret)
    found = [path for path in _all(home) if hmac.compare_digest(path.name, wanted)]
    return found[0] if found and _good(found[0]) else None


def use_up(invitation: Path) -> bool:
    """Nobody can use it any more. False where somebody else was sooner."""
    try:
        invitation.unlink()
    except FileNotFoundError:
        return False
    return True


def remember(home: Home, invitation: Invitation) -> None:
    """This machine has been let in there."""
    write_private_json(home.membership_file, {"door": invitation.door, "fingerprint": invitation.fingerprint})


def remembered(home: Home) -> Invitation | None:
    """To where this machine was let in last."""
    data = read_json(home.membership_file) or {}
    with suppress(TypeError):
        return Invitation(**data)
    return None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _all(home: Home) -> Iterator[Path]:
    """Files that are being written have other names."""
    return home.invitations.glob("[0-9a-f]*")


def _good(path: Path) -> bool:
    try:
        return 0 < float(path.read_text(encoding="ascii")) - time.time() <= LIFE_S
    except (OSError, ValueError):
        return False
