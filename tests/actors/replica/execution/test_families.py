"""The position law for every family of models, through the whole engine.

The weights are random, so the likeliest token is often a close call and free-running answers would part at rounding.
Every sequence is therefore *forced*: a sampler in place of the real one gives it the tokens of its script and notes the
logits that it would have drawn from. The reference is one forward pass over the whole script: of the model itself,
without any cache, and where KV is sealed through one empty cache, which `test_paged_cache.py` holds against attention
written out. Where attention is all there is, sequences in company must also equal the sequence alone to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels import prefill_kernel
from satchel.actors.replica.kv import attention
from satchel.actors.replica.loading import models
from tests.worlds.models.families import FAMILIES, VOCABULARY, write_model
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench, Forced, Logits
from tests.worlds.replica.drafting import oracle

TOLERANCE = 2e-5
"""Of the logits' scale. In float32 the paths differ by rounding only."""

FLIPPED_TOLERANCE, FLIPPED_MAX = 2e-2, 0.1
"""Of recurrent models with sealed KV, and the share of positions that may be off by so much. Their chunked scans round
in another order, and where a number lies between two codes that decides which one it gets, for all that follows."""

EXEMPT_MAX = 0.02
"""How many positions may have a top-2 gap too small to ask for the same best token."""

PROMPTS = (1, 3, 60, 255, 256, 257, 420, 610)
ANSWERS = (9, 30, 14, 8, 20, 7, 25, 40)


class Family:
    """A loaded tiny model, its sequences' scripts, and the logits that the bare model has for them.

    Attributes:
        ways: tokens of a chunk, and whether prompts run as padded batches.
        alone: what `run_alone` has found.
    """

    def __init__(self, folder: Path, name: str, bits: int | None, kv: str) -> None:
        self.bits = bits
        if bits is not None:
            self.ways = [(512, True)]
        else:
            self.ways = [(256, False), (1024, True)] if name in PADDED else [(256, False)]
        self.loaded: LoadedModel = models.load(
            str(write_model(folder / name, name, bits=bits)),
            context_tokens_max=None,
            progress=lambda *_: None,
            weights="stored",
            kv=kv,
            numerics="reproducible",
        )
        assert self.loaded.kv == kv
        rng = random.Random(3)
        self.scripts = {
            sequence: [rng.randrange(VOCABULARY) for _ in range(prompt + answer)]
            for sequence, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
        }
        self.alone: Logits = {}
        self.reference: Logits = {}
        for sequence, script in self.scripts.items():
            caches = None if kv == "fp16" else self.loaded.new_caches()
            values = np.array(self.loaded.model(mx.array([script]), cache=caches)[0].astype(mx.float32))
            for drawn in range(ANSWERS[sequence]):
                self.reference[(sequence, drawn)] = values[PROMPTS[sequence] - 1 + drawn]

    @property
    def exact(self) -> bool:
        """Whether bits are promised: full attention in dense layers, in float32. The others sum in another order."""
        return self.loaded.spec.rule.window == 0 and not self.loaded.spec.recurrent

    @property
    def flips(self) -> bool:
        return self.loaded.spec.recurrent and self.loaded.kv != "fp16"

    def compare(self, noted: Logits, what: str) -> None:
        exempt = flipped = 0
        for key, expected in self.reference.items():
            scale = np.abs(expected).max()
            error = np.abs(noted[key] - expected).max()
            flipped += error > TOLERANCE * scale
            tolerance = FLIPPED_TOLERANCE if self.flips else TOLERANCE
            assert error <= tolerance * scale, (
                f"{what}: sequence {key[0]}, draw {key[1]}: off by {error:.2e} of {scale:.2f}"
            )
            best, second = np.sort(expected)[::-1][:2]
            if best - second > 10 * TOLERANCE * scale and error <= TOLERANCE * scale:
                assert noted[key].argmax() == expected.argmax(), f"{what}: sequence {key[0]}, draw {key[1]}"
            else:
                exempt += 1
        print(f"{what}: {exempt} of {len(self.reference)} positions are close calls, {flipped} see another code")
        assert flipped <= FLIPPED_MAX * len(self.reference)
        assert exempt - flipped <= EXEMPT_MAX * len(self.reference)


KINDS = ((None, "fp16"), (None, "q4"), (4, "q4"))
"""Bits of the weights, and how KV is kept."""

ALWAYS: dict[str, tuple[int | None, str]] = {
    # Full attention in dense layers; with biases, with a rotation of half of each head, and tied to the embeddings.
    "qwen2": (None, "q4"),
    "llama": (None, "fp16"),
    "glm4": (None, "q4"),
    "qwen3": (None, "q4"),
    "qwen3_moe": (4, "q4"),
    # Keys and values of different sizes.
    "deepseek_v2": (None, "q4"),
    # Windows, longer and shorter than a block, and sinks.
    "gemma3_text": (None, "q4"),
    "gpt_oss": (None, "q4"),
    # States of recurrent layers: in full precision they are compared by the small tolerance.
    "qwen3_next": (None, "fp16"),
    "nemotron_h": (None, "q4"),
}
"""How each family is tried every time; other ways are slow."""

