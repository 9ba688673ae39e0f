"""The handshake in which two nodes prove to each other that they have the cluster's key, and encryption. Pure.

::

    initiator (wants KV)             acceptor (has KV)
    hello: nonce              ─────►
                              ◄─────  challenge: nonce, the acceptor's proof
    the initiator's proof     ─────►
    from here on every byte is sealed, with a key of this connection and direction

Each message begins with a preamble that all versions share. Proofs and keys are HKDF-SHA256 of the cluster's key,
salted with both nonces, over the version and the acceptor's name; each role has its own. So a proof cannot be replayed
in another connection, sent back, or used for another node or version. Sealing is AES-256-GCM, and the nonce is a
counter: nobody else can read the data, and changed, dropped, reordered or repeated frames are detected. Nonces of the
handshake are arguments, so nothing here is random.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ....cluster.errors import LinkError, LinkGarbage, LinkRefused, LinkVersion

VERSION = 5
NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES_MIN = 16
PREAMBLE_BYTES = 12
BODY_BYTES_MAX = NONCE_BYTES + PROOF_BYTES
"""Bytes of the longest message of a handshake, the challenge."""

SEAL_BYTES = 16
"""Bytes that sealing adds."""

FRAMES_MAX = 2**18
"""Frames sealed with one key: at most 128 GiB, far below what AES-GCM allows. Then the connection ends, or both sides
take the next key."""

_MAGIC = b"satchel\x00"


def preamble(body: bytes) -> bytes:
    """Returns `body` as a message of the handshake."""
    return _MAGIC + VERSION.to_bytes(2, "big") + len(body).to_bytes(2, "big") + body


def refusal() -> bytes:
    """Returns an acceptor's answer to another version: a preamble, which tells its own version."""
    return preamble(b"")


def body_length(raw: bytes) -> int:
    """Returns how many bytes follow the preamble `raw` (12 bytes).

    Raises:
        LinkGarbage: it is no preamble, or announces an impossible length.
        LinkVersion: the peer speaks another version.
    """
    if len(raw) != PREAMBLE_BYTES or raw[:8] != _MAGIC:
        raise LinkGarbage("the peer does not speak this protocol")
    version, length = int.from_bytes(raw[8:10], "big"), int.from_bytes(raw[10:12], "big")
    if version != VERSION:
        raise LinkVersion(f"the peer speaks version {version}, this is {VERSION}")
    if not 1 <= length <= BODY_BYTES_MAX:
        raise LinkGarbage(f"a handshake has no message of {length} bytes")
    return length


class Seal:
    """Encryption of one direction of one connection. Both sides count the frames, and the count is the nonce.

    Attributes:
        renews: whether the next key, which follows from this one, is taken after `FRAMES_MAX` frames; both sides must
            agree.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher = key, AESGCM(key)
        self._count = 0
        self.renews = False

    def seal_into(self, data: bytes | memoryview, sealed: memoryview) -> None:
        """Encrypts the next frame into `sealed`, `SEAL_BYTES` longer. Raises `LinkError` after `FRAMES_MAX` frames,
        unless it `renews`."""
        self._cipher.encrypt_into(self._next(), data, None, sealed)

    def open_into(self, sealed: bytes | memoryview, data: memoryview) -> None:
        """Decrypts the next frame into `data`, of exactly its size. After an error, discard `data`.

        Raises:
            LinkGarbage: it does not verify.
            LinkError: there were `FRAMES_MAX` frames, and it does not renew.
        """
        try:
            self._cipher.decrypt_into(self._next(), sealed, None, data)
        except InvalidTag:
            raise LinkGarbage("a frame does not verify") from None

    def _next(self) -> bytes:
        if self._count == FRAMES_MAX:
            if not self.renews:
                raise LinkError("the connection's keys are used up")
            self._key = HKDF(SHA256(), PROOF_BYTES, None, b"satchel.link.next").derive(self._key)
            self._cipher, self._count = AESGCM(self._key), 0
        self._count += 1
        return self._count.to_bytes(12, "big")


class Seals(NamedTuple):
    """One side's seals of a connection, for what it sends and what it receives."""

    out: Seal
    into: Seal


class _Secrets(NamedTuple):
    """What follows from the cluster's key and a handshake, 32 bytes each."""

    acceptor_proof: bytes
    initiator_proof: bytes
    to_acceptor: bytes
    to_initiator: bytes


def _secrets(key: bytes, acceptor: str, initiator_nonce: bytes, acceptor_nonce: bytes) -> _Secrets:
    about = b"satchel.link" + VERSION.to_bytes(2, "big") + acceptor.encode("utf-8", "surrogatepass")
    derived = HKDF(SHA256(), 4 * PROOF_BYTES, initiator_nonce + acceptor_nonce, about).derive(key)
    return _Secrets(*(derived[start : start + PROOF_BYTES] for start in range(0, len(derived), PROOF_BYTES)))


def checked_key(key: bytes) -> bytes:
    """Returns the cluster's key. Raises `LinkError` if it is too short."""
    if len(key) < KEY_BYTES_MIN:
        raise LinkError(f"a cluster's key has at least {KEY_BYTES_MIN} bytes")
    return key


class Initiator:
    """The side that connects.

    Args:
        key: the cluster's.
        peer: the name of the node that must answer.
        nonce: 32 bytes that were never used before.
    """

    def __init__(self, key: bytes, peer: str, nonce: bytes) -> None:
        self._key, self._peer, self._nonce = key, peer, nonce

    def hello(self) -> bytes:
        """Returns the first message, with its preamble."""
        return preamble(self._nonce)

    def answer(self, challenge: bytes) -> tuple[bytes, Seals]:
        """Returns the proof that answers the body of the acceptor's challenge, with its preamble, and the seals.

        Raises:
            LinkGarbage: the challenge has another length.
            LinkRefused: the peer has another key, or is another node.
        """
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        if len(proof) != PROOF_BYTES:
            raise LinkGarbage("the challenge has another length")
        found = _secrets(self._key, self._peer, self._nonce, nonce)
        if nonce == self._nonce or not hmac.compare_digest(proof, found.acceptor_proof):
            raise LinkRefused(f"the peer is not {self._peer}, or does not have this cluster's key")
        return preamble(found.initiator_proof), Seals(Seal(found.to_acceptor), Seal(found.to_initiator))


class Acceptor:
    """The side that listens.

    Args:
        key: the cluster's.
        node: this node's name.
        nonce: 32 bytes that were never used before.
    """

    def __init__(self, key: bytes, node: str, nonce: bytes) -> None:
        self._key, self._node, self._nonce = key, node, nonce
        self._secrets: _Secrets | None = None

    def challenge(self, hello: bytes) -> bytes:
        """Returns the answer to the body of a hello, with its preamble. Raises `LinkGarbage` if it is no hello."""
        if len(hello) != NONCE_BYTES:
            raise LinkGarbage("the hello has another length")
        self._secrets = _secrets(self._key, self._node, hello, self._nonce)
        return preamble(self._nonce + self._secrets.acceptor_proof)

    def finish(self, proof: bytes) -> Seals:
        """Checks the body of the initiator's proof. Returns the seals.

        Raises:
            LinkRefused: the peer has another key, or asked for another node.
        """
        assert self._secrets, "the handshake has not begun"
        if not hmac.compare_digest(proof, self._secrets.initiator_proof):
            raise LinkRefused("the peer does not have this cluster's key")
        return Seals(Seal(self._secrets.to_initiator), Seal(self._secrets.to_acceptor))
