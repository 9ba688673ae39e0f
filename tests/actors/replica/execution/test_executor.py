"""A sequence's results and its KV do not depend on which others it was prefilled, decoded or cut with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.entries import flat_bytes, signature
from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.device.device_errors import DeviceFailed
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kv import attention, query_pieces, sequence_view
from satchel.actors.replica.kv.caches import PooledBlock, Slab
from satchel.actors.replica.loading.warming import warm_up
from satchel.actors.replica.loop import engine
from satchel.actors.replica.memory.slab_codec import Layout, to_parts
from tests.worlds.replica.bench import Bench, load_tiny

GREEDY = Sampling(temperature=0.0, max_tokens=100)
LENGTHS = (250, 250, 300, 40, 520)


INIT = BatchExecutor.__init__


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


def executor_of(loaded: LoadedModel) -> BatchExecutor:
    """As on a GPU: prompts in padded batches, sequences cut by way of all of them."""
    executor = BatchExecutor(loaded)
    executor.batched_prefill = executor._on_gpu = True
    return executor


def prefill(executor: BatchExecutor, prompts: Sequence[Sequence[int]]) -> list[str]:
    names = [str(sequence) for sequence in range(len(prompts))]
    for name in names:
        executor.open(name, [], None, 0)
    executor.prefill([(name, prompt[:-1]) for name, prompt in zip(names, prompts, strict=True)])
    return names


def join(executor: BatchExecutor, names: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
    for name in names:
        executor.join(name, prompts[int(name)], GREEDY, 0)


def decode(executor: BatchExecutor, steps: int) -> dict[str, list[int]]:
    drawn: dict[str, list[int]] = {}
    for _ in range(steps):
        for ready in executor.step():
            drawn.setdefault(ready.sequence_id, []).append(ready.token)
    return drawn


def bytes_of(executor: BatchExecutor, pieces: Sequence[Slab | PooledBlock]) -> list[list[bytes]]:
    spec = executor._loaded.spec
    return [[array.tobytes() for array in to_parts(spec, copy).values()] for copy in executor.copied(pieces)]


def alone(loaded: LoadedModel, prompt: Sequence[int], steps: int) -> tuple[list[int], list[list[bytes]]]:
    """What it draws, and the bytes of its blocks and its tail after that."""
    executor = BatchExecutor(loaded)
    names = prefill(executor, [prompt])
    join(executor, names, [prompt])
    drawn = decode(executor, steps)["0"]
    return drawn, bytes_of(executor, executor.cut("0", spans_of(executor.length("0"))))


def spans_of(length: int) -> list[tuple[int, int]]:
    whole = length // BLOCK_TOKENS * BLOCK_TOKENS
    spans = [(start, start + BLOCK_TOKENS) for start in range(0, whole, BLOCK_TOKENS)]
    return [*spans, (whole, length)] if whole < length else spans


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[tuple[list[int], list[list[bytes]]]]:
    return [alone(loaded, prompt, 8) for prompt in prompts_of(LENGTHS)]


@pytest.mark.parametrize("joining", ["0 1 2 3 4", "4 3 1"])
def test_sequences_that_were_prefilled_together_join_in_any_batch(
    loaded: LoadedModel, expected: list[tuple[list[int], list[list[bytes]]]], joining: str
):
    """All of them as they are, or some, in any order; the rest joins later or leaves."""
    prompts, first = prompts_of(LENGTHS), joining.split()
    executor = executor_of(loaded)
    names = prefill(executor, prompts)
    join(executor, first, prompts)
    drawn = decode(executor, 8)
    rest = [name for name in names if name not in first]
    executor.leave(rest[:1])
    join(executor, rest[1:], prompts)
    drawn |= {name: tokens for name, tokens in decode(executor, 8).items() if name not in first}
    assert drawn.keys() == set(names) - set(rest[:1])
    for name, tokens in drawn.items():
        assert tokens == expected[int(name)][0][: len(tokens)] and len(tokens) >= 7


def test_a_step_of_a_changed_batch_waits_only_for_what_was_drawn_before(loaded: LoadedModel):
    """The inputs of sequences that have joined are put together behind a prefill that runs ahead."""
    prompts = prompts_of([30, 40, 50, 60])
    executor = executor_of(loaded)
    names = prefill(executor, prompts)
    join(executor, names[:3], prompts)
    decode(executor, 3)
    executor.leave(names[1:2])
    join(executor, names[3:], prompts)
    executor._change_batch()
    batch = executor._now
    wanted = batch.inputs.tolist()
    assert [each.sequence_id for each in batch.sequences] == ["0", "2", "3"]
    assert wanted[2] == prompts[3][-1]
    batch.inputs = mx.zeros((3,), mx.uint32)
    assert batch.tokens() == wanted
    # After the step there is no change.
    batch.inputs = mx.array(wanted, mx.uint32)
    assert [ready.token for ready in executor.step()] == wanted[:2]
    assert batch.change is None


def test_sequences_that_join_together_are_not_taken_apart(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """A sequence of its own is two copies a layer, and as many to bring it back."""
    executor = executor_of(loaded)
    prompts = prompts_of((40, 40, 64, 50))
    names = prefill(executor, prompts)
    monkeypatch.setattr("satchel.actors.replica.kv.caches.extract", None)
    monkeypatch.setattr("satchel.actors.replica.kv.caches.merge", None)
    join(executor, names, prompts)
    assert decode(executor, 2).keys() == set(names)


def test_a_sequence_of_those_prefilled_together_goes_on_alone(
    loaded: LoadedModel, expected: list[tuple[list[int], list[list[bytes]]]]
):
    executor, prompts = executor_of(loaded), prompts_of(LENGTHS)
    for name in map(str, range(3)):
        executor.open(name, [], None, 0)
    executor.prefill([(str(sequence), prompts[sequence][:100]) for sequence in range(3)])
    executor.prefill([("2", prompts[2][100:-1])])
    executor.leave(["0"])
    executor.prefill([("1", prompts[1][100:-1])])
    join(executor, ["1", "2"], prompts)
    drawn = decode(executor, 8)
    assert {name: tokens == expected[int(name)][0][:7] for name, tokens in drawn.items()} == {"1": True, "2": True}


@pytest.mark.parametrize("limit", [sequence_view.STACK_BYTES_MAX, 0], ids=["together", "each for itself"])
def test_what_is_cut_is_the_sequence_s_own_to_the_last_byte(
    loaded: LoadedModel,
    expected: list[tuple[list[int], list[list[bytes]]]],
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Of many sequences after one step, whatever the batch does afterwards."""
    monkeypatch.setattr(sequence_view, "STACK_BYTES_MAX", limit)
    executor, prompts = executor_of(loaded), prompts_of(LENGTHS)
    names = prefill(executor, prompts)
    join(executor, names, prompts)
    decode(executor, 8)
    slabs = {name: executor.cut(name, spans_of(executor.length(name))) for name in names}
    executor.leave(names[::2])
    decode(executor, 3)
    for name in names:
        assert bytes_of(executor, slabs[name]) == expected[int(name)][1], name


