"""A sequence for which a head drafts says what it says without drafts, and the head drafts what mlx-vlm's own does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel
from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config

from satchel.actors.model_files.source import read_json
from satchel.actors.replica.execution.draft_model import head_drafts
from satchel.actors.replica.execution.draft_model.head_drafts import HeadDrafts
from satchel.actors.replica.execution.draft_model.model_drafts import DraftModel
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels import gpu_kernels
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.draft_model import load_draft_model
from satchel.cluster.errors import ModelLoadError
from tests.actors.replica.execution.test_drafts import HOW, TOKENS, same
from tests.worlds.models.families import write_model
from tests.worlds.models.heads import write_head
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench
from tests.worlds.replica.drafting import eager


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_model(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=4)
    return models.load(
        str(folder), context_tokens_max=None, progress=lambda what, fraction: None, numerics="reproducible"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def head(deep: LoadedModel, folder: Path) -> DraftModel:
    return load_draft_model(str(folder), deep, progress=lambda what, fraction: None)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_sequences_that_come_and_go_say_the_same(
    deep: LoadedModel, head: DraftModel, prompts: list[list[int]], seed: int
):
    """Beside each other, preempted, and begun anew when there is no room for more of their tokens."""
    asked = [
        (prompts[index % len(prompts)], {"max_tokens": TOKENS - 5 * index, **how}) for index, how in enumerate(HOW)
    ]
    alone = [Bench(deep).run("one", prompt, **how) for prompt, how in asked]
    rng = random.Random(seed)
    with eager(seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_drafts, "ROOM", 60)
        bench = Bench(deep, draft_model=head, kv_tokens_max=1500)
        bench.engine.executor.batched_prefill = True
        bench.submit_between_turns(asked, rng)
    for index, expected in enumerate(alone):
        assert same(bench.sequences[str(index)], expected), asked[index][1]
    assert bench.engine.executor.drafts.drafted_by_model > 30


@pytest.fixture
def recorded(deep: LoadedModel) -> Iterator[LoadedModel]:
    """The same model, whose steps are recorded."""
    with nullcontext() if gpu_kernels.is_available() else fake_kernels.kernels():
        yield models.load(
            str(deep.folder), context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False, kv="fp16"
        )


@pytest.mark.parametrize("steps", ["deep", "recorded"])
def test_a_head_drafts_what_that_of_mlx_vlm_does(
    steps: str, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """From the outputs of the same layers, for the first token of the answer and all after it."""
    target: LoadedModel = request.getfixturevalue(steps)
    assert target.way.compiled == (steps == "recorded")
    head = load_draft_model(str(folder), target, progress=lambda what, fraction: None)
    drafted: list[tuple[list[int], list[int]]] = []
    draft = HeadDrafts.draft

    def noting(drafts: HeadDrafts, places: dict[int, int], depth: int, sampler: Any) -> dict[int, list[int]]:
        found = draft(drafts, places, depth, sampler)
        (followed,) = drafts._followed
        drafted.append((followed.drafter.since(0), found[0]))
        return found

    monkeypatch.setattr(HeadDrafts, "draft", noting)
    prompt = prompts[2]
    with eager(1):
        bench = Bench(target, draft_model=head)
        bench.engine.executor.batched_prefill = True
        assert bench.run("one", prompt, max_tokens=30).tokens == Bench(target).run("one", prompt, max_tokens=30).tokens
    # It would take the model's embeddings, which a head's are in a real checkpoint.
    monkeypatch.setattr(Eagle3DraftModel, "bind", lambda own, _: own)
    own = Eagle3DraftModel(Eagle3Config.from_dict(read_json(folder / "config.json")))
    own.load_weights(str(folder / "model.safetensors"))
    assert len(drafted) > 10
    assert head.outputs is not None
    for tokens, got in drafted:
        with head.outputs.noted() as outputs:
            target.model(mx.array([tokens[:-1]]), cache=make_prompt_cache(target.model))
        own.reset(target.model)
        first = len(prompt) - 1
        own.prefill_from_target_hidden(
            mx.array([tokens[first:-1]]), outputs[0][:, first:], tokens[-1], sampler=None, greedy=True
        )
        expected: Any = own.draft_block(tokens[-1], outputs[0][:, -1:], None, len(got) + 1, sampler=None, greedy=True)
        assert got == expected[0].tolist()


def test_a_head_of_another_model_is_refused(deep: LoadedModel, loaded: LoadedModel, tmp_path: Path):
    def refusal(target: LoadedModel, **other: Any) -> str:
        with pytest.raises(ModelLoadError) as caught:
            folder = write_head(tmp_path / str(len(other)), **other)
            load_draft_model(str(folder), target, progress=lambda what, fraction: None)
        return caught.value.message

    assert "it needs layers [1, 2, 4], and the model has 2" in refusal(loaded)
    assert "weights do not fit its config" in refusal_of_weights(deep, tmp_path)


def refusal_of_weights(deep: LoadedModel, tmp_path: Path) -> str:
    folder = write_head(tmp_path / "damaged")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    del weights["fc.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError) as caught:
        load_draft_model(str(folder), deep, progress=lambda what, fraction: None)
    return caught.value.message
