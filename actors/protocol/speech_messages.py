"""What models of speech are asked for, and what they answer: transcripts of audio, and audio of texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TRANSCRIBE, TRANSLATE, SPEAK = "transcribe", "translate", "speak"

TOKENS_PER_S = 50
"""What a second of audio counts as: Whisper's encoder has so many frames a second."""

SPOKEN_CHARACTERS_MAX = 4096
"""The longest text that is spoken, as with OpenAI."""


@dataclass(frozen=True, slots=True)
class SpeechInfo:
    """What a model of speech does. `family` is mlx-audio's name for its kind, "" if it is no such model.

    `listens` says whether it writes down speech, and `speaks` whether it makes audio; `rate` is the samples a second of
    that audio. It `translates` speech into English, states the times of `segments` and of `words`, and takes a
    `language`, a `prompt`, a `temperature`, a `speed` and `instructions`, if it says so. `voices` and `languages` are
    those that may be named. Without `voices` it speaks with its own; without `languages` any code is handed to the
    model, which may refuse or ignore it.
    """

    family: str = ""
    listens: bool = False
    speaks: bool = False
    rate: int = 16_000
    translates: bool = False
    segments: bool = False
    words: bool = False
    language: bool = False
    prompt: bool = False
    temperature: bool = False
    speed: bool = False
    instructions: bool = False
    voices: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Asks for one transcript, or for one text to be spoken.

    Attributes:
        task: `transcribe`, `translate` or `speak`.
        samples: the audio of a transcript, float32, little-endian, at the model's rate.
        text: what is spoken; of a transcript what came before, or words that may occur.
        seed: what is drawn depends on it. The same request with the same seed gives the same on the same device.
        temperature: None for the model's own way.
        words: whether a transcript has the times of words.
        tenant, flow: as in `GenerateRequest`.
    """

    request_id: str
    model: str
    task: str
    samples: bytes = b""
    rate: int = 16_000
    text: str = ""
    voice: str = ""
    instructions: str = ""
    language: str = ""
    speed: float = 1.0
    temperature: float | None = None
    words: bool = False
    seed: int = 0
    priority: int = 0
    deadline_s: float = 600.0
    tenant: str = ""
    flow: str = ""

    @property
    def seconds(self) -> float:
        """Of the audio."""
        return len(self.samples) / 4 / self.rate

    @property
    def tokens(self) -> int:
        """What it costs: the audio's length, and the text's characters."""
        return max(1, round(self.seconds * TOKENS_PER_S) + len(self.text))


@dataclass(frozen=True, slots=True)
class TranscriptWord:
    """A word, with its times in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A part of a transcript, with its times in seconds. The other fields are Whisper's; other families have none."""

    start: float
    end: float
    text: str
    tokens: list[int] = field(default_factory=list)
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: list[TranscriptWord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is said in audio. `language` is "" if the model does not say it."""

    text: str
    language: str = ""
    segments: list[TranscriptSegment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpeechPiece:
    """A part of the result: text of a transcript, or audio, 16-bit samples, little-endian, one channel."""

    text: str = ""
    audio: bytes = b""


@dataclass(frozen=True, slots=True)
class SpeechUpdate:
    """How far a request is.

    Attributes:
        number: of the update, from 1.
        partial: the pieces that are new.
        transcript: with the last update of a transcript.
        seconds: of the audio that was made, with the last update of a text that is spoken.
        done: whether it is the last update of a request that has not failed.
        error: as in `SequenceUpdate`, with the last update of a request that failed.
    """

    number: int
    partial: list[SpeechPiece] = field(default_factory=list)
    transcript: Transcript | None = None
    seconds: float = 0.0
    done: bool = False
    error: dict[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        return self.done or self.error is not None


def speech_refusal(info: SpeechInfo, request: SpeechRequest) -> tuple[str, str] | None:
    """Returns the field of a request that its model does not take, and why; None if it takes all."""
    name = repr(request.model)
    if request.task == SPEAK:
        if not info.speaks:
            return "model", f"the model {name} does not speak: POST /v1/audio/transcriptions serves it"
        if info.voices and request.voice not in info.voices:
            return "voice", f"voice: {request.voice!r} is none of {name}; it has {', '.join(info.voices)}"
        asked = {"speed": request.speed != 1.0, "instructions": bool(request.instructions)}
    else:
        if not info.listens:
            return "model", f"the model {name} writes down no speech: POST /v1/audio/speech serves it"
        if request.task == TRANSLATE and not info.translates:
            return "model", f"the model {name} does not translate: POST /v1/audio/transcriptions serves it"
        if request.words and not info.words:
            return "timestamp_granularities", f"timestamp_granularities: {name} states no times of words"
        if request.language and info.languages and request.language not in info.languages:
            return "language", f"language: {name} knows no {request.language!r}"
        asked = {
            "language": bool(request.language),
            "prompt": bool(request.text),
            "temperature": bool(request.temperature),
        }
    wrong = next((key for key, is_asked in asked.items() if is_asked and not getattr(info, key)), None)
    return None if wrong is None else (wrong, f"{wrong}: the model {name} takes none")
