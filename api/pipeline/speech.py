"""Transcripts of audio and spoken texts: the pipeline behind the routes for models of speech. Independent of HTTP and
Ray."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ...actors.model_files.source import found_here
from ...actors.model_files.speech_folders import speech_folder
from ...actors.protocol.speech_messages import (
    SPEAK,
    TOKENS_PER_S,
    SpeechInfo,
    SpeechPiece,
    SpeechRequest,
    Transcript,
    speech_refusal,
)
from ...cluster.errors import InvalidRequest, ModelLoadError
from ...cluster.telemetry.context import span
from ..requests.backend import ServedModel
from ..requests.callers import Caller
from ..requests.requests import Request
from .generation import Generator
from .kinds import check_does_speech, speech_models
from .sending import sent_fields
from .spans import SPEECH, TRANSCRIPTION, note_model, note_usage
from .told import news_and_result

SEEDS = 2**32

Told = Callable[[SpeechPiece], None]


@dataclass(frozen=True, kw_only=True)
class SpeechAsked(Request):
    """A request for a transcript, or for a spoken text; otherwise as `Request`.

    Attributes:
        task: `transcribe`, `translate` or `speak`.
        file: the audio file of a transcript, in a list that is emptied once it is decoded.
        text, voice, instructions, language, speed, temperature, words: as in `SpeechRequest`.
        timed: whether the answer has times.
        seed: None draws one.
    """

    task: str
    file: list[bytes] = field(default_factory=list, repr=False)
    text: str = ""
    voice: str = ""
    instructions: str = ""
    language: str = ""
    speed: float = 1.0
    temperature: float | None = None
    timed: bool = False
    words: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class MadeSpeech:
    """What was made. `replica`, `node` and `why` are as in `Vectors`.

    Attributes:
        transcript: of audio; None for a spoken text.
        seconds: of the audio.
        tokens: (of what was given, of what was made), as limits count them.
    """

    model: ServedModel
    transcript: Transcript | None
    seconds: float
    tokens: tuple[int, int]
    replica: str
    node: str
    why: str


class SpeechMaker:
    """Writes down speech, and speaks, on the generator's backend."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def first(self, caller: Caller, task: str) -> str:
        """Returns the first loaded model that does a task and that the caller may use; "" if there is none."""
        models = speech_models(await self._generator.backend.models(), task)
        return next((each for each in models if caller.may_use(each)), "")

    async def is_of_speech(self, name: str, caller: Caller, *, any_model: bool) -> bool | None:
        """Returns whether the model called `name` is one of speech; None if only loading it shows that. If it comes and
        goes, its config says it, if its files are on this machine.

        Raises:
            ModelNotFound: there is no such model that the caller may use.
        """
        wanted = await self._generator.named(name, caller, any_model=any_model)
        for model in await self._generator.backend.models():
            if model.info.name == wanted.name:
                return bool(model.info.speech.family)
        if not wanted.comes_and_goes or not wanted.source:
            return None
        return await asyncio.to_thread(_source_is_of_speech, wanted.source)

    async def loaded(self, request: SpeechAsked) -> ServedModel:
        """Returns the model of a request, after loading it if need be. Raises as `make`."""
        async with self._generator.deadline(request, "the model was not loaded"):
            return await self._model(request)

    async def make(self, request: SpeechAsked, told: Told = lambda piece: None) -> MadeSpeech:
        """Returns a transcript, or speaks a text.

        Args:
            told: called with each piece: of the transcript's text, or of the audio, which comes in no other way.

        Raises:
            RequestError: the request is invalid, or the model does not do this.
            Unavailable: no replica takes it now.
            DeadlineExceeded: it took too long.
        """
        generator, caller = self._generator, request.caller
        async with generator.deadline(request, "the request was not done") as deadline:
            model = await self._model(request)
            priority, info = caller.priority(request.options.priority), model.info.speech
            samples = b""
            asked = _checked(request, model)
            if request.file:
                audio = await generator.loader.load_audio_file(request.file[0], "file", info.rate)
                # Only its samples are needed from now on.
                request.file.clear()
                samples = audio.samples
            note_model(SPEECH if request.task == SPEAK else TRANSCRIPTION, request.model, model.info.name)
            seed = secrets.randbelow(SEEDS) if request.seed is None else request.seed
            sent = sent_fields(request, "speech", deadline)
            asked = replace(asked, samples=samples, seed=seed, priority=priority, **sent)
            admitted = caller.admit(1, asked.tokens)
            try:
                answer = await generator.backend.do_speech(model, asked, told)
                update = answer.update
                seconds = update.seconds if request.task == SPEAK else asked.seconds
                made = round(seconds * TOKENS_PER_S) if request.task == SPEAK else _tokens_of(update.transcript)
                admitted.end_sequence(made)
            finally:
                admitted.close()
            note_usage(span(), asked.tokens, completion_tokens=made)
            tokens = asked.tokens, made
            return MadeSpeech(model, update.transcript, seconds, tokens, answer.replica, answer.node, answer.why)

    async def _model(self, request: SpeechAsked) -> ServedModel:
        generator, caller = self._generator, request.caller
        name = request.model or await self.first(caller, request.task)
        model = await generator.served(name, caller, any_model=request.any_model, loading=request.loading)
        check_does_speech(model, request.task)
        return model

    def stream(self, request: SpeechAsked) -> AsyncGenerator[SpeechPiece | MadeSpeech, None]:
        """Yields the pieces, and then what was made. Raises as `make`. Closing it ends the request."""
        return news_and_result(partial(self.make, request))


def _source_is_of_speech(source: str) -> bool | None:
    """Returns whether a model's config is that of a model of speech; None if it is not on this machine."""
    try:
        folder = found_here(source)
    except ModelLoadError:
        return None
    return None if folder is None else speech_folder(folder) is not None


def _checked(request: SpeechAsked, model: ServedModel) -> SpeechRequest:
    """Returns the request, without its audio.

    Raises:
        InvalidRequest: the model does not do this.
    """
    info = model.info.speech
    asked = SpeechRequest(
        request_id="",
        model=model.info.name,
        task=request.task,
        rate=info.rate,
        text=request.text,
        voice=request.voice or next(iter(info.voices), ""),
        instructions=request.instructions,
        language=_language(request.language, info),
        speed=request.speed,
        temperature=request.temperature,
        words=request.words,
    )
    if request.timed and not info.segments:
        message = f"response_format: the model {model.info.name!r} states no times; possible are json and text"
        raise InvalidRequest(message, param="response_format")
    if (refusal := speech_refusal(info, asked)) is not None:
        raise InvalidRequest(refusal[1], param=refusal[0])
    return asked


def _language(code: str, info: SpeechInfo) -> str:
    """Returns a code of a language as the model knows it: `de` for `de-AT`, if it knows only the former."""
    plain = code.partition("-")[0].lower()
    return plain if code not in info.languages and plain in info.languages else code


def _tokens_of(transcript: Transcript | None) -> int:
    """Returns what a transcript counts as: its tokens, if they are known, else its words."""
    if transcript is None:
        return 0
    return sum(len(each.tokens) for each in transcript.segments) or len(transcript.text.split())
