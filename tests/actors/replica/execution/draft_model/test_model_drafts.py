"""A sequence for which a small model drafts says what it says without drafts, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from satchel.actors.model_files.checkpoints import load_checkpoint
from satchel.actors.replica.execution.draft_model import model_drafts
from satchel.actors.replica.execution.draft_model.model_drafts import DraftModel, ModelDrafts
from satchel.actors.replica.execution.draft_model.recent_kv import RecentKV
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import draft_model, models
from satchel.actors.replica.loading.draft_model import load_draft_model
from satchel.actors.replica.proving.agreement import agree
from tests.actors.replica.execution.test_drafts import HOW, TOKENS, same
from tests.worlds.models.families import VOCABULARY, write_model
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.drafting import eager

Asked = list[tuple[list[int], dict[str, Any]]]


def load(folder: Path | str, loaded: LoadedModel) -> DraftModel:
    return load_draft_model(str(folder), loaded, progress=lambda what, fraction: None)


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> Asked:
    return [(prompts[index % len(prompts)], {"max_tokens": TOKENS - 5 * index, **how}) for index, how in enumerate(HOW)]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, asked: Asked) -> list[Received]:
    """What each says without drafts."""
    return [Bench(loaded).run("one", prompt, **how) for prompt, how in asked]


@pytest.fixture(scope="module")
def itself(loaded: LoadedModel) -> DraftModel:
    """The model itself: what it drafts is right."""
    return load(loaded.folder, loaded)


@pytest.fixture(scope="module")
def stranger(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    """Another one, of fewer tokens: what it drafts is wrong."""
    return load(write_model(tmp_path_factory.mktemp("small"), "qwen3", seed=8, vocab_size=2048), loaded)


def together(loaded: LoadedModel, draft_model: DraftModel, **fields: Any) -> Bench:
    bench = Bench(loaded, draft_model=draft_model, **fields)
    bench.engine.executor.batched_prefill = True
    return bench


@pytest.mark.parametrize("how", HOW)
def test_a_model_that_draws_as_the_sequence_does_is_right(
    loaded: LoadedModel, prompts: list[list[int]], itself: DraftModel, how: dict[str, Any]
):
    """Whatever the sequence was asked for: the model's draws have its noise, penalties and limits."""
    # A sealed block would be in 4 bits, and the model's KV is not.
    prompt, asked = prompts[2], {"max_tokens": 40, **how}
    expected = Bench(loaded).run("one", prompt, **asked)
    with eager(3):
        bench = Bench(loaded, draft_model=itself)
        assert same(bench.run("one", prompt, **asked), expected)
    drafts = bench.engine.executor.drafts
    assert drafts.drafted_by_model and drafts.right_by_model > 0.9 * drafts.drafted_by_model
    assert bench.engine.counters.steps < 0.9 * len(expected.tokens)


@pytest.mark.slow
def test_recorded_steps_of_the_model_draft_the_same(
    loaded: LoadedModel, prompts: list[list[int]], itself: DraftModel, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU, for one sequence and for several, which others join."""
    monkeypatch.setattr(draft_model, "on_gpu", lambda: True)
    recorded = load(loaded.folder, loaded)
    assert set(recorded.pieces) == set(model_drafts.PIECES)
    found = []
    for each in (itself, recorded):
        with eager(4):
            bench = together(loaded, each)
            for index in (2, 0, 1):
                bench.submit(str(index), prompts[index], max_tokens=20)
                bench.turn()
            bench.drain()
        drafts = bench.engine.executor.drafts
        found.append((drafts.drafted_by_model, drafts.right_by_model))
    assert found[0] == found[1] and found[0][1] > 0.9 * found[0][0] > 10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize("right", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sequences_that_come_and_go_say_the_same(
    loaded: LoadedModel,
    asked: Asked,
    alone: list[Received],
    itself: DraftModel,
    stranger: DraftModel,
    seed: int,
    right: bool,
):
    """Beside each other, preempted, and begun anew when there is no room for more of their tokens."""
    rng = random.Random(seed)
    with eager(seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_drafts, "ROOM", 80)
        patch.setattr(model_drafts, "KEPT", 30)
        bench = together(loaded, itself if right else stranger, kv_tokens_max=1500)
        bench.submit_between_turns(asked, rng)
    for index, expected in enumerate(alone):
        assert same(bench.sequences[str(index)], expected), asked[index][1]
    drafts = bench.engine.executor.drafts
    assert drafts.drafted_by_model > 50
    assert not right or drafts.right_by_model > 20


def test_a_model_that_is_wrong_changes_nothing(
    loaded: LoadedModel, asked: Asked, alone: list[Received], stranger: DraftModel
):
    with eager(2):
        bench = Bench(loaded, draft_model=stranger)
        assert same(bench.run("one", asked[1][0], **asked[1][1]), alone[1])
    drafts = bench.engine.executor.drafts
    assert drafts.drafted_by_model > 20 > drafts.right_by_model


def test_a_model_that_fails_drafts_no_more(
    loaded: LoadedModel, asked: Asked, alone: list[Received], itself: DraftModel, monkeypatch: pytest.MonkeyPatch
):
    """The sequence goes on without it, and the replica says why."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise ValueError("shapes do not match")

    for what in ("compute_piece", "draft"):
        with eager(1), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelDrafts, what, fail)
            bench = Bench(loaded, draft_model=itself)
            assert same(bench.run("one", asked[1][0], **asked[1][1]), alone[1])
            drafts = bench.engine.executor.drafts
            assert drafts.model is None and "shapes do not match" in drafts.failure
    assert len(calls) == 2


