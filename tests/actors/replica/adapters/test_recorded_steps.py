"""Recorded decode steps, in which the numbers of adapters are an input: with a GPU's kernels, or what replaces them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.replica.drafting.pace import DraftPace
from satchel.actors.replica.execution.executor import BatchExecutor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.loading import models
from tests.worlds.models.adapters import write_adapter
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.drafting import oracle

NAMES = ("", "one", "two", "one")
LENGTHS = (236, 500, 740, 3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("recorded")
    model = write_model(folder / "model", "qwen2")
    whole = load_checkpoint(model, trusted=False)[0]
    # Scales of two change no last bit.
    adapters = {
        name: str(write_adapter(folder / name, whole, rank=rank, seed=rank)) for name, rank in (("one", 4), ("two", 8))
    }
    with nullcontext() if gpu_kernels.is_available() else fake_kernels.kernels():
        yield models.load(
            str(model),
            context_tokens_max=None,
            progress=lambda *_: None,
            dtype="float32",
            warm=False,
            adapters=adapters,
            gathers=True,
        )


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3000) for _ in range(length)] for length in LENGTHS]


def said(bench: Bench, names: tuple[str, ...] = NAMES) -> list[list[int]]:
    """What sequences say that join one after the other; the first ones leave first."""
    for index, (name, prompt) in enumerate(zip(names, prompts(), strict=True)):
        bench.submit(str(index), prompt, max_tokens=30 + index, adapter=name)
        bench.turn()
    bench.drain()
    return [bench.sequences[str(index)].tokens for index in range(len(names))]


def test_recorded_steps_say_what_others_say(loaded: LoadedModel):
    """In one batch as alone, recorded or not; and a batch without adapters as a model without any."""
    assert loaded.way.compiled
    together = said(Bench(loaded))
    alone = [
        Bench(loaded).run("one", prompt, max_tokens=30 + index, adapter=name).tokens
        for index, (name, prompt) in enumerate(zip(NAMES, prompts(), strict=True))
    ]
    assert together == alone
    assert together == said(Bench(replace(loaded, way=replace(loaded.way, compiled=False, fused=False))))
    assert together != said(Bench(loaded), ("",) * 4)
    bare = models.load(
        str(loaded.folder), context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False
    )
    assert said(Bench(loaded), ("",) * 4) == said(Bench(bare), ("",) * 4)


def test_drafts_in_recorded_steps_have_their_sequences_adapters(loaded: LoadedModel):
    expected = said(Bench(loaded))
    with oracle([prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]):
        bench = Bench(loaded, drafts=True)
        bench.engine.executor.batched_prefill = True
        assert said(bench) == expected
    assert bench.engine.executor.drafts.right > 20


def test_exact_drafts_are_where_a_test_has_found_the_same_bits(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """In steps of no more tokens than it has found, and beside no adapter: these it has not tried. Each draft pays."""
    names, lengths, computed, adapters = ("",) * 4, DraftPace.lengths, list[int](), set[int]()
    compute = BatchExecutor.compute_ahead

    def noting(executor: BatchExecutor, tokens: Sequence[Sequence[int]]) -> mx.array:
        adapters.update(each.adapter for each in executor._sequences)
        computed.append(sum(map(len, tokens)))
        return compute(executor, tokens)

    monkeypatch.setattr(BatchExecutor, "compute_ahead", noting)
    expected = said(Bench(loaded), names)
    alike = replace(loaded, way=replace(loaded.way, alike=8))
    scripts = [prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]
    with oracle(scripts), pytest.MonkeyPatch.context() as patch:
        for name, value in (("lengths", lengths), ("is_timed", lambda *_: True), ("single_s", lambda *_: 1.0)):
            patch.setattr(DraftPace, name, value)
        patch.setattr(DraftPace, "_known", lambda *_: 1.0)
        bench = Bench(alike, exact_drafts=True)
        bench.engine.executor.batched_prefill = True
        assert said(bench, names) == expected
        assert max(computed) == 8
        bench.sequences.clear()
        said(bench)
    assert adapters == {0}
    assert not Bench(replace(loaded, way=replace(loaded.way, alike=0)), exact_drafts=True).engine.executor.drafts.wanted


def test_a_recorded_graph_takes_other_numbers(loaded: LoadedModel):
    """It is recorded once, and not for the adapters of its first call."""
    adapted, tokens = loaded.adapters.adapted, mx.array([[5], [70], [900]], mx.uint32)

    def run(ids: mx.array, numbers: mx.array) -> mx.array:
        with adapted.recording(numbers):
            return loaded.model(ids)

    mx.enable_compile()
    try:
        recorded = mx.compile(run)
        for numbers in ([0, 1, 2], [2, 2, 0], [0, 0, 0]):
            found = np.array(recorded(tokens, mx.array(numbers, mx.uint32)))
            with adapted.calling(numbers):
                expected = np.array(loaded.model(tokens))
            assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    finally:
        if not gpu_kernels.is_available():
            mx.disable_compile()
