"""The takeover state: what a head sends to its machines, so that one of them can replace it (`satchel promote`).

It has the config, the endpoint's keys (their hashes) and certificate, the members, by which the others recognize the
new head, and the authorities' certificates, by which the new head recognizes the others. A machine that has it may run
code on the head anyway (`docs/security.md`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config.config import Config
from ..config.nodes import host_port
from ..home import Home, write_private
from .certificates import trusted_authorities
from .invitations import Membership
from .members import Members, members


@dataclass(frozen=True)
class TakeoverState:
    """The takeover state of one cluster.

    Attributes:
        head: the name of the head's node.
        config: as `parse_config` reads it; empty on a machine that has left, and may not lead.
        members: the machines, without the head.
        authorities: the certificates of those that signed the machines' certificates, PEM.
        keys: the text of the head's file of keys; None if there is none.
        certificate, certificate_key: of the endpoint, PEM; "" if it has none.
    """

    head: str
    config: dict[str, Any]
    members: Members = field(default_factory=Members)
    authorities: str = ""
    keys: str | None = None
    certificate: str = ""
    certificate_key: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, default=str)

    @staticmethod
    def from_text(text: str) -> TakeoverState:
        """Reads what `to_text` wrote.

        Raises:
            ValueError: the text is no takeover state.
        """
        try:
            data = json.loads(text)
            return TakeoverState(**{**data, "members": Members.from_dict(data["members"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no takeover state: {error}") from None


def digest(text: str) -> str:
    """Returns a digest of a takeover state's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def takeover_state_of(home: Home, config: Config) -> Callable[[], TakeoverState]:
    """Returns a function that reads the present takeover state of the cluster that this home leads with `config`."""
    plain = asdict(config)
    tls = config.endpoint.tls

    def read() -> TakeoverState:
        return TakeoverState(
            head=config.machines[0].name,
            config=plain,
            members=members(home),
            authorities=trusted_authorities(home),
            keys=_text(home.keys_file),
            certificate="" if tls is None else _text(Path(tls.certificate).expanduser()) or "",
            certificate_key="" if tls is None else _text(Path(tls.key).expanduser()) or "",
        )

    return read


def keep_takeover_state(home: Home, text: str) -> None:
    """Stores the takeover state that the head sent."""
    write_private(home.takeover_state_file, text)


def renounce_takeover_state(home: Home) -> None:
    """Erases the parts that only a possible head needs. The rest says where the cluster may be found."""
    if (found := kept_takeover_state(home)) is not None:
        keep_takeover_state(home, TakeoverState(found[0].head, {}, found[0].members).to_text())


def forget_takeover_state(home: Home) -> None:
    """Erases the takeover state."""
    home.takeover_state_file.unlink(missing_ok=True)


def kept_takeover_state(home: Home) -> tuple[TakeoverState, str] | None:
    """Returns the last takeover state that the head sent, and its text; None if it sent none."""
    text = _text(home.takeover_state_file)
    if text is None:
        return None
    try:
        return TakeoverState.from_text(text), text
    except ValueError:
        return None


def ways_back(home: Home, last: Membership) -> list[Membership]:
    """Returns where a cluster may be found: at its last join server, and at the same port of every machine that may be
    the head now."""
    port = last.join_server.rpartition(":")[2]
    found = kept_takeover_state(home)
    others = [] if found is None else [*found[0].members.admitted.values()]
    join_servers = [
        Membership(host_port(each.address, port), each.fingerprint, last.name, last.address)
        for each in others
        if each.name != last.name
    ]
    known = (last.join_server, last.fingerprint)
    return [last, *(each for each in join_servers if (each.join_server, each.fingerprint) != known)]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
