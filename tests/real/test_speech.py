"""A real model of speech writes down recordings whose words are known, as mlx-audio itself does."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_audio.stt.utils import load_model

from satchel.actors.protocol.speech_messages import TRANSCRIBE, SpeechPiece, SpeechRequest
from satchel.actors.replica.audio.listening import ListeningModel, transcript_of
from satchel.actors.replica.audio.loading import compute_in_float32
from satchel.actors.replica.device import blas
from satchel.api.media.audio import AudioLimits, decode_audio

from .conftest import SPEECH
from .reference import ON_CPU

pytestmark = pytest.mark.real

RECORDINGS = [Path(name) for name in os.environ.get("SATCHEL_REAL_SPEECH", "").replace(",", " ").split()]
"""Each has its words beside it, in a file that ends in `.txt`."""

RIGHT_MIN = 0.9
"""The least share of words that must be right. Numbers may be written as digits."""


@cache
def listener(folder: Path) -> ListeningModel:
    blas.chosen()
    return ListeningModel.load(folder, folder.name)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@pytest.mark.parametrize("folder", SPEECH, ids=lambda folder: folder.name)
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.stem)
def test_what_was_said_is_written_down_as_mlx_audio_does(folder: Path, recording: Path):
    model, pieces = listener(folder), list[SpeechPiece]()
    audio = decode_audio(recording.read_bytes(), model.info.rate, AudioLimits(seconds_max=600, timeout_s=60))
    samples = np.frombuffer(audio.samples, "<f4")
    request = SpeechRequest("", "", TRANSCRIBE, audio.samples, model.info.rate)
    made = model.transcribe(request, lambda steps: None, pieces.append)
    library: Any = load_model(folder, model_type=model.info.family, model_name_parts=[])
    if ON_CPU:
        compute_in_float32(library)
    how = {"fp16": not ON_CPU} if model.in_windows else {}
    mx.random.seed(0)
    assert made == transcript_of(library.generate(mx.array(samples), **how))
    assert "".join(piece.text for piece in pieces) == made.text
    said, heard = words_of(recording.with_suffix(".txt").read_text()), words_of(made.text)
    right = sum(block.size for block in SequenceMatcher(a=said, b=heard, autojunk=False).get_matching_blocks())
    assert right >= RIGHT_MIN * len(said), made.text
    if model.info.words:
        timed = model.transcribe(replace(request, words=True), lambda steps: None, pieces.append)
        times = [time for each in timed.segments for word in each.words for time in (word.start, word.end)]
        assert times == sorted(times) and times[-1] <= len(samples) / model.info.rate + 0.1
