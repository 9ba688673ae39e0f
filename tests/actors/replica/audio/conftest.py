"""Tiny models of speech, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from satchel.actors.replica.audio.listening import ListeningModel
from satchel.actors.replica.audio.speaking import SpeakingModel
from tests.worlds.models.speech_families import write_speech_model


@pytest.fixture(scope="session")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The folder's name says something wrong of the family.
    return write_speech_model(tmp_path_factory.mktemp("speech") / "parakeet-kokoro", "whisper")


@pytest.fixture(scope="session")
def soprano_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech_model(tmp_path_factory.mktemp("speech") / "qwen-7b", "soprano")


@pytest.fixture(scope="session")
def whisper(whisper_folder: Path) -> ListeningModel:
    return ListeningModel.load(whisper_folder, "ear")


@pytest.fixture(scope="session")
def soprano(soprano_folder: Path) -> SpeakingModel:
    return SpeakingModel.load(soprano_folder, "mouth")
