"""A recorded step computes what the model does, in every batch and after every change of the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.execution.decode_way import DecodeWay
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.kernels.decode_views import KernelView, padded_rows
from satchel.actors.replica.kernels.head_transform import HeadTransform, Norm
from satchel.actors.replica.kv.caches import new_pool
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.warming.warm_up import WarmUp
from satchel.actors.replica.memory.slab_codec import to_parts
from tests.worlds.models import vision_families
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.drafting import oracle

GREEDY = Sampling(temperature=0.0, max_tokens=1000)
LENGTHS = (236, 236, 256, 500, 740, 3)


@pytest.fixture
def kernels() -> Iterator[None]:
    """A GPU's kernels, or what stands for them."""
    with nullcontext() if gpu_kernels.is_available() else fake_kernels.kernels():
        yield


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("qwen2", "q4"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("llama", "fp16"), ("gpt_oss", "fp16"), ("gpt_oss", "q4")]
        ),
    ],
)
def test_sequences_say_the_same_if_steps_with_drafts_come_between_recorded_ones(
    family: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A kernel writes into the open blocks, which a step with drafts reads and replaces; both with one sequence and
    with several, some of which fill blocks while others are drafted. What is kept of them is right too."""
    folder = str(write_model(tmp_path / "model", family))
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False, kv=kv)
    assert loaded.way.compiled and not loaded.undrafted
    rng = random.Random(2)
    prompts = [[rng.randrange(3000) for _ in range(length)] for length in (236, 500, 740, 3)]
    said = [Bench(loaded).run("one", prompt, max_tokens=44).tokens for prompt in prompts]
    filled, step_ahead = [], BatchExecutor._step_ahead

    def noted(executor: BatchExecutor, inputs: mx.array, drafts: list[list[int]]) -> Any:
        filled.append(executor._seals)
        return step_ahead(executor, inputs, drafts)

    monkeypatch.setattr(BatchExecutor, "_step_ahead", noted)
    with oracle([prompt + tokens for prompt, tokens in zip(prompts, said, strict=True)]):
        bench = Bench(loaded, drafts=True)
        bench.engine.executor.batched_prefill = True
        for index, prompt in enumerate(prompts):
            bench.submit(str(index), prompt, max_tokens=32)
            bench.turn()
        bench.drain()
        assert any(filled) and not all(filled)
        for index, (prompt, tokens) in enumerate(zip(prompts, said, strict=True)):
            again = bench.run(f"again {index}", prompt + tokens[:32], generated=32, max_tokens=12)
            assert again.tokens == tokens[32:] and again.cached is not None
            assert again.cached >= (len(prompt) + 31) // BLOCK_TOKENS * BLOCK_TOKENS
        alone = bench.run("alone", prompts[1], max_tokens=32)
    assert [bench.sequences[str(index)].tokens for index in range(4)] == [tokens[:32] for tokens in said]
    assert alone.tokens == said[1][:32]
    assert bench.engine.executor.drafts.right > 40


@pytest.mark.variants(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("qwen2", "q4"),
        pytest.param("qwen2", "fp16", marks=pytest.mark.slow),
        # Windows, sinks and experts.
        ("gpt_oss", "q4"),
        # Capped scores, which MLX's attention does not have.
        ("gemma2", "q4"),
        *(pytest.param(family, "q4", marks=pytest.mark.slow) for family in ("qwen3_moe", "gemma3_text")),
    ],
)
def test_sequences_that_join_fill_blocks_and_leave_get_the_same_tokens_and_kv(family: str, kv: str, tmp_path: Path):
    """Whether the graph is recorded or not; and as without a kernel, where nothing is rounded otherwise: read where
    they lie, or dequantized."""
    write_model(tmp_path / "model", family)
    folder = str(tmp_path / "model")
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", kv=kv, warm=False)
    assert loaded.way == DecodeWay(
        Reads.KERNEL, compiled=True, fused=True, summed=loaded.way.summed, alike=loaded.way.alike
    )
    assert loaded.way.summed or on_gpu()
    told = story(replace(loaded, way=replace(loaded.way, summed=True)))
    check_alike(told, story(replace(loaded, way=DecodeWay(Reads.KERNEL, compiled=True))))
    check_alike(told, story(replace(loaded, way=DecodeWay(Reads.KERNEL))))
    if not on_gpu():
        check_alike(told, story(without_kernels(loaded, Reads.IN_PLACE)))
        check_alike(told, story(without_kernels(loaded)))


def quantized(*codes: int) -> Story:
    words = np.array(codes, np.uint8).reshape(-1, 2)
    return {"1": [7]}, [
        np.ascontiguousarray(words[:, 0] | words[:, 1] << 4).view(np.uint32),
        np.full(4, 0.5, np.float32),
    ]


def test_kv_that_was_rounded_otherwise_is_alike_and_other_kv_is_not():
    """On a GPU a recorded step may add in another order."""
    codes = [3] * 1024
    told = quantized(*codes)
    check_alike(told, quantized(*codes), exact=True)
    check_alike(told, quantized(*codes[:-1], 4), exact=False)
    for other in (quantized(*codes[:-1], 5), quantized(*codes[:-64], *[4] * 64), ({"1": [8]}, told[1])):
        with pytest.raises(AssertionError):
            check_alike(told, other, exact=False)
    with pytest.raises(AssertionError):
        check_alike(told, quantized(*codes[:-1], 4), exact=True)
    off = told[0], [told[1][0], told[1][1] + np.float32(1e-4)]
    check_alike(told, off, exact=False)
    with pytest.raises(AssertionError):
        check_alike(told, (told[0], [told[1][0], told[1][1] * 1.01]), exact=False)


@pytest.mark.skipif(on_gpu(), reason="a GPU has its own kernel")
@pytest.mark.parametrize("context", [4_096, 32_768])
def test_a_kernel_that_rotates_otherwise_far_away_is_found_out(
    context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where sequences can be as long. Then the model rotates itself."""
    model_does = HeadTransform._apply

    def apply(self: HeadTransform, norm: Norm | None, x: mx.array, positions: mx.array) -> mx.array:
        return model_does(self, norm, x, mx.where(positions > 20_000, -positions, positions))

    monkeypatch.setattr(HeadTransform, "_apply", apply)
    folder = write_model(tmp_path / "model", "qwen2", max_position_embeddings=context)
    with fake_kernels.kernels():
        loaded = models.load(
            str(folder), context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False
        )
    assert loaded.way.compiled and loaded.way.fused is (context < 20_000)


@pytest.mark.skipif(on_gpu(), reason="a GPU has its own kernel")
def test_a_kernel_that_computes_drafts_otherwise_is_used_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = fake_kernels.attend

    def attend(queries: mx.array, view: KernelView, *rest: Any) -> mx.array:
        out = kernel(queries, view, *rest)
        return out if view.step.read.most == 1 else -out

    monkeypatch.setattr(fake_kernels, "attend", attend)
    folder = write_model(tmp_path / "model", "qwen2")
    with fake_kernels.kernels():
        loaded = models.load(
            str(folder), context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False
        )
        assert loaded.way.compiled and loaded.way.fused and not loaded.way.drafts
        bench = Bench(loaded, drafts=True)
        bench.submit("one", [1, 2, 3], max_tokens=4)
        while not bench.engine.executor._sequences:
            bench.turn()
        assert not bench.engine.executor.takes_drafts


@pytest.mark.skipif(on_gpu(), reason="a GPU rounds otherwise without kernels")
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_an_engine_with_kernels_answers_as_one_without(family: str, tmp_path: Path):
    """After the warm-up, with prompts that go on from a token of another's, padded together and joined at any time."""
    write = vision_families.write_model if family in vision_families.FAMILIES else write_model
    write(tmp_path / "model", family)
    with fake_kernels.kernels():
        folder = str(tmp_path / "model")
        loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=True)
        assert loaded.way.reads is Reads.KERNEL
        pieces = WarmUp(loaded, 256)
        for _ in range(12):
            pieces.step()
        answers = bursts(loaded)
    assert answers == bursts(without_kernels(loaded))
    assert not any(error for _, error in answers.values())