PADDED = ("llama", "gemma3_text", "gpt_oss", "deepseek_v2", "nemotron_h")
"""Those that are also tried with larger chunks, and prefill in padded batches where there are such, as on a GPU."""

DISTINCT = ("llama", "qwen2", "gpt_oss", "deepseek_v2")
"""Each attends in another way: with full or sealed KV, windows and sinks, values smaller than keys."""


USUAL = tuple(name for name in ALWAYS if name not in ("glm4", "qwen3", "gemma3_text", "qwen3_moe", "qwen2"))
"""The first two differ from others in norms and rotations only; windows, experts and sealed KV are gpt_oss's too."""


def _params(among: Collection[str]) -> list[Any]:
    return [
        pytest.param(
            (name, *kind),
            marks=[] if name in among and ALWAYS[name] == kind else [pytest.mark.slow],
            id="-".join(map(str, (name, *kind))),
        )
        for name in FAMILIES
        for kind in KINDS
    ]


few_families = pytest.mark.parametrize("family", _params(DISTINCT), indirect=True)
"""For tests of what families share but for their attention; the others are slow."""


@pytest.fixture(scope="module", params=_params(USUAL))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("models"), *request.param)


@pytest.fixture
def forced(family: Family, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Bench, Logits]]:
    def make(**scheduling: Any) -> tuple[Bench, Logits]:
        noted: Logits = {}
        monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(family.scripts, noted))
        return Bench(family.loaded, **scheduling), noted

    return make


def submit(bench: Bench, family: Family, sequence: int, name: str, more: int = 0) -> None:
    bench.submit(
        name, family.scripts[sequence][: PROMPTS[sequence] + more], seed=sequence, max_tokens=ANSWERS[sequence] - more
    )


def run_alone(make: Callable[..., tuple[Bench, Logits]], family: Family) -> Logits:
    """Each sequence in an engine of its own, computed once for a family."""
    for sequence in family.scripts if not family.alone else ():
        bench, noted = make()
        submit(bench, family, sequence, "one")
        bench.drain()
        assert bench.sequences["one"].tokens == family.scripts[sequence][PROMPTS[sequence] :]
        family.alone |= noted
    return family.alone


def same_bits(left: Logits, right: Logits, keys: Sequence[tuple[int, int]]) -> bool:
    return all(np.array_equal(left[key], right[key]) for key in keys)


