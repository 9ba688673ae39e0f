"""Reads `data:` URLs, and files of this machine in the folders that the config allows. Blocking."""

from __future__ import annotations

import binascii
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SPACES = b" \t\r\n"
_PIECE_CHARACTERS = 2**16
"""How many characters are decoded before other threads may run."""


class Unreadable(Exception):
    """A URL that is refused. Its message continues after its position: "is outside ..."."""


def data_url(url: str, bytes_max: int) -> bytes:
    """Returns the content of a `data:` URL, regardless of its media type.

    Raises:
        Unreadable: it is malformed, or holds more than `bytes_max`.
    """
    head, comma, body = url.partition(",")
    if not comma:
        raise Unreadable("is a data URL without a comma")
    # Four base64 characters are three bytes, and "%xx" is one byte, so a longer text cannot fit.
    if len(body) > 4 * bytes_max + 4:
        raise _too_large(bytes_max)
    pieces = _unquoted(body)
    data = b"".join(_base64(pieces) if head[-7:].lower() == ";base64" else pieces)
    if len(data) > bytes_max:
        raise _too_large(bytes_max)
    return data


def _unquoted(body: str) -> Iterator[bytes]:
    """Yields `body` decoded, in pieces that split no percent escape."""
    at = 0
    while at < len(body):
        end = at + _PIECE_CHARACTERS
        if end < len(body) and (percent := body.find("%", end - 2, end)) >= 0:
            end = percent
        yield unquote_to_bytes(body[at:end])
        at = end


def _base64(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    try:
        for piece in pieces:
            rest += piece.translate(_URL_SAFE, _SPACES)
            whole = len(rest.rstrip(b"=")) // 4 * 4
            yield binascii.a2b_base64(rest[:whole], strict_mode=True)
            rest = rest[whole:]
        rest = rest.rstrip(b"=")
        yield binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)
    except ValueError:
        raise Unreadable("is a data URL whose base64 is damaged") from None


def read_file(url: str, roots: Sequence[str], bytes_max: int) -> bytes:
    """Reads a regular file within one of `roots`, by its path or `file://` URL.

    Links are resolved first, so a link that leads out of a root is outside.

    Raises:
        Unreadable: it is outside of all roots, absent, not a regular file, or has more than `bytes_max`.
    """
    if not roots:
        raise Unreadable("names a file of this machine, and media.file_roots names no folder for such")
    # The same message whether it exists or not, so that callers learn nothing about other files.
    outside = Unreadable("names a file outside of the folders in media.file_roots")
    try:
        path = Path(os.path.realpath(_path(url)))
        root = next((root for root in map(os.path.realpath, roots) if path.is_relative_to(root)), None)
    except (OSError, ValueError):
        raise outside from None
    if root is None:
        raise outside
    try:
        return _read(Path(root), path.relative_to(root).parts, bytes_max)
    except OSError:
        raise Unreadable("names a file that is not there or cannot be read") from None


def _path(url: str) -> str:
    if url.startswith("/"):
        return url
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError("another machine's file")
    return unquote(parts.path)


def _read(root: Path, parts: Sequence[str], bytes_max: int) -> bytes:
    """Opens folder by folder without following links, so that no link can be inserted between check and use."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    opened = os.open(root, flags | os.O_DIRECTORY)
    try:
        for index, part in enumerate(parts):
            folder = os.O_DIRECTORY if index < len(parts) - 1 else 0
            below = os.open(part, flags | folder, dir_fd=opened)
            os.close(opened)
            opened = below
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise Unreadable("names no regular file")
        with os.fdopen(os.dup(opened), "rb") as file:
            content = file.read(bytes_max + 1)
    finally:
        os.close(opened)
    if len(content) > bytes_max:
        raise _too_large(bytes_max)
    return content


def _too_large(bytes_max: int) -> Unreadable:
    return Unreadable(f"has more than {bytes_max} bytes (media.source_bytes_max)")
