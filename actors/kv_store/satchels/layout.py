"""The file in which an agent is carried, a *satchel*: written, and read without trust. Pure.

::

    8 bytes    MAGIC
    4 bytes    version, little-endian
    frames     1 byte kind, 8 bytes length, little-endian, and as many bytes

    AGENT      msgpack of a `Manifest`
    BRANCH     msgpack of (token ids, text, transcript), for each branch of the manifest
    LAYOUT     msgpack of (model id, parts, meta) of the entries up to the next one
    ENTRY      4 bytes length and msgpack of the entry's facts, and its bytes
    END        SHA-256 of all bytes before this frame, and its MAC under the key of the cluster that packed it

The digest detects accidental damage. Against deliberate changes there are the MAC, by which a cluster recognizes its
own satchels, and a passphrase (`cluster/trust/locked.py`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import Annotated, Any, BinaryIO, NamedTuple, Protocol, cast

import msgpack
import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from ....cluster.errors import InvalidRecord, InvalidSatchel
from ...protocol.entries import (
    ID_BYTES,
    OWNER_BYTES,
    TOKEN_BYTES,
    EntryLayout,
    EntryRecord,
    Location,
)
from ...protocol.store_messages import Content

MAGIC = b"SATCHEL\n"
LOCKED_MAGIC = b"SATCHEL*"
"""The first bytes of a satchel that is encrypted as a whole (`cluster/trust/locked.py`)."""

VERSION = 1
MANIFEST_BYTES_MAX = 16 * 2**20
FACTS_BYTES_MAX = 2**20
ENTRY_BYTES_MAX = 2**30
BRANCHES_MAX = 4096
_DIGEST_BYTES = 32
_HEAD_BYTES = 9

_Id = Annotated[bytes, Field(min_length=ID_BYTES, max_length=ID_BYTES)]
_Text = Annotated[str, Field(max_length=1024)]
_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Time = Annotated[float, Field(ge=0, lt=2**36)]
"""Seconds since 1970."""

_KNOWN = ConfigDict(extra="forbid")


class Kind(IntEnum):
    AGENT = 1
    BRANCH = 2
    LAYOUT = 3
    ENTRY = 4
    END = 5


@validated(frozen=True, config=_KNOWN)
class CarriedBranch:
    """A branch without its content, as in `Head`. `use` orders the branches by their last use."""

    model: _Id
    files: Annotated[bytes, Field(max_length=ID_BYTES)]
    turns: _Count
    injected: bool
    messages: _Count
    use: _Count
    created: _Time
    used: _Time
    program: _Text
    parent: _Text


@validated(frozen=True, config=_KNOWN)
class Chain:
    """KV of a branch (its number in the manifest) under a model id. `root` is the parent of its first block there."""

    branch: _Count
    model: _Id
    root: _Id


@validated(frozen=True, config=_KNOWN)
class Manifest:
    """The contents of a satchel: the agent's id without its tenant, its branches, the oldest first, and their KV. The
    numbers of entries and bytes are upper bounds, because damaged entries are left out."""

    agent: _Text
    packed_s: _Time
    branches: Annotated[list[CarriedBranch], Field(min_length=1, max_length=BRANCHES_MAX)]
    chains: Annotated[list[Chain], Field(max_length=64 * BRANCHES_MAX)]
    entries: _Count
    entries_bytes: _Count


_MANIFEST = TypeAdapter(Manifest)


class CarriedEntry(NamedTuple):
    """An entry that matches its digest. `data` is `(nbytes,) uint8`."""

    record: EntryRecord
    model: bytes
    layout: EntryLayout
    data: np.ndarray


class SatchelWriter:
    """Writes a satchel, frame after frame.

    Args:
        write: takes all bytes, in order.
        key: of the cluster.
    """

    def __init__(self, write: Callable[[Any], object], key: bytes) -> None:
        self._write, self._key = write, key
        self._hash = hashlib.sha256()
        self._layout = b""
        self._put(MAGIC + VERSION.to_bytes(4, "little"))

    def begin(self, manifest: Manifest, contents: Sequence[Content]) -> None:
        """Writes the manifest and the branches' contents, in its order."""
        self._frame(Kind.AGENT, _packed(asdict(manifest)))
        for content in contents:
            self._frame(Kind.BRANCH, _packed((content.tokens, content.text, content.messages)))

    def entry(self, entry: Location, layout: EntryLayout, data: memoryview) -> None:
        """Writes an entry, preceded by its model and layout if these differ from the last entry's."""
        described = _packed((entry.model, layout.parts, layout.meta))
        if described != self._layout:
            self._layout = described
            self._frame(Kind.LAYOUT, described)
        facts = entry.facts()
        self._frame(Kind.ENTRY, len(facts).to_bytes(4, "little"), facts, data)

    def end(self) -> None:
        digest = self._hash.digest()
        self._frame(Kind.END, digest, proof_of(self._key, digest))

    def _frame(self, kind: Kind, *payload: bytes | memoryview) -> None:
        self._put(bytes([kind]) + sum(map(len, payload)).to_bytes(8, "little"))
        for each in payload:
            self._put(each)

    def _put(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._write(data)


def proof_of(key: bytes, digest: bytes) -> bytes:
    """Returns the MAC (32 bytes) by which a cluster knows a satchel with this digest as its own."""
    return hmac.new(key, b"satchel.carried.1" + digest, hashlib.sha256).digest()


class SatchelReader:
    """Reads an untrusted satchel: lengths are checked before they are used, and nothing is valid before the end is
    verified.

    Args:
        file: at its beginning.
        nbytes: of the whole file.
        key: of this cluster.
        words_bytes_max: the contents of all branches together.

    Attributes:
        manifest, contents: the branches.
        native: whether this cluster packed it; known after the last of `entries`.

    Raises:
        InvalidSatchel: the file is no satchel, truncated, damaged, or of a newer version; so does `entries`.
        OSError: it cannot be read.
    """

    def __init__(self, file: BinaryIO, nbytes: int, key: bytes, *, words_bytes_max: int) -> None:
        self._file, self._left, self._key = file, nbytes, key
        self._hash, self.native = hashlib.sha256(), False
        check_beginning(self._take(min(nbytes, len(MAGIC) + 4)))
        self.manifest = _manifest_of(self._payload(Kind.AGENT, MANIFEST_BYTES_MAX))
        self.contents: list[Content] = []
        for branch in self.manifest.branches:
            content = _content_of(self._payload(Kind.BRANCH, words_bytes_max), branch)
            words_bytes_max -= len(content.tokens) + len(content.text) + len(content.messages)
            self.contents.append(content)

    def entries(self) -> Iterator[CarriedEntry]:
        """Yields all entries; the next one overwrites `data`. If this ends without an error, the whole file is
        valid."""
        layout: EntryLayout | None = None
        model, buffer = b"", np.empty(0, np.uint8)
        count = 0
        while True:
            digest = self._hash.digest()
            kind, length = self._head()
            if kind == Kind.END:
                break
            if kind == Kind.LAYOUT:
                model, layout = _layout_of(self._take(self._bounded(length, MANIFEST_BYTES_MAX)))
                continue
            if kind != Kind.ENTRY or layout is None:
                raise InvalidSatchel(f"the satchel is damaged: a frame of kind {kind} is out of place")
            size = int.from_bytes(self._take(4), "little")
            record = _record_of(self._take(self._bounded(size, FACTS_BYTES_MAX)))
            if length != 4 + size + record.nbytes or record.nbytes != layout.nbytes:
                raise InvalidSatchel("the satchel is damaged: an entry has another size than it says")
            if len(buffer) != record.nbytes:
                buffer = np.empty(self._bounded(record.nbytes, ENTRY_BYTES_MAX), np.uint8)
            self._fill(buffer.data)
            if layout.digest_of(buffer.data) != record.digest:
                raise InvalidSatchel("the satchel is damaged: an entry's bytes are not as they were written")
            count += 1
            yield CarriedEntry(record, model, layout, buffer)
        if length != 2 * _DIGEST_BYTES or self._left != length:
            raise InvalidSatchel("the satchel does not end where it says")
        told, proof = self._take(_DIGEST_BYTES), self._take(_DIGEST_BYTES)
        if told != digest or count > self.manifest.entries:
            raise InvalidSatchel("the satchel is damaged: it has not the bytes that were packed")
        self.native = hmac.compare_digest(proof, proof_of(self._key, digest))

    def _payload(self, kind: Kind, limit: int) -> bytes:
        found, length = self._head()
        if found != kind:
            raise InvalidSatchel(f"the satchel is damaged: a frame of kind {found} is out of place")
        return self._take(self._bounded(length, limit))

    def _head(self) -> tuple[int, int]:
        head = self._take(_HEAD_BYTES)
        return head[0], self._bounded(int.from_bytes(head[1:], "little"), self._left)

    def _bounded(self, length: int, limit: int) -> int:
        if length > self._left:
            raise _cut()
        if length > limit:
            raise InvalidSatchel(f"the satchel has a part of {length} bytes where {limit} are allowed")
        return length

    def _take(self, count: int) -> bytes:
        data = bytearray(self._bounded(count, self._left))
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, target: memoryview) -> None:
        if len(target) > self._left:
            raise _cut()
        self._left -= len(target)
        done = 0
        while done < len(target):
            count = cast(Any, self._file).readinto(target[done:])
            if not count:
                raise _cut()
            done += count
        self._hash.update(target)


