"""On Metal a step in flight is waited for, before what it wrote in place is read by what takes none of its outputs, and
before what it reads is written (`gpu_kernels.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.entries import flat_bytes, signature
from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.kernels import block_kernels, decode_kernel
from satchel.actors.replica.kv.paged_cache import PagedKVCache, Reads
from satchel.actors.replica.kv.pool import SlotGroup
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory.slab_codec import Layout, to_parts
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels

pytestmark = pytest.mark.skipif(on_gpu(), reason="a GPU has its own kernels")

STEP, WAIT, SEAL, READ, WRITE = "a step", "a wait", "sealing", "reading open blocks", "writing into the pool"
KINDS = {STEP, WAIT, SEAL, READ, WRITE}


def watched(patch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list of what is launched and what is waited for from now on."""
    seen: list[str] = []

    def noted(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            seen.append(what)
            return real(*given, **named)

        return call

    def seal_filled(cache: PagedKVCache) -> None:
        if cache._filled is not None:
            seen.append(SEAL)
        sealing(cache)

    def update_and_fetch(cache: PagedKVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[2] > 1 and cache.nbytes:
            seen.append(READ)
        return updating(cache, keys, values)

    sealing, updating = PagedKVCache.seal_filled, PagedKVCache.update_and_fetch
    patch.setattr(PagedKVCache, "update_and_fetch", update_and_fetch)
    patch.setattr(PagedKVCache, "seal_filled", seal_filled)
    for method in (PagedKVCache.tail, PagedKVCache.filter, PagedKVCache.extend):
        patch.setattr(PagedKVCache, method.__name__, noted(READ, method))
    patch.setattr(decode_kernel, "attend", noted(STEP, decode_kernel.attend))
    patch.setattr(block_kernels, "write", noted(WRITE, block_kernels.write))
    # From the disk, by the host or by a kernel; and into other slots.
    for method in (SlotGroup.write_records, SlotGroup.shrink):
        patch.setattr(SlotGroup, method.__name__, noted(WRITE, method))
    patch.setattr(mx, "synchronize", noted(WAIT, mx.synchronize))
    return seen


def test_nothing_meets_a_step_that_writes_in_place(tmp_path: Path):
    """Sequences are prefilled beside others, join, fill blocks while they decode, are cut, leave, and blocks come from
    the disk."""
    folder = str(write_model(tmp_path / "model", "qwen2", bits=4))
    how: dict[str, Any] = {"dtype": "float32", "weights": "stored", "warm": False}
    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, **how)
        assert loaded.way.reads is Reads.KERNEL
        executor, events = BatchExecutor(loaded), watched(patch)
        for name, length in {"a": 250, "b": 3, "c": 600, "d": 509}.items():
            prompt = [7 + token % 500 for token in range(length)]
            executor.open(name, [], None, 0)
            executor.prefill([(name, prompt[:-1])])
            executor.join(name, prompt, Sampling(temperature=0.0, max_tokens=100), 0)
            for _ in range(5):
                executor.step()
        blocks = executor.cut("c", [(0, BLOCK_TOKENS), (2 * BLOCK_TOKENS, executor.length("c"))])[:1]
        executor.step()
        parts = [to_parts(loaded.spec, copy) for copy in executor.copied(blocks)]
        data = np.stack([np.concatenate([flat_bytes(array) for array in each.values()]) for each in parts])
        executor.adopt(Layout(loaded.spec, signature(parts[0])).records(data, [0]))
        executor.step()
        executor.give_back(0)
        executor.step()
        executor.leave(["a", "b"])
        executor.step()
        executor.leave(["d"])
        executor.step()
        # Several tokens of the only sequence, which its grammar leaves no choice of.
        executor._now.forced = (7, 8, 9)
        executor.step()
    assert set(events) == KINDS
    flying, sealing = False, False
    for at, event in enumerate(events):
        before = events[max(0, at - 5) : at]
        if event == WAIT:
            flying = sealing = False
        elif event == STEP:
            assert not sealing, f"a step writes into blocks that are being sealed: {before}"
            flying = True
        else:
            assert not flying, f"{event} meets a step in flight: {before}"
            sealing = sealing or event == SEAL
