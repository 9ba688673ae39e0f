"""OpenAI's transcriptions and translations on the way in: the fields of a form with an audio file."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ....cluster.errors import InvalidRequest, quoted
from ...http.forms import Form
from ...media.sources import AudioSource
from ...requests.history import Message
from ...requests.options import Priority, Temperature, TimeoutS, invalid, make_options
from ...requests.requests import ChatRequest

PROMPT_CHARACTERS_MAX = 32_000
FILE = "file"

_TRANSCRIBE = "Transcribe the speech in this audio word by word. Answer with the transcript alone."
_TRANSLATE = "Translate the speech in this audio into English. Answer with the translation alone."
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
_TIMED = ("verbose_json", "srt", "vtt", "diarized_json")
_NO_TIMES = "models that answer chats state no times"


class SpeechForm(BaseModel):
    """The fields of `/v1/audio/transcriptions` and `/v1/audio/translations` besides the file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    language: Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$")] | None = None
    prompt: Annotated[str, Field(max_length=PROMPT_CHARACTERS_MAX)] | None = None
    response_format: Literal["json", "text"] | None = None
    temperature: Temperature | None = None
    stream: bool | None = None
    chunking_strategy: Literal["auto"] | None = None
    user: str | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None

    @field_validator("temperature", "priority", "timeout_s", "stream", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Returns the value of a field of a form, where all are texts."""
        if not isinstance(value, str):
            return value
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
        return value

    def request(self, file: bytes, *, translates: bool) -> ChatRequest:
        """Returns the request to the model: a conversation of one message, with the audio and what is to be done."""
        words = _TRANSLATE if translates else _TRANSCRIBE
        if self.language:
            words += f" The language that is spoken has the code {self.language}."
        if self.prompt:
            words += f" This came before, or shows words that may occur: {self.prompt}"
        url = f"data:;base64,{base64.b64encode(file).decode()}"
        content: list[Any] = [AudioSource(FILE, url, url_where=FILE), {"type": "text", "text": words}]
        message: Message = {"role": "user", "content": content}
        return ChatRequest(
            messages=[message],
            model=self.model or "",
            options=make_options(temperature=self.temperature or 0.0, priority=self.priority, timeout_s=self.timeout_s),
            template_kwargs={"enable_thinking": False},
        )


def read_speech_form(form: Form, *, translates: bool) -> tuple[SpeechForm, bytes]:
    """Returns the fields of a form, and its file.

    Raises:
        InvalidRequest: a field is wrong or not supported, or there is not exactly one file; `param` is the field.
    """
    files = form.files.get(FILE, [])
    if len(files) != 1:
        raise InvalidRequest(f"{FILE}: the form must have exactly one", param=FILE)
    if other := next((name for name in form.files if name != FILE), None):
        raise InvalidRequest(f"{other[:100]}: is not supported", param=other[:100])
    fields = {name: value for name, value in form.fields.items() if value != ""}
    _refuse(fields, translates=translates)
    try:
        return SpeechForm.model_validate(fields), files[0]
    except ValidationError as error:
        raise invalid(error) from None


def _refuse(fields: Mapping[str, str], *, translates: bool) -> None:
    """Raises for known fields and values that are not supported."""
    if (form := fields.get("response_format")) in _TIMED:
        raise InvalidRequest(
            f"response_format {quoted(form)} is not supported: {_NO_TIMES}; possible are json and text",
            param="response_format",
        )
    for name in fields:
        plain = name.removesuffix("[]")
        if plain in _LISTS:
            why = f": {_NO_TIMES}" if plain == _LISTS[0] else ""
            raise InvalidRequest(f"{plain} is not supported{why}", param=plain)
    if translates and (name := next((name for name in ("language", "stream") if name in fields), None)):
        raise InvalidRequest(f"{name}: translations do not have it", param=name)
