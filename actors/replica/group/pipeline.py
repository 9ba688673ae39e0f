"""A stage as a model that a batch calls: hidden states come from the stage before and go to the one after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..loading.quirks import FlatCaches
from .connection import Connection
from .stages import Stage


class PipelinedStage:
    """Takes the place of a model in `Batch`. Hidden states pass between two evaluations, so no GPU waits for a network.

    Attributes:
        before, after: the connections to the neighbours; None at the ends of the model, and while nothing is connected.
    """

    def __init__(self, stage: Stage) -> None:
        self.before: Connection | None = None
        self.after: Connection | None = None
        self.stage, self._called = stage, FlatCaches.of(stage)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Computes the layers for `tokens` `(sequences, tokens)`.

        Returns:
            `(sequences, tokens, vocabulary)`, the logits, if it is the last stage. Else the hidden states, which have
            been sent.

        Raises:
            LinkError: a neighbour is gone, or has failed.
        """
        hidden = None if self.before is None else self.before.receive_array((*tokens.shape, self.stage.width))
        states = self.compute(tokens, cache, hidden)
        if self.after is not None:
            self.after.send_array(states)
        return states

    def compute(self, tokens: mx.array, cache: Sequence[Any], hidden: mx.array | None) -> mx.array:
        """Returns what the layers make of `hidden`, as `Stage` does."""
        return self._called(tokens, cache=cache, hidden=hidden)

    def make_cache(self) -> list[Any]:
        """Returns empty caches of one sequence for the stage's layers."""
        return self._called.make_cache()