@pytest.mark.usefixtures("kernels")
def test_few_graphs_are_recorded_while_sequences_join_and_leave_one_by_one(tmp_path: Path):
    """Their number is padded; a graph takes as long as several steps."""
    folder = str(write_model(tmp_path / "model", "qwen2"))
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False)
    executor, sizes = BatchExecutor(loaded), set[int]()
    for sequence in map(str, range(13)):
        executor.open(sequence, [], None, 0)
        executor.prefill([(sequence, [5, 6])])
        executor.join(sequence, [5, 6, 7], GREEDY, 0)
        executor.step()
        sizes.add(len(executor._sequences))
    for sequence in map(str, range(12)):
        executor.leave([sequence])
        assert [ready.sequence_id for ready in executor.step()] == [*map(str, range(int(sequence) + 1, 13))]
        sizes.add(len(executor._sequences))
    assert executor._compiled is not None and sizes == {*range(1, 14)}
    assert len(executor._compiled._graphs) == len({padded_rows(size) for size in sizes}) == 5


def without_kernels(loaded: LoadedModel, reads: Reads = Reads.DEQUANTIZED) -> LoadedModel:
    return replace(loaded, way=DecodeWay(reads), pool=new_pool(loaded.spec))


def bursts(loaded: LoadedModel) -> dict[str, tuple[list[int], object]]:
    bench = Bench(loaded, sequences_max=32)
    bench.engine.executor.batched_prefill = True
    for number, (count, length, answer) in enumerate(
        [(1, 32, 8), (6, 32, 8), (1, 128, 128), (6, 128, 130), (3, 300, 20)]
    ):
        rng = random.Random(number)
        for sequence in range(count):
            prompt = [7, *(rng.randrange(10, 3000) for _ in range(length - 1))]
            bench.submit(f"{number}.{sequence}", prompt, max_tokens=answer)
        bench.drain()
    return {name: (sequence.tokens, sequence.error) for name, sequence in bench.sequences.items()}


