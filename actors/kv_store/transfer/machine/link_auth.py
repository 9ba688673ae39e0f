"""The handshake in which two nodes prove to each other that they have the cluster's key, and encryption. Pure.

::

    initiator (wants KV)                                acceptor (has KV)
    hello: nonce, own name, the name it wants    ─────►
                                                 ◄─────  challenge: nonce, own name, proof of role "acceptor"
    proof of role "initiator"                    ─────►
    from here on every byte is sealed, with a key of this connection and direction

Each message begins with a preamble that all versions share. A proof is an HMAC-SHA256 over the transcript so far. So it
cannot be replayed in another connection (fresh nonces of both sides), in the other direction (the role), for another
node (the names) or under another version. Sealing is AES-256-GCM with a counter: nobody else can read the data, and
changed, dropped, reordered or repeated data is detected. Nonces are arguments, so nothing here is random.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .....cluster.errors import LinkError, LinkGarbage, LinkRefused, LinkVersion

VERSION = 3
NONCE_BYTES = 32
KEY_BYTES_MIN = 16
NODE_BYTES_MAX = 128
PREAMBLE_BYTES = 12
BODY_BYTES_MAX = NONCE_BYTES + 2 * (1 + NODE_BYTES_MAX)
"""Bytes of the longest message of a handshake, the hello."""

SEAL_BYTES = 16
"""Bytes that sealing adds."""

RECORD_BYTES = 2**18
"""The bytes that follow a frame are sealed in records of this size."""

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
        self._key, self._nonce = _link_key(key), _checked_nonce(nonce)
        self._node, self._peer = _name(node), _name(peer)
        self._transcript = b""

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
        transcript = _transcript(self._nonce, nonce, self._node, self._peer, peer)
        if nonce == self._nonce or not hmac.compare_digest(proof, _proof(self._key, b"acceptor", transcript)):
            raise LinkRefused("the peer does not have this cluster's key")
        if peer != self._peer:
            raise LinkRefused(f"{_text(peer)} answered instead of {_text(self._peer)}")
        self._transcript = transcript
        return preamble(_proof(self._key, b"initiator", transcript))

    def frames(self) -> tuple[FrameSeal, FrameSeal]:
        """Returns the seals for sent and for received frames. Call it after `answer`."""
        assert self._transcript, "the handshake is not done"
        return _seals(self._key, self._transcript, b"initiator", b"acceptor")


class Acceptor:
    """The side that listens. Arguments and errors as `Initiator`'s.

    Attributes:
        peer: the name of the other node, "" until it is authenticated.
    """

    def __init__(self, key: bytes, node: str, nonce: bytes) -> None:
        self._key, self._nonce, self._node = _link_key(key), _checked_nonce(nonce), _name(node)
        self._claimed = b""
        self._wanted = b""
        self._transcript = b""
        self.peer = ""

    def challenge(self, hello: bytes) -> bytes:
        """Returns the answer to the body of a hello, with its preamble. Raises `LinkGarbage` if it is no hello."""
        nonce, rest = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        claimed, rest = _take(rest)
        wanted, rest = _take(rest)
        if len(nonce) != NONCE_BYTES or rest:
            raise LinkGarbage("the hello has another length")
        _text(claimed)
        self._claimed, self._wanted = claimed, wanted
        self._transcript = _transcript(nonce, self._nonce, claimed, wanted, self._node)
        proof = _proof(self._key, b"acceptor", self._transcript)
        return preamble(self._nonce + _prefixed(self._node) + proof)

    def finish(self, proof: bytes) -> None:
        """Checks the body of the initiator's proof.

        Raises:
            LinkRefused: the peer has another key, or asked for another node.
        """
        assert self._transcript, "the handshake has not begun"
        if not hmac.compare_digest(proof, _proof(self._key, b"initiator", self._transcript)):
            raise LinkRefused("the peer does not have this cluster's key")
        if self._wanted != self._node:
            raise LinkRefused(f"the peer asked for {_text(self._wanted)}, this is {_text(self._node)}")
        self.peer = _text(self._claimed)

    def frames(self) -> tuple[FrameSeal, FrameSeal]:
        """Returns the seals for sent and for received frames. Call it after `finish`."""
        assert self.peer, "the handshake is not done"
        return _seals(self._key, self._transcript, b"acceptor", b"initiator")


class FrameSeal:
    """Encryption of one direction of one connection. Both sides count the messages, and the count is the nonce, so
    dropped, reordered or repeated ones do not verify."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, data: bytes | memoryview) -> bytes:
        """Returns `data` encrypted, `SEAL_BYTES` longer."""
        return self._cipher.encrypt(self._next(), data, None)

    def open(self, sealed: bytes | memoryview) -> bytes:
        """Returns the next message decrypted. Raises `LinkGarbage` if it does not verify."""
        try:
            return self._cipher.decrypt(self._next(), sealed, None)
        except InvalidTag:
            raise LinkGarbage("a frame does not verify") from None

    def open_into(self, sealed: bytes | memoryview, data: memoryview) -> None:
        """Decrypts the next message into `data`, of exactly its size. After an error, discard `data`.

        Raises:
            LinkGarbage: it does not verify.
        """
        try:
            self._cipher.decrypt_into(self._next(), sealed, None, data)
        except InvalidTag:
            raise LinkGarbage("parts do not verify") from None

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")


def records(buffers: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of all buffers in pieces of `RECORD_BYTES`; the last may be shorter."""
    pieces: list[memoryview] = []
    missing = RECORD_BYTES
    for buffer in buffers:
        while len(buffer):
            pieces.append(buffer[:missing])
            missing -= len(pieces[-1])
            buffer = buffer[len(pieces[-1]) :]
            if not missing:
                yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces, missing = [], RECORD_BYTES
    if pieces:
        yield b"".join(pieces)


def _link_key(key: bytes) -> bytes:
    if len(key) < KEY_BYTES_MIN:
        raise LinkError(f"a cluster's key has at least {KEY_BYTES_MIN} bytes")
    # A derived key, so that other uses of the cluster's key cannot replace this one.
    return hmac.digest(key, b"satchel.link." + str(VERSION).encode(), "sha256")


def _checked_nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise LinkError(f"a nonce has {NONCE_BYTES} bytes")
    return nonce


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


def _transcript(*fields: bytes) -> bytes:
    return VERSION.to_bytes(2, "big") + b"".join(len(part).to_bytes(4, "big") + part for part in fields)


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"proof " + role + b"\x00" + transcript, "sha256")


def _seals(key: bytes, transcript: bytes, own: bytes, other: bytes) -> tuple[FrameSeal, FrameSeal]:
    def seal(role: bytes) -> FrameSeal:
        return FrameSeal(hmac.digest(key, b"frames " + role + b"\x00" + transcript, "sha256"))

    return seal(own), seal(other)
