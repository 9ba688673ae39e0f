"""Requests over sockets, and what came of them: which answers are right where a server is attacked."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
SHOWN = 12
KEY = "{the attacker's key}"
"""Stands for the key in requests that are written before there is one; `sign` says which it is."""

_signed: dict[str, str] = {}
_BODY_BYTES_MAX = 4 * 2**20


@dataclass(frozen=True)
class AttackAnswer:
    """`status` 0 where none came; `error` says why then."""

    status: int
    body: bytes = b""
    error: str = ""


@dataclass
class AttackOutcome:
    """What came of one attack. `unexpected` are answers that no attack may cause; `notes` are for readers.

    Attributes:
        allowed: statuses from 500 on that a named limit gives here.
        skipped: why it was not done; "" where it was.
    """

    allowed: tuple[int, ...] = ()
    statuses: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, answer: AttackAnswer, what: str) -> None:
        """One answer to a whole request; `what` was asked."""
        with self._lock:
            self.statuses[str(answer.status or answer.error)] += 1
            if wrong := self.wrong(answer):
                self.unexpected.append(f"{wrong}: {what[:300]}")

    def wrong(self, answer: AttackAnswer) -> str:
        """What is wrong with it; "" for nothing."""
        if not answer.status:
            return answer.error
        if answer.status >= 500 and answer.status not in self.allowed:
            return f"{answer.status} {answer.body[:200].decode(errors='replace')}"
        if b"Traceback (most recent call last)" in answer.body:
            return "shows a stack trace"
        if answer.status >= 400 and not _is_error(answer.body):
            return f"{answer.status} in no known shape: {answer.body[:100]!r}"
        if answer.status == 200 and b'data: {"error"' in answer.body:
            return f"a stream with an error: {answer.body[-200:].decode(errors='replace')}"
        return ""


def _is_error(body: bytes) -> bool:
    # Nothing is also right: the answer to HEAD, or to a client that is taken for gone.
    if not body:
        return True
    try:
        whole = json.loads(body)
        error = whole["error"]
        if isinstance(error, str):
            # Ollama's.
            return bool(error)
        shape = {"type"} if whole.get("type") == "error" else {"type", "param", "code"}
        return isinstance(error["message"], str) and shape <= set(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def sign(secret: str) -> None:
    """From now on requests have this key, unless they say another."""
    _signed["Authorization"] = f"Bearer {secret}"


def _with_key(data: bytes) -> bytes:
    return data.replace(f"Bearer {KEY}".encode(), _signed.get("Authorization", "").encode())


def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> AttackAnswer:
    """One request on a connection of its own; `body` is bytes or becomes JSON."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        given = {"Content-Type": "application/json"} | _signed | (headers or {})
        # A server that has answered early closes while the rest is on its way.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method or ("GET" if data is None else "POST"), path, data, given)
        response = connection.getresponse()
        return AttackAnswer(response.status, response.read(_BODY_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return AttackAnswer(0, error=type(error).__name__)
    finally:
        connection.close()


def question(port: int, *, timeout_s: float = TIMEOUT_S, **fields: Any) -> AttackAnswer:
    """The smallest of questions."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
    return ask(port, "/v1/chat/completions", body, timeout_s=timeout_s)


def healthy(port: int, *, within_s: float = 60.0) -> bool:
    """Whether it answers a question, now or soon."""
    ends = time.monotonic() + within_s
    while True:
        if question(port, timeout_s=within_s).status == 200:
            return True
        if time.monotonic() > ends:
            return False
        time.sleep(1.0)


def raw(port: int, pieces: Sequence[bytes], *, wait_s: float = 6.0, pause_s: float = 0.0) -> bytes:
    """All that the server says to these bytes, until it closes or says nothing more."""
    out = b""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=wait_s) as connection:
        with suppress(OSError):
            for piece in pieces:
                connection.sendall(_with_key(piece))
                time.sleep(pause_s)
        with suppress(OSError):
            while data := connection.recv(65536):
                out += data
                if len(out) > _BODY_BYTES_MAX:
                    break
    return out


def head(path: str, length: int, *, method: str = "POST") -> bytes:
    """The head of a request with a body of so many bytes."""
    lines = (
        f"{method} {path} HTTP/1.1",
        f"Host: {HOST}",
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def opened(port: int, first: bytes, *, receive_bytes: int | None = None) -> socket.socket | None:
    """A connection on which something has been said; None where none could be had."""
    connection = socket.socket()
    try:
        connection.settimeout(10.0)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect((HOST, port))
        if first:
            connection.sendall(_with_key(first))
        return connection
    except OSError:
        connection.close()
        return None


def at_a_time(threads: int, work: Callable[[T], None], items: Iterable[T], until: float) -> int:
    """Do the work for the items, so many at a time, none begun after `until` (by `time.monotonic`). Returns how many
    were done."""

    def one(item: T) -> int:
        if time.monotonic() > until:
            return 0
        work(item)
        return 1

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(one, items))