class Readable(Protocol):
    def read(self, count: int, /) -> bytes: ...


def read_manifest(file: Readable, nbytes: int) -> Manifest:
    """Returns a satchel's manifest before anything is verified.

    Raises:
        InvalidSatchel: the file is no satchel.
    """
    head = file.read(len(MAGIC) + 4 + _HEAD_BYTES)
    check_beginning(head[: len(MAGIC) + 4])
    length = int.from_bytes(head[-8:], "little")
    if head[len(MAGIC) + 4 : -8] != bytes([Kind.AGENT]) or length > min(MANIFEST_BYTES_MAX, nbytes):
        raise InvalidSatchel("the satchel is damaged: it does not begin with an agent")
    return _manifest_of(file.read(length))


def check_beginning(beginning: bytes) -> None:
    """Checks the first 12 bytes. If they are wrong, raises `InvalidSatchel` that says what they are instead."""
    if beginning.startswith(LOCKED_MAGIC):
        raise InvalidSatchel("the satchel is encrypted: `satchel agents unpack` opens it with its passphrase")
    if not beginning.startswith(MAGIC) or len(beginning) < len(MAGIC) + 4:
        raise InvalidSatchel("this is no satchel: it does not begin as one")
    version = int.from_bytes(beginning[len(MAGIC) :], "little")
    if version != VERSION:
        newer = "a newer" if version > VERSION else "an unknown"
        raise InvalidSatchel(f"the satchel has the format {version} of {newer} Satchel; this one reads {VERSION}")


