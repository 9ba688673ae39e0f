"""A connection between two processes of a group: messages, and arrays of hidden states.

Both sides prove that they have the cluster's key, and every byte is encrypted, as on connections that move blocks
(`kv_store/transfer`). A message is a kind and its fields; the bytes of a large array follow its message.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import secrets
import selectors
import socket
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .....cluster.errors import LinkError, LinkGarbage
from ....kv_store.transfer.handshake import NONCE_BYTES, Acceptor, Initiator, Seals
from ....kv_store.transfer.link import Link
from ....kv_store.transfer.wire import pack, unpack
from ...device.device import as_numpy, launched_as_numpy
from .arrays import FAIL_S, Incoming, Launched, Outgoing, Plain
from .device_ring import Receiving, Sending
from .times import Times

Address = tuple[str, int]

HANDSHAKE_S = 3.0
"""The time limit of a handshake."""

STALL_S = 60.0
"""How long a peer may stop within a message. That it lives is for heartbeats to find out."""

FAILED = "failed"
"""The kind of a message that says why the sender's process ends."""

_ARRAY = "array"
"""The kind of a message that says which array follows."""

ARRAY_BYTES_MAX = 2**30
"""The most bytes of an array."""

INSIDE_BYTES = 2**20
"""An array of at most so many bytes is inside of its message: each wait for more costs a switch of threads."""

_SO_NWRITE = 0x1024
"""On macOS: the bytes in a socket's send buffer, which keeps them until they are acknowledged (XNU's sys/socket.h)."""

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16, "uint32": mx.uint32}


