"""Families whose language parts want something of their own compute what mlx-vlm's model does with the whole prompt at
once: in chunks, in company, in a second turn from memory, and after a restart from the disk."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor
from mlx_vlm.utils import load_model

from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.replica.execution import executor
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.execution.media.vision import LanguagePart
from satchel.actors.replica.loading import models
from satchel.actors.replica.memory.disk_tier import DiskTier
from satchel.actors.replica.scheduling.prefill_budget import PrefillPace
from satchel.api.media.prompt import Medium
from satchel.cluster.errors import ModelLoadError
from tests.worlds.replica.bench import Bench, Forced, Logits
from tests.worlds.replica.bench_disk import Node, write_down
from tests.zoo.vision_types import write

from .test_vision import ANSWER, Script, by_mlx_vlm, noisy, written

TOLERANCE = 1e-4
"""Relative to the logits' scale. Recurrent layers are computed in chunks, and experts in another order."""

AGENT, CHUNK = "default/alice", 64
PLANS = ((5, 0, 20), (-246, 1, 30))
"""Sequences: numbers of text tokens (negative: up to which place), and between them a picture. The second one's lies
across the end of a block."""

FAMILIES = ("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4+both-ways", "hunyuan_vl", "qwen3_vl_moe")
"""States that recur, inputs of every layer, attention both ways, positions that are kept, masks of another width."""

REFUSED = {"paligemma": "attend to each other", "mllama": "cross attention", "florence2": "encoder"}
"""Families that are refused, and a word of the reason."""

NUMBERS = {
    "hunyuan_vl": {
        "IMAGE_TOKEN_ID": "<image>",
        "IM_START_TOKEN_ID": "<im_start>",
        "IM_END_TOKEN_ID": "<im_end>",
        "PAD_TOKEN_ID": "<pad>",
    }
}
"""Tokens that a family's processor knows by the numbers of its real tokenizer, by the names of its attributes."""

ONE_BY_ONE = {"hunyuan_vl"}
"""Families whose sequences are computed one after the other, as their self-test finds."""

MORE = 12
"""Tokens of the next turn, after an answer."""


class World:
    """A tiny model of a family, sequences that it answers, and what they are to be.

    Attributes:
        turns: by sequence its first turn and its second one, which goes on from the first one's answer.
            Turns from 20 on are first ones that end with other words.
        expected: logits by the numbers of `Forced`.
        sequences_max: how many sequences are computed together.
    """

    def __init__(self, folder: Path, one_by_one: bool) -> None:
        self.loaded, self.sequences_max = self._load(folder), 1 if one_by_one else 2
        processor, noise, rng = PictureProcessor.load(folder), np.random.default_rng(5), random.Random(3)
        self.turns: dict[int, Script] = {}
        self.expected: Logits = {}
        bare: Any = load_model(folder)
        for sequence, (before, picture, behind) in enumerate(PLANS):
            medium = Medium([noisy(noise, *((200, 150), (120, 130))[picture])])
            words, (media,) = written(processor, medium)
            start = before if before >= 0 else -before - len(words) // 2
            first = [rng.randrange(3000) for _ in range(start)]
            last = [rng.randrange(3000) for _ in range(behind)]
            answer, more, again = ([rng.randrange(3000) for _ in range(count)] for count in (ANSWER, MORE, ANSWER))
            prompt, at = [*first, *words, *last], start + media.start
            given = [*prompt[:at], *media.tokens, *prompt[at + len(media.tokens) :]]
            one = Script(prompt, [replace(media, start=at)], answer, given, [medium])
            self.turns[sequence] = one
            self.turns[sequence + 10] = replace(
                one, prompt=[*one.prompt, *answer, *more], given=[*one.given, *answer, *more], answer=again
            )
            self.turns[sequence + 20] = replace(
                one, prompt=[*one.prompt[: -len(last)], *more], given=[*one.given[: -len(last)], *more]
            )
            for told, turns in ((sequence + 10, (sequence, sequence + 10)), (sequence + 20, (sequence + 20,))):
                logits = by_mlx_vlm(processor, bare, self.turns[told])
                for turn, drawn in ((turn, drawn) for turn in turns for drawn in range(ANSWER)):
                    self.expected[(turn, drawn)] = logits[len(self.turns[turn].prompt) - 1 + drawn]

    @staticmethod
    def _load(folder: Path) -> LoadedModel:
        loaded = models.load(
            str(folder), context_tokens_max=None, progress=lambda *_: None, kv="fp16", numerics="reproducible"
        )
        assert loaded.vision is not None and loaded.spec.reusable
        return loaded


