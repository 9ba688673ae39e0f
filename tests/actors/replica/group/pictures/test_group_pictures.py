"""Vision models whose layers are divided answer about pictures as in one process, to the bit."""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.replica_messages import MediaSpan
from satchel.actors.replica.execution.followers import ShownPictures
from satchel.actors.replica.execution.media.language_inputs import ImageEmbeddings, SequencePictures
from satchel.actors.replica.execution.prefilling import Prefilling
from satchel.actors.replica.execution.sequence_states import ExecutorSequence
from satchel.actors.replica.group.forming import Member
from satchel.actors.replica.group.loading import load_stage
from satchel.actors.replica.group.pictures.picture_messages import (
    Wanted,
    pack_pictures,
    read_pictures,
    read_shown,
    tell,
)
from satchel.actors.replica.group.self_test import prove_group
from satchel.actors.replica.loading import models
from satchel.api.media.prompt import Medium
from satchel.cluster.config.config import parse_model
from tests.worlds.models.vision_families import FAMILIES, write
from tests.worlds.replica.bench import Bench, Received
from tests.worlds.replica.group import GROUP, KEY, TIMES, Led, listener, on_a_thread
from tests.worlds.replica.ranks import ranks_of
from tests.zoo.vision_omni import OMNI
from tests.zoo.vision_patches import PATCHES
from tests.zoo.vision_squares import SQUARES

from ...execution.media.test_vision import noisy, written
from ..test_group import follower, same

HOW: dict[str, Any] = {"context_tokens_max": None, "progress": lambda *_: None, "weights": "stored"}


class Album:
    """Prompts with pictures, and a clip if the model knows videos."""

    def __init__(self, folder: Path) -> None:
        self._processor = PictureProcessor.load(folder)
        self._noise, self._rng = np.random.default_rng(5), random.Random(3)
        self.pictures = [Medium([noisy(self._noise, *size)]) for size in ((200, 150), (64, 64))]
        if self._processor.video_placeholder:
            self.pictures.append(Medium([noisy(self._noise, 90, 70) for _ in range(4)], video=True))

    def prompt(self, *plan: int | Medium) -> tuple[list[int], list[MediaSpan]]:
        """Of so many tokens of text, and pictures."""
        prompt: list[int] = []
        media: list[MediaSpan] = []
        for part in plan:
            if isinstance(part, int):
                prompt += [self._rng.randrange(10, 3000) for _ in range(part)]
                continue
            words, found = written(self._processor, part)
            media += [replace(each, start=each.start + len(prompt)) for each in found]
            prompt += words
        return prompt, media


def look(bench: Bench, folder: Path) -> dict[str, Received]:
    """Sequences with pictures beside one of text: a picture, one across the end of a block, all in one prompt; and a
    turn that goes on from memory and brings a further picture."""
    album = Album(folder)
    first, other, *video = album.pictures
    prompts = {
        "one": album.prompt(5, first, 20),
        "text": album.prompt(70),
        "cut": album.prompt(250, other, 40, first, 9),
        "all": album.prompt(3, *video, 30, other, 2),
    }

    def submit(name: str, prompt: list[int], media: list[MediaSpan], seed: int) -> None:
        bench.submit(name, prompt, media=media, temperature=0.8, logprobs=2, seed=seed, max_tokens=8)

    for seed, (name, (prompt, media)) in enumerate(prompts.items()):
        submit(name, prompt, media, seed)
    bench.drain()
    for seed, name in enumerate(("one", "cut")):
        prompt, media = prompts[name]
        said = bench.sequences[name].tokens
        more, further = album.prompt(4, other, 6)
        moved = [replace(each, start=each.start + len(prompt) + len(said)) for each in further]
        submit(f"next {name}", [*prompt, *said, *more], [*media, *moved], 9 + seed)
    bench.drain()
    return dict(bench.sequences)


