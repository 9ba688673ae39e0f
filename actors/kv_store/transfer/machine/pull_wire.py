"""The client side of one connection, without its socket: bytes in, bytes out, events for the state machine.

The protocol is one generator that yields the buffer to fill next. So the code follows the order of the messages, arrays
are received without a copy, and the caller owns the socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .....cluster.errors import InvalidRecord, LinkError, LinkGarbage
from ....protocol.block_ids import BLOCK_TOKENS
from ....protocol.entries import DTYPES, EntryDigest, pack_tokens, part_digest, tail_id, unpack_tokens
from . import block_messages as messages
from .block_messages import Described, FetchRequest, FindRequest, RenewRequest, Request, Run, Signature
from .link_auth import PREAMBLE_BYTES, RECORD_BYTES, SEAL_BYTES, FrameSeal, Initiator, body_length
from .pull_terms import Chunk, Connected, EntryOutcome, Event, Renewed

Reading = Generator[memoryview, None, None]


@dataclass(frozen=True)
class Wanted:
    """A chain of blocks, and the tokens after it.

    Attributes:
        model: the model id, 32 bytes.
        root: the parent of the first block, `block_ids.root_id`.
        chain: the ids of the blocks, in order.
        tokens: the tokens of the chain if they are known; blocks with other tokens are then refused.
        rest: the tokens after the chain. Tails whose tokens are a prefix of these are pulled too.
        tails_max: how many tails at most.
    """

    model: bytes
    root: bytes
    chain: tuple[bytes, ...]
    tokens: Sequence[int] | None = None
    rest: Sequence[int] = ()
    tails_max: int = 2

    @property
    def tail_parent(self) -> bytes:
        return self.chain[-1] if self.chain else self.root


@dataclass(frozen=True)
class Received:
    """A received entry with a verified digest. `tokens` is packed; `parts` are arrays of the signature's shapes and
    dtypes, by name."""

    what: Described
    tail: bool
    tokens: bytes
    parts: dict[str, np.ndarray]
    digests: list[bytes]
    meta: dict[str, str]


class _Kind:
    """The layout of the entries with one signature."""

    def __init__(self, signature: Signature) -> None:
        self.parts, self.meta = signature
        self.sizes = [part.nbytes for part in self.parts]
        self.nbytes = sum(self.sizes)
        self.numbers = {part.name: number for number, part in enumerate(self.parts)}
        self.digest_of = EntryDigest(self.parts)


class _IncomingEntry:
    """One entry of a fetch, while it is received.

    Attributes:
        left: the numbers of the parts that have not been announced, by name.
    """

    def __init__(self, what: Described, tokens: bytes, kind: _Kind) -> None:
        self.what, self.tokens, self.kind = what, tokens, kind
        self.left = dict(kind.numbers)
        self._arrays: dict[str, np.ndarray] = {}
        self._digests = [b""] * len(kind.parts)

    def take(self, number: int, raw: np.ndarray) -> None:
        """Stores part `number`, given its bytes, `(bytes,) uint8`."""
        part = self.kind.parts[number]
        self._arrays[part.name] = raw.view(DTYPES[part.dtype]).reshape(part.shape)
        self._digests[number] = part_digest(raw.data)

    def received(self, tail: bool) -> Received | None:
        """Returns the whole entry, None if it does not match its announced digest."""
        if self.left or self.kind.digest_of(self._digests) != self.what.digest:
            return None
        ordered = {part.name: self._arrays[part.name] for part in self.kind.parts}
        return Received(self.what, tail, self.tokens, ordered, self._digests, self.kind.meta)


class PullWire:
    """One connection of a pull.

    ::

        while wire.target is not None: receive into wire.target; wire.filled(count); send wire.outbox; take wire.events

    Args:
        number: of the connection.
        handshake: its handshake.
        wanted: what to fetch.
        found: turns the source's answer to `find` (lease in seconds, blocks, tails) into an event.

    Attributes:
        outbox: bytes to send, in order.
        events: for the state machine; the caller removes them.
        received: whole entries by id; the caller removes them.
        target: the buffer to receive into next.
    """

    def __init__(
        self,
        number: int,
        handshake: Initiator,
        wanted: Wanted,
        found: Callable[[float, list[Described | None], list[Described]], Event],
    ) -> None:
        self.outbox: deque[memoryview] = deque()
        self.events: list[Event] = []
        self.received: dict[bytes, Received] = {}
        self._number = number
        self._handshake = handshake
        self._wanted = wanted
        self._found = found
        self._known: dict[bytes, Described] = {}
        self._blocks = {block: index for index, block in enumerate(wanted.chain)}
        self._fetches: deque[tuple[bytes, ...]] = deque()
        self._put(handshake.hello())
        self._reading = self._read()
        self.target = next(self._reading)

    def filled(self, count: int) -> None:
        """Continues after `count` bytes were received into the target.

        Raises:
            LinkError: the peer failed to authenticate, or broke the protocol.
            InvalidRecord: a message is malformed.
        """
        self.target = self.target[count:]
        while not len(self.target):
            self.target = next(self._reading)

    def find(self) -> None:
        wanted = self._wanted
        tokens = pack_tokens(wanted.rest)
        self._ask(FindRequest(wanted.model, wanted.chain, wanted.tail_parent, tokens, wanted.tails_max))

    def fetch(self, ids: tuple[bytes, ...]) -> None:
        self._fetches.append(ids)
        self._ask(FetchRequest(self._wanted.model, ids))

    def renew(self) -> None:
        self._ask(RenewRequest())

    def _ask(self, request: Request) -> None:
        payload = messages.pack_request(request)
        sealed = self._out.seal(payload)
        self._put(len(sealed).to_bytes(4, "big") + sealed)

    def _put(self, raw: bytes) -> None:
        self.outbox.append(memoryview(raw))

    # The conversation.

    def _read(self) -> Reading:
        challenge = yield from self._handshake_body()
        self._put(self._handshake.answer(challenge))
        self._out, self._into = self._handshake.frames()
        self.events.append(Connected(self._number))
        while True:
            kind, fields = yield from self._frame()
            if kind == "found":
                self._take_found(fields)
            elif kind == "renewed":
                self.events.append(Renewed(self._number, messages.read_renewed(fields)))
            elif kind == "batch" and self._fetches:
                yield from self._batch(self._fetches.popleft(), fields)
            elif kind == "error":
                raise LinkError(f"the source reports: {messages.read_error(fields)}")
            else:
                raise LinkGarbage(f"{kind!r:.40} answers no request")

    def _handshake_body(self) -> Generator[memoryview, None, bytes]:
        head = yield from _exactly(PREAMBLE_BYTES)
        return (yield from _exactly(body_length(head)))

    def _frame(self) -> Generator[memoryview, None, tuple[str, list[Any]]]:
        length = int.from_bytes((yield from _exactly(messages.LENGTH_BYTES)), "big")
        if not 1 <= length <= messages.ANSWER_BYTES_MAX + SEAL_BYTES:
            raise LinkGarbage(f"a frame of {length} bytes is over {messages.ANSWER_BYTES_MAX}")
        return messages.read_answer(self._into.open((yield from _exactly(length))))

    def _take_found(self, fields: list[Any]) -> None:
        lease_s, blocks, tails = messages.read_found(fields, self._wanted.chain)
        tokens = pack_tokens(self._wanted.rest)
        for packed, tail in tails:
            if not tokens.startswith(packed) or tail.id != tail_id(self._wanted.tail_parent, unpack_tokens(packed)):
                raise InvalidRecord("a tail does not match the request")
        ends = [tail for _, tail in tails[: self._wanted.tails_max]]
        self._known = {entry.id: entry for entry in (*blocks, *ends) if entry is not None}
        self.events.append(self._found(lease_s, blocks, ends))

    def _batch(self, ids: tuple[bytes, ...], fields: list[Any]) -> Reading:
        signatures, coming = messages.read_batch(fields, len(ids))
        kinds = [_Kind(signature) for signature in signatures]
        entries: list[_IncomingEntry | None] = []
        failures: dict[int, str] = {}
        for row, (entry_id, announced) in enumerate(zip(ids, coming, strict=True)):
            entries.append(
                self._begin(entry_id, announced.tokens, kinds[announced.signature])
                if announced.signature >= 0
                else None
            )
            if announced.signature < 0:
                failures[row] = announced.reason
        while True:
            kind, values = yield from self._frame()
            if kind == "end":
                failures |= messages.read_end(values, len(ids))
                break
            if kind != "parts":
                raise LinkGarbage(f"{kind!r:.40} in the middle of a batch")
            yield from _receive_parts(messages.read_parts(values, len(ids)), entries, self._into)
        for row, entry_id in enumerate(ids):
            self._finish(entry_id, entries[row], failures.get(row))

    def _begin(self, entry_id: bytes, tokens: bytes, kind: _Kind) -> _IncomingEntry:
        # Only entries that were found are fetched.
        described = self._known[entry_id]
        if kind.nbytes != described.nbytes:
            raise InvalidRecord("an entry has another size than was announced")
        return _IncomingEntry(described, tokens, kind)

    def _finish(self, entry_id: bytes, entry: _IncomingEntry | None, failure: str | None) -> None:
        if entry is None or failure is not None:
            self.events.append(
                Chunk(self._number, entry_id, EntryOutcome.GONE, failure or "the source did not send it")
            )
            return
        block = self._blocks.get(entry_id)
        if not self._right_tokens(block, entry.tokens, entry_id):
            self.events.append(Chunk(self._number, entry_id, EntryOutcome.GONE, "it has other tokens"))
            return
        received = entry.received(tail=block is None)
        if received is None:
            self.events.append(Chunk(self._number, entry_id, EntryOutcome.BAD, "it does not match its digest"))
            return
        self.received[entry_id] = received
        self.events.append(Chunk(self._number, entry_id, EntryOutcome.GOOD))

    def _right_tokens(self, block: int | None, packed: bytes, entry_id: bytes) -> bool:
        if block is None:
            return entry_id == tail_id(self._wanted.tail_parent, unpack_tokens(packed))
        if len(packed) != 4 * BLOCK_TOKENS:
            return False
        if self._wanted.tokens is None:
            return True
        start = block * BLOCK_TOKENS
        return packed == pack_tokens(self._wanted.tokens[start : start + BLOCK_TOKENS])


def _receive_parts(runs: Sequence[Run], entries: Sequence[_IncomingEntry | None], seal: FrameSeal) -> Reading:
    """Receives and opens the bytes of all runs into one buffer, of which the entries' parts are views."""
    coming = [part for run in runs for part in _announced(run, entries)]
    raw = np.empty(sum(entry.kind.sizes[number] for entry, number in coming), np.uint8)
    sealed = memoryview(bytearray(min(len(raw), RECORD_BYTES) + SEAL_BYTES))
    for start in range(0, len(raw), RECORD_BYTES):
        data = raw[start : start + RECORD_BYTES].data
        yield sealed[: len(data) + SEAL_BYTES]
        seal.open_into(sealed[: len(data) + SEAL_BYTES], data)
    start = 0
    for entry, number in coming:
        end = start + entry.kind.sizes[number]
        entry.take(number, raw[start:end])
        start = end


def _announced(run: Run, entries: Sequence[_IncomingEntry | None]) -> list[tuple[_IncomingEntry, int]]:
    """Returns the entries of a run, each with the number of the run's part. Raises `InvalidRecord` if the part was not
    announced or comes twice, so that a peer cannot cause allocations beyond what it announced."""
    parts = []
    for row in run.rows:
        entry = entries[row]
        if entry is None or run.name not in entry.left:
            raise InvalidRecord(f"part {run.name!r:.80} was not announced, or comes twice")
        parts.append((entry, entry.left.pop(run.name)))
    return parts


def _exactly(count: int) -> Generator[memoryview, None, bytes]:
    raw = bytearray(count)
    yield memoryview(raw)
    return bytes(raw)
