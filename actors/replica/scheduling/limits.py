"""The limits of a replica's batch and queue, and what sequences cost of its memory, in tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.block_ids import BLOCK_TOKENS

STEP_TOKENS = 2
"""Tokens that a running sequence may gain before the next `plan`: one step read, one in flight."""


@dataclass(frozen=True)
class Limits:
    """The bounds of a batch and its queue.

    Attributes:
        kv_tokens_max: the most that the KV of all sequences may cost.
        sequence_tokens: what a sequence costs besides its tokens: its open block, windows and states.
        paged: if true, a sequence costs its own whole blocks; if false, the batch is dense, and each sequence costs as
            much as the longest.
        shares: whether sequences share the memory of blocks with equal `keys`, so that these are counted once. A
            sequence that is admitted then reuses the blocks that another one holds.
        stops_at_borders: whether a chunk must end at every multiple of `prefill_chunk_tokens`, where the states of
            recurrent layers are saved.
    """

    sequences_max: int
    queue_requests_max: int
    prefill_chunk_tokens: int
    kv_tokens_max: int
    prefill_sequences_max: int = 4
    sequence_tokens: int = 0
    paged: bool = False
    shares: bool = False
    stops_at_borders: bool = False

    def cost(self, lengths: Sequence[int]) -> int:
        """Returns what sequences of these lengths cost if they share no blocks, in tokens."""
        if not self.paged:
            return len(lengths) * (max(lengths, default=0) + self.sequence_tokens)
        # The tokens after the last whole block are in the open block, which `sequence_tokens` counts.
        whole = sum(length // BLOCK_TOKENS for length in lengths)
        return whole * BLOCK_TOKENS + len(lengths) * self.sequence_tokens

    @property
    def prompt_tokens_max(self) -> int:
        """The longest prompt that memory can hold; negative if none."""
        room = self.kv_tokens_max - self.sequence_tokens
        if self.paged:
            room = (room // BLOCK_TOKENS + 1) * BLOCK_TOKENS - 1
        return room - STEP_TOKENS
