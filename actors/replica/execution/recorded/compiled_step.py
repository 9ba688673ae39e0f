"""A decode step as a recorded graph, for batches in which a kernel reads the KV of every layer.

Python takes 2 to 3 ms to build the graph of a step with 30 layers, as long as a GPU takes to compute it. `mx.compile`
records a graph for arrays of given shapes, and builds it again in a third of that time. So all that changes from step
to step is passed as arrays: lengths, slots, and how sequences are divided among groups of threads. Arrays are padded to
size classes, so that a batch needs few graphs while its sequences grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from cachetools import LRUCache

from ...adapters.rows import Adapted
from ...kernels.decode_views import KernelStep, KernelView, NewTokens
from ...kernels.head_transform import NOTHING, HeadTransform
from ...kernels.sealing import Sealed, SealPolicy
from ...kv.paged_cache import PagedKVCache
from .deferral import Deferral
from .fused_products import FusedProducts
from .layer_outputs import LayerOutputs
from .residual_sums import ResidualSums

GRAPHS_MAX = 64
"""How many recorded graphs are kept. Each has the binaries of its kernels, 50 KB a layer."""


@dataclass
class RecordedCache:
    """What a model gets as a layer's cache while a step is recorded."""

    policy: SealPolicy
    offset: mx.array | None = None
    step: KernelStep | None = None
    transform: Callable[[int], HeadTransform] = lambda dim: NOTHING
    view: KernelView | None = field(default=None, init=False)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Returns None: the kernel needs no mask."""

    def reads_in_place(self, count: int) -> bool:
        """Returns True: the kernel reads all blocks."""
        return True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self.step is not None
        self.view = KernelView(keys, values, self.step, self.transform)
        return keys, values


class CompiledStep:
    """Decode steps of one model. Used on the engine's thread.

    Args:
        deferral: which operations of the model are left to the kernel; None for none.
        adapted: the adapters of the model; None for none.
        fusions: what else is computed by fewer operations; each is active while a step is recorded.
        outputs: layers whose outputs are wanted too; None for none.

    Attributes:
        hidden: what these layers gave for the tokens of the last call, `(tokens, dimensions)`.
    """

    def __init__(
        self,
        model: Any,
        deferral: Deferral | None = None,
        adapted: Adapted | None = None,
        fusions: Sequence[ResidualSums | FusedProducts] = (),
        outputs: LayerOutputs | None = None,
    ) -> None:
        self._outputs = outputs
        self.hidden: mx.array | None = None
        self._model, self._deferral, self._adapted, self._fusions = model, deferral, adapted, fusions
        self._graphs: LRUCache[Any, Callable[..., tuple[mx.array, list[mx.array]]]] = LRUCache(GRAPHS_MAX)

    def __call__(
        self,
        inputs: mx.array | Sequence[int],
        caches: Sequence[PagedKVCache],
        extra: Mapping[str, mx.array],
        new: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
    ) -> mx.array | None:
        """Computes the logits of a batch's next tokens, and adds the tokens to the caches.

        Args:
            inputs: (tokens,), an integer dtype, or numbers: sequence after sequence.
            caches: one a layer.
            extra: the model's other inputs, for `padded_rows` sequences, or `padded_count` tokens if `new` is given.
            new: how many of the tokens each sequence has, as for `PagedKVCache.kernel_step`.
            adapters: the number of each token's adapter, 0 for none; empty if no token has one.

        Returns:
            (tokens, vocabulary), logits in the model's dtype; None, with nothing changed, if no sequence has a token
            yet, if the kernel has no room for so many tokens of a sequence, or if steps with adapters are not recorded.
        """
        if not self.records(caches, adapters) or not (new is None or caches[0].takes_drafts):
            return None
        steps = [cache.kernel_step(new, padded=True) for cache in caches]
        read = steps[0].read
        groups = {cache.group: [step.read.slots, step.read.numbers] for cache, step in zip(caches, steps, strict=True)}
        layers = [[*step.tails, step.written, *step.pool] for step in steps]
        shapes = [[array.shape for array in arrays] for arrays in groups.values()]
        slots = [step.pool[0].shape[0] for step in steps]
        extras = [(name, array.shape) for name, array in extra.items()]
        rows, adapts = steps[0].tails[0].shape[0], any(adapters)
        key = str((read.tokens, read.most, rows, shapes, slots, extras, adapts))
        run = self._graphs.get(key)
        if run is None:
            run = self._graphs[key] = self._record(caches, type(steps[0].pool), read.most)
        offsets, count = caches[0].lengths, len(inputs)
        if new is not None:
            offsets = [length + at for length, count in zip(offsets, new, strict=True) for at in range(count)]
        padding = [0] * (read.tokens - count)
        offsets = offsets + padding
        if not isinstance(inputs, mx.array):
            inputs = mx.array([*inputs, *padding], mx.uint32)
        elif padding:
            inputs = mx.concatenate([inputs, mx.array(padding, inputs.dtype)])
        numbers = [mx.array([*adapters, *padding], mx.uint32)] if adapts else []
        logits, hidden = run(inputs[:, None], mx.array(offsets), groups, layers, dict(extra), numbers)
        self.hidden = hidden[0][:count, 0] if hidden else None
        for cache in caches:
            cache.end_kernel_step(new)
        return logits[:count] if padding else logits

    def records(self, caches: Sequence[PagedKVCache], adapters: Sequence[int] = ()) -> bool:
        """Whether it computes a step of one token a sequence: each has a token already, and adapters are gathered.

        Args:
            adapters: as for a call.
        """
        gathers = self._adapted is not None and self._adapted.gathers
        return all(cache.nbytes for cache in caches) and (gathers or not any(adapters))

    def _record(
        self, caches: Sequence[PagedKVCache], kind: type[Sealed], most: int
    ) -> Callable[..., tuple[mx.array, list[mx.array]]]:
        outputs = self._outputs
        deferral, adapted, fusions = self._deferral, self._adapted, self._fusions
        recorded = [(RecordedCache(cache.policy), cache.group) for cache in caches]
        for cache, _ in recorded:
            if deferral is not None:
                cache.transform = deferral.take

        def run(
            tokens: mx.array,
            offset: mx.array,
            groups: dict[int, list[mx.array]],
            layers: list[list[mx.array]],
            extra: dict[str, mx.array],
            numbers: list[mx.array],
        ) -> tuple[mx.array, list[mx.array]]:
            read = {number: NewTokens(*arrays, tokens=len(tokens), most=most) for number, arrays in groups.items()}
            for (cache, group), (keys, values, written, *pool) in zip(recorded, layers, strict=True):
                cache.offset, cache.step = (
                    offset,
                    KernelStep((keys, values), kind._make(pool), read[group], written),
                )
            adapting = adapted.recording(numbers[0]) if numbers and adapted is not None else nullcontext()
            deferring = nullcontext() if deferral is None else deferral.active(offset)
            # A sum that the model computes, and that is computed otherwise here, would be computed twice.
            sums = next((each.computed for each in fusions if isinstance(each, ResidualSums)), lambda output: output)
            noting = nullcontext(list[mx.array]()) if outputs is None else outputs.noted(sums)
            with ExitStack() as fusing, adapting, deferring, noting as hidden:
                for fusion in fusions:
                    fusing.enter_context(fusion.active())
                logits = self._model(tokens, cache=[cache for cache, _ in recorded], **extra)[:, -1]
            for cache, _ in recorded:
                # They stood for the inputs.
                cache.offset = cache.step = cache.view = None
            return logits, hidden

        return mx.compile(run)
