"""Unbatched decode: sequences decode in the same steps but are computed one by one, for models that compute something
else when batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .caches import seal_filled


class UnbatchedSequences:
    """Takes the place of a batch's caches: every sequence has its own.

    Attributes:
        sequences: a sequence's caches, one a layer.
    """

    def __init__(self, sequences: Sequence[list[Any]]) -> None:
        self.sequences = list(sequences)

    def extend(self, other: UnbatchedSequences) -> None:
        """Appends the sequences of another batch."""
        self.sequences += other.sequences

    def keep(self, sequences: Sequence[int]) -> None:
        """Keeps only these sequences, in this order."""
        self.sequences = [self.sequences[sequence] for sequence in sequences]

    def seal_filled(self) -> None:
        """As `caches.seal_filled`."""
        for caches in self.sequences:
            seal_filled(caches)

    def step(self, compute: Callable[[int, mx.array, list[Any]], mx.array], inputs: mx.array) -> mx.array:
        """Returns the logits `(sequences, vocabulary)` after one token of every sequence, `inputs` `(sequences,)`.

        Args:
            compute: given a sequence's number, its token `(1, 1)` and its caches, returns logits `(1, 1, vocabulary)`.
        """
        logits = [
            compute(sequence, inputs[sequence : sequence + 1, None], caches)[:, -1, :]
            for sequence, caches in enumerate(self.sequences)
        ]
        return mx.concatenate(logits, axis=0)
