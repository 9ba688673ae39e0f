"""The self-test of pictures at load: if pictures do not reach a model correctly, it gets none, and a note says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import _get_classes, save_model
from PIL import Image

from satchel.actors.model_files.media.processors import NO_PLACE_FOR_VIDEOS, sees, sight
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.loading import models
from satchel.actors.replica.selftest import pictures
from satchel.actors.replica.selftest.self_test import prove
from satchel.api.requests.conversation import with_shown
from satchel.cluster.config.config import Model
from satchel.cluster.errors import InvalidRequest
from tests.worlds.models.families import random_weights
from tests.worlds.models.vision_families import write_files, write_model
from tests.zoo import vision_types

PATCHES = 16 * 12
"""The layout of a picture of the usual size of self-tests, whose tokens are a quarter of it."""

TOKENS_ALONE = 60
"""At most so many has a picture or a part of a video alone, and more every prompt."""


def load(folder: Path) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, numerics="reproducible")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl"))


@pytest.fixture
def shows(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the model make something else of token ids and pixels."""

    def install(fault: Callable[[mx.array, Any, mx.array], mx.array]) -> None:
        assert loaded.vision is not None
        kind = type(loaded.vision.model)
        plain = kind.get_input_embeddings

        def made(self: Any, ids: mx.array, pixels: Any = None, **given: Any) -> Any:
            features = plain(self, ids, pixels, **given)
            if pixels is not None:
                features.inputs_embeds = fault(ids, pixels, features.inputs_embeds)
            return features

        monkeypatch.setattr(kind, "get_input_embeddings", made)

    return install


