"""The limits, events, commands and results of a pull's state machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Stop(StrEnum):
    """Why a pull ended."""

    COMPLETE = "complete"
    """All wanted entries are here."""
    MISSING = "missing"
    """The source does not have the next block, or lost it."""
    DAMAGED = "damaged"
    """The next block arrived damaged, in the retry too."""
    TOO_LARGE = "too_large"
    UNREACHABLE = "unreachable"
    """No address answered, or every connection broke."""
    REFUSED = "refused"
    """No address has an authentic peer of this cluster."""
    DISK = "disk"
    """This node could not write or commit it."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class EntryOutcome(StrEnum):
    """The result of fetching an entry."""

    GOOD = "good"
    BAD = "bad"
    """It does not match its digest."""
    GONE = "gone"
    """The source cannot send it."""


@dataclass(frozen=True)
class PullLimits:
    """Limits of a pull.

    Attributes:
        connects_max: connections tried, over all addresses.
        connect_s: until a connection is established.
        answer_s: until the source has answered `find`, including the handshake.
        stall_s: without a byte of an answer.
        backoff_s, backoff_s_max: before a retry, doubled with each failure in a row; none before a fresh address.
        batch_bytes_min, batch_bytes_max, batch_entries_max: of one fetch request.
        batch_s: the duration for which fetch requests are sized.
        batches_max: outstanding fetch requests, so that the source always has something to send.
        window_bytes: outstanding or in memory at one time, and the maximum of one entry.
        install_entries_max: entries written together; few enough that writing keeps up with receiving.
        again_max: retries of a damaged entry.
        total_bytes_max: of all fetched entries.
    """

    connects_max: int = 6
    connect_s: float = 3.0
    answer_s: float = 5.0
    stall_s: float = 3.0
    backoff_s: float = 0.1
    backoff_s_max: float = 2.0
    batch_bytes_min: int = 32 * 2**20
    batch_bytes_max: int = 96 * 2**20
    batch_entries_max: int = 16
    batch_s: float = 0.2
    batches_max: int = 2
    window_bytes: int = 256 * 2**20
    install_entries_max: int = 8
    again_max: int = 1
    total_bytes_max: int = 2**62


class Offer(NamedTuple):
    """An entry that the source has, or that is here already (`held`)."""

    id: bytes
    nbytes: int
    held: bool = False


@dataclass(frozen=True)
class Want:
    """Begins the pull. `blocks` are the ids of the chain, in order."""

    blocks: tuple[bytes, ...]


@dataclass(frozen=True)
class Connected:
    connection: int


@dataclass(frozen=True)
class Found:
    """The entries of the chain (None if neither side has one) and its tails. The source keeps them for `lease_s`."""

    connection: int
    lease_s: float
    blocks: tuple[Offer | None, ...]
    tails: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class BytesArrived:
    """Bytes of an answer arrived. While it answers, the source renews its lease before half of it is over."""

    connection: int


@dataclass(frozen=True)
class Chunk:
    """An entry arrived and was verified, or the source reported that it cannot send it."""

    connection: int
    id: bytes
    outcome: EntryOutcome
    reason: str = ""


@dataclass(frozen=True)
class Renewed:
    connection: int
    lease_s: float


@dataclass(frozen=True)
class Lost:
    """The connection broke or was never established. `refused`: the address has no authentic peer; do not retry it."""

    connection: int
    reason: str
    refused: bool = False


@dataclass(frozen=True)
class Installed:
    """These entries are committed."""

    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class InstallFailed:
    """Nothing more can be written."""

    reason: str


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True)
class Cancel:
    pass


Event = Want | Connected | Found | BytesArrived | Chunk | Renewed | Lost | Installed | InstallFailed | Tick | Cancel


@dataclass(frozen=True)
class Connect:
    """Connect to address number `address`. Every connection has its own number."""

    connection: int
    address: int


@dataclass(frozen=True)
class Find:
    """Ask which entries the source has, and for a lease on them."""

    connection: int


@dataclass(frozen=True)
class Fetch:
    connection: int
    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Renew:
    connection: int


@dataclass(frozen=True)
class CloseConnection:
    connection: int


@dataclass(frozen=True)
class Install:
    """Write and commit these entries, in this order. Only one such command is running at a time."""

    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Discard:
    """Free these received entries."""

    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Recompute:
    """The blocks from this one on are missing."""

    block: int
    reason: str


@dataclass(frozen=True)
class Done:
    """The last command. `nbytes` counts the installed entries."""

    stop: Stop
    installed: int
    nbytes: int
    reason: str


Command = Connect | Find | Fetch | Renew | CloseConnection | Install | Discard | Recompute | Done
