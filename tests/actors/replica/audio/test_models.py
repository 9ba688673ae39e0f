"""Models of speech: what they make is what mlx-audio makes for the same input, and what cannot be served says why."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_audio.stt.models.whisper.whisper import AudioEncoder
from mlx_audio.stt.utils import load_model as load_listener
from mlx_audio.tts.utils import load_model as load_speaker

from satchel.actors.protocol.speech_messages import (
    SPEAK,
    TRANSCRIBE,
    TRANSLATE,
    SpeechPiece,
    SpeechRequest,
    speech_refusal,
)
from satchel.actors.replica.audio.listening import ListeningModel, transcript_of
from satchel.actors.replica.audio.loading import compute_in_float32, load_speech_model
from satchel.actors.replica.audio.speaking import SpeakingModel, pcm16
from satchel.actors.replica.device.device import on_gpu
from satchel.cluster.errors import ModelLoadError
from tests.worlds.models.speech_families import noise

SAMPLES = noise(31)
HEARD = SpeechRequest("", "", TRANSCRIBE, SAMPLES.tobytes(), seed=5)
SAID = SpeechRequest("", "", SPEAK, text="Hello there.\nAnd you.", seed=5)


def quiet(steps: int) -> None:
    pass


def heard(model: ListeningModel, **fields: Any) -> tuple[Any, list[str]]:
    pieces: list[SpeechPiece] = []
    request = SpeechRequest(**{**{name: getattr(HEARD, name) for name in HEARD.__slots__}, **fields})
    return model.transcribe(request, quiet, pieces.append), [each.text for each in pieces]


@pytest.mark.parametrize(
    ("seconds", "fields", "own"),
    [
        (31, {}, {}),
        (
            3,
            {"language": "de", "text": "Ada <|0.00|>", "temperature": 0.7},
            {"language": "de", "initial_prompt": "Ada < |0.00|>", "temperature": 0.7},
        ),
        (3, {"task": TRANSLATE}, {"task": "translate"}),
        pytest.param(3, {"words": True}, {"word_timestamps": True}, marks=pytest.mark.slow),
    ],
)
def test_a_transcript_is_mlx_audios_own(
    whisper: ListeningModel, whisper_folder: Path, seconds: int, fields: dict[str, Any], own: dict[str, Any]
):
    samples = SAMPLES[: 16_000 * seconds]
    made, pieces = heard(whisper, samples=samples.tobytes(), **fields)
    library: Any = load_listener(whisper_folder, model_type="whisper", model_name_parts=[])
    if not on_gpu():
        compute_in_float32(library)
    mx.random.seed(5)
    reference = transcript_of(library.generate(mx.array(samples), fp16=on_gpu(), **own))
    assert made == reference and made.text
    assert "".join(pieces) == made.text and len(pieces) == (2 if seconds > 30 else 1)
    assert made.language == fields.get("language", made.language) != ""
    words = [word for segment in made.segments for word in segment.words]
    assert bool(words) == bool(fields.get("words"))


def test_times_are_numbers_from_the_begin_on():
    """mlx-audio states words before it, and JSON has no NaN."""
    words = [{"word": "a", "start": -0.02, "end": math.nan}]
    given = {"start": -0.02, "end": 0.5, "text": "a", "words": words, "avg_logprob": -0.3}
    (segment,) = transcript_of(SimpleNamespace(text="a", language="en", segments=[given])).segments
    assert (segment.start, segment.end, segment.avg_logprob) == (0.0, 0.5, -0.3)
    assert [(word.start, word.end) for word in segment.words] == [(0.0, 0.0)]


def test_windows_are_told_one_after_the_other(whisper: ListeningModel):
    done: list[int] = []
    whisper.transcribe(HEARD, lambda windows: done.append(windows), lambda piece: None)
    # At every step of decoding, and between windows.
    assert sorted(done) == done and set(done) == {0, 1} and done.count(0) > 3
    assert whisper.steps(HEARD) == 2


def test_a_window_is_encoded_once_however_often_it_is_decoded(whisper: ListeningModel, monkeypatch: pytest.MonkeyPatch):
    calls, encode = list[mx.array](), AudioEncoder.__call__

    def counted(encoder: Any, frames: mx.array) -> Any:
        calls.append(frames)
        return encode(encoder, frames)

    monkeypatch.setattr(AudioEncoder, "__call__", counted)
    # Noise is improbable, so it is decoded at all temperatures.
    one = {"samples": SAMPLES[: 3 * 16_000].tobytes(), "language": "en", "words": True}
    heard(whisper, **one)
    assert calls and not any(mx.array_equal(first, second) for first, second in pairwise(calls))
    once = len(calls)
    heard(whisper, **one)
    assert len(calls) == 2 * once, "nothing of a caller is kept"


@pytest.mark.skipif(on_gpu(), reason="a GPU computes in the model's own dtype")
def test_a_cpu_computes_in_float32(whisper_folder: Path, soprano_folder: Path):
    for folder in (whisper_folder, soprano_folder):
        model, _ = load_speech_model(folder, "m")
        halves = [name for name, module in model.named_modules() for array in module.values() if is_half(array)]
        assert halves == [] and getattr(model, "dtype", mx.float32) == mx.float32


def is_half(array: Any) -> bool:
    return isinstance(array, mx.array) and array.dtype in (mx.float16, mx.bfloat16)


def test_what_a_whisper_model_takes_is_found(whisper: ListeningModel):
    info = whisper.info
    assert (info.family, info.rate, info.listens, info.speaks) == ("whisper", 16_000, True, False)
    assert info.translates and info.words and info.segments and info.prompt and info.temperature
    assert {"en", "de"} < {*info.languages} and len(info.languages) == 99


def test_speech_is_mlx_audios_own(soprano: SpeakingModel, soprano_folder: Path):
    pieces: list[SpeechPiece] = []
    seconds = soprano.speak(SAID, quiet, pieces.append)
    library: Any = load_speaker(soprano_folder, model_type="soprano", model_name_parts=[])
    if not on_gpu():
        compute_in_float32(library)
    mx.random.seed(5)
    reference = [pcm16(each.audio) for each in library.generate(SAID.text)]
    assert [each.audio for each in pieces] == reference and len(reference) == 2
    assert (soprano.info.rate, seconds) == (32_000, sum(map(len, reference)) / 2 / 32_000)


def test_loud_audio_is_cut_off():
    assert pcm16(mx.array([[0.0, 1.0, -2.0, 0.5]])) == b"\x00\x00\xff\x7f\x01\x80\x00\x40"


def copied(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to)
    known = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**known, **config}))
    return to


def test_a_model_without_its_tokenizer_is_refused(whisper_folder: Path, tmp_path: Path):
    folder = copied(whisper_folder, tmp_path / "m")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match="writes nothing down: Processor not found"):
        ListeningModel.load(folder, "ear")


def test_missing_weights_are_refused_and_not_drawn(whisper_folder: Path, tmp_path: Path):
    folder = copied(whisper_folder, tmp_path / "m")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    del weights["decoder.ln.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError, match=r"incomplete: its weights lack decoder\.ln\.weight"):
        ListeningModel.load(folder, "ear")


@pytest.mark.parametrize("kind", ["kokoro", "spark"])
def test_a_family_whose_package_is_missing_says_which(soprano_folder: Path, tmp_path: Path, kind: str):
    folder = copied(soprano_folder, tmp_path / "m", model_type=kind)
    with pytest.raises(ModelLoadError) as refused:
        SpeakingModel.load(folder, "mouth")
    assert refused.value.message.startswith("mouth cannot be loaded: "), refused.value.message


def test_code_of_a_folder_is_never_run(whisper_folder: Path, tmp_path: Path):
    folder = copied(whisper_folder, tmp_path / "m")
    ran = tmp_path / "ran"
    (folder / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    known = json.loads((folder / "tokenizer_config.json").read_text())
    maps = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, **maps}))
    with pytest.raises(ModelLoadError, match="brings code of its own"):
        ListeningModel.load(folder, "ear")
    assert not ran.exists()


@pytest.mark.parametrize("key", ["tokenizer_path", "anything"])
def test_paths_that_leave_the_folder_are_refused(whisper_folder: Path, tmp_path: Path, key: str):
    (tmp_path / "secret.json").write_text("{}")
    folder = copied(whisper_folder, tmp_path / "m", inner={key: ["a", "../secret.json"]})
    with pytest.raises(ModelLoadError, match=r"config\.json names '\.\./secret\.json', which is not in its folder"):
        ListeningModel.load(folder, "ear")


class Recorded:
    """A model that says what it is given."""

    is_multilingual = False

    def __init__(self, sample_rate: int = 1000) -> None:
        self.sample_rate, self.given = sample_rate, list[tuple[Any, dict[str, Any]]]()

    def generate(self, audio: Any, *, language: str = "", context: str = "", instruct: str = "", **more: Any) -> Any:
        self.given.append((audio, {"language": language, "context": context, "instruct": instruct}))
        return SimpleNamespace(text="Hello", audio=mx.zeros(4), sample_rate=self.sample_rate)


def test_very_short_audio_is_filled_up_to_the_length_that_was_tried():
    model = Recorded()
    listening = ListeningModel(model, "fake")
    for count in (1, 999, 1000, 1001):
        request = SpeechRequest("", "", TRANSCRIBE, np.ones(count, "<f4").tobytes(), 1000)
        assert listening.transcribe(request, quiet, lambda piece: None).text == "Hello"
    assert [each.shape for each, _ in model.given] == [(1000,), (1000,), (1000,), (1001,)]
    assert [each.sum().item() for each, _ in model.given] == [1, 999, 1000, 1001]


def test_an_english_whisper_knows_english_alone():
    info = ListeningModel(Recorded(), "whisper").info
    assert (info.languages, info.translates) == (["en"], False)
    refused = speech_refusal(info, SpeechRequest("", "m", TRANSCRIBE, language="de"))
    assert refused is not None and refused[0] == "language"
    assert speech_refusal(info, SpeechRequest("", "m", TRANSCRIBE, language="en")) is None


def test_texts_of_callers_have_no_control_tokens(tmp_path: Path):
    model = Recorded()
    speaking = SpeakingModel(model, "fake", tmp_path)
    speaking.info = replace(speaking.info, rate=model.sample_rate)
    speaking.speak(SpeechRequest("", "", SPEAK, text="a <|eot|>", instructions="<|b|>"), quiet, lambda piece: None)
    ListeningModel(model, "fake").transcribe(replace(HEARD, text="<|c|>"), quiet, lambda piece: None)
    (said, how), (_, told) = model.given
    assert (said, how["instruct"], told["context"]) == ("a < |eot|>", "< |b|>", "< |c|>")