def one_short(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
    return embeddings[:, 1:]


def always_one_picture(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
    return mx.ones_like(embeddings)


def as_long_as_the_prompt(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
    return embeddings * ids.shape[1]


def a_place_off_inside_a_prompt(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
    return embeddings if ids.shape[1] <= TOKENS_ALONE else mx.roll(embeddings, 1, 1)


def fails_if_wide(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
    if pixels.shape[0] % PATCHES:
        raise IndexError("no such part")
    return embeddings


def wrong_if_wide_inside_a_prompt(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
    return embeddings * (2 if pixels.shape[0] % PATCHES and ids.shape[1] > TOKENS_ALONE else 1)


def test_a_right_model_sees(loaded: LoadedModel):
    assert not pictures.faults(loaded)
    assert not pictures.fault_of_videos(loaded)


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (one_short, r"mlx-vlm makes \d+ embeddings of a picture"),
        (always_one_picture, "the same for two different ones"),
        (as_long_as_the_prompt, "differently than alone"),
        (a_place_off_inside_a_prompt, "differently than alone"),
        (fails_if_wide, r"a picture of 728 x 364 pixels fails \(no such part\)"),
        (wrong_if_wide_inside_a_prompt, "differently than alone"),
    ],
)
def test_embeddings_that_are_wrong_are_found(loaded: LoadedModel, shows: Callable[..., None], fault: Any, why: str):
    shows(fault)
    assert pictures.faults(loaded).alone
    proven = prove(loaded, Model(name="tiny", source="somewhere/tiny"), lambda what, fraction: None)
    assert proven.loaded.vision is None
    (note,) = proven.notes
    assert note.startswith("it does not support pictures: ") and proven.loaded.blind in note
    with pytest.raises(ValueError, match=why):
        raise ValueError(proven.loaded.blind)


@pytest.fixture
def films(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the model make something else of token ids and a video's pixels."""

    def install(fault: Callable[[mx.array, mx.array], mx.array]) -> None:
        assert loaded.vision is not None
        kind = type(loaded.vision.model)
        plain = kind.get_input_embeddings

        def made(self: Any, ids: mx.array, pixels: Any = None, **given: Any) -> Any:
            features = plain(self, ids, pixels, **given)
            if given.get("pixel_values_videos") is not None:
                features.inputs_embeds = fault(ids, features.inputs_embeds)
            return features

        monkeypatch.setattr(kind, "get_input_embeddings", made)

    return install


def fails(ids: mx.array, embeddings: mx.array) -> mx.array:
    raise TypeError("no videos")


def other_inside_a_prompt(ids: mx.array, embeddings: mx.array) -> mx.array:
    return embeddings * (1 if ids.shape[1] <= TOKENS_ALONE else 2)


@pytest.mark.parametrize(
    ("fault", "why"), [(fails, "a video fails (no videos)"), (other_inside_a_prompt, "differently than alone")]
)
def test_a_model_whose_videos_are_wrong_is_shown_single_pictures(
    loaded: LoadedModel, films: Callable[..., None], tmp_path: Path, fault: Any, why: str
):
    films(fault)
    for _ in range(2):
        # The second time from what the first one found.
        proven = prove(loaded, Model(name="tiny", source="somewhere/tiny"), lambda *_: None, tmp_path / "trials.json")
        assert proven.loaded.vision is not None and not proven.loaded.blind
        assert why in proven.loaded.stills
        assert proven.notes == [f"videos are shown to it as single pictures: {proven.loaded.stills}"]


def test_logits_that_are_wrong_with_a_video_are_found(loaded: LoadedModel):
    vision = loaded.vision
    assert vision is not None
    plain, swapped = vision.set_positions, 0

    def place(pictures: Any, tokens: Any, grids: Any) -> None:
        nonlocal swapped
        plain(pictures, tokens, grids)
        if any(video for _, video in grids) and pictures.positions is not None:
            pictures.positions, swapped = pictures.positions[::-1], swapped + 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vision, "set_positions", place)
        assert not pictures.faults(loaded) and not swapped
        assert "computes something else" in pictures.fault_of_videos(loaded)


def test_a_processor_of_videos_without_a_place_for_them_is_said(loaded: LoadedModel):
    assert loaded.vision is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loaded.vision.processor, "video_placeholder", "")
        patched.setattr(loaded.vision.processor, "stills", NO_PLACE_FOR_VIDEOS)
        assert pictures.fault_of_videos(loaded) == NO_PLACE_FOR_VIDEOS


def test_a_picture_that_nobody_looks_at_is_an_error(loaded: LoadedModel, shows: Callable[..., None]):
    assert loaded.vision is not None
    plain = loaded.vision.model.get_input_embeddings
    shows(lambda ids, pixels, embeddings: plain(ids, None).inputs_embeds)
    span = loaded.vision.processor.layout(56, 56).span
    with pytest.raises(ValueError, match="does not look at the picture"):
        loaded.vision.encode(span, [[Image.new("RGB", (56, 56))]], video=False)


def test_logits_that_are_wrong_with_a_picture_are_found(loaded: LoadedModel):
    class Faulty:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, tokens: mx.array, cache: list[Any], **given: Any) -> mx.array:
            logits = self.inner(tokens, cache=cache, **given)
            return mx.roll(logits, 1, -1) if np.array(given.get("position_ids", 0)).max() > 100 else logits

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    found = pictures.faults(replace(loaded, model=Faulty(loaded.model)))
    assert found.alone.startswith("with a picture in its prompt it computes something else")


def test_what_a_model_notes_of_pictures_is_taken_back(loaded: LoadedModel, shows: Callable[..., None]):
    assert loaded.vision is not None
    model, norm = loaded.vision.model, loaded.vision.model.language_model.model.norm

    def note(ids: mx.array, pixels: mx.array, embeddings: mx.array) -> mx.array:
        norm.weight = mx.full(norm.weight.shape, -3.0)
        return embeddings

    before = model.language_model.model.norm.weight
    shows(note)
    assert pictures.faults(loaded).alone
    assert mx.array_equal(model.language_model.model.norm.weight, before)


@pytest.mark.parametrize("name", ["aya_vision", "deepseek_vl_v2"])
def test_types_that_are_not_served_elsewhere_see(tmp_path: Path, name: str):
    loaded = load(vision_types.write(tmp_path, name))
    assert not loaded.blind
    assert not pictures.faults(loaded)


@pytest.mark.parametrize("name", ["llava_next"])
def test_types_of_another_number_of_embeddings_are_blind(tmp_path: Path, name: str):
    assert "embeddings of a picture" in pictures.faults(load(vision_types.write(tmp_path, name))).alone


@pytest.mark.parametrize(
    ("missing", "why"),
    [("chat_template.jinja", "cannot be loaded")],
)
def test_a_model_without_a_part_of_its_processor_is_of_text(tmp_path: Path, missing: str, why: str):
    (write_model(tmp_path, "llava") / missing).unlink()
    loaded = load(tmp_path)
    assert loaded.vision is None
    assert why in loaded.blind


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_5", "qwen3_vl", "gemma4+plain"])
@pytest.mark.parametrize("files", [True, False])
def test_a_conversion_of_the_language_part_is_a_model_of_text(tmp_path: Path, name: str, files: bool):
    kind = vision_types.TYPES[name]
    config = write_files(tmp_path, name, kind)
    classes, arguments = _get_classes(config)
    model = classes(arguments.from_dict(json.loads(json.dumps(config))))
    model.update(random_weights(model, 7))
    save_model(tmp_path, model, donate_model=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not files:
        for file in kind.files:
            (tmp_path / file).unlink()
    assert sight(tmp_path) == (False, "its weights are the language part's alone")
    loaded = load(tmp_path)
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.allclose(loaded.model(tokens, cache=loaded.new_caches()), model(tokens), atol=1e-2)
    assert loaded.vision is None and "language part" in loaded.blind


def test_a_model_with_an_encoder_sees(tmp_path: Path):
    assert sees(write_model(tmp_path, "llava"))


def test_a_picture_for_a_blind_model_is_refused_with_the_reason():
    message: Any = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(
        InvalidRequest, match="this model does not support images: its weights are the language part's alone"
    ):
        with_shown([message], None, "its weights are the language part's alone")
