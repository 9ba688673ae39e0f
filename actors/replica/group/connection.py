"""A connection between two processes of a group: messages, and arrays of hidden states.

Both sides prove that they have the cluster's key, and every byte is encrypted, as on connections that move blocks
(`kv_store/transfer`). A message is a kind and its fields; the bytes of an array follow its message.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ....cluster.errors import LinkError, LinkGarbage
from ...kv_store.transfer.handshake import NONCE_BYTES, Acceptor, Initiator, Seals
from ...kv_store.transfer.link import Link
from ...kv_store.transfer.wire import pack, unpack
from ..device.device import as_numpy

Address = tuple[str, int]

HANDSHAKE_S = 3.0
"""The time limit of a handshake."""

STALL_S = 60.0
"""How long a peer may stop within a message. That it lives is for heartbeats to find out."""

FAILED = "failed"
"""The kind of a message that says why the sender's process ends."""

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class Connection:
    """One connection. One thread sends and one receives; any thread may `shut` it. Methods raise `LinkError` if the
    connection breaks.

    Args:
        sock: connected, after the handshake.
        seals: from the handshake.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self._sock, self._link = sock, Link(sock, STALL_S)
        for seal in seals:
            seal.renews = True
        self._link.sealed_by(seals)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    @classmethod
    def connect(cls, address: Address, key: bytes, peer: str, until: float) -> Connection:
        """Connects to a process, which may not listen yet.

        Args:
            key: the cluster's.
            peer: the name of the process that must answer.
            until: monotonic seconds.
        """
        while True:
            try:
                sock = socket.create_connection(address, timeout=HANDSHAKE_S)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise LinkError(f"{peer} cannot be reached at {address[0]}: {error.strerror or error}") from None
                time.sleep(0.05)
        initiator = Initiator(key, peer, secrets.token_bytes(NONCE_BYTES))
        with _closed_on_error(sock):
            link = _shaking_hands(sock)
            link.send(initiator.hello())
            proof, seals = initiator.answer(link.receive_handshake())
            link.send(proof)
            return cls(sock, seals)

    @classmethod
    def accept(cls, sock: socket.socket, key: bytes, name: str) -> Connection:
        """Does the other side of `connect`, as the process `name`."""
        with _closed_on_error(sock):
            acceptor, link = Acceptor(key, name, secrets.token_bytes(NONCE_BYTES)), _shaking_hands(sock)
            link.send(acceptor.challenge(link.receive_handshake()))
            return cls(sock, acceptor.finish(link.receive_handshake()))

    def send(self, kind: str, *fields: Any) -> None:
        """Sends a message of values that msgpack has."""
        self._link.send_message(pack(kind, *fields))

    def receive(self, wait_s: float | None = None) -> tuple[str, list[Any]] | None:
        """Returns the kind and the fields of the next message; None if none begins within `wait_s`, if that is given.

        Raises:
            LinkError: the connection broke, or the peer says that it failed.
            InvalidRecord: it is no message.
        """
        if not self._selector.select(wait_s):
            return None
        kind, fields = unpack(self._link.receive_message())
        if kind == FAILED:
            raise LinkError(str(fields[0]) if fields else "the peer failed")
        return kind, fields

    def send_array(self, array: mx.array) -> None:
        """Sends an array of floats; waits for the device."""
        dtype = str(array.dtype).removeprefix("mlx.core.")
        self.send("array", dtype, list(array.shape))
        plain = as_numpy(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        data = np.ascontiguousarray(plain).reshape(-1).view(np.uint8)

        def read(piece: memoryview, start: int) -> None:
            np.frombuffer(piece, np.uint8)[:] = data[start : start + len(piece)]

        self._link.send_bytes(len(data), read)

    def receive_array(self, shape: Sequence[int]) -> mx.array:
        """Returns the next message's array.

        Raises:
            LinkGarbage: it is something else, or of another shape.
        """
        kind, fields = self.receive() or ("", [])
        if kind != "array" or len(fields) != 2 or fields[0] not in _DTYPES or fields[1] != list(shape):
            raise LinkGarbage(f"hidden states of the shape {list(shape)} were to come, not {kind} {fields!r:.80}")
        dtype = _DTYPES[fields[0]]
        data, filled = np.empty(math.prod(shape) * dtype.size, np.uint8), 0

        def take(piece: memoryview) -> None:
            nonlocal filled
            data[filled : filled + len(piece)] = piece
            filled += len(piece)

        self._link.receive_bytes(len(data), take)
        if dtype == mx.bfloat16:
            return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
        return mx.array(data.view(fields[0]).reshape(shape))

    def shut(self) -> None:
        """Ends the connection and all waits on it; from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the connection, when no thread uses it any more."""
        self._selector.close()
        self._sock.close()


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket):
    try:
        yield
    except BaseException:
        sock.close()
        raise


def _shaking_hands(sock: socket.socket) -> Link:
    sock.settimeout(None)
    link = Link(sock, HANDSHAKE_S)
    link.until = time.monotonic() + HANDSHAKE_S
    return link
