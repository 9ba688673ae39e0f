"""What orders a kernel that writes into its inputs, and those that read what it wrote (`gpu_kernels.py`): on Metal only
that they take its output. MLX's own graph says who does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.device.device import on_cuda
from satchel.actors.replica.kernels import decode_kernel, gpu_kernels, sealing
from satchel.actors.replica.kernels.decode_views import KernelView
from satchel.actors.replica.kernels.sealing import POLICIES, SealPolicy
from satchel.actors.replica.kv.paged_batch import PagedBatch, Reads
from satchel.actors.replica.kv.paged_cache import PagedKVCache
from satchel.actors.replica.kv.pool import BlockPool, Field, LayerFields, slots_of

pytestmark = pytest.mark.skipif(on_cuda(), reason="MLX records kernels for CUDA otherwise")

DIM = 64
WRITERS = "custom_kernel_satchel_write_"
VIEWS = {"Reshape", "Transpose", "Slice", "View", "AsStrided", "ExpandDims", "Squeeze", "Flatten", "Unflatten"}


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLX thinks that it has Metal, and records kernels for it."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    # MLX cannot export its own.
    monkeypatch.setattr(mx, "contiguous", sealing.copied)
    gpu_kernels.kernel.cache_clear()
    decode_kernel._plan.cache_clear()
    yield
    gpu_kernels.kernel.cache_clear()
    decode_kernel._plan.cache_clear()


class Story:
    """A layer whose blocks are written, and then read, in one evaluation."""

    def __init__(self, policy: SealPolicy, *, forgets: bool = False) -> None:
        self.policy, self.forgets = policy, forgets
        self.done: list[mx.array] = []
        self.pool = BlockPool([[0]], kernels=True)
        self.group = self.pool.groups[0]
        self.group.reserve(16)
        self.batch = PagedBatch.of_sequences(self.pool, 1, Reads.KERNEL)
        self.cache = PagedKVCache(0, policy, batch=self.batch)

    def add(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Appends (1, 1, tokens, DIM) as keys and as values; returns what attention gets."""
        self.cache.make_mask(tokens.shape[2])
        return self.cache.update_and_fetch(tokens, tokens)

    def written(self) -> None:
        """If it is to be one that forgets, what comes takes no output of what has been written."""
        self.done += self.group._written
        if self.forgets:
            self.group._written = [mx.zeros((1,), mx.uint32)]

    def fill(self, tokens: mx.array) -> None:
        """Seals blocks in two chunks, the second with two."""
        self.add(tokens[:, :, :300])
        self.done += self.group._written
        self.add(tokens[:, :, 300:800])
        self.written()

    def decode(self, tokens: mx.array) -> list[mx.array]:
        self.fill(tokens)
        self.add(tokens[:, :, 800:801])
        assert isinstance(self.cache.view, KernelView)
        return [decode_kernel.attend(tokens[:, :, 800:801], self.cache.view, self.policy, 1.0)]

    def prefill(self, tokens: mx.array) -> list[mx.array]:
        self.fill(tokens)
        return list(self.add(tokens[:, :, 800:]))

    def cut(self, tokens: mx.array) -> list[mx.array]:
        self.fill(tokens)
        number = self.group.written(0) + self.batch.tables[0][0].slots[1].number
        return [array[number] for array in self.group.layer(0)]

    def restore(self, tokens: mx.array) -> list[mx.array]:
        """From records, after other blocks were written."""
        self.fill(tokens)
        sealed = sealing.seal(tokens[:, :, :BLOCK_TOKENS], tokens[:, :, :BLOCK_TOKENS], self.policy)
        blocks = slots_of(sealed, 1)
        ends = list(accumulate((array.nbytes for array in blocks), initial=0))
        fields = [
            Field(start, stop, array.dtype, array.shape)
            for start, stop, array in zip(ends, ends[1:], blocks, strict=False)
        ]
        slots = self.group.take(1)
        self.group.write_records(slots, [LayerFields(type(blocks), fields)], mx.zeros((1, ends[-1]), mx.uint8))
        self.written()
        return list(self.group.gather(0, mx.array([[slots[0].number, 0]], mx.uint32)))


STORIES = {story.__name__: story for story in (Story.decode, Story.prefill, Story.cut, Story.restore)}


def unordered(run: Callable[[mx.array], list[mx.array]]) -> list[str]:
    """Returns who reads or writes an array that a kernel writes into, and neither depends on that kernel nor is what it
    depends on. Fails if nothing is written, or nobody reads it."""
    steps: list[dict[str, Any]] = []
    mx.export_function(steps.append, run, mx.zeros((1, 1, 1000, DIM)))
    operations = [step for step in steps if step["type"] == "primitive"]
    made = {name: at for at, step in enumerate(operations) for name, *_ in step["outputs"]}
    behind: list[set[int]] = []
    viewed: dict[str, str] = {}

    def memory_of(name: str) -> str:
        return viewed.get(name, name)

    users: defaultdict[str, set[int]] = defaultdict(set)
    for at, step in enumerate(operations):
        inputs = [name for name, *_ in step["inputs"]]
        makers = {made[name] for name in inputs if name in made}
        behind.append(makers.union(*(behind[maker] for maker in makers)))
        if step["name"] in VIEWS:
            viewed[step["outputs"][0][0]] = memory_of(inputs[0])
            continue
        for name in inputs:
            users[memory_of(name)].add(at)
    wrong, read = [], False
    writers = [at for at, step in enumerate(operations) if titled(step).startswith(WRITERS)]
    assert writers
    for writer in writers:
        inputs = [name for name, *_ in operations[writer]["inputs"]]
        name = titled(operations[writer]).removeprefix(WRITERS)
        kinds = int(name.removeprefix("records_").removeprefix("sealed_").partition("_")[0])
        for name in inputs[:kinds]:
            for user in users[memory_of(name)] - {writer}:
                read = read or user not in writers
                if writer not in behind[user] and user not in behind[writer]:
                    wrong.append(f"{titled(operations[user])} and {titled(operations[writer])} of {name}")
    assert read
    return wrong


def titled(step: dict[str, Any]) -> str:
    return step["arguments"][0] if step["name"] == "CustomKernel" else step["name"]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", STORIES)
def test_whoever_reads_a_slot_takes_the_output_of_all_that_wrote_the_pool(name: str, policy: SealPolicy):
    story = Story(policy)
    assert unordered(lambda tokens: [*STORIES[name](story, tokens), *story.done]) == []


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", STORIES)
def test_a_reader_that_does_not_is_noticed(name: str, policy: SealPolicy):
    story = Story(policy, forgets=True)
    assert unordered(lambda tokens: [*STORIES[name](story, tokens), *story.done])
