"""A folder's config.json says which of mlx-audio's families its model is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.model_files.image_folders import image_files
from satchel.actors.model_files.speech_folders import (
    SpeechFolder,
    read_speech_weights,
    refuse_other_places,
    speech_files,
    speech_folder,
    speech_type,
)
from satchel.cluster.errors import ModelLoadError


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "whisper"}, SpeechFolder("stt", "whisper")),
        ({"model_type": "kokoro"}, SpeechFolder("tts", "kokoro")),
        ({"model_type": "csm"}, SpeechFolder("tts", "csm")),
        ({"target": "nemo.collections.asr.models.EncDecRNNTBPEModel"}, SpeechFolder("stt", "parakeet")),
        ({"target": "nemo.collections.asr.models.EncDecMultiTaskModel"}, SpeechFolder("stt", "canary")),
        ({"model_type": "vibevoice"}, SpeechFolder("tts", "vibevoice")),
        ({"model_type": "vibevoice", "architectures": ["VibeVoiceForASR"]}, SpeechFolder("stt", "vibevoice")),
        ({"flow_lm": {}, "mimi": {}}, SpeechFolder("tts", "pocket_tts")),
        # Types of text, though mlx-audio has families of these names.
        ({"model_type": "llama"}, None),
        ({"model_type": "qwen3"}, None),
        ({"model_type": "gemma4"}, None),
        ({"model_type": "nobody_knows"}, None),
        ({"model_type": ["whisper"]}, None),
        ({}, None),
    ],
)
def test_a_type_is_that_of_the_config(config: dict[str, Any], found: SpeechFolder | None):
    assert speech_type(config) == found


def test_a_folder_without_a_readable_config_is_none(tmp_path: Path):
    assert speech_folder(tmp_path) is None
    (tmp_path / "config.json").write_text("[")
    assert speech_folder(tmp_path) is None


def test_weights_lie_in_the_folder_itself(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="has no weights"):
        read_speech_weights(tmp_path)


def test_what_macos_leaves_on_other_disks_is_no_file_of_a_model(tmp_path: Path):
    for name in ("config.json", "vae/x.safetensors"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7\xff")
    assert [*image_files(tmp_path)] == [*speech_files(tmp_path)] == ["model/config.json", "model/vae/x.safetensors"]
    refuse_other_places("m", tmp_path)


def test_only_what_is_there_is_a_place(tmp_path: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    outside = tmp_path / "other"
    outside.mkdir()
    fine = {"labels": ["/", "..", "a\0b"], "path": "nowhere/at/all", "manifest_filepath": "/data/none.json"}
    (folder / "config.json").write_text(json.dumps({**fine, "voices_path": "./voices", "text": str(outside)}))
    refuse_other_places("m", folder)
    (folder / "config.json").write_text(json.dumps({"voices_path": str(outside)}))
    with pytest.raises(ModelLoadError, match="which is not in its folder"):
        refuse_other_places("m", folder)


ADDRESSES = ("http://127.0.0.1/x", "HTTPS://a.b/c", " hf://a/b", "file:/etc/passwd", "file:x", "s3://a", "data:,x")


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_refused_whatever_its_key(tmp_path: Path, address: str):
    (tmp_path / "config.json").write_text(json.dumps({"flow_lm": {"lookup": ["a", {"anything": address}]}}))
    with pytest.raises(ModelLoadError, match=r"config\.json names .*, which is not in its folder"):
        refuse_other_places("m", tmp_path)


def test_texts_with_colons_are_no_addresses(tmp_path: Path):
    fine = ["https://", "see https://a.b", "a:b", "data: x", "{% if x: %}", ":", "//", "file", "ratio 1:2", "<|hf:|>"]
    (tmp_path / "config.json").write_text(json.dumps({"texts": fine}))
    refuse_other_places("m", tmp_path)