def test_sequences_are_cut_anew_after_every_step(loaded: LoadedModel):
    """A cut through stacks does not use copies that were made before the batch changed."""
    executor, prompts = executor_of(loaded), prompts_of((250, 252))
    names = prefill(executor, prompts)
    join(executor, names, prompts)
    decode(executor, 3)
    before = bytes_of(executor, executor.cut("1", [(0, 240)]))
    executor.leave(["0"])
    decode(executor, 1)
    assert bytes_of(executor, executor.cut("1", [(0, 240)])) == before


def test_a_slab_keeps_no_other_sequence_alive(loaded: LoadedModel):
    executor, prompts = executor_of(loaded), prompts_of([300] * 8)
    names = prefill(executor, prompts)
    join(executor, names, prompts)
    decode(executor, 2)
    (slab,) = executor.cut(names[3], [(0, BLOCK_TOKENS)])
    mx.eval(slab.arrays())
    executor.leave(names)
    del executor
    mx.clear_cache()
    held = mx.get_active_memory()
    size = slab.nbytes
    del slab
    mx.clear_cache()
    assert held - mx.get_active_memory() <= 1.1 * size


@pytest.mark.slow
def test_the_warm_up_makes_all_plans_that_prompts_use_and_leaves_nothing_behind(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """Whatever prompts follow whatever histories, cuDNN would make no plan for them."""
    monkeypatch.setattr(BatchExecutor, "__init__", lambda self, loaded: as_on_a_gpu(self, loaded))
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    monkeypatch.setattr(attention.Heads, "planned", True)
    plans: set[object] = set()

    def planned(asked: mx.array, keys: mx.array, values: mx.array, cache: object, **named: Any) -> mx.array:
        if asked.shape[2] > 1:
            # Not a decode step.
            arrays = (asked, keys, values, named["mask"])
            plans.add(str([(array.shape, array.dtype) for array in arrays]))
        return mx.fast.scaled_dot_product_attention(asked, keys, values, **named)

    monkeypatch.setattr(llama, attention.NAME, attention._Attend(planned))
    pool, most = loaded.pool, 1500
    assert pool is not None
    before = pool.taken_bytes
    warm_up.meet_usual(loaded)
    pieces = warm_up.WarmUp(replace(loaded, context_tokens=most), 512)
    while pieces.step():
        # Between two steps the pool may shrink, whatever sequences a piece has there.
        pool.shrink(0)
    assert pool.taken_bytes <= before
    pool.check()
    # Columns of 1 to 8 blocks, and queries that are not more.
    assert len(plans) == sum(queries <= 256 * blocks for queries in query_pieces.PIECES for blocks in range(1, 9))
    warm, rng = set(plans), random.Random(3)
    for _ in range(6):
        executor, left = (
            BatchExecutor(loaded),
            {str(name): rng.randrange(1, most) for name in range(rng.choice([1, 3]))},
        )
        for name in left:
            executor.open(name, [], None, 0)
        while any(left.values()):
            work = {name: min(tokens, rng.randrange(1, 513)) for name, tokens in left.items() if tokens}
            executor.prefill([(name, [5] * tokens) for name, tokens in work.items()])
            left |= {name: left[name] - tokens for name, tokens in work.items()}
    assert plans == warm


def as_on_a_gpu(executor: BatchExecutor, loaded: LoadedModel) -> None:
    INIT(executor, loaded)
    executor.batched_prefill = True


@pytest.mark.parametrize("error", [RuntimeError, DeviceFailed])
def test_a_warm_up_that_fails_is_over_and_fails_nothing(
    error: type[BaseException], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    def fail(loaded: LoadedModel, sequences: int, length: int) -> None:
        raise error("out of memory")

    monkeypatch.setattr(warm_up, "_prefill", fail)
    warm_up.meet_usual(loaded)
    bench = Bench(loaded)
    bench.engine._warm_up = warm_up.WarmUp(loaded, 256)
    monkeypatch.setattr(engine, "QUIET_S", 0.0)
    bench.engine.wait()
    assert bench.engine._warm_up is None and bench.engine.counters.device_failures == 1
    assert bench.run("one", prompts_of([20])[0]).finish == "length"


def test_a_block_is_written_into_the_pool_without_a_copy_of_it(tmp_path: Path):
    """Whatever step is in flight: in decode steps that fill blocks, in prefill beside them, and from disk."""
    # Of its own: each turn of an engine in a test looks at all slots of its pool.
    loaded = load_tiny(tmp_path)
    executor, prompts = executor_of(loaded), prompts_of([250, 253, 300])
    assert loaded.pool is not None
    (group,) = loaded.pool.groups
    spare = group.take(30_000)
    names = prefill(executor, prompts)
    join(executor, names, prompts)
    decode(executor, 2)
    largest = max(array.nbytes for array in group.arrays())
    del spare
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decode(executor, 10)
    executor.open("more", [], None, 0)
    executor.prefill([("more", prompts_of([700])[0])])
    blocks = executor.cut("more", [(0, BLOCK_TOKENS)])
    decode(executor, 1)
    slabs = executor.copied(blocks)
    mx.eval([slab.arrays() for slab in slabs])
    parts = [to_parts(loaded.spec, slab) for slab in slabs]
    data = np.stack([np.concatenate([flat_bytes(array) for array in each.values()]) for each in parts])
    executor.adopt(Layout(loaded.spec, signature(parts[0])).records(data, [0]))
    decode(executor, 1)
    mx.synchronize()
    assert mx.get_peak_memory() - before < largest / 2, "an array of the pool was copied"


def test_what_was_computed_before_it_is_not_its_temporary_memory(loaded: LoadedModel):
    """Tests of a load may need more than any prompt."""
    much = 2**26
    mx.eval(mx.zeros((much,), mx.uint8) + 1)
    executor = BatchExecutor(loaded)
    for name in ("one", "two"):
        executor.open(name, [], None, 0)
        executor.prefill([(name, [1, 2, 3])])
    assert 0 < executor.workspace_bytes < much