class Connection:
    """One connection. One thread sends and one receives; any thread may `shut` it. Methods raise `LinkError` if the
    connection breaks.

    Args:
        sock: connected, after the handshake.
        seals: from the handshake.

    Attributes:
        failed: called with the reason, by another thread, if the device fails at an array that `send_launched` has.
        times: of the process: its threads' waits for the device, and sending.
        sending, receiving: through which cards of one machine pass arrays; None if these go over the network.
        leaves_nothing: whether `put_launched` returns only when all is sent. It must if this process's card may wait
            for another one: this thread may wait for the card and let no other one run, which would have to send what
            the other card waits for.
    """

    def __init__(self, sock: socket.socket, seals: Seals) -> None:
        self._sock, self._link = sock, Link(sock, STALL_S)
        for seal in seals:
            seal.renews = True
        self._link.sealed_by(seals)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None
        self.failed: Callable[[str], object] = lambda why: None
        self.times = Times()
        self.sending: Sending | None = None
        self.receiving: Receiving | None = None
        self.leaves_nothing = False
        # Of the array that came last, and of the one that was sent last, as its name.
        self._dtype = self._sent_dtype = ""
        # What was promised by `await_array` and was not waited for yet.
        self._awaited: deque[_Awaited] = deque()

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

    def limit(self, stall_s: float) -> None:
        """Sets how long the peer may stop within a message."""
        self._link.stall_s = stall_s

    def unacknowledged(self) -> int | None:
        """Returns how many bytes were sent that the peer's machine has not acknowledged yet; None if the system does
        not say. For any thread."""
        try:
            if sys.platform == "darwin":
                return self._sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
            count = bytearray(4)
            fcntl.ioctl(self._sock, termios.TIOCOUTQ, count)
            return int.from_bytes(count, sys.byteorder)
        except (OSError, ValueError):
            # It is closed, or the system does not know this.
            return None

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
        """Has an array of floats sent, in the dtype that it has; waits for the device, and while too many bytes wait
        (`arrays.py`). Only arrays, and at last `fail`, may be sent on this connection from now on."""
        self._sending().put(_plain(array))

    def send_launched(self, array: mx.array) -> None:
        """As `send_array`, but launches the array and does not wait for the device: another thread does. So an error of
        the device may be reported there, and must be one that this thread's next wait reports too, as CUDA's are."""
        before, self._sent_dtype = self._sent_dtype, _name_of(array.dtype)
        if self.sending is None:
            there, launched = self.launchable(array)
            mx.async_eval(there)
            self.put_launched(launched)
        elif not before:
            # It says the dtype of all. It must be gone before the device can wait for what only comes after it: while
            # this thread waits for the device, no other one may run.
            self.send_array(array)
            self.wait_sent()
        elif before != self._sent_dtype:
            raise LinkGarbage(f"hidden states are {self._sent_dtype}, not {before}")
        else:
            self.sending.send(array)

    def launchable(self, array: mx.array) -> tuple[mx.array, Launched]:
        """Returns what must be launched before an array can be sent as by `send_launched`, and the argument of
        `put_launched`, which sends it."""
        dtype, shape = _name_of(array.dtype), array.shape
        # MLX may move the memory of what another thread reads, so that must be nobody else's: a copy, of words, because
        # adding would change the sign of a float's zero.
        there = array.view(mx.uint16 if array.dtype.size == 2 else mx.uint32) + 0

        def wait() -> Plain:
            with self.times.of("waiting for the device, to send"):
                data = np.ascontiguousarray(launched_as_numpy(there)).reshape(-1).view(np.uint8)
            self.times.is_there()
            return Plain(dtype, shape, data)

        return there, Launched(array.nbytes, wait)

    def put_launched(self, launched: Launched) -> None:
        """Sends what `launchable` returned. Waits as `send_array`, and for more if `leaves_nothing`."""
        self._sending().put_launched(launched)
        if self.leaves_nothing:
            self.wait_sent()

    def send_numbers(self, numbers: Sequence[int]) -> None:
        """As `send_array`, for an array `(numbers,) uint32`."""
        data = np.array(numbers, "<u4").view(np.uint8)
        self._sending().put(Plain("uint32", [len(numbers)], data))

    def wait_sent(self) -> None:
        """Waits until all arrays are sent, or none can be any more."""
        if self._outgoing is not None:
            self._outgoing.flush(None)

    def _sending(self) -> Outgoing:
        if self._outgoing is None:
            self._outgoing = Outgoing(self._send_plain, self.failed)
        return self._outgoing

    def send_behind(self, arrays: Sequence[mx.array]) -> None:
        """Sends arrays of floats, each in the dtype that it has, behind the message that tells of them. Waits for the
        device."""
        for array in arrays:
            self._send_plain(_plain(array))

    def receive_behind(self, count: int) -> list[mx.array]:
        """Returns the arrays that follow a message. Raises as `receive_array`."""
        return [_array(self._receive_plain()) for _ in range(count)]

    def expect(self, kind: str, until: float) -> Any:
        """Returns the only field of the next message, which must be of this kind.

        Args:
            until: monotonic seconds, by which it must have begun.

        Raises:
            LinkGarbage: something else came, or nothing. And errors as for `receive`.
        """
        found, fields = self.receive(max(0.0, until - time.monotonic())) or ("nothing", [])
        if found != kind or len(fields) != 1:
            raise LinkGarbage(f"{kind} was to come, not {found!r:.40}")
        return fields[0]

    def receive_array(self, shape: Sequence[int]) -> mx.array:
        """Returns the next array. Only arrays may be received on this connection from now on.

        Raises:
            LinkGarbage: something else came, or an array of another shape.
        """
        array = self._from_ring(shape)
        return self._received(shape) if array is None else array

    def _received(self, shape: Sequence[int]) -> mx.array:
        plain = self._receiving().take()
        self._dtype = plain.dtype
        if why := _why_another(plain, shape):
            raise LinkGarbage(why)
        return _array(plain)

    def await_array(self, shape: Sequence[int]) -> mx.array:
        """Returns the next array, in the dtype of the one before it. It need not have come yet: a graph can be built
        with it, which may be launched after `wait_came`.

        Raises:
            LinkError: as `receive_array`, if it has to be waited for here, or if it is known that it does not come.
        """
        array = self._from_ring(shape)
        return self._awaited_array(shape) if array is None else array

    def await_numbers(self, count: int) -> mx.array:
        """As `await_array`, for what `send_numbers` sends, or tokens that go over the network."""
        return self._awaited_array((count,))

    def _awaited_array(self, shape: Sequence[int]) -> mx.array:
        incoming = self._receiving()
        if not self._dtype or incoming.ready:
            return self._received(shape)
        awaited = _Awaited(shape, self._dtype)
        incoming.give_next(awaited.give)
        self._awaited.append(awaited)
        return awaited.array

    def _from_ring(self, shape: Sequence[int]) -> mx.array | None:
        """Returns the next array if it comes through the ring."""
        if self.receiving is None or not self._dtype:
            return None
        return self.receiving.receive(shape, _DTYPES[self._dtype])

    def wait_came(self) -> None:
        """Waits until all arrays have come that `await_array` has returned. Raises as `receive_array`."""
        while self._awaited:
            awaited = self._awaited.popleft()
            awaited.came.wait()
            if awaited.why:
                raise LinkGarbage(awaited.why)
            if awaited.lost:
                # Raises why.
                self._receiving().take()

    def _receiving(self) -> Incoming:
        if self._incoming is None:
            self._incoming = Incoming(self._receive_plain)
        return self._incoming

    def fail(self, why: str) -> None:
        """Tells the peer why this process ends, after the arrays that wait to be sent, if that does not take long."""
        if self._outgoing is None or self._outgoing.flush(FAIL_S):
            self.send(FAILED, why)

    def _send_plain(self, array: Plain) -> None:
        def read(piece: memoryview, start: int) -> None:
            np.frombuffer(piece, np.uint8)[:] = array.data[start : start + len(piece)]

        with self.times.of("sending"):
            if len(array.data) <= INSIDE_BYTES:
                self.send(_ARRAY, array.dtype, [*array.shape], array.data.tobytes())
            else:
                self.send(_ARRAY, array.dtype, [*array.shape])
                self._link.send_bytes(len(array.data), read)

    def _receive_plain(self) -> Plain:
        kind, fields = self.receive() or ("", [])
        dtype, shape, *inside = fields if kind == _ARRAY and len(fields) in (2, 3) else ("", [])
        if not isinstance(dtype, str) or dtype not in _DTYPES or not _is_shape(shape):
            raise LinkGarbage(f"hidden states were to come, not {kind} {fields!r:.80}")
        nbytes, filled = math.prod(shape) * _DTYPES[dtype].size, 0
        if nbytes > ARRAY_BYTES_MAX:
            raise LinkGarbage(f"hidden states of {nbytes} bytes are over {ARRAY_BYTES_MAX}")
        if inside:
            if not isinstance(inside[0], bytes) or len(inside[0]) != nbytes:
                raise LinkGarbage(f"hidden states of {nbytes} bytes were to come, not {inside[0]!r:.80}")
            self.times.came()
            return Plain(dtype, shape, np.frombuffer(inside[0], np.uint8))
        data = np.empty(nbytes, np.uint8)

        def take(piece: memoryview) -> None:
            nonlocal filled
            data[filled : filled + len(piece)] = piece
            filled += len(piece)

        self._link.receive_bytes(nbytes, take)
        self.times.came()
        return Plain(dtype, shape, data)

    def shut(self) -> None:
        """Ends the connection and all waits on it; from any thread."""
        for ring in (self.sending, self.receiving):
            if ring is not None:
                ring.break_off()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the connection, when no thread uses it any more."""
        # The ring of what comes first: what is sent waits for it.
        for ring in (self.receiving, self.sending):
            if ring is not None:
                ring.close()
        threads = [thread for thread in (self._outgoing, self._incoming) if thread is not None]
        if threads:
            self.shut()
        for thread in threads:
            thread.end()
        self._selector.close()
        self._sock.close()


class _Awaited:
    """An array that is still to come.

    Args:
        dtype: its name.

    Attributes:
        array: the array; its memory is written when it comes.
        came: set when it has come, or does not come.
        lost, why: whether it does not come, or could not be written; why what came is another one, or empty.
    """

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self._shape, self._dtype = shape, dtype
        words = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
        memory = mx.array(np.zeros([*shape], words))
        # A view. Nothing else reads the memory before it is written: nothing was launched with it.
        self._memory = np.array(memory, copy=False)
        self.array = memory.view(mx.bfloat16) if dtype == "bfloat16" else memory
        self.came, self.lost, self.why = threading.Event(), True, ""

    def give(self, plain: Plain | None) -> None:
        """Writes what has come; None if nothing comes. On the thread that receives."""
        try:
            if plain is not None:
                self.why = _why_another(plain, self._shape, self._dtype)
                if not self.why:
                    self._memory.reshape(-1).view(np.uint8)[:] = plain.data
                self.lost = False
        finally:
            self.came.set()


def _why_another(plain: Plain, shape: Sequence[int], dtype: str = "") -> str:
    """Returns why an array is not the one to come; empty if it is."""
    if [*plain.shape] == [*shape] and dtype in ("", plain.dtype):
        return ""
    return f"hidden states of the shape {[*shape]} were to come, not {plain.dtype} {[*plain.shape]}"


def _name_of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _plain(array: mx.array) -> Plain:
    dtype = _name_of(array.dtype)
    plain = as_numpy(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    return Plain(dtype, array.shape, np.ascontiguousarray(plain).reshape(-1).view(np.uint8))


def _array(plain: Plain) -> mx.array:
    dtype, shape, data = plain
    if _DTYPES[dtype] == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(data.view(dtype).reshape(shape))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and size > 0 for size in value)


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket):
    try:
        yield
    except BaseException:
        sock.close()
        raise


def _shaking_hands(sock: socket.socket) -> Link:
    link = Link(sock, HANDSHAKE_S)
    link.until = time.monotonic() + HANDSHAKE_S
    return link
