"""A model of mlx-audio that speaks: its voices, and one text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....cluster.errors import GenerationFailed, ModelLoadError
from ...model_files.source import files_in
from ...model_files.speech_folders import SPEAKS
from ...patches import evaluations_told
from ...protocol.speech_messages import SPEAK, SpeechInfo, SpeechPiece, SpeechRequest
from ..jobs.engine import Paused
from .loading import LOAD_ERRORS, family_package, load_speech_model, what_it_lacks
from .texts import as_text

TRIED = "Hello."
TRIED_TOKENS = 32
"""The most tokens of the text with which a model is tried, if its family has a limit."""

_INSTRUCTIONS = ("instruct", "instructions")

Told = Callable[[SpeechPiece], None]


class SpeakingModel:
    """A loaded model. Use it on one thread.

    Attributes:
        info: what it takes.
    """

    def __init__(self, model: Any, family: str, folder: Path) -> None:
        self._model = model
        self._parameters = inspect.signature(model.generate).parameters
        self._instructions = next((name for name in _INSTRUCTIONS if name in self._parameters), "")
        voices = _voices(model, folder) if "voice" in self._parameters else []
        self.info = SpeechInfo(
            family,
            speaks=True,
            rate=0,
            speed="speed" in self._parameters,
            instructions=bool(self._instructions),
            voices=voices,
        )

    @classmethod
    def load(cls, folder: Path, source: str) -> SpeakingModel:
        """Loads the model in a folder, and speaks a word with it.

        Raises:
            ModelLoadError: as `load_speech_model`; or it does not speak.
        """
        model, found = load_speech_model(folder, source)
        if found.kind != SPEAKS or not callable(getattr(model, "generate", None)):
            raise ModelLoadError(f"{source} cannot be loaded: models of type {found.type} do not speak")
        try:
            made = cls(model, family_package(model).rpartition(".")[2], folder)
            made.try_out()
        except LOAD_ERRORS as error:
            raise ModelLoadError(f"{source} does not speak: {what_it_lacks(error)}") from error
        return made

    def try_out(self) -> None:
        """Speaks a word, and finds the rate. Raises what the library raises; `ValueError` if there is no audio."""
        voice = self.info.voices[0] if self.info.voices else ""
        most = {"max_tokens": TRIED_TOKENS} if "max_tokens" in self._parameters else {}
        made = [*self._generate(SpeechRequest("", "", SPEAK, text=TRIED, voice=voice), most)]
        if not sum(len(pcm) for pcm, _ in made):
            raise ValueError("it makes no audio")
        self.info = replace(self.info, rate=made[0][1])

    def size(self, request: SpeechRequest) -> int:
        """Returns what the memory of a spoken text grows with at most."""
        return request.tokens

    def steps(self, request: SpeechRequest) -> int:
        """Returns in how many segments a text is spoken, about: most families make one of each line."""
        return max(1, sum(not line.isspace() for line in request.text.splitlines() if line))

    def speak(self, request: SpeechRequest, paused: Paused, told: Told) -> float:
        """Speaks a text, and returns the seconds of its audio.

        Args:
            paused: called with the segments that are done, whenever something was evaluated.
            told: called with each segment.
        """
        segments, samples = 0, 0
        with evaluations_told(lambda: paused(segments)).for_now():
            for pcm, rate in self._generate(request, {}):
                if rate != self.info.rate:
                    raise GenerationFailed(f"the model spoke with {rate} samples a second, not {self.info.rate}")
                if pcm:
                    told(SpeechPiece(audio=pcm))
                segments, samples = segments + 1, samples + len(pcm) // 2
                paused(segments)
        return samples / self.info.rate

    def _generate(self, request: SpeechRequest, more: Mapping[str, Any]) -> Iterator[tuple[bytes, int]]:
        """Has mlx-audio speak a text, and yields each segment as 16-bit samples, with its samples a second."""
        how: dict[str, Any] = dict(more)
        if self.info.voices:
            how["voice"] = request.voice
        if request.speed != 1.0:
            how["speed"] = request.speed
        if request.instructions:
            how[self._instructions] = as_text(request.instructions)
        if "verbose" in self._parameters:
            how["verbose"] = False
        if "seed" in self._parameters:
            how["seed"] = request.seed
        mx.random.seed(request.seed)
        # Some families draw from it.
        np.random.seed(request.seed % 2**32)
        made = self._model.generate(as_text(request.text), **how)
        for result in [made] if hasattr(made, "audio") else made:
            yield pcm16(result.audio), int(result.sample_rate)


def pcm16(audio: Any) -> bytes:
    """Returns audio from -1 to 1 as 16-bit samples, little-endian. Louder parts are cut off.

    Raises:
        GenerationFailed: it has other values than numbers.
    """
    samples = np.array(mx.array(audio).astype(mx.float32)).reshape(-1)
    if not np.isfinite(samples).all():
        raise GenerationFailed("the model made audio that is not finite")
    return np.round(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def _voices(model: Any, folder: Path) -> list[str]:
    """Returns the names of a model's voices, as far as it says them."""
    supported: Any = getattr(model, "get_supported_speakers", None)
    if supported is not None:
        return sorted(map(str, supported()))
    if isinstance(known := getattr(model, "voices", None), Mapping) and known:
        return sorted(map(str, known))
    return [path.stem for path in files_in(folder / "voices", "*.safetensors")]
