"""OpenAI's wire format on the way in: messages and tools, including variants that other servers' clients send.

Errors name the place as a caller would write it, such as `messages[2].content[0].type`. Unsupported parts are an error
in the user's newest message. In older messages they are left out, so that the conversation can go on. Large inputs
belong in a worker thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    with_config,
)
from typing_extensions import TypedDict

from ....cluster.errors import InvalidRequest, quoted
from ...media.sources import AudioSource, MediaSource, PictureSource, VideoSource, detail_of
from ...requests.documents import cannot_be_read, words_of
from ...requests.left_out import LeftOut, MessageList, newest_said
from ...requests.options import WHOLE, invalid_at, position
from ...requests.request_body import arguments_text, wrong

_PICTURE_KEYS = {"image_url": ("image_url",), "input_image": ("image_url",), "image": ("image", "url", "image_url")}
_VIDEO_KEYS = {"video_url": ("video_url",), "video": ("video", "url", "video_url")}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT = ("text", "input_text", "output_text")
_AUDIO_KEYS = {"audio_url": ("audio_url",), "audio": ("audio", "url", "audio_url")}
_UNSUPPORTED = {
    "file": "files other than text",
    "input_file": "files other than text",
    "document": "documents other than text",
}
_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "reasoning_content", "redacted_thinking")
_THOUGHT_FIELDS = ("thinking", "reasoning", "text", "content")
_PICTURE_OPTIONS = ("detail", "min_pixels", "max_pixels")
_VIDEO_OPTIONS = ("fps", "max_frames", "min_pixels", "max_pixels")
# `cache_control` is a hint for other servers that is ignored here; text parts may have it too.
_BESIDE = ("type", "cache_control")
_STRICT = ConfigDict(strict=True)


# Parts are checked without pydantic, which would copy thousands of them.
MessageContent = str | list[Any]
Label = Annotated[str, Field(max_length=1024)]


class CalledFunction(TypedDict):
    name: str
    arguments: NotRequired[Any]


class CallBody(TypedDict):
    id: NotRequired[Label | None]
    type: NotRequired[Literal["function"] | None]
    function: CalledFunction


class UserMessage(TypedDict):
    role: Literal["system", "developer", "user"]
    content: MessageContent
    name: NotRequired[Label | None]


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[MessageContent | None]
    refusal: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[CallBody] | None]
    function_call: NotRequired[CalledFunction | None]
    name: NotRequired[Label | None]


class ToolMessage(TypedDict):
    role: Literal["tool"]
    content: NotRequired[MessageContent | None]
    tool_call_id: NotRequired[Label | None]
    name: NotRequired[Label | None]


class FunctionMessage(TypedDict):
    """The result of a function, in the older form."""

    role: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    content: MessageContent | None


MessageBody = Annotated[UserMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")]


@with_config(ConfigDict(strict=True, extra="allow"))
class ToolFunction(TypedDict):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(ConfigDict(strict=True, extra="allow"))
class ToolBody(TypedDict):
    """A tool. Other fields are kept, because templates print the whole tool."""

    type: Literal["function"]
    function: ToolFunction


_MESSAGES: TypeAdapter[list[Any]] = TypeAdapter(list[MessageBody], config=_STRICT)


def read_messages(messages: Any) -> MessageList:
    """Checks and converts messages in OpenAI's form.

    Raises:
        InvalidRequest: a message is malformed; `param` is the place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise wrong("messages", "must be a list")
    if not messages:
        raise wrong("messages", "is empty")
    try:
        bodies = _MESSAGES.validate_python(list(messages))
    except ValidationError as error:
        raise _refused(error) from None
    newest, left_out = newest_said([body["role"] for body in bodies]), LeftOut()
    said = [
        _message(_in_newer_form(body, index), index, None if index == newest else left_out)
        for index, body in enumerate(bodies)
    ]
    return MessageList(said, left_out)


