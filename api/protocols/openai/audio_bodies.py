"""OpenAI's audio on the way in: forms with an audio file to write down, and bodies with a text to speak."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....actors.protocol.speech_messages import SPEAK, SPOKEN_CHARACTERS_MAX, TRANSCRIBE, TRANSLATE
from ....cluster.errors import InvalidRequest, quoted
from ...http.forms import Form, value_of
from ...media.sources import AudioSource
from ...pipeline.speech import SEEDS, SpeechAsked
from ...requests.history import Message
from ...requests.options import WHOLE, Options, Priority, Temperature, TimeoutS, invalid, make_options
from ...requests.request_body import RequestBody
from ...requests.requests import ChatRequest

PROMPT_CHARACTERS_MAX = 32_000
FILE = "file"
GRANULARITIES = "timestamp_granularities"

_TRANSCRIBE = "Transcribe the speech in this audio word by word. Answer with the transcript alone."
_TRANSLATE = "Translate the speech in this audio into English. Answer with the translation alone."
_LISTS = ("include", "known_speaker_names", "known_speaker_references")
_TIMED = ("verbose_json", "srt", "vtt")
_NO_TIMES = "models that answer chats state no times"
_NOT_WRITTEN = ("mp3", "opus", "aac", "flac")
"""Formats of OpenAI's that no installed library writes."""

_KINDS = MappingProxyType({"temperature": float, "timeout_s": float, "priority": int, "seed": int, "stream": bool})

Seed = Annotated[int, Field(ge=0, lt=SEEDS), WHOLE]