ZOO = {**FAMILIES, **PATCHES, **SQUARES}
FURTHER = ("gemma3", "internvl_chat", "llava", "smolvlm", "qwen3_5", "mistral3+windows", "llama4", "paddleocr_vl")
"""Windows, recurrent states, experts, and positions that the processor makes, among others."""


def folder_of(path: Path, family: str) -> Path:
    return write(path / family, family.partition("+")[0], ZOO[family])


def whole_of(folder: Path) -> Bench:
    return Bench(models.load(str(folder), numerics="reproducible", **HOW), prefill_chunk_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("family", ["qwen3_vl", *(pytest.param(each, marks=pytest.mark.slow) for each in FURTHER)])
def test_two_stages_see_as_one_process(tmp_path: Path, family: str):
    """The encoder is the leader's alone; each picture is encoded once."""
    folder = folder_of(tmp_path, family)
    single = whole_of(folder)
    expected = look(single, folder)
    assert not any(received.error for received in expected.values())
    layers = len(single.loaded.spec.layers)
    listens = listener()
    member = Member(GROUP, 0, KEY, listens, TIMES)
    with on_a_thread(lambda: follower(folder, member, stop=layers // 2)) as done:
        last = load_stage(str(folder), layers // 2, layers)
        led = Led(last, listens.getsockname()[:2], prefill_chunk_tokens=BLOCK_TOKENS)
        try:
            same(expected, look(led.bench, folder))
            pictures = led.bench.engine.pictures.embeddings
            assert pictures.encodes == single.engine.pictures.embeddings.encodes > 1
        finally:
            led.member.close()
    assert done.exception() is None


@pytest.mark.slow
@pytest.mark.parametrize("family, cuts", [("qwen3_vl_moe", (1, 2)), ("qwen3_omni_moe", (2, 3)), ("qwen2_5_vl", (1,))])
def test_stages_in_other_places_see_as_one_process(tmp_path: Path, family: str, cuts: tuple[int, ...]):
    """Levels are added in stages of their own, in either form, and a model has an output layer of its own."""
    kind = {**ZOO, **OMNI}[family]
    kind = copy.deepcopy(kind)
    text = kind.config.get("text_config", kind.config)
    text["tie_word_embeddings"] = kind.config["tie_word_embeddings"] = False
    folder = write(tmp_path / family, family, kind)
    single = whole_of(folder)
    expected = look(single, folder)
    ends = [0, *cuts, len(single.loaded.spec.layers)]
    listens = [listener() for _ in cuts]
    with ExitStack() as stack:
        followers = []
        for rank, (start, stop) in enumerate(pairwise(ends[:-1])):
            member = Member(GROUP, rank, KEY, listens[rank], TIMES)
            run = partial(follower, folder, member, start=start, stop=stop)
            followers.append(stack.enter_context(on_a_thread(run)))
        last = load_stage(str(folder), *ends[-2:])
        led = Led(last, *(each.getsockname()[:2] for each in listens), prefill_chunk_tokens=BLOCK_TOKENS)
        stack.callback(led.member.close)
        same(expected, look(led.bench, folder))
    assert not any(done.exception() for done in followers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe"])
def test_shares_of_every_layer_see_within_rounding_what_one_process_sees(tmp_path: Path, family: str):
    """As with text: a sum over shares rounds otherwise than a whole product."""
    folder = folder_of(tmp_path, family)
    expected = look(whole_of(folder), folder)
    with ranks_of(folder, 2) as ranks:
        found = ranks.ask(look, folder)
        assert ranks.end() == [0, 0]
    for name in ("one", "text", "cut", "all"):
        assert found[name].tokens[0] == expected[name].tokens[0]
        (drawn, likeliest), (other, others) = found[name].logprobs[0], expected[name].logprobs[0]
        assert drawn == pytest.approx(other, abs=1e-3)
        assert likeliest == [(token, pytest.approx(value, abs=1e-3)) for token, value in others]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_a_group_whose_pictures_are_wrong_is_served_for_text(
    tmp_path: Path, fault: bool, monkeypatch: pytest.MonkeyPatch
):
    """Its self-test encodes pictures and videos, and runs prompts with them."""
    folder = folder_of(tmp_path, "qwen3_vl")
    listens = listener()
    member = Member(GROUP, 0, KEY, listens, TIMES)
    with on_a_thread(lambda: follower(folder, member, stop=1)) as done:
        last = load_stage(str(folder), 1, 2)
        led = Led(last, listens.getsockname()[:2])
        try:
            if fault:
                assert last.vision is not None
                black = last.vision.encode
                nothing = [Image.new("RGB", (224, 168))]
                blind = lambda span, shown, *, video: black(span, [nothing] * len(shown), video=video)  # noqa: E731
                monkeypatch.setattr(last.vision, "encode", blind)
            followers, model = led.bench.engine.executor.followers, parse_model(name="m", source=str(folder))
            assert followers is not None
            proven = prove_group(last, followers, "0 to 1; 1 to 2", model, lambda what, done: None, None)
            if fault:
                assert proven.loaded.vision is None and "does not look at pictures" in proven.loaded.blind
            else:
                assert proven.loaded.vision is last.vision
                assert (proven.loaded.blind, proven.loaded.stills, proven.together) == ("", "", True)
        finally:
            led.member.close()
    assert done.exception() is None


def test_what_is_told_of_pictures_comes_as_it_was():
    """Positions, which are told by their steps, and of the embeddings what is wanted."""
    places = np.array([[0, 1, 2, 2, 2, 5], [0, 1, 2, 2, 3, 5], [0, 1, 2, 3, 3, 5]])
    pictures = SequencePictures([(2, 3)], {}, places, -4, [(2, 4)], [(0, 5)])
    came = read_pictures(pack_pictures(pictures))
    assert came.positions is not None and np.array_equal(came.positions, places)
    assert replace(came, positions=None) == replace(pictures, positions=None)
    inputs, *levels = mx.split(mx.random.normal((3 * 6, 8)), 3)
    part = ImageEmbeddings(inputs, tuple(levels), mx.arange(2 * 3 * 6).reshape(2, 3, 6)).part(2, 5)
    shown = ShownPictures({"one": {4: part}})
    for wanted, arrays in ((Wanted(True, 0), [0, 1, 2]), (Wanted(False, 1), [2]), (Wanted(False, 2), [])):
        told = tell(shown, wanted)
        every = [part.inputs, *part.levels]
        assert [each.tolist() for each in told.arrays] == [every[number].tolist() for number in arrays]
        found = read_shown(told.packed, iter(told.arrays)).sequences["one"][4]
        assert found.first == 2 and len(found.levels) == 2
        assert found.positions is not None and part.positions is not None
        assert found.positions.tolist() == part.positions.tolist()
        for number in arrays:
            assert [found.inputs, *found.levels][number].tolist() == every[number].tolist()


def test_tokens_that_attend_to_each_other_are_not_cut_into_pieces():
    """Stages compute prompts in pieces, so that they overlap; but these in one."""
    pictures = SequencePictures([(100, 700)], unbroken=[(100, 800)])
    coming = {"seen": ExecutorSequence("seen", 50, pictures=pictures), "text": ExecutorSequence("text", 0)}
    batch: Any = SimpleNamespace(_coming=coming, _loaded=SimpleNamespace(piece_tokens=512))
    for work, tokens_max in (
        ([("seen", [0] * 900)], None),
        ([("text", [0] * 900), ("seen", [0] * 51)], None),
        ([("text", [0] * 900), ("seen", [0] * 50)], 512),
    ):
        assert Prefilling._piece_tokens(batch, work) == tokens_max
    coming["seen"].length = 800
    assert Prefilling._piece_tokens(batch, [("seen", [0] * 900)]) == 512
