"""How a machine joins a cluster: at the door (`door.py`) that its invitation names."""

from __future__ import annotations

import hmac
import json
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any

from ..config import Home
from ..connection import versions
from ..errors import ClusterError, NotRunning
from ..home import write_private
from ..nodes import Node
from .certificates import fingerprint, keep, request
from .invitations import Invitation, remember

CONNECT_S = 5.0
TALK_S = 15.0
ANSWER_BYTES_MAX = 65_536


@dataclass(frozen=True)
class Admission:
    """The cluster that admitted a machine: the addresses (`HOST:PORT`) of its door and of its Ray."""

    door: str
    ray: str


def enter(home: Home, node: Node, invitation: Invitation) -> Admission:
    """Joins as `node`. Stores the token and the certificates in the home, so that it can rejoin without a secret.

    Raises:
        NotRunning: nobody answers there.
        ClusterError: another machine than the inviting head answers (nothing is sent to it), or the head refuses.
    """
    message = {
        "name": node.name,
        "address": node.address,
        "secret": invitation.secret,
        "versions": versions(),
        "request": request(home),
    }
    answer = _ask(home, invitation, json.dumps(message).encode() + b"\n")
    if "error" in answer:
        raise ClusterError(f"{invitation.door} does not let {node.name} in: {answer['error']}")
    try:
        ray, token, certificate, authority = (str(answer[key]) for key in ("ray", "token", "certificate", "authority"))
    except KeyError:
        raise ClusterError(f"{invitation.door} answers as no cluster of this version does") from None
    write_private(home.token_file, token)
    keep(home, certificate, authority)
    remember(home, invitation)
    return Admission(invitation.door, ray)


def _ask(home: Home, invitation: Invitation, message: bytes) -> dict[str, Any]:
    door = invitation.door
    host, _, port = door.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The head is known by its key, not by an authority.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if not invitation.secret:
        try:
            context.load_cert_chain(home.certificate_file, home.key_file)
        except (OSError, ssl.SSLError):
            raise ClusterError(f"this machine has no certificate of {door}; `satchel invite` there") from None
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, ValueError, OverflowError) as error:
        raise NotRunning(f"no cluster answers at {door}: {error}") from None
    try:
        with plain, context.wrap_socket(plain) as sock:
            shown = sock.getpeercert(binary_form=True)
            if shown is None or not hmac.compare_digest(fingerprint(shown), invitation.fingerprint):
                raise ClusterError(f"at {door} answers another than who invited; nothing was said to it")
            sock.settimeout(TALK_S)
            sock.sendall(message)
            return _line(sock)
    except (OSError, ValueError) as error:
        advice = "" if invitation.secret else "; where it does not know this machine, `satchel invite` there helps"
        raise NotRunning(f"{door} does not answer as the door of a cluster does: {error}{advice}") from None


def _line(sock: ssl.SSLSocket) -> dict[str, Any]:
    """Reads the answer. Raises `OSError` and `ValueError`."""
    data, ends = b"", time.monotonic() + TALK_S
    while not data.endswith(b"\n"):
        sock.settimeout(max(0.001, ends - time.monotonic()))
        part = sock.recv(16_384)
        if not part or len(data) > ANSWER_BYTES_MAX:
            raise ValueError("the answer is cut off, or has no end")
        data += part
    answer = json.loads(data)
    if not isinstance(answer, dict):
        raise ValueError("the answer is none")
    return answer
