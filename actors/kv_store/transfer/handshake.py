"""The handshake in which two nodes prove to each other that they have the cluster's key, and encryption. Pure.

::

    initiator (wants KV)                                acceptor (has KV)
    hello: nonce, own name, the name it wants    ─────►
                                                 ◄─────  challenge: nonce, own name, the acceptor's proof
    the initiator's proof                        ─────►
    from here on every byte is sealed, with a key of this connection and direction

Each message begins with a preamble that all versions share. Proofs and keys are HKDF-SHA256 of the cluster's key,
salted with both nonces, over the version and the names; each role has its own. So a proof cannot be replayed in another
connection, sent back, or used for another node or version. Sealing is AES-256-GCM, and the nonce is a counter: nobody
else can read the data, and changed, dropped, reordered or repeated frames are detected. Nonces of the handshake are
arguments, so nothing here is random.
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
KEY_BYTES_MIN = 16
NODE_BYTES_MAX = 128
PREAMBLE_BYTES = 12
BODY_BYTES_MAX = NONCE_BYTES + 2 * (1 + NODE_BYTES_MAX)
"""Bytes of the longest message of a handshake, the hello."""

SEAL_BYTES = 16
"""Bytes that sealing adds."""

FRAMES_MAX = 2**18
"""Frames sealed with one key: at most 128 GiB, far below what AES-GCM allows. Then the connection ends."""

_MAGIC = b"satchel\x00"
_PROOF_BYTES = 32


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
    """Encryption of one direction of one connection. Both sides count the frames, and the count is the nonce."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0

    def seal_into(self, data: bytes | memoryview, sealed: memoryview) -> None:
        """Encrypts the next frame into `sealed`, `SEAL_BYTES` longer. Raises `LinkError` after `FRAMES_MAX` frames."""
        self._cipher.encrypt_into(self._next(), data, None, sealed)

    def open_into(self, sealed: bytes | memoryview, data: memoryview) -> None:
        """Decrypts the next frame into `data`, of exactly its size. After an error, discard `data`.

        Raises:
            LinkGarbage: it does not verify.
            LinkError: there were `FRAMES_MAX` frames.
        """
        try:
            self._cipher.decrypt_into(self._next(), sealed, None, data)
        except InvalidTag:
            raise LinkGarbage("a frame does not verify") from None

    def _next(self) -> bytes:
        if self._count == FRAMES_MAX:
            raise LinkError("the connection's keys are used up")
        self._count += 1
        return self._count.to_bytes(12, "big")


class _Secrets(NamedTuple):
    """What follows from the cluster's key and a handshake, 32 bytes each."""

    acceptor_proof: bytes
    initiator_proof: bytes
    to_acceptor: bytes
    to_initiator: bytes


def _secrets(key: bytes, initiator_nonce: bytes, acceptor_nonce: bytes, *names: bytes) -> _Secrets:
    about = b"satchel.link" + VERSION.to_bytes(2, "big") + b"".join(_prefixed(name) for name in names)
    derived = HKDF(SHA256(), 4 * _PROOF_BYTES, initiator_nonce + acceptor_nonce, about).derive(key)
    return _Secrets(*(derived[start : start + _PROOF_BYTES] for start in range(0, len(derived), _PROOF_BYTES)))


