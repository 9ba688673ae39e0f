"""How a machine's memory is divided: among its replicas, and in one of them among sequences and what is kept. Pure.

A replica's memory is the device's, less the models' weights and what a prefill needs for a moment, divided by the
number of replicas. It holds, in this order of right: the sequences that have a place; what others hold for a while, as
KV on its way to the disk, pictures of sequences in the queue and a text that is embedded in chunks; image embeddings;
and in all the rest kept prefixes, of which the least recently used are evicted when one of the others needs room. So it
is between two steps. Within one, what a sequence leaves behind is there beside the sequence: its open block, and copies
for the disk only once there is room for them. If the disk is slow, what is being written is held twice, by
`unwritten_bytes_max`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PICTURES_PART = 8
"""Image embeddings that nobody needs take at most this part of the memory (an eighth)."""

SLACK_PART = 32
"""The part of the memory that is used only for a moment, so that the block pool, which copies itself to change its
size, does not do so at every token. It does not grow either by less than this part of itself."""

OPEN_PART = 8
"""At most this part is reserved for open blocks of sequences that are not there yet."""

FREE_PART = 32
"""The part of the device's memory that is left free for others."""

HIDDEN_VECTORS, INTERMEDIATE_VECTORS = 12, 4
"""How many vectors of hidden size and of the feed-forward layers a token of a prefill has alive at a time, at most."""


@dataclass(frozen=True)
class MemoryClaim:
    """What a replica needs before anything is divided, in bytes."""

    weights: int
    workspace: int


def share_bytes(memory_bytes: int, claims: Sequence[MemoryClaim]) -> int:
    """Returns each replica's part of a node's memory for KV and pictures; 0 if the models alone take all of it."""
    taken = sum(claim.weights + claim.workspace for claim in claims)
    return max(0, memory_bytes - taken) // max(1, len(claims))


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
    """Estimates what a prefill needs for a moment, beyond weights and KV: vectors of its tokens, their mask, and one
    layer's history, dequantized and then joined with them. Attention is taken to be fused; where it is not, as on
    CPUs, a measurement shows more.

    Args:
        tokens: of one call.
        context: tokens of the longest sequence.
        hidden, intermediate: sizes of the model's layers.
        itemsize: bytes of a number.
        layer: bytes of a token's KV in the largest layer, in full precision.
        mask: bytes of a query and a key in masks.
    """
    vectors = tokens * (HIDDEN_VECTORS * hidden + INTERMEDIATE_VECTORS * intermediate) * itemsize
    return vectors + mask * tokens * context + 2 * context * layer


@dataclass(frozen=True)
class Held:
    """What a replica's memory holds now, in bytes.

    Attributes:
        pool: the block pool's arrays; `slots` of that in slots that somebody holds.
        kept: kept prefixes outside of the pool.
        loose: kept prefixes that nobody needs, in the pool or not.
        pictures: image embeddings that sequences need; `seen` others.
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
        """Without the slack."""
        return self.bytes_max - self.bytes_max // SLACK_PART

    def used(self, sequences: Sequences, held: Held) -> int:
        """Returns what is used now."""
        own = sequences.count * self.sequence_bytes if self.paged else sequences.held * self.token_bytes
        return own + held.pool + held.outside

    def others(self, sequences: Sequences, held: Held) -> int:
        """Returns what is held that neither counts as a sequence's nor can be evicted."""
        fixed = held.kept - held.loose
        if self.paged:
            # Whatever the scheduler counted, what it did not expect of the slots is here.
            fixed += held.slots + sequences.count * self.sequence_bytes - sequences.held * self.token_bytes
        return max(0, fixed) + held.pictures + held.unwritten + held.text

    def sequences_tokens(self, sequences: Sequences, held: Held) -> int:
        """Returns what sequences may cost now, in tokens."""
        return max(0, self.usable - self.others(sequences, held)) // self.token_bytes

    def pictures_bytes(self, sequences: Sequences, held: Held) -> int:
        """Returns what image embeddings may take that no sequence needs."""
        return min(self.bytes_max // PICTURES_PART, self._rest(sequences, held))

    def kept_bytes(self, sequences: Sequences, held: Held) -> int:
        """Returns what kept prefixes may take that nobody needs."""
        more = self.pool_bytes(sequences, held) - held.pool
        too_little = more if 0 < more < held.pool // SLACK_PART else 0
        return max(0, self._rest(sequences, held) - held.seen - too_little)

    def _rest(self, sequences: Sequences, held: Held) -> int:
        spare = self._open_bytes(sequences) - sequences.count * self.sequence_bytes
        return max(0, self.usable - self.others(sequences, held) - sequences.cost * self.token_bytes - spare)

    def _open_bytes(self, sequences: Sequences) -> int:
        """Returns what is reserved for sequences outside of the pool: it should not have to shrink for every further
        sequence."""
        return max(
            sequences.count * self.sequence_bytes,
            min(self.sequences_max * self.sequence_bytes, self.bytes_max // OPEN_PART),
        )

    def pool_bytes(self, sequences: Sequences, held: Held) -> int:
        """Returns what the block pool may grow to."""
        return self.usable - held.outside - self._open_bytes(sequences)

    def pool_is_too_large(self, sequences: Sequences, held: Held) -> bool:
        """Whether the pool must give memory back."""
        return held.pool > self.bytes_max - held.outside - sequences.count * self.sequence_bytes