@pytest.fixture(params=[*FAMILIES[:4], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[4:])])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    folder = write(tmp_path / "model", request.param)
    ids = {
        token["content"]: token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    for name, token in NUMBERS.get(request.param, {}).items():
        monkeypatch.setattr(HunYuanVLProcessor, name, ids[token])
    return World(folder, request.param in ONE_BY_ONE)


def test_sequences_are_what_the_bare_model_computes(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted: Logits = {}
    scripts = {turn: script.tokens for turn, script in world.turns.items()}
    monkeypatch.setattr(executor, "BatchSampler", lambda *_: Forced(scripts, noted))
    node = Node(tmp_path / "kv")

    def start() -> tuple[Bench, DiskTier]:
        disk = DiskTier(world.loaded.spec, world.loaded.model_id, node.client)
        bench = Bench(
            world.loaded,
            disk=disk,
            prefill_chunk_tokens=256,
            prefill_sequences_max=world.sequences_max,
            sequences_max=world.sequences_max,
        )
        bench.engine.prefill.pace = PrefillPace(CHUNK, pause_s=0.1)
        return bench, disk

    def ask(bench: Bench, turns: tuple[int, ...], what: str) -> list[int]:
        """Returns how many tokens of each prompt need not be computed."""
        for turn in turns:
            script = world.turns[turn]
            bench.submit(f"{what}{turn}", script.prompt, media=script.media, seed=turn, max_tokens=ANSWER, agent=AGENT)
            bench.turn()
        bench.drain()
        for turn in turns:
            sequence = bench.sequences[f"{what}{turn}"]
            assert sequence.finish == "length", f"{what}: {sequence.error}"
            for drawn in range(ANSWER):
                one, scale = world.expected[(turn, drawn)], np.abs(world.expected[(turn, drawn)]).max()
                assert np.abs(noted[(turn, drawn)] - one).max() <= TOLERANCE * scale, (
                    f"{what}: sequence {turn}, {drawn}"
                )
        noted.clear()
        return [bench.sequences[f"{what}{turn}"].cached or 0 for turn in turns]

    try:
        bench, disk = start()
        if world.sequences_max > 1 and not world.loaded.spec.recurrent:
            # As on a GPU.
            bench.engine.executor.batched_prefill = True
        assert ask(bench, (0, 1), "cold") == [0, 0]
        assert min(ask(bench, (11, 10, 21), "from memory")) > 0
        write_down(bench, disk)
        node.restart()
        bench, disk = start()
        assert min(ask(bench, (10, 11), "from disk")) > 0
        write_down(bench, disk)
    finally:
        node.store.close()


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_computed_from_left_to_right_is_refused_and_says_what_to_take(
    family: str, tmp_path: Path
) -> None:
    folder, words = write(tmp_path / "model", family), REFUSED[family]
    with pytest.raises(ModelLoadError, match=f"{words}.*use a causal model"):
        models.load(str(folder), context_tokens_max=None, progress=lambda *_: None)


class _AxesLast:
    """A language part whose positions are `(sequences, tokens, axes)`, and which gives them back."""

    def get_rope_index(self, tokens: mx.array, *given: Any) -> tuple[mx.array, mx.array]:
        places = mx.broadcast_to(mx.arange(tokens.shape[1]), tokens.shape)
        return mx.stack([places] * 3, axis=-1), mx.zeros((tokens.shape[0],))

    def __call__(self, tokens: mx.array, cache: Any, position_ids: mx.array) -> Any:
        return SimpleNamespace(logits=position_ids)


def test_positions_have_the_order_of_axes_that_the_model_gives_its_own() -> None:
    part = LanguagePart(SimpleNamespace(language_model=_AxesLast()))
    caches = [SimpleNamespace(), SimpleNamespace(offset=mx.array([3, 8]))]
    counted = part(mx.zeros((2, 2), mx.int32), cache=caches)
    assert counted.tolist() == [[[3] * 3, [4] * 3], [[8] * 3, [9] * 3]]
    given = mx.arange(12).reshape(3, 2, 2)
    assert part(mx.zeros((2, 2), mx.int32), cache=caches, position_ids=given).tolist() == [
        [[0, 4, 8], [1, 5, 9]],
        [[2, 6, 10], [3, 7, 11]],
    ]
