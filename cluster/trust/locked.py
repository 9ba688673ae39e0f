"""A file encrypted with a passphrase, as a stream: truncation, changed bytes and reordered chunks are detected.

::

    8 bytes    MAGIC
    4 bytes    version, little-endian
    3 bytes    scrypt's log2(n), r and p
    16 bytes   salt
    chunks     AES-256-GCM of 1 MiB, the last one shorter or empty; each 16 bytes longer than what it holds

A chunk's nonce is its number (11 bytes, big-endian) and whether it is the last one (1 byte), as in the STREAM
construction (Hoang, Reyhanitabar, Rogaway and Vizár, 2015) and in age. The key is used for one file only, since it
follows from the salt. What comes before the chunks is authenticated with each of them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import InvalidSatchel

MAGIC = b"SATCHEL*"
VERSION = 1
CHUNK_BYTES = 2**20
_TAG_BYTES = 16
_SALT_BYTES = 16
_HEAD_BYTES = len(MAGIC) + 4 + 3 + _SALT_BYTES
_COST = (17, 8, 1)
"""These parameters take 128 MiB and some tenths of a second."""

_MEMORY_MAX = 2**30
"""The most memory that opening a file may take."""


def is_locked(beginning: bytes) -> bool:
    return beginning.startswith(MAGIC)


def lock(pieces: Iterable[bytes], passphrase: bytes) -> Iterator[bytes]:
    """Yields the encrypted file of `pieces`, of any sizes."""
    salt = secrets.token_bytes(_SALT_BYTES)
    head = MAGIC + VERSION.to_bytes(4, "little") + bytes(_COST) + salt
    cipher = _cipher(passphrase, salt, *_COST)
    yield head
    number, held = 0, bytearray()
    for piece in pieces:
        held += piece
        while len(held) > CHUNK_BYTES:
            yield cipher.encrypt(_nonce(number, last=False), bytes(held[:CHUNK_BYTES]), head)
            del held[:CHUNK_BYTES]
            number += 1
    yield cipher.encrypt(_nonce(number, last=True), bytes(held), head)


def unlock(file: BinaryIO, passphrase: bytes) -> Iterator[bytes]:
    """Yields the content of an encrypted file, each piece authenticated. If this ends without an error, the file is
    complete.

    Args:
        file: at its beginning.

    Raises:
        InvalidSatchel: the passphrase is wrong, or the file was changed, is truncated or of a newer version.
    """
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not is_locked(head):
        raise InvalidSatchel("this is no encrypted satchel: it does not begin as one")
    version = int.from_bytes(head[8:12], "little")
    if version != VERSION:
        newer = "a newer" if version > VERSION else "an unknown"
        raise InvalidSatchel(f"the satchel is encrypted in the format {version} of {newer} Satchel, not {VERSION}")
    log_n, r, p = head[12:15]
    if not (0 < log_n <= 24 and r and p and p <= 16 and 128 * r * 2**log_n <= _MEMORY_MAX):
        raise InvalidSatchel("the satchel asks for more memory to be opened than it may")
    cipher = _cipher(passphrase, head[15:], log_n, r, p)
    number, chunk = 0, file.read(CHUNK_BYTES + _TAG_BYTES)
    while True:
        following = file.read(CHUNK_BYTES + _TAG_BYTES)
        try:
            yield cipher.decrypt(_nonce(number, last=not following), chunk, head)
        except (InvalidTag, ValueError):
            first = "the passphrase is another one, or the satchel is damaged"
            raise InvalidSatchel(first if number == 0 else "the satchel is damaged or cut off") from None
        if not following:
            return
        number, chunk = number + 1, following


def locked_size(nbytes: int) -> int:
    """Returns the bytes of an encrypted file that holds `nbytes`."""
    return _HEAD_BYTES + nbytes + _TAG_BYTES * max(1, -(-nbytes // CHUNK_BYTES))


def unlocked_size(nbytes: int) -> int:
    """Returns how many bytes an encrypted file of `nbytes` holds, at least 0."""
    body = max(0, nbytes - _HEAD_BYTES)
    return max(0, body - _TAG_BYTES * max(1, -(-body // (CHUNK_BYTES + _TAG_BYTES))))


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cipher(passphrase: bytes, salt: bytes, log_n: int, r: int, p: int) -> AESGCM:
    key = hashlib.scrypt(passphrase, salt=salt, n=2**log_n, r=r, p=p, maxmem=_MEMORY_MAX + 2**26, dklen=32)
    return AESGCM(key)
