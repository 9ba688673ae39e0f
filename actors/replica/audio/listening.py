"""A model of mlx-audio that writes down speech: what it takes, and one transcript."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from ....cluster.errors import ModelLoadError
from ...model_files.speech_folders import LISTENS
from ...patches import evaluations_told
from ...protocol.speech_messages import (
    TOKENS_PER_S,
    TRANSCRIBE,
    TRANSLATE,
    SpeechInfo,
    SpeechPiece,
    SpeechRequest,
    Transcript,
    TranscriptSegment,
    TranscriptWord,
)
from ..jobs.engine import Paused
from .loading import LOAD_ERRORS, family_package, load_speech_model, what_it_lacks
from .texts import as_text
from .whisper_windows import EncodedOnce, WhisperWindows

RATE = 16_000
WHISPER = "whisper"
WINDOW_S = 30.0
TRIED_S = 1.0
"""Seconds of the noise with which a model is tried."""

TOKENS_A_SECOND = 16
"""Families with a limit of tokens may write so many for a second of audio, if that is more than their own limit."""

_NEEDED = MappingProxyType({"moonshine": "tokenizer.json", "mms": "vocab.json"})
"""Files without which families write numbers in the place of words."""

_PROMPTS = ("initial_prompt", "context")
"""What families call the text that came before, or words that may occur."""

Told = Callable[[SpeechPiece], None]


class ListeningModel:
    """A loaded model. Use it on one thread.

    Attributes:
        info: what it takes.
        in_windows: whether it writes down one window after the other, not a whole file at once.
    """

    def __init__(self, model: Any, family: str) -> None:
        self._model = model
        self._parameters = inspect.signature(model.generate).parameters
        self._prompt = next((name for name in _PROMPTS if name in self._parameters), "")
        self.in_windows = family == WHISPER
        self.info = SpeechInfo(
            family,
            listens=True,
            rate=_rate(model),
            translates=self.in_windows and bool(model.is_multilingual),
            words="word_timestamps" in self._parameters,
            language="language" in self._parameters,
            prompt=bool(self._prompt),
            temperature="temperature" in self._parameters,
            languages=self._languages(),
        )

    @classmethod
    def load(cls, folder: Path, source: str) -> ListeningModel:
        """Loads the model in a folder, and writes down a second of noise with it.

        Raises:
            ModelLoadError: as `load_speech_model`; or it writes nothing down.
        """
        model, found = load_speech_model(folder, source)
        if found.kind != LISTENS or not callable(getattr(model, "generate", None)):
            raise ModelLoadError(f"{source} cannot be loaded: models of type {found.type} write down no speech")
        try:
            made = cls(model, family := family_package(model).rpartition(".")[2])
            if not (folder / (needed := _NEEDED.get(family, "config.json"))).is_file():
                raise ModelLoadError(f"{source} cannot be loaded: {needed} is missing, so it would write no words")
            made.try_out()
        except ModelLoadError:
            raise
        except LOAD_ERRORS as error:
            raise ModelLoadError(f"{source} writes nothing down: {what_it_lacks(error)}") from error
        return made

    def try_out(self) -> None:
        """Writes down noise, and finds what a transcript has. Raises what the library raises."""
        noise = 0.01 * np.random.default_rng(0).standard_normal(round(TRIED_S * self.info.rate))
        samples = noise.astype("<f4").tobytes()
        request = SpeechRequest("", "", TRANSCRIBE, samples, self.info.rate)
        result = self._generate(request)
        # Some families have one segment without times.
        timed = any(each.end > each.start for each in transcript_of(result).segments)
        segments = self.in_windows or timed or getattr(result, "sentences", None) is not None
        self.info = replace(self.info, segments=segments)
        if self.info.words:
            # With a language, or Whisper would find it out again.
            language = next(iter(self.info.languages), "")
            transcript_of(self._generate(replace(request, words=True, language=language)))

    def _languages(self) -> list[str]:
        """Returns the codes of languages that a request may name; [] if they are not known."""
        if not self.in_windows:
            return []
        if not self._model.is_multilingual:
            return ["en"]
        tokenizer = self._model.get_tokenizer()
        known = tokenizer.hf_tokenizer.get_vocab()
        return [code for code in tokenizer.all_language_codes if f"<|{code}|>" in known]

    def size(self, request: SpeechRequest) -> int:
        """Returns what the memory of a transcript grows with at most. Whisper keeps the mel frames of the whole file,
        and decodes one window after the other; other families' attention may look at the whole file."""
        frames = max(1, round(request.seconds * TOKENS_PER_S))
        if self.in_windows:
            return min(frames, round(WINDOW_S * TOKENS_PER_S)) + frames // 10
        return frames * frames

    def steps(self, request: SpeechRequest) -> int:
        """Returns in how many windows the audio is written down."""
        return max(1, int(-(-request.seconds // WINDOW_S))) if self.in_windows else 1

    def transcribe(self, request: SpeechRequest, paused: Paused, told: Told) -> Transcript:
        """Returns a transcript.

        Args:
            paused: called with the windows that are done, whenever something was evaluated.
            told: called with each piece of text once it is certain.
        """
        done = 0

        def say(text: str, *, certain: bool = True) -> None:
            if text and certain:
                told(SpeechPiece(text=text))

        def next_window(text: str) -> None:
            nonlocal done
            # With the times of words, segments without length are left out later.
            say(text, certain=not request.words)
            done += 1
            paused(done)

        if not self.in_windows:
            with evaluations_told(lambda: paused(done)).for_now():
                transcript = transcript_of(self._generate(request))
            say(transcript.text)
            return transcript
        windows = WhisperWindows(self._model, next_window)
        with windows.followed(), evaluations_told(lambda: paused(done)).for_now():
            transcript = transcript_of(self._generate(request))
        say(transcript.text if request.words else windows.last())
        return transcript

    def _generate(self, request: SpeechRequest) -> Any:
        """Has mlx-audio write down audio, and returns its result."""
        how: dict[str, Any] = {}
        if request.language:
            how["language"] = request.language
        if request.text:
            how[self._prompt] = as_text(request.text)
        # 0 leaves it to the library: Whisper begins there, and goes up if the text is improbable.
        if request.temperature:
            how["temperature"] = request.temperature
        if request.words:
            how["word_timestamps"] = True
        if request.task == TRANSLATE:
            how["task"] = "translate"
        most = self._parameters.get("max_tokens")
        if most is not None and isinstance(most.default, int):
            how["max_tokens"] = max(most.default, round(TOKENS_A_SECOND * request.seconds))
        mx.random.seed(request.seed)
        samples = np.frombuffer(request.samples, "<f4")
        if self.in_windows:
            with EncodedOnce(self._model).used():
                return self._model.generate(mx.array(samples), fp16=self._model.dtype == mx.float16, **how)
        if (short := round(TRIED_S * self.info.rate) - len(samples)) > 0:
            # Some families fail at audio that is shorter than one of their frames.
            samples = np.pad(samples, (0, short))
        return self._model.generate(mx.array(samples), **how)


def transcript_of(result: Any) -> Transcript:
    """Returns a result of any family as a transcript.

    Raises:
        TypeError: it has no text.
    """
    text = getattr(result, "text", None)
    if not isinstance(text, str):
        raise TypeError(f"a {type(result).__name__} has no text")
    language = getattr(result, "language", None)
    segments = getattr(result, "segments", None)
    if segments is None:
        segments = getattr(result, "sentences", None)
    # Some families say one language for each segment.
    named = language if isinstance(language, str) else ""
    return Transcript(text, named, [_segment(each) for each in segments or ()])


def _segment(given: Any) -> TranscriptSegment:
    def of(*names: str) -> Any:
        found = (given.get(name) if isinstance(given, Mapping) else getattr(given, name, None) for name in names)
        return next((each for each in found if each is not None), None)

    tokens = of("tokens")
    numbers = isinstance(tokens, Sequence) and all(isinstance(each, int) for each in tokens)
    return TranscriptSegment(
        start=_seconds(of("start", "start_time")),
        end=_seconds(of("end", "end_time")),
        text=str(of("text", "content") or ""),
        tokens=[*tokens] if numbers and tokens else [],
        temperature=_finite(of("temperature")),
        avg_logprob=_finite(of("avg_logprob")),
        compression_ratio=_finite(of("compression_ratio")),
        no_speech_prob=_finite(of("no_speech_prob")),
        words=[_word(each) for each in of("words") or ()],
    )


def _word(given: Mapping[str, Any]) -> TranscriptWord:
    return TranscriptWord(str(given["word"]), _seconds(given["start"]), _seconds(given["end"]))


def _finite(value: Any) -> float:
    """Returns a number. JSON has none that are not finite."""
    number = float(value or 0.0)
    return number if math.isfinite(number) else 0.0


def _seconds(value: Any) -> float:
    """Returns a time. mlx-audio states some of words a fiftieth of a second before the audio."""
    return max(0.0, _finite(value))


def _rate(model: Any) -> int:
    """Returns the samples a second that a model takes."""
    rate = getattr(model, "sample_rate", None)
    if rate is None:
        rate = getattr(getattr(model, "preprocessor_config", None), "sample_rate", None)
    return int(rate or RATE)
