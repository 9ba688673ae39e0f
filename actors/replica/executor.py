"""The MLX side of a replica: rows' caches, prefill chunks, and one batched decode step. No policy.

Everything here runs on one thread, because a lazy MLX array can be evaluated only on the thread that made it.

A decode step is pipelined: `step` starts computing token t+1 of every row, then returns token t, which is ready. So
the Python work between two steps overlaps with the device's. A row that joins is fed the last token of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..messages import Sampling
from . import kv_cache
from .kv_cache import Slab
from .models import LoadedModel
from .sampling import BatchSampler

CLEAR_EVERY_STEPS = 512


@dataclass
class _Row:
    row_id: str
    sampling: Sampling
    drawn: int
    fed: bool = False


class BatchExecutor:
    """Rows being prefilled, each alone, and the batch of rows being decoded together."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._prefilling: dict[str, list[Any]] = {}
        self._rows: list[_Row] = []
        self._caches: list[Any] = []
        self._inputs: mx.array | None = None
        self._sampler: BatchSampler | None = None
        self._steps = 0

    def open(self, row_id: str, blocks: Sequence[Slab], tail: Slab | None, tail_tokens: int) -> None:
        """Make room for a row and restore what of its prompt is known."""
        caches = self._loaded.new_caches()
        if blocks or tail_tokens:
            kv_cache.restore(caches, blocks, tail, tail_tokens)
        self._prefilling[row_id] = caches

    def prefill(self, row_id: str, tokens: Sequence[int]) -> None:
        """Compute the KV of the row's next `tokens`."""
        caches = self._prefilling[row_id]
        self._model(mx.array([list(tokens)]), cache=caches)
        # The logits are never evaluated, so the output layer is never computed.
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()

    def join(self, row_id: str, token: int, sampling: Sampling, drawn: int) -> None:
        """Move a prefilled row into the batch.

        Args:
            token: the prompt's last token, the row's first input.
            drawn: how many tokens the row has drawn before (after preemption or on a lost replica).
        """
        caches = self._prefilling.pop(row_id)
        self._caches = kv_cache.join(self._caches, caches)
        first = mx.array([token], dtype=mx.uint32)
        self._inputs = first if self._inputs is None else mx.concatenate([self._inputs, first])
        self._rows.append(_Row(row_id, sampling, drawn))
        self._sampler = None

    def step(self) -> list[tuple[str, int]]:
        """One decode step for the whole batch.

        Returns:
            (row id, token) for every row whose previous draw is ready; a row just joined has none yet.
        """
        if not self._rows or self._inputs is None:
            return []
        if self._sampler is None:
            self._sampler = BatchSampler([row.sampling for row in self._rows])
        inputs = self._inputs
        logits = self._model(inputs[:, None], cache=self._caches)[:, -1, :]
        self._inputs = self._sampler(logits, [row.drawn for row in self._rows]).astype(mx.uint32)
        mx.async_eval(self._inputs)
        tokens: list[int] = inputs.tolist()  # type: ignore[assignment]
        ready = [(row.row_id, token) for row, token in zip(self._rows, tokens, strict=True) if row.fed]
        for row in self._rows:
            row.drawn += 1
            row.fed = True
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        return ready

    def cut(self, row_id: str, spans: Sequence[tuple[int, int]]) -> list[Slab]:
        """Copies of a row's KV for token spans [start, stop), wherever the row is."""
        if row_id in self._prefilling:
            return kv_cache.cut(self._prefilling[row_id], 0, spans)
        return kv_cache.cut(self._caches, self._index(row_id), spans)

    def leave(self, row_ids: Sequence[str]) -> None:
        """Take rows out; unknown ids are ignored."""
        for row_id in row_ids:
            self._prefilling.pop(row_id, None)
        gone = set(row_ids)
        keep = [index for index, row in enumerate(self._rows) if row.row_id not in gone]
        if len(keep) == len(self._rows):
            return
        if not keep:
            self.clear_batch()
            return
        indices = mx.array(keep)
        for cache in self._caches:
            cache.filter(indices)
        assert self._inputs is not None
        self._inputs = self._inputs[indices]
        self._rows = [self._rows[index] for index in keep]
        self._sampler = None

    def clear_batch(self) -> None:
        """Forget every decoding row, after the last one left or a step failed."""
        self._rows, self._caches, self._inputs, self._sampler = [], [], None, None

    def _index(self, row_id: str) -> int:
        return next(index for index, row in enumerate(self._rows) if row.row_id == row_id)
