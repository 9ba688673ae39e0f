"""How a machine's memory is divided: among its replicas, and within a replica among sequences and caches. Pure.

The memory of the device, less the models' weights and the temporary memory of a prefill, is divided evenly among the
replicas that have KV. One without KV, such as of a model that makes images, claims all that it needs. A replica's part
goes, in this order of priority, to: the sequences that have a place; what is held for a while (KV on its way to the
disk, pictures of queued sequences, a text that is embedded in chunks); image embeddings; cached prefixes, which get all
the rest. If one of the others needs room, the least recently used prefixes are evicted.

This holds between two steps. During a step, KV that a sequence leaves exists beside the sequence: its open block, and
copies for the disk, which are made only if there is room. If the disk is slow, KV that is being written is held twice,
up to `unwritten_bytes_max`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PICTURES_PART = 8
"""Image embeddings that no sequence needs take at most this part of the memory (an eighth)."""

SLACK_PART = 32
"""The part of the memory that is left as slack. The block pool copies itself to change its size, and with slack it does
not have to at every token. It also grows by at least this part of itself."""

OPEN_PART = 8
"""At most this part of the memory is reserved for open blocks of future sequences."""

LEAST_PART = 16
"""A model that comes and goes is loaded beside others only if each of them is left this part of the memory for KV."""

FREE_PART = 32
"""The part of the device's memory that is left free for other programs."""

HIDDEN_VECTORS, INTERMEDIATE_VECTORS = 12, 4
"""How many vectors of hidden size, and of the feed-forward layers' size, a prefilled token has in memory at a time, at
most."""


@dataclass(frozen=True)
class MemoryClaim:
    """What a replica needs before anything is divided, in bytes. `kv`: whether it gets a part of the rest."""

    weights: int
    workspace: int
    kv: bool = True


def share_bytes(memory_bytes: int, claims: Sequence[MemoryClaim]) -> int:
    """Returns the part of a node's memory for KV and pictures of each replica that has KV; 0 if the models alone take
    all of it. If none has KV, returns what is not claimed."""
    taken = sum(claim.weights + claim.workspace for claim in claims)
    return max(0, memory_bytes - taken) // max(1, sum(claim.kv for claim in claims))