def test_an_error_of_the_device_is_one_of_the_replica(
    loaded: LoadedModel, asked: Asked, alone: list[Received], itself: DraftModel
):
    """Sequences are computed anew, and the model drafts on."""
    compute, left = RecentKV.compute, [2]

    def fail_once(kv: RecentKV, *given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device failed")
        return compute(kv, *given)

    with eager(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecentKV, "compute", fail_once)
        bench = Bench(loaded, draft_model=itself)
        assert same(bench.run("one", asked[1][0], **asked[1][1]), alone[1])
    drafts = bench.engine.executor.drafts
    assert bench.engine.counters.device_failures == 1
    assert not drafts.failure and drafts.right_by_model


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt_oss", "deepseek_v2"])
def test_kv_of_many_tokens_is_that_of_the_models_own_caches(loaded: LoadedModel, tmp_path: Path, family: str):
    """Windows and sinks included, for sequences of different lengths, after tokens were taken back."""
    made = load(write_model(tmp_path, family), loaded)
    model, _ = load_checkpoint(tmp_path, trusted=False)
    model.set_dtype(mx.float32)
    rng = random.Random(2)
    tokens = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (330, 40, 700)]
    kv, got = made.kv.bare(), []
    for each in tokens:
        one = made.kv.bare()
        one.open()
        for at in range(0, len(each) - 3, 256):
            one.compute([each[:-3][at : at + 256]], 256)
        kv.join(one)
    kv.compute([[5, 6], [], [7, 8, 9]], 4)
    kv.lengths = [len(each) - 3 for each in tokens]
    kv.compute([each[-3:-1] for each in tokens], 2)
    got = kv.compute_one(mx.array([each[-1] for each in tokens]))
    for index, each in enumerate(tokens):
        expected = model(mx.array([each]), cache=make_prompt_cache(model))[:, -1]
        assert agree([expected], [got[index : index + 1]]), index


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "glm4", "deepseek_v2"])
def test_models_of_each_family_say_the_same_if_they_draft_for_themselves(family: str, asked: Asked, tmp_path: Path):
    """Families with windows are not drafted where bits are promised, and recurrent ones nowhere."""
    folder = write_model(tmp_path, family)
    target = models.load(
        str(folder), context_tokens_max=None, progress=lambda *_: None, numerics="reproducible", kv="fp16"
    )
    drafting = load(folder, target)
    expected = [Bench(target).run("one", prompt, **how) for prompt, how in asked]
    with eager(6):
        bench = together(target, drafting)
        for index, (prompt, how) in enumerate(asked):
            bench.submit(str(index), prompt, **how)
            bench.turn()
        bench.drain()
    assert all(same(bench.sequences[str(index)], each) for index, each in enumerate(expected))
    drafts = bench.engine.executor.drafts
    assert drafts.right_by_model > 0.5 * drafts.drafted_by_model > 20
