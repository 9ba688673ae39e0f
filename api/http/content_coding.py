"""Compressed bodies: `Content-Encoding`, RFC 9110, section 8.4."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from fastapi import Request

from ...cluster.errors import InvalidRequest, RequestTooLarge, UnsupportedMediaType

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def codings_of(request: Request) -> list[str]:
    """Returns the codings of a request's body, in the order in which they were applied.

    Raises:
        UnsupportedMediaType: one of them is not supported.
    """
    named = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    codings = [name for coding in named if (name := coding.strip()) not in ("", "identity")]
    for name in codings:
        if name not in _DECODERS:
            raise UnsupportedMediaType(f"the content encoding {name[:40]!r} is not supported: use gzip or deflate")
    return codings


def decoded(body: bytes | bytearray, codings: list[str], bytes_max: int) -> bytes | bytearray:
    """Returns a body decoded.

    Raises:
        InvalidRequest: it is not in the declared coding, or its end is missing.
        RequestTooLarge: it is larger than `bytes_max` after one of the codings is removed.
    """
    for name in reversed(codings):
        try:
            body = _DECODERS[name](body, bytes_max)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not {name}, as Content-Encoding says: {error}") from None
    return body


def _gunzip(body: bytes | bytearray, bytes_max: int) -> bytearray:
    """Decodes gzip, which may have several members, one after the other."""
    whole, rest = bytearray(), bytes(body)
    while rest:
        member, rest = _inflate(rest, _GZIP, bytes_max - len(whole))
        whole += member
        # Some writers pad the last block with zeros.
        rest = rest.lstrip(b"\0")
    return whole


def _undeflate(body: bytes | bytearray, bytes_max: int) -> bytes:
    """Decodes deflate. The standard means zlib's format, but some clients send raw deflate."""
    try:
        return _inflate(bytes(body), _ZLIB, bytes_max)[0]
    except zlib.error:
        return _inflate(bytes(body), _RAW, bytes_max)[0]


def _inflate(data: bytes, window: int, bytes_max: int) -> tuple[bytes, bytes]:
    """Returns the decompressed data, and the bytes that follow it."""
    inflater = zlib.decompressobj(window)
    found = inflater.decompress(data, bytes_max + 1)
    if len(found) > bytes_max:
        raise RequestTooLarge("the body without its content encoding is larger than endpoint.body_bytes_max")
    if not inflater.eof:
        raise zlib.error("its end is missing")
    return found, inflater.unused_data


_DECODERS: dict[str, Callable[[bytes | bytearray, int], bytes | bytearray]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _undeflate,
}