def _refused(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    where, given = f"messages[{first['loc'][0]}]", first["input"]
    if len(first["loc"]) == 1:
        if not isinstance(given, dict):
            return wrong(where, "must be an object with role and content")
        return wrong(f"{where}.role", f"is {quoted(given.get('role'))}; known are {', '.join(_ROLES)}")
    # pydantic adds the union's member to the place: the role, and the kind of content.
    steps = first["loc"][2:]
    if steps[0] == "content" and len(steps) > 1:
        return wrong(f"{where}.content", "must be a string or a list of parts")
    return invalid_at((where, *steps), first["msg"])


_OBJECTS = WithJsonSchema({"type": "array", "items": {"type": "object"}})
Messages = Annotated[MessageList, PlainValidator(read_messages), _OBJECTS]
Tools = Annotated[list[ToolBody], _OBJECTS]
Functions = Annotated[list[ToolFunction], _OBJECTS]


def _in_newer_form(body: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a message without nulls, with OpenAI's names instead of other servers', and with functions of the older
    form as tools."""
    if None in body.values():
        body = {name: value for name, value in body.items() if value is not None}
    if body["role"] == "developer":
        body["role"] = "system"
    elif body["role"] == "function":
        # A message calls at most one function, so this is the result of the call in the message before.
        body = {"content": "", **body, "role": "tool", "tool_call_id": f"function-{index - 1}"}
    elif body["role"] == "tool":
        body.setdefault("content", "")
    elif body["role"] == "assistant":
        if (reasoning := body.pop("reasoning", None)) is not None:
            body.setdefault("reasoning_content", reasoning)
        if (refusal := body.pop("refusal", None)) is not None:
            body.setdefault("content", refusal)
        if (called := body.pop("function_call", None)) is not None:
            if body.get("tool_calls"):
                where = f"messages[{index}].function_call"
                raise InvalidRequest(f"{where}: the message has tool_calls already", param=where)
            function = _called(called, f"messages[{index}].function_call")
            body["tool_calls"] = [{"id": f"function-{index}", "type": "function", "function": function}]
        # An answer may be empty: the model ended at once, or only reasoning was there and was dropped.
        body.setdefault("content", "")
    return body


def _message(body: dict[str, Any], index: int, left_out: LeftOut | None) -> Any:
    """Reads a message. If `left_out` is None, unsupported content is an error."""
    if calls := body.get("tool_calls"):
        for place, call in enumerate(calls):
            call["type"] = "function"
            call["function"] = _called(call["function"], f"messages[{index}].tool_calls[{place}].function")
            if call.get("id", "") is None:
                del call["id"]
    elif calls is not None:
        del body["tool_calls"]
    if not isinstance(content := body["content"], str):
        # System messages apply to every turn, so unsupported content in them is always an error.
        lenient = None if body["role"] == "system" else left_out
        read = _Content(content, f"messages[{index}].content", lenient, thinks=body["role"] == "assistant")
        body["content"] = read.content
        if read.thoughts:
            body.setdefault("reasoning_content", "\n".join(read.thoughts))
    return body


def _called(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a called function with its arguments as text."""
    given = function.get("arguments")
    return {**function, "arguments": "" if given is None else arguments_text(given, f"{where}.arguments", free=True)}


class _Content:
    """The content of a message, read from parts.

    Args:
        left_out: gets the types of unsupported parts; None refuses them.
        thinks: whether parts may be reasoning.

    Attributes:
        content: the text of text parts, joined without a separator; with media, the parts.
        thoughts: the texts of reasoning.
    """

    def __init__(self, parts: list[Any], where: str, left_out: LeftOut | None, *, thinks: bool) -> None:
        self.thoughts: list[str] = []
        self._left_out = left_out
        content: list[Any] = []
        for index, part in enumerate(parts):
            kind, place = part.get("type") if isinstance(part, dict) else None, f"{where}[{index}]"
            if kind in _TEXT and isinstance(text := part.get("text"), str):
                content.append(text)
            elif kind == "refusal" and isinstance(refusal := part.get("refusal"), str):
                content.append(refusal)
            elif thinks and kind in _THOUGHTS:
                self.thoughts += _thought(part, place)
            elif (read := self._read(part, place)) is not None:
                content.append(read)
        self.content: str | list[Any] = "".join(map(str, content))
        if any(isinstance(part, MediaSource) for part in content):
            self.content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]

    def _read(self, part: Any, where: str) -> MediaSource | str | None:
        """Returns a medium, or a part as text; None for a part that is left out."""
        if not isinstance(part, dict):
            raise wrong(where, "must be an object with a type")
        if (read := media_part(part, where) or words_of(part, where)) is not None:
            return read
        kind = part.get("type")
        if kind in _TEXT:
            raise wrong(f"{where}.text", "must be a string")
        if not isinstance(kind, str) or self._left_out is None:
            if isinstance(kind, str) and kind in _UNSUPPORTED:
                raise InvalidRequest(f"{where}: this model does not support {_UNSUPPORTED[kind]}", param=where)
            raise wrong(f"{where}.type", f"is {quoted(kind)}; known is 'text'")
        self._left_out.add(kind)
        return cannot_be_read(part) if kind in _UNSUPPORTED else None


def _thought(part: dict[str, Any], where: str) -> list[str]:
    """Returns the reasoning in a part of an answer. Mistral's clients send it as text parts."""
    name = next((name for name in (part["type"], *_THOUGHT_FIELDS) if part.get(name) is not None), None)
    if name is None:
        # The reasoning is encrypted or empty.
        return []
    said, place = part[name], f"{where}.{name}"
    if isinstance(said, str):
        return [said] if said else []
    if not isinstance(said, list):
        raise wrong(place, "must be a string or a list of text parts")
    texts: list[str] = []
    for index, piece in enumerate(said):
        if not isinstance(piece, dict) or not isinstance(text := piece.get("text"), str):
            raise wrong(f"{place}[{index}]", "must be a part with a text")
        texts.append(text)
    return ["".join(texts)]


Whole = Annotated[int, Field(ge=1, le=10**9), WHOLE]


class MediaOptions(BaseModel):
    model_config = _STRICT

    detail: str | None = None
    fps: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    max_frames: Whole | None = None
    min_pixels: Whole | None = None
    max_pixels: Whole | None = None


def media_part(part: dict[str, Any], where: str) -> MediaSource | None:
    """Returns the picture, video or audio in a part of a message's content; None if it is of another type.

    Raises:
        InvalidRequest: its form is wrong, or it has an unknown option; `param` is the place.
    """
    kind = part.get("type")
    if not isinstance(kind, str):
        return None
    if kind in _PICTURE_KEYS:
        return _picture(part, _PICTURE_KEYS[kind], where)
    if kind in _AUDIO_KEYS:
        value, _, place = _named(part, _AUDIO_KEYS[kind], (), where, ignored=("format",))
        return AudioSource(where, _url(value, place), url_where=place)
    if kind == "input_audio":
        return input_audio(part, where)
    return _video(part, _VIDEO_KEYS[kind], where) if kind in _VIDEO_KEYS else None


def input_audio(part: dict[str, Any], where: str) -> AudioSource:
    """Returns the audio in a part with its data and format, as chat completions and responses have it.

    Raises:
        InvalidRequest: its form is wrong; `param` is the place.
    """
    place, given = f"{where}.input_audio", part.get("input_audio")
    if not isinstance(given, dict):
        raise wrong(place, "must be an object with data and format")
    _check_known(part, (*_BESIDE, "input_audio"), (), where)
    _check_known(given, ("data", "format"), (), place)
    data, form = given.get("data"), given.get("format")
    if not isinstance(data, str) or not data:
        raise wrong(f"{place}.data", "must be base64")
    if not isinstance(form, str) or not form:
        raise wrong(f"{place}.format", "must be the name of a format")
    # Some clients write a whole URL.
    url = data if data[:5].lower() == "data:" else f"data:;base64,{data}"
    return AudioSource(where, url, form, url_where=f"{place}.data")


def _video(part: dict[str, Any], keys: tuple[str, ...], where: str) -> VideoSource:
    value, options, place = _named(part, keys, _VIDEO_OPTIONS, where)
    more = (options.fps, options.max_frames, options.min_pixels, options.max_pixels)
    if not isinstance(value, list):
        return VideoSource(where, _url(value, place), (), *more, place)
    if not value:
        raise wrong(place, "has no frames")
    frames = tuple(_frame(frame, f"{place}[{index}]", options) for index, frame in enumerate(value))
    return VideoSource(where, None, frames, *more)


def _frame(given: Any, where: str, options: MediaOptions) -> PictureSource:
    """Reads a frame of a video: a URL, or a part as for a picture."""
    if not isinstance(given, dict):
        return PictureSource(where, _url(given, where), "auto", options.min_pixels, options.max_pixels, where)
    pixels = {"min_pixels": options.min_pixels, "max_pixels": options.max_pixels}
    return _picture({**pixels, **given}, ("image_url", "image", "url"), where)


def _picture(part: dict[str, Any], keys: tuple[str, ...], where: str) -> PictureSource:
    # Some clients give a picture's MIME type as `format`. It is ignored, because the file's bytes tell its format.
    value, options, place = _named(part, keys, _PICTURE_OPTIONS, where, ignored=("format",))
    return PictureSource(
        where, _url(value, place), detail_of(options.detail), options.min_pixels, options.max_pixels, place
    )


def _named(
    part: dict[str, Any], keys: tuple[str, ...], known: tuple[str, ...], where: str, *, ignored: tuple[str, ...] = ()
) -> tuple[Any, MediaOptions, str]:
    """Returns the value of the first of `keys` in the part, the part's options, and the place of the value.

    OpenAI puts a URL and its options into an object, which may also have the `ignored` keys. Other servers put both
    beside the type.
    """
    key = next((key for key in keys if part.get(key) is not None), None)
    if key is None:
        raise wrong(f"{where}.{keys[0]}", "is missing")
    _check_known(part, (*_BESIDE, *keys), known, where)
    value, place = part[key], f"{where}.{key}"
    if isinstance(value, dict):
        _check_known(value, ("url", *ignored), known, place)
        part, value, place = {**part, **value}, value.get("url"), f"{place}.url"
    try:
        options = MediaOptions.model_validate(part)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise wrong(position((where, *first["loc"])), first["msg"].removeprefix("Input ")) from None
    if (options.min_pixels or 0) > (options.max_pixels or math.inf):
        raise wrong(f"{where}.min_pixels", "is more than max_pixels")
    return value, options, place


def _check_known(given: dict[str, Any], keys: tuple[str, ...], options: tuple[str, ...], where: str) -> None:
    """Raises for unknown keys, except those with the value null, which clients write for unset fields."""
    for key, value in given.items():
        if value is not None and key not in keys and key not in options:
            raise wrong(f"{where}.{key}", f"is not supported; possible are {', '.join(options)}")


def _url(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(where, "must be a URL")
    return value
