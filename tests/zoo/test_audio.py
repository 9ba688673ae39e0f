"""Types that take audio compute with it what mlx-vlm does, and those that cannot are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from satchel.actors.model_files.media.processors import PictureProcessor
from satchel.actors.replica.loading import models
from satchel.actors.replica.selftest.audio import fault_of_audio
from tests.worlds.models.vision_families import write_model

from . import vision_types
from .audio_types import AUDIO, write

LONG_S = {"gemma4": 29, "gemma4_unified": 29, "nemotron_h_nano_omni": 60}
"""Seconds of audio that a type takes."""

MOST_S = {"gemma4": 30, "gemma4_unified": 30}
"""Seconds of the longest audio of a type whose processor drops the end of longer audio."""


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDIO)
def test_a_type_takes_audio(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / name, name)
    loaded = models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="fp16")
    assert loaded.media["audio"] and loaded.vision is not None and loaded.vision.audio is not None
    processor = loaded.vision.audio.processor
    short, long = (len(processor.layout(seconds * processor.rate).span.places) for seconds in (1, LONG_S[name]))
    assert long > 0.9 * LONG_S[name] * short
    if name in MOST_S:
        assert processor.layout(MOST_S[name] * processor.rate)
        for longer_s in (0.02, 0.1, 1, 60):
            with pytest.raises(ValueError, match="it drops the end"):
                processor.layout(round((MOST_S[name] + longer_s) * processor.rate))
    assert fault_of_audio(loaded) == ""


def test_audio_shorter_than_a_window_is_too_short(tmp_path: Path) -> None:
    processor = PictureProcessor.load(write(tmp_path / "gemma4", "gemma4")).audio
    assert processor is not None
    for seconds in (0.001, 0.01):
        with pytest.raises(ValueError, match="is too short"):
            processor.layout(round(seconds * processor.rate))
    assert len(processor.layout(round(0.02 * processor.rate)).span.places) == 1


def test_a_model_without_an_encoder_of_audio_takes_none_though_its_processor_does(tmp_path: Path) -> None:
    processor = PictureProcessor.load(vision_types.write(tmp_path / "gemma4", "gemma4"))
    assert (processor.audio, processor.no_audio) == (None, "")


def test_a_model_whose_template_has_no_place_for_audio_is_refused_by_name(tmp_path: Path) -> None:
    folder = vision_types.write(tmp_path / "gemma4_unified", "gemma4_unified")
    processor = PictureProcessor.load(folder)
    assert (processor.audio, processor.no_audio) == (None, "its chat template has no place for audio")


def test_a_model_of_pictures_alone_says_nothing_of_audio(tmp_path: Path) -> None:
    processor = PictureProcessor.load(write_model(tmp_path / "qwen3_vl", "qwen3_vl"))
    assert (processor.audio, processor.no_audio) == (None, "")
