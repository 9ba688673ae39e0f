"""Whether a token's logits have the same bits whatever else a step computes is tried, not taken for granted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx

from satchel.actors.replica.execution.recorded.compiled_step import CompiledStep
from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.ways.alike import tokens_alike
from satchel.actors.replica.proving.pieces import IN_ONE_PIECE
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels


class Rounding:
    """A step that rounds otherwise if it computes more than so many tokens."""

    def __init__(self, step: CompiledStep, most: int) -> None:
        self._step, self._most = step, most

    def __call__(self, tokens: Sequence[int], *others: Any) -> mx.array | None:
        logits = self._step(tokens, *others)
        return logits if logits is None or len(tokens) <= self._most else logits * (1 + 2**-20)


def test_steps_are_alike_up_to_where_they_begin_to_round_otherwise(tmp_path: Path):
    folder = str(write_model(tmp_path / "model", "qwen2"))
    with nullcontext() if gpu_kernels.is_available() else fake_kernels.kernels():
        loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False)
        assert loaded.way.alike == 128
        step = CompiledStep(loaded.model, loaded.deferral, fusions=loaded.fusions)
        for most, alike in ((32, 32), (7, 0)):
            rounding: Any = Rounding(step, most)
            assert tokens_alike(loaded.model, loaded.spec, rounding, 1, 64, IN_ONE_PIECE) == alike
