"""The engine's thread of a replica whose model writes down speech, or speaks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ...model_files.source import resolve
from ...model_files.speech_folders import LISTENS, read_speech_weights, speech_files, speech_folder
from ...model_files.weights import WeightFile
from ..jobs.serving import JobServing, Loaded
from .engine import SpeechEngine
from .listening import ListeningModel
from .speaking import SpeakingModel


class SpeechServing(JobServing):
    """Loads and serves a model of speech."""

    library, does = "mlx-audio", "is a model of speech"

    def find(self, source: str) -> Path:
        return resolve(source, self._shell.note_progress, speech=True)

    def files_of(self, folder: Path) -> tuple[dict[str, Path], list[WeightFile]]:
        return speech_files(folder), read_speech_weights(folder)

    def load(self, folder: Path, source: str) -> Loaded:
        found = speech_folder(folder)
        listens = found is None or found.kind == LISTENS
        model = ListeningModel.load(folder, source) if listens else SpeakingModel.load(folder, source)
        return Loaded(partial(SpeechEngine, model), listens)