def test_batched_cached_and_chunked_sequences_equal_the_bare_model(
    family: Family, forced: Callable[..., tuple[Bench, Logits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch of 8 joining and leaving at random, prefix cached, and with any chunk size: the same logits."""
    keys = list(family.reference)
    alone = run_alone(forced, family)
    family.compare(alone, "alone")
    rng = random.Random(1)
    for chunk, together in family.ways:
        bench, noted = forced(prefill_chunk_tokens=chunk, prefill_sequences_max=3)
        # A machine's speed decides, so here chance does.
        budgets = [size for size in (64, 128, 256, 512, 1024) if size <= chunk]
        monkeypatch.setattr(bench.engine.prefill.pace, "budget", lambda decoding, sizes=budgets: rng.choice(sizes))
        for round_name in ("cold", "cached"):
            order = list(family.scripts)
            rng.shuffle(order)
            executor = bench.engine.executor
            executor.batched_prefill = executor.runs_ahead = together and not family.loaded.spec.recurrent
            for sequence in order:
                submit(bench, family, sequence, f"{round_name}{sequence}")
                for _ in range(rng.randrange(4)):
                    bench.turn()
            bench.drain()
            family.compare(noted, f"{round_name}, chunks of {chunk}")
            assert together or not family.exact or same_bits(noted, alone, keys)
            noted.clear()
        reused = sum(bench.sequences[f"cached{sequence}"].cached or 0 for sequence in family.scripts)
        whole = sum((prompt - 1) // 256 * 256 for prompt in PROMPTS)
        # Recurrent layers can go on only from a snapshot.
        assert reused >= (256 if family.loaded.spec.recurrent else whole)


def compare_together(bench: Bench, family: Family, noted: Logits) -> None:
    """Computes all sequences at once, then again from what is kept, and compares them with the bare model."""
    tolerance = TOLERANCE if family.loaded.kv == "fp16" else FLIPPED_TOLERANCE
    for round_name in ("cold", "cached"):
        for sequence in family.scripts:
            submit(bench, family, sequence, f"{round_name}{sequence}")
        bench.drain()
        for key, logits in family.reference.items():
            assert np.abs(noted[key] - logits).max() <= tolerance * np.abs(logits).max(), f"{round_name}, {key}"
        noted.clear()


@pytest.mark.variants(4)
@few_families
@pytest.mark.parametrize("few_queries", [256, 40])
def test_prompts_on_cuda_equal_the_bare_model(
    few_queries: int,
    family: Family,
    forced: Callable[..., tuple[Bench, Logits]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short turns attend by products of their own, which round in another way, so that codes may differ, others in
    pieces."""
    if family.loaded.spec.recurrent:
        pytest.skip("its prompts are not padded")
    few, cut, taken = attention.attend_few, attention.pieces_of, []
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    monkeypatch.setattr(attention, "attend_few", lambda *given: taken.append(given) or few(*given))
    monkeypatch.setattr(attention, "pieces_of", lambda *given: taken.append(given) or cut(*given))
    monkeypatch.setattr(attention, "FEW_QUERIES", few_queries)
    bench, noted = forced(prefill_chunk_tokens=256 if few_queries == 256 else 1024)
    bench.engine.executor.batched_prefill = True
    compare_together(bench, family, noted)
    assert taken


@pytest.mark.variants(3)
@few_families
def test_prompts_that_a_kernel_attends_for_equal_the_bare_model(
    family: Family, forced: Callable[..., tuple[Bench, Logits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is told where a chunk's tokens are; the rest follows."""
    if family.loaded.spec.recurrent:
        pytest.skip("its prompts are not padded")
    taken: list[int] = []
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    monkeypatch.setattr(attention, "prefill_kernel_works", lambda heads, window: True)
    monkeypatch.setattr(
        prefill_kernel, "attend", lambda *given: taken.append(given[5]) or fake_kernels.attend_prompts(*given)
    )
    bench, noted = forced(prefill_chunk_tokens=512)
    bench.engine.executor.batched_prefill = True
    compare_together(bench, family, noted)
    windows = {layer.window for layer in family.loaded.spec.layers if layer.sealed}
    assert taken
    assert any(taken) == any(windows)


def test_drafted_sequences_equal_the_bare_model(
    family: Family, forced: Callable[..., tuple[Bench, Logits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, with drafts of which some are wrong: the same logits. Without windows, also the same bits."""
    identity = family.loaded.identity
    loaded = replace(family.loaded, identity=replace(identity, computing={**identity.computing, "numerics": "fast"}))
    if loaded.spec.recurrent:
        assert loaded.undrafted
        return
    alone = run_alone(forced, family)
    monkeypatch.setattr(family, "loaded", loaded)
    for together in (False, True) if family.bits is None else (True,):
        bench, noted = forced(drafts=True, sequences_max=8 if together else 1)
        bench.engine.executor.batched_prefill = together
        with oracle(list(family.scripts.values())):
            for sequence in family.scripts:
                submit(bench, family, sequence, str(sequence))
                bench.turn()
            bench.drain()
        drafts = bench.engine.executor.drafts
        assert len(family.scripts) < drafts.right < drafts.drafted
        for sequence, script in family.scripts.items():
            assert bench.sequences[str(sequence)].tokens == script[PROMPTS[sequence] :]
        family.compare(noted, "drafted")
        assert not family.exact or same_bits(noted, alone, list(family.reference))


def test_a_conversation_goes_on_from_where_its_answer_ended(
    family: Family, forced: Callable[..., tuple[Bench, Logits]]
) -> None:
    """A second turn finds all of the first, its answer included, and computes the same."""
    for sequence in (2, 4, 6, 7) if family.bits is None else (6,):
        bench, noted = forced()
        half = ANSWERS[sequence] // 2
        bench.submit("first", family.scripts[sequence][: PROMPTS[sequence]], seed=sequence, max_tokens=half)
        bench.drain()
        submit(bench, family, sequence, "second", more=half + 1)
        bench.drain()
        assert bench.sequences["second"].cached == PROMPTS[sequence] + half
        for drawn in range(ANSWERS[sequence] - half - 1):
            # The second request's draws begin at 0 again.
            expected = family.reference[(sequence, half + 1 + drawn)]
            assert (
                np.abs(noted[(sequence, drawn)] - expected).max()
                <= (FLIPPED_TOLERANCE if family.flips else TOLERANCE) * np.abs(expected).max()
            )


def test_preempted_sequences_go_on_where_they_were(family: Family, forced: Callable[..., tuple[Bench, Logits]]) -> None:
    """Memory for about two of the longest sequences."""
    if family.bits is not None:
        pytest.skip("the quantized ones differ in nothing that preemption touches")
    bench, noted = forced(kv_tokens_max=1300)
    for sequence in family.scripts:
        submit(bench, family, sequence, str(sequence))
    bench.drain()
    assert {sequence.finish for sequence in bench.sequences.values()} == {"length"}
    family.compare(noted, "preempted")