def _cut() -> InvalidSatchel:
    return InvalidSatchel("the satchel is cut off: it ends before it says so")


def _packed(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException, UnicodeDecodeError) as error:
        raise InvalidSatchel(f"the satchel is damaged: {error}") from None


def _manifest_of(data: bytes) -> Manifest:
    try:
        manifest = _MANIFEST.validate_python(_unpacked(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidSatchel(f"the satchel is damaged: its manifest at {where}: {first['msg']}") from None
    if any(chain.branch >= len(manifest.branches) for chain in manifest.chains):
        raise InvalidSatchel("the satchel is damaged: it has KV of a branch that it lacks")
    return manifest


def _content_of(data: bytes, branch: CarriedBranch) -> Content:
    values = _unpacked(data)
    kinds = (bytes, str, bytes)
    if not isinstance(values, list) or len(values) != 3 or not all(map(isinstance, values, kinds)):
        raise InvalidSatchel("the satchel is damaged: a branch has not tokens, text and transcript")
    content = Content(*values)
    if len(content.tokens) % TOKEN_BYTES:
        raise InvalidSatchel("the satchel is damaged: a branch has half a token")
    return content


def _layout_of(data: bytes) -> tuple[bytes, EntryLayout]:
    try:
        model, described, meta = _unpacked(data)
        if not isinstance(model, bytes) or len(model) != ID_BYTES:
            raise InvalidSatchel("the satchel is damaged: the layout of its KV is none")
        return model, EntryLayout(described, meta)
    except (TypeError, ValueError, InvalidRecord) as error:
        raise InvalidSatchel(f"the satchel is damaged: the layout of its KV: {error}") from None


def _record_of(facts: bytes) -> EntryRecord:
    try:
        return EntryRecord.from_facts(facts, (bytes(OWNER_BYTES),)).checked()
    except (InvalidRecord, TypeError) as error:
        raise InvalidSatchel(f"the satchel is damaged: an entry: {error}") from None