Story = tuple[dict[str, list[int]], list[np.ndarray]]
"""Tokens by sequence, and arrays of KV: numbers, or codes of four bits."""

OFF_MOST, CODES_MOST = 1e-3, 0.01
"""How far numbers may be off on a GPU, of the largest, and which part of the codes may be the next one."""


def check_alike(one: Story, other: Story, exact: bool | None = None) -> None:
    """Checks that tokens are equal, and KV to the last bit; on a GPU within a bound, as it may round otherwise."""
    assert one[0] == other[0]
    for array, second in zip(one[1], other[1], strict=True):
        if not on_gpu() if exact is None else exact:
            assert array.tobytes() == second.tobytes()
        elif array.dtype == np.uint32:
            steps = np.abs(codes_of(array) - codes_of(second))
            assert steps.max() <= 1 and steps.mean() <= CODES_MOST
        else:
            assert np.abs(array - second).max() <= OFF_MOST * np.abs(array).max()


def codes_of(words: np.ndarray) -> np.ndarray:
    halves = words.view(np.uint8)
    return np.stack([halves & 15, halves >> 4]).astype(np.int8)


def story(loaded: LoadedModel) -> Story:
    """Sequences are prefilled in twos and join, decode over the ends of blocks, and half of them leave. Returns their
    tokens, and what is left in the first layer, before which nothing is rounded."""
    rng, executor, drawn = random.Random(5), BatchExecutor(loaded), {}
    executor.batched_prefill = True
    prompts = [[rng.randrange(10, 500) for _ in range(length)] for length in LENGTHS]
    for first in range(0, len(LENGTHS), 2):
        together = [(str(sequence), prompts[sequence]) for sequence in (first, first + 1)]
        for sequence, _ in together:
            executor.open(sequence, [], None, 0)
        executor.prefill([(sequence, prompt[:-1]) for sequence, prompt in together])
        for sequence, prompt in together:
            executor.join(sequence, prompt, GREEDY, 0)
        for _ in range(5):
            note(executor, drawn)
    executor.leave(["0", "3"])
    for _ in range(30):
        note(executor, drawn)
    left = list[np.ndarray]()
    for sequence in ("1", "2", "4", "5"):
        whole = executor.length(sequence) // BLOCK_TOKENS * BLOCK_TOKENS
        spans = [(start, start + BLOCK_TOKENS) for start in range(0, whole, BLOCK_TOKENS)]
        pieces = executor.copied(executor.cut(sequence, [*spans, (whole, executor.length(sequence))]))
        parts = [to_parts(loaded.spec, piece) for piece in pieces if piece.window_from == 0]
        left += [np.array(array) for each in parts for name, array in each.items() if name.startswith("0.")]
    executor.check()
    return drawn, left


def note(executor: BatchExecutor, drawn: dict[str, list[int]]) -> None:
    for ready in executor.step():
        drawn.setdefault(ready.sequence_id, []).append(ready.token)
