"""A stage as a model that a batch calls: hidden states come from the stage before and go to the one after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...device.device import on_cuda
from ...device.temporary_memory import TEMPORARY
from ...execution.recorded.compiled_step import CompiledStep
from ...execution.recorded.deferral import Deferral
from ...execution.recorded.fused_products import FusedProducts
from ...execution.recorded.residual_sums import ResidualSums
from ...kernels.decode_views import padded_rows
from ...kv.paged_cache import PagedKVCache
from ...loading.quirks import FlatCaches
from ..link.connection import Connection
from ..link.times import Times
from .stages import Stage


class PipelinedStage:
    """Takes the place of a model in `Batch`. Hidden states pass between two evaluations, so no GPU waits for a network.

    Attributes:
        before, after: the connections to the neighbours; None at the ends of the model, and while nothing is connected.
        tokens: the connection on which the first stage awaits tokens; None for other stages.
        launches: whether hidden states that the device still computes are handed to another thread, which waits for
            them and sends them. MLX must report an error of the device to every thread, as it does on CUDA.
        before_launch: called before those of a prompt's piece are launched.
        times: how long this thread waits for hidden states, and builds and launches graphs.
    """

    def __init__(self, stage: Stage) -> None:
        self.before: Connection | None = None
        self.after: Connection | None = None
        self.tokens: Connection | None = None
        self.launches = on_cuda()
        self.before_launch: Callable[[], object] = lambda: None
        self.times = Times()
        self.stage, self._called = stage, FlatCaches.of(stage)

    def __call__(self, tokens: mx.array, cache: Sequence[Any], **given: mx.array) -> mx.array:
        """Computes the layers for `tokens` `(sequences, tokens)`.

        Args:
            given: as for `Stage`.

        Returns:
            `(sequences, tokens, vocabulary)`, the logits, if it is the last stage. Else the hidden states, which have
            been sent.

        Raises:
            LinkError: a neighbour is gone, or has failed.
        """
        hidden = self.received(*tokens.shape)
        self.settle()
        with self.times.of("building a prompt's piece"):
            states = self.compute(tokens, cache, hidden, **given)
        if self.after is not None:
            self.before_launch()
        with TEMPORARY.limited():
            self.pass_on(states)
        return states

    def received(self, sequences: int, tokens: int) -> mx.array | None:
        """Waits for the hidden states of a call, `(sequences, tokens, width)`. Returns None if no stage is connected
        before this one. Raises as `__call__`."""
        if self.before is None:
            return None
        with self.times.of("waiting for hidden states"):
            return self.before.receive_array((sequences, tokens, self.stage.width))

    def awaited(self, sequences: int) -> mx.array | None:
        """As `received` for one token of each sequence, but they need not have come before `settle`."""
        return None if self.before is None else self.before.await_array((sequences, 1, self.stage.width))

    def settle(self) -> None:
        """Waits until all has come with which graphs were built. Raises as `__call__`."""
        with self.times.of("waiting for what a step needs"):
            for connection in (self.before, self.tokens):
                if connection is not None:
                    connection.wait_came()

    def pass_on(self, states: mx.array) -> None:
        """Sends hidden states, if a stage is connected after this one. Raises as `__call__`."""
        if self.after is None:
            return
        with self.times.of("launching hidden states"):
            if self.launches:
                self.after.send_launched(states)
            else:
                self.after.send_array(states)

    def compute(
        self, tokens: mx.array, cache: Sequence[Any], hidden: mx.array | None = None, **given: mx.array
    ) -> mx.array:
        """Returns what the layers make of `hidden`, as `Stage` does."""
        return self._called(tokens, cache=cache, hidden=hidden, **given)

    def recorded(self, deferral: Deferral | None, fusions: Sequence[ResidualSums | FusedProducts]) -> RecordedStage:
        """Returns what computes the stage's decode steps as recorded graphs. Arguments as for `CompiledStep`."""
        return RecordedStage(self, deferral, fusions)

    def make_cache(self) -> list[Any]:
        """Returns empty caches of one sequence for the stage's layers."""
        return self._called.make_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage.model, name)


class RecordedStage(CompiledStep):
    """Decode steps of a stage. Hidden states come and go between two recorded graphs. A graph is built before its
    hidden states have come."""

    def __init__(
        self,
        stage: PipelinedStage,
        deferral: Deferral | None,
        fusions: Sequence[ResidualSums | FusedProducts],
    ) -> None:
        super().__init__(stage.compute, deferral, fusions=fusions)
        self._stage = stage

    def __call__(
        self,
        inputs: mx.array,
        caches: Sequence[PagedKVCache],
        extra: Mapping[str, mx.array],
        new: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
    ) -> mx.array | None:
        """As `CompiledStep`, without drafts and adapters; a stage that is not the last one returns `(sequences,
        width)`. Raises as `PipelinedStage`."""
        if new is not None or not self.records(caches):
            return None
        count = len(inputs)
        hidden = self._stage.awaited(count)
        if hidden is not None and (more := padded_rows(count) - count):
            hidden = mx.pad(hidden, [(0, more), (0, 0), (0, 0)])
        with self._stage.times.of("building a step"):
            states = super().__call__(inputs, caches, extra if hidden is None else {**extra, "hidden": hidden})
        assert states is not None
        self._stage.settle()
        self._stage.pass_on(states[:, None])
        return states