class SpeechForm(BaseModel):
    """The fields of `/v1/audio/transcriptions` and `/v1/audio/translations` besides the file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    language: Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$")] | None = None
    prompt: Annotated[str, Field(max_length=PROMPT_CHARACTERS_MAX)] | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] | None = None
    temperature: Temperature | None = None
    stream: bool | None = None
    chunking_strategy: Literal["auto"] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    seed: Seed | None = None
    user: str | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None

    @property
    def timed(self) -> bool:
        """Whether the answer has times."""
        return self.response_format in _TIMED

    @property
    def words(self) -> bool:
        """Whether the answer has the times of words."""
        return "word" in (self.timestamp_granularities or ())

    @property
    def options(self) -> Options:
        """Those of every request."""
        return make_options(priority=self.priority, timeout_s=self.timeout_s)

    def chat(self, file: list[bytes], *, translates: bool) -> ChatRequest:
        """Returns the request to a model that takes audio in chats: a conversation of one message, with the audio and
        what is to be done. Encodes the whole file: call it in a worker thread.

        Args:
            file: the audio file, in a list that is emptied.

        Raises:
            InvalidRequest: such models cannot give what is asked for.
        """
        if self.timed:
            raise InvalidRequest(
                f"response_format {quoted(self.response_format)} is not supported: {_NO_TIMES}; possible are json and "
                "text",
                param="response_format",
            )
        if self.timestamp_granularities:
            raise InvalidRequest(f"{GRANULARITIES} is not supported: {_NO_TIMES}", param=GRANULARITIES)
        words = _TRANSLATE if translates else _TRANSCRIBE
        if self.language:
            words += f" The language that is spoken has the code {self.language}."
        if self.prompt:
            words += f" This came before, or shows words that may occur: {self.prompt}"
        url = f"data:;base64,{base64.b64encode(file.pop()).decode()}"
        content: list[Any] = [AudioSource(FILE, url, url_where=FILE), {"type": "text", "text": words}]
        message: Message = {"role": "user", "content": content}
        options = {"temperature": self.temperature or 0.0, "seed": self.seed}
        return ChatRequest(
            messages=[message],
            model=self.model or "",
            options=make_options(priority=self.priority, timeout_s=self.timeout_s, **options),
            template_kwargs={"enable_thinking": False},
        )

    def speech(self, file: list[bytes], *, translates: bool) -> SpeechAsked:
        """Returns the request to a model that writes down speech.

        Args:
            file: as in `SpeechAsked`.

        Raises:
            InvalidRequest: fields contradict each other.
        """
        if self.stream and self.timed:
            message = f"response_format {quoted(self.response_format)} is not streamed; possible are json and text"
            raise InvalidRequest(message, param="response_format")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(f"{GRANULARITIES}: only with response_format verbose_json", param=GRANULARITIES)
        return SpeechAsked(
            model=self.model or "",
            task=TRANSLATE if translates else TRANSCRIBE,
            file=file,
            text=self.prompt or "",
            language=self.language or "",
            temperature=self.temperature,
            timed=self.timed,
            words=self.words,
            seed=self.seed,
            options=self.options,
        )


def read_speech_form(form: Form, *, translates: bool) -> tuple[SpeechForm, list[bytes]]:
    """Returns the fields of a form, and its file, in a list.

    Raises:
        InvalidRequest: a field is wrong or not supported, or there is not exactly one file; `param` is the field.
    """
    files = form.files.get(FILE, [])
    if len(files) != 1:
        raise InvalidRequest(f"{FILE}: the form must have exactly one", param=FILE)
    if other := next((name for name in form.files if name != FILE), None):
        raise InvalidRequest(f"{other[:100]}: is not supported", param=other[:100])
    fields: dict[str, Any] = {
        name: value_of(text, _KINDS.get(name, str)) for name, text in form.fields.items() if text != ""
    }
    _refuse(fields, translates=translates)
    wanted = [each for name in (GRANULARITIES, f"{GRANULARITIES}[]") for each in form.lists.get(name, ()) if each]
    fields.pop(f"{GRANULARITIES}[]", None)
    if wanted:
        fields[GRANULARITIES] = wanted
    try:
        return SpeechForm.model_validate(fields), files
    except ValidationError as error:
        raise invalid(error) from None


def _refuse(fields: Mapping[str, str], *, translates: bool) -> None:
    """Raises for known fields that are not supported."""
    for name in fields:
        plain = name.removesuffix("[]")
        if plain in _LISTS:
            raise InvalidRequest(f"{plain} is not supported", param=plain)
    if fields.get("response_format") == "diarized_json":
        message = "response_format: diarized_json is not supported: no model that is served tells speakers apart"
        raise InvalidRequest(message, param="response_format")
    absent = ("language", "stream", GRANULARITIES, f"{GRANULARITIES}[]")
    if translates and (name := next((name for name in absent if name in fields), None)):
        raise InvalidRequest(f"{name}: translations do not have it", param=name)


class SpeakBody(RequestBody):
    """The body of `/v1/audio/speech`. `null` means the default."""

    input: Annotated[str, Field(min_length=1, max_length=SPOKEN_CHARACTERS_MAX)]
    model: str | None = None
    # A family may take a voice's name as that of a file: it is a plain name.
    voice: Annotated[str, Field(pattern=r"^[\w][\w -]{0,99}$")] | None = None
    instructions: Annotated[str, Field(max_length=SPOKEN_CHARACTERS_MAX)] | None = None
    response_format: Literal["wav", "pcm", "mp3", "opus", "aac", "flac"] | None = None
    speed: Annotated[float, Field(ge=0.25, le=4.0, allow_inf_nan=False)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    seed: Seed | None = None
    user: str | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None

    def check(self) -> None:
        if not self.input.strip():
            raise InvalidRequest("input: must not be empty", param="input")
        if self.response_format in _NOT_WRITTEN:
            message = f"response_format: nothing installed here writes {self.response_format}; possible are wav and pcm"
            raise InvalidRequest(message, param="response_format")

    def request(self) -> SpeechAsked:
        """Returns the request."""
        return SpeechAsked(
            model=self.model or "",
            task=SPEAK,
            text=self.input,
            voice=self.voice or "",
            instructions=self.instructions or "",
            speed=1.0 if self.speed is None else self.speed,
            seed=self.seed,
            options=make_options(priority=self.priority, timeout_s=self.timeout_s),
        )