class Initiator:
    """The side that connects.

    Args:
        key: the cluster's, at least 16 bytes.
        node: this node's name.
        peer: the name of the node that must answer.
        nonce: 32 bytes that were never used before.

    Raises:
        LinkError: the key is too short, or a name is invalid.
    """

    def __init__(self, key: bytes, node: str, peer: str, nonce: bytes) -> None:
        self._key, self._nonce = _checked(key, nonce)
        self._node, self._peer = _name(node), _name(peer)
        self._secrets: _Secrets | None = None

    def hello(self) -> bytes:
        """Returns the first message, with its preamble."""
        return preamble(self._nonce + _prefixed(self._node) + _prefixed(self._peer))

    def answer(self, challenge: bytes) -> bytes:
        """Returns the proof that answers the body of the acceptor's challenge, with its preamble.

        Raises:
            LinkGarbage: the challenge has another length.
            LinkRefused: the peer has another key, or is another node.
        """
        nonce, rest = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        peer, proof = _take(rest)
        if len(nonce) != NONCE_BYTES or len(proof) != _PROOF_BYTES:
            raise LinkGarbage("the challenge is cut off")
        found = _secrets(self._key, self._nonce, nonce, self._node, self._peer, peer)
        if nonce == self._nonce or not hmac.compare_digest(proof, found.acceptor_proof):
            raise LinkRefused("the peer does not have this cluster's key")
        if peer != self._peer:
            raise LinkRefused(f"{_text(peer)} answered instead of {_text(self._peer)}")
        self._secrets = found
        return preamble(found.initiator_proof)

    def seals(self) -> tuple[Seal, Seal]:
        """Returns the seals for sent and for received frames. Call it after `answer`."""
        assert self._secrets, "the handshake is not done"
        return Seal(self._secrets.to_acceptor), Seal(self._secrets.to_initiator)


class Acceptor:
    """The side that listens. Arguments and errors as `Initiator`'s.

    Attributes:
        peer: the name of the other node, "" until it is authenticated.
    """

    def __init__(self, key: bytes, node: str, nonce: bytes) -> None:
        self._key, self._nonce = _checked(key, nonce)
        self._node = _name(node)
        self._claimed = self._wanted = b""
        self._secrets: _Secrets | None = None
        self.peer = ""

    def challenge(self, hello: bytes) -> bytes:
        """Returns the answer to the body of a hello, with its preamble. Raises `LinkGarbage` if it is no hello."""
        nonce, rest = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        self._claimed, rest = _take(rest)
        self._wanted, rest = _take(rest)
        if len(nonce) != NONCE_BYTES or rest:
            raise LinkGarbage("the hello has another length")
        _text(self._claimed)
        self._secrets = _secrets(self._key, nonce, self._nonce, self._claimed, self._wanted, self._node)
        return preamble(self._nonce + _prefixed(self._node) + self._secrets.acceptor_proof)

    def finish(self, proof: bytes) -> None:
        """Checks the body of the initiator's proof.

        Raises:
            LinkRefused: the peer has another key, or asked for another node.
        """
        assert self._secrets, "the handshake has not begun"
        if not hmac.compare_digest(proof, self._secrets.initiator_proof):
            raise LinkRefused("the peer does not have this cluster's key")
        if self._wanted != self._node:
            raise LinkRefused(f"the peer asked for {_text(self._wanted)}, this is {_text(self._node)}")
        self.peer = _text(self._claimed)

    def seals(self) -> tuple[Seal, Seal]:
        """Returns the seals for sent and for received frames. Call it after `finish`."""
        assert self.peer and self._secrets, "the handshake is not done"
        return Seal(self._secrets.to_initiator), Seal(self._secrets.to_acceptor)


def _checked(key: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    if len(key) < KEY_BYTES_MIN:
        raise LinkError(f"a cluster's key has at least {KEY_BYTES_MIN} bytes")
    if len(nonce) != NONCE_BYTES:
        raise LinkError(f"a nonce has {NONCE_BYTES} bytes")
    return key, nonce


def _name(node: str) -> bytes:
    name = node.encode("utf-8", "surrogatepass")
    if not 1 <= len(name) <= NODE_BYTES_MAX or not node.isprintable():
        raise LinkError(f"{node!r:.80} is not the name of a node")
    return name


def _text(name: bytes) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise LinkGarbage("a node's name is no text") from None
    if not text.isprintable():
        raise LinkGarbage("a node's name is not printable")
    return text


def _prefixed(name: bytes) -> bytes:
    return len(name).to_bytes(1, "big") + name


def _take(raw: bytes) -> tuple[bytes, bytes]:
    """Splits off a name with a length prefix. Returns it and the rest."""
    length = raw[0] if raw else 0
    if not 1 <= length <= NODE_BYTES_MAX or len(raw) < 1 + length:
        raise LinkGarbage("a node's name is cut off")
    return raw[1 : 1 + length], raw[1 + length :]
