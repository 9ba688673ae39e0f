"""A machine's side of joining a cluster and asking for news: calls the join server that its invitation names."""

from __future__ import annotations

import hmac
import json
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from ..config.nodes import Node, host_port
from ..connection import versions
from ..errors import ClusterError, NodeRemoved, NotRunning
from ..home import Home, read_json, write_private
from .certificates import fingerprint, keep, request
from .invitations import Invitation, remember
from .members import Member, members

CONNECT_S = 5.0
KNOCK_S = 2.0
TALK_S = 15.0
ANSWER_BYTES_MAX = 4 * 2**20


@dataclass(frozen=True)
class Admission:
    """The cluster that admitted a machine: the addresses (`HOST:PORT`) of its join server and of its Ray."""

    join_server: str
    ray: str


def enter(home: Home, node: Node, invitation: Invitation) -> Admission:
    """Joins as `node`. Stores the token and the certificates in the home, so that it can rejoin without a secret.

    Raises:
        NotRunning: nobody answers there.
        ClusterError: a machine other than the inviting head answers (nothing is sent to it), or the head refuses.
    """
    message = {
        "name": node.name,
        "address": node.address,
        "secret": invitation.secret,
        "versions": versions(),
        "request": request(home),
    }
    answer = _ask(home, invitation, json.dumps(message).encode() + b"\n")
    _check(answer, node.name, invitation)
    try:
        ray, token, certificate, authority = (str(answer[key]) for key in ("ray", "token", "certificate", "authority"))
    except KeyError:
        raise ClusterError(f"{invitation.join_server} answers as no cluster of this version does") from None
    write_private(home.token_file, token)
    keep(home, certificate, authority)
    remember(home, invitation, node)
    return Admission(invitation.join_server, ray)


@dataclass(frozen=True)
class News:
    """The join server's news for a member: the address of the cluster's Ray, and the text of the takeover state if it
    has changed, else ""."""

    ray: str
    takeover_state: str


def ask_news(home: Home, name: str, invitation: Invitation, have: str) -> News:
    """Asks for news of this machine's cluster.

    Args:
        have: the digest of the takeover state that this machine has, "" for none.

    Raises:
        NotRunning: nobody answers there.
        NodeRemoved: the head has removed this machine.
        ClusterError: another machine answers, or other versions run there.
    """
    answer = _ask(home, invitation, _news_message(have))
    _check(answer, name, invitation)
    return News(str(answer.get("ray", "")), str(answer.get("estate", "")))


def _news_message(have: str) -> bytes:
    return json.dumps({"news": True, "versions": versions(), "have": have}).encode() + b"\n"


def knock(join_server: str) -> Literal["open", "refused", "silent"]:
    """Returns whether a join server listens there: `refused` if its machine answers that nothing listens."""
    host, _, port = join_server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except ConnectionRefusedError:
        return "refused"
    except (OSError, ValueError, OverflowError):
        return "silent"
    return "open"


def led_elsewhere(home: Home) -> Invitation | None:
    """Returns how to reach a machine that is the head of this home's cluster now; None if there is none.

    A machine that took over has its join server at the same port, and accepts certificates that this home's authority
    signed.

    Raises:
        ClusterError: the members of this home's cluster cannot be read.
    """
    port = (read_json(home.join_server_file) or {}).get("port")
    others = members(home).admitted.values()
    if port is None or not others:
        return None

    def look(member: Member) -> Invitation | None:
        invitation = Invitation(host_port(member.address, port), member.fingerprint)
        if knock(invitation.join_server) != "open":
            return None
        try:
            answer = _ask(home, invitation, _news_message(""))
        except ClusterError:
            # What listens there is no head.
            return None
        # A machine that has removed this one is a head. So is one with other versions.
        return None if answer.get("removed") else invitation

    with ThreadPoolExecutor(len(others)) as pool:
        return next((found for found in pool.map(look, others) if found is not None), None)


def _check(answer: dict[str, Any], name: str, invitation: Invitation) -> None:
    if "error" in answer:
        kind = NodeRemoved if answer.get("removed") else ClusterError
        raise kind(f"{invitation.join_server} does not let {name} in: {answer['error']}")


def _ask(home: Home, invitation: Invitation, message: bytes) -> dict[str, Any]:
    join_server = invitation.join_server
    host, _, port = join_server.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The head is identified by its key, not by an authority.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if not invitation.secret:
        try:
            context.load_cert_chain(home.certificate_file, home.key_file)
        except (OSError, ssl.SSLError):
            raise ClusterError(f"this machine has no certificate of {join_server}; `satchel invite` there") from None
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, ValueError, OverflowError) as error:
        raise NotRunning(f"no cluster answers at {join_server}: {error}") from None
    try:
        with plain, context.wrap_socket(plain) as sock:
            shown = sock.getpeercert(binary_form=True)
            if shown is None or not hmac.compare_digest(fingerprint(shown), invitation.fingerprint):
                raise ClusterError(
                    f"at {join_server} another machine answers than the inviting one; nothing was sent to it"
                )
            sock.settimeout(TALK_S)
            sock.sendall(message)
            return _line(sock)
    except (OSError, ValueError) as error:
        advice = "" if invitation.secret else "; if it does not know this machine, `satchel invite` there helps"
        raise NotRunning(f"{join_server} does not answer as a cluster's join server does: {error}{advice}") from None


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
        raise ValueError("it is no JSON object")
    return answer
