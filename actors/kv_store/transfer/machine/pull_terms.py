"""What is said to and by the machine of a pull: its limits, events, commands and ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Stop(StrEnum):
    """Why a pull ended."""

    COMPLETE = "complete"
    """All that was wanted is there."""
    MISSING = "missing"
    """The source does not have the next block, or not any more."""
    DAMAGED = "damaged"
    """The next block came damaged, also the second time."""
    TOO_LARGE = "too_large"
    UNREACHABLE = "unreachable"
    """No address answers, or every connection broke."""
    REFUSED = "refused"
    """No address has a peer of this cluster."""
    DISK = "disk"
    """It could not be written down here."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """What became of an entry that was asked for."""

    GOOD = "good"
    BAD = "bad"
    """Not what its digest names."""
    GONE = "gone"
    """The source cannot give it."""


@dataclass(frozen=True)
class PullLimits:
    """What a pull may take.

    Attributes:
        connects_max: connections that are tried, of all addresses together.
        connect_s: until a connection stands.
        answer_s: until the handshake is done and the source has said what it has.
        stall_s: without a byte of what was asked for.
        backoff_s, backoff_s_max: before the next try, doubled each time in a row; none before a fresh address.
        batch_bytes_min, batch_bytes_max, batch_entries_max: what is asked for at once.
        batch_s: what is asked for at once shall take about this long.
        batches_max: asked for at one time, so that the source always has something to send.
        window_bytes: asked for or in memory at one time, and the most that one entry may have.
        install_entries_max: entries that are written down together; few enough that writing keeps up with what comes.
        again_max: how often a damaged entry is asked for again.
        total_bytes_max: of everything that is fetched.
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
    """Begin. `blocks` are the ids of the chain, in order."""

    blocks: tuple[bytes, ...]


@dataclass(frozen=True)
class Connected:
    connection: int


@dataclass(frozen=True)
class Found:
    """What there is of the chain, None for what neither side has, and of its tails; the source keeps it `lease_s`."""

    connection: int
    lease_s: float
    blocks: tuple[Offer | None, ...]
    tails: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Progress:
    """Bytes of an answer came. While it answers, the source renews its lease before the half of it is over."""

    connection: int


@dataclass(frozen=True)
class Chunk:
    """An entry came and was compared with its digest, or the source said that it cannot give it."""

    connection: int
    id: bytes
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Renewed:
    connection: int
    lease_s: float


@dataclass(frozen=True)
class Lost:
    """The connection broke, or never stood. `refused`: this address has no peer of ours, so it is not tried again."""

    connection: int
    reason: str
    refused: bool = False


@dataclass(frozen=True)
class Installed:
    """These are durable, and count."""

    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class InstallFailed:
    """Nothing more can be written down."""

    reason: str


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True)
class Cancel:
    pass


Event = Want | Connected | Found | Progress | Chunk | Renewed | Lost | Installed | InstallFailed | Tick | Cancel


@dataclass(frozen=True)
class Connect:
    """Connect to the address number `address`; every connection has a number of its own."""

    connection: int
    address: int


@dataclass(frozen=True)
class Find:
    """Ask what the source has, and to keep it."""

    connection: int


@dataclass(frozen=True)
class Fetch:
    connection: int
    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Renew:
    connection: int


@dataclass(frozen=True)
class Close:
    connection: int


@dataclass(frozen=True)
class Install:
    """Write these down and let them count, in this order. Only one such command is under way at a time."""

    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Discard:
    """What came of these is not wanted any more."""

    ids: tuple[bytes, ...]


@dataclass(frozen=True)
class Recompute:
    """The blocks from this one on are not here."""

    block: int
    reason: str


@dataclass(frozen=True)
class Done:
    """Nothing comes after this. `nbytes` are of what was installed."""

    stop: Stop
    installed: int
    nbytes: int
    reason: str


Command = Connect | Find | Fetch | Renew | Close | Install | Discard | Recompute | Done
