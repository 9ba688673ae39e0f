"""What the planner says, and the processes of a divided model."""

from __future__ import annotations

from dataclasses import dataclass, field

from .store_messages import Limits


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that may be divided. `what` says what is waited for until it is placed; `replica` is "" until then."""

    name: str
    what: str = ""
    replica: str = ""


@dataclass(frozen=True, slots=True)
class StageState:
    """What a follower does until its stage is loaded, and then what it can hold.

    Attributes:
        what, fraction, ready: as in `ReplicaProgress`.
        memory_bytes: for KV.
        token_bytes, sequence_bytes: what a token of a sequence costs in it, and each sequence besides.
    """

    what: str
    fraction: float | None = None
    ready: bool = False
    memory_bytes: int = 0
    token_bytes: int = 1
    sequence_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A prompt whose KV is to be read back from the disks of all nodes of a group.

    Attributes:
        reading: a unique name.
        owner, scope, root, ids: of the prompt, as in `disk_tier.Prompt`.
        tokens: packed.
        hot_tokens: how many of its first tokens have KV in memory.
        limits: what the tenant may have on disk.
    """

    reading: str
    owner: str
    scope: str
    root: bytes
    ids: list[bytes]
    tokens: bytes
    hot_tokens: int
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundPart:
    """What a follower has read of a prompt: how many blocks after the hot ones, and the packed tokens of the tails
    after them."""

    blocks: int
    tails: list[bytes]


@dataclass(frozen=True, slots=True)
class StageAddress:
    """Where a follower listens."""

    host: str
    port: int