def claimable_bytes(memory_bytes: int, claims: Sequence[MemoryClaim]) -> int:
    """Returns how much more a replica without KV may claim: each one that has KV is left `LEAST_PART`."""
    left = sum(claim.kv for claim in claims) * (memory_bytes // LEAST_PART)
    return max(0, memory_bytes - sum(claim.weights + claim.workspace for claim in claims) - left)


def has_room(memory_bytes: int, claims: Sequence[MemoryClaim], need: MemoryClaim) -> bool:
    """Returns whether a model that comes and goes has room beside the `claims` of others. If there are none, what it
    leaves for KV need only be more than nothing."""
    least = max(1, memory_bytes // LEAST_PART) if claims else 1
    return share_bytes(memory_bytes, [*claims, need]) >= least


def bearable_bytes(share: int, used: int, free: int, total: int) -> int:
    """Returns how many bytes of its share a replica may use, if other programs use the memory too.

    Args:
        used: what it uses now.
        free: what is free on the device now, of `total`.
    """
    return max(0, min(share, used + free - total // FREE_PART))


def workspace_bytes(
    *, tokens: int, context: int, hidden: int, intermediate: int, itemsize: int, layer: int, mask: int = 1
) -> int:
    """Estimates the temporary memory of a prefill, beyond weights and KV, in bytes: its tokens' vectors, their mask,
    and one layer's history, which is dequantized and then concatenated with the new tokens. Attention is assumed to be
    fused; if it is not, as on CPUs, a measurement shows more.

    Args:
        tokens: tokens of one call.
        context: tokens of the longest sequence.
        hidden, intermediate: sizes of the model's layers.
        itemsize: bytes of a number.
        layer: bytes of a token's KV in the largest layer, in full precision.
        mask: bytes that a pair of a query and a key takes in masks.
    """
    vectors = tokens * (HIDDEN_VECTORS * hidden + INTERMEDIATE_VECTORS * intermediate) * itemsize
    return vectors + mask * tokens * context + 2 * context * layer


@dataclass(frozen=True)
class Held:
    """What a replica's memory holds now, in bytes.

    Attributes:
        pool: the block pool's arrays; `slots` is the part of them in slots that are held.
        kept: cached prefixes outside of the pool.
        loose: cached prefixes that are not pinned, in the pool or not.
        pictures: image embeddings that sequences need; `seen`: all others.
        unwritten: copies of KV on their way to the disk.
        text: caches of a long text that is embedded.
    """

    pool: int = 0
    slots: int = 0
    kept: int = 0
    loose: int = 0
    pictures: int = 0
    seen: int = 0
    unwritten: int = 0
    text: int = 0

    @property
    def outside(self) -> int:
        """What is not in the pool."""
        return self.kept + self.pictures + self.seen + self.unwritten + self.text


@dataclass(frozen=True)
class Sequences:
    """Sequences that have a place or just had one. `cost` and `held` are as `Scheduler.cost_tokens` and
    `held_tokens`."""

    count: int = 0
    cost: int = 0
    held: int = 0


@dataclass(frozen=True)
class MemoryBudget:
    """One replica's memory.

    Attributes:
        bytes_max: all of it.
        token_bytes: what the scheduler's tokens cost.
        sequence_bytes: what a sequence has outside of the pool: its open block, its states, in a dense model its
            windows.
        sequences_max: how many sequences may have a place.
        paged: whether sequences have their blocks in the pool, where kept prefixes lie too.
    """

    bytes_max: int
    token_bytes: int
    sequence_bytes: int
    sequences_max: int
    paged: bool

    @property
    def usable(self) -> int:
        """All of it without the slack, in bytes."""
        return self.bytes_max - self.bytes_max // SLACK_PART

    def used(self, sequences: Sequences, held: Held) -> int:
        """Returns what is used now."""
        own = sequences.count * self.sequence_bytes if self.paged else sequences.held * self.token_bytes
        return own + held.pool + held.outside

    def others(self, sequences: Sequences, held: Held) -> int:
        """Returns the bytes that are not counted for sequences and cannot be evicted."""
        fixed = held.kept - held.loose
        if self.paged:
            # Slots that are held beyond what the scheduler counts for sequences are counted here.
            fixed += held.slots + sequences.count * self.sequence_bytes - sequences.held * self.token_bytes
        return max(0, fixed) + held.pictures + held.unwritten + held.text

    def sequences_tokens(self, sequences: Sequences, held: Held) -> int:
        """Returns how much sequences may cost now, in tokens."""
        return max(0, self.usable - self.others(sequences, held)) // self.token_bytes

    def pictures_bytes(self, sequences: Sequences, held: Held) -> int:
        """Returns how many bytes image embeddings that no sequence needs may take."""
        return min(self.bytes_max // PICTURES_PART, self._rest(sequences, held))

    def kept_bytes(self, sequences: Sequences, held: Held) -> int:
        """Returns how many bytes unpinned cached prefixes may take."""
        more = self.pool_bytes(sequences, held) - held.pool
        too_little = more if 0 < more < held.pool // SLACK_PART else 0
        return max(0, self._rest(sequences, held) - held.seen - too_little)

    def _rest(self, sequences: Sequences, held: Held) -> int:
        spare = self._open_bytes(sequences) - sequences.count * self.sequence_bytes
        return max(0, self.usable - self.others(sequences, held) - sequences.cost * self.token_bytes - spare)

    def _open_bytes(self, sequences: Sequences) -> int:
        """Returns the bytes that are reserved for sequences outside of the pool, so that the pool need not shrink for
        every new sequence."""
        return max(
            sequences.count * self.sequence_bytes,
            min(self.sequences_max * self.sequence_bytes, self.bytes_max // OPEN_PART),
        )

    def pool_bytes(self, sequences: Sequences, held: Held) -> int:
        """Returns the size to which the block pool may grow, in bytes."""
        return self.usable - held.outside - self._open_bytes(sequences)

    def pool_is_too_large(self, sequences: Sequences, held: Held) -> bool:
        """Whether the pool must give memory back."""
        return held.pool > self.bytes_max - held.outside - sequences.count * self.sequence_bytes
