"""HTTP as nobody should write it, and as some do: the answer has the protocol's shape, or the connection is closed."""

from __future__ import annotations

import socket

from .http import HOST, KEY, AttackAnswer, AttackOutcome, at_a_time, raw
from .scene import AttackScene

_CHAT = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2}'
_PATH = b"/v1/chat/completions"


def _request(
    *headers: bytes,
    method: bytes = b"POST",
    path: bytes = _PATH,
    version: bytes = b"HTTP/1.1",
    body: bytes = _CHAT,
    length: bool = True,
    host: bool = True,
) -> bytes:
    lines = [b" ".join((method, path, version))]
    lines += [b"Host: localhost"] * host + [b"Content-Type: application/json"] * bool(body)
    lines += [f"Authorization: Bearer {KEY}".encode(), *headers]
    lines += [b"Content-Length: %d" % len(body)] * (length and bool(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _get(path: bytes, *headers: bytes, **how: bytes) -> bytes:
    return _request(*headers, **{"method": b"GET", "path": path, "body": b"", **how})  # type: ignore[arg-type]


def _chunked(body: bytes, *headers: bytes) -> bytes:
    return _request(b"Transfer-Encoding: chunked", *headers, body=body, length=False)


CASES: dict[str, bytes] = {
    "no host": _request(host=False),
    "a strange host": _request(b"Host: evil.example", host=False),
    "half an address": _request(b"Host: [", host=False),
    "two hosts": _request(b"Host: other"),
    "a page of another origin": _request(b"Origin: http://evil.example"),
    "HTTP/1.0": _request(version=b"HTTP/1.0"),
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2.0": _request(version=b"HTTP/2.0"),
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a TLS greeting": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160),
    "random bytes": bytes(range(256)) * 8,
    "HEAD": _get(b"/health", method=b"HEAD"),
    "OPTIONS *": _get(b"*", method=b"OPTIONS"),
    "CONNECT": _get(b"evil.example:443", method=b"CONNECT"),
    "TRACE": _get(b"/", method=b"TRACE"),
    "a method with a zero": _request(method=b"PO\x00ST"),
    "an absolute address": _get(b"http://evil.example/health"),
    "a path with a zero": _get(b"/v1/agents/\x00"),
    "a path that is no UTF-8": _get(b"/v1/agents/\xff\xfe"),
    "a wrong escape": _get(b"/v1/agents/%zz%"),
    "a path upwards": _get(b"/v1/agents/../../etc/passwd"),
    "a path upwards, escaped": _get(b"/v1/agents/..%2f..%2fetc%2fpasswd"),
    "a path of 60 KB": _get(b"/" + b"a" * 60_000),
    "a path of 300 KB": _get(b"/" + b"a" * 300_000),
    "a query of odd bytes": _get(b"/v1/agents?limit=%00&after=%ff%fe&limit=2"),
    "10,000 headers": _request(*[b"X%d: y" % number for number in range(10_000)]),
    "a header of 200 KB": _request(b"X: " + b"y" * 200_000),
    "a header with a zero": _request(b"X-Agent-ID: a\x00b"),
    "a header with a bare CR": _request(b"X-Agent-ID: a\rX: b"),
    "a folded header": _request(b"X-Agent-ID: a\r\n b"),
    "a header without a colon": _request(b"nonsense"),
    "an agent of 10 KB": _request(b"X-Agent-ID: " + b"a" * 10_000),
    "an agent upwards": _request(b"X-Agent-ID: ../../x"),
    "two agents": _request(b"X-Agent-ID: a", b"X-Agent-ID: b"),
    "a request id with a tab": _request(b"X-Request-ID: a\tb"),
    "a length that is too short": _request(b"Content-Length: 5", length=False),
    "a negative length": _request(b"Content-Length: -1", length=False),
    "a signed length": _request(b"Content-Length: +5", length=False),
    "a length of 20 digits": _request(b"Content-Length: 99999999999999999999", length=False),
    "a length of 2^63": _request(b"Content-Length: 9223372036854775808", length=False),
    "two lengths": _request(b"Content-Length: 5", b"Content-Length: 60", length=False),
    "length and chunks": _request(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", length=False),
    "an unknown coding": _request(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n", length=False),
    "a chunk of no size": _chunked(b"zz\r\n\r\n"),
    "a chunk of endless size": _chunked(b"fffffffffffffffff\r\n\r\n"),
    "chunks": _chunked(b"%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(_CHAT), _CHAT)),
    "Expect": _request(b"Expect: 100-continue"),
    "Expect something": _request(b"Expect: more"),
    "an upgrade": _get(b"/v1/models", b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"),
    "a compressed body": _request(b"Content-Encoding: gzip"),
    "five at once": _get(b"/health") * 5,
    "a request and rubbish": _request() + b"rubbish\r\n\r\n",
    "an empty body": _request(b"Content-Length: 0", body=b""),
    "zeros": _request(body=bytes(100)),
    "a byte order mark": _request(body=b"\xef\xbb\xbf" + _CHAT),
    "UTF-16": _request(body=_CHAT.decode().encode("utf-16")),
    "Latin-1": _request(body=b'{"messages":[{"role":"user","content":"\xff"}]}'),
    "100,000 brackets": _request(body=b"[" * 100_000),
    "deep messages": _request(body=b'{"messages":' + b"[" * 190 + b"]" * 190 + b"}"),
    "an endless number": _request(body=b'{"messages":[],"seed":' + b"9" * 5000 + b"}"),
    "NaN": _request(body=_CHAT[:-1] + b',"temperature":NaN}'),
    "equal keys": _request(body=b'{"messages":1,' + _CHAT[1:]),
    "half a pair": _request(body=b'{"messages":[{"role":"user","content":"\\ud800"}]}'),
    "DELETE with a body": _request(method=b"DELETE", path=b"/v1/agents/nobody"),
    "PUT": _request(method=b"PUT"),
}


def run(scene: AttackScene) -> AttackOutcome:
    """Each case on a connection of its own, then each cut off in the middle, then one byte at a time."""
    # 505: what HTTP says to a version that is not spoken.
    outcome = AttackOutcome(allowed=(505,))
    at_a_time(8, lambda case: _count(outcome, case[0], raw(scene.port, [case[1]])), CASES.items(), float("inf"))
    for data in CASES.values():
        with socket.create_connection((HOST, scene.port), timeout=5) as connection:
            connection.sendall(data[: len(data) // 2])
    data = _get(b"/health", b"Connection: close")
    _count(outcome, "byte by byte", raw(scene.port, [bytes([byte]) for byte in data]))
    return outcome


def _count(outcome: AttackOutcome, name: str, said: bytes) -> None:
    if not said.startswith(b"HTTP/"):
        outcome.statuses["closed" if not said else "no HTTP"] += 1
        return
    first, _, rest = said.partition(b"\r\n\r\n")
    status = int(first.split(b" ", 2)[1])
    # Of several answers, and of one in chunks, only the first line is looked at.
    body = rest if status >= 400 and b"HTTP/1.1" not in rest and b"chunked" not in first.lower() else b""
    outcome.count(AttackAnswer(status, body), name)
