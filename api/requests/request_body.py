"""Request bodies of every protocol: parsed within the endpoint's limits, then validated strictly."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from ...cluster.config.config import Endpoint
from ...cluster.errors import InvalidRequest
from ..text.json_slices import DEPTH_MAX, TooDeep, TooManyValues, check_values, parse
from ..text.lone_surrogates import not_characters
from .field_aliases import Translated, translated
from .history import called_with
from .left_out import MessageList
from .options import invalid


class RequestBody(BaseModel):
    """The base of bodies that are checked before and after their fields are.

    Fields under the names of other protocols are read too (`field_aliases.py`): `own_names` says which things of
    `NAMES` a body has and under which names, and `beside` which other names it reads itself. `tolerated` are names of
    unknown fields that are checked elsewhere.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    own_names: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    beside: ClassVar[Sequence[str]] = ()
    tolerated: ClassVar[Collection[str]] = frozenset()

    _named: dict[str, str] = PrivateAttr(default_factory=dict)
    _beside: dict[str, Any] = PrivateAttr(default_factory=dict)
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _translate(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, dict):
            return handler(given)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        read = translated(given, known | set(cls.tolerated), cls.own_names, cls.beside)
        cls.adapt(read)
        try:
            body = handler(read.fields)
        except ValidationError as error:
            if not read.named:
                raise
            # The error's place has the name that the caller used.
            raise invalid(error, read.named) from None
        body._named, body._beside, body._ignored = read.named, read.beside, read.ignored
        return body

    @classmethod
    def adapt(cls, read: Translated) -> None:
        """Changes the raw fields before they are validated, if a protocol has several ways to say something.

        Raises:
            InvalidRequest: one of these is wrong.
        """

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        """Checks the raw fields before they are validated.

        Args:
            values: how many JSON values and keys the body has.

        Raises:
            InvalidRequest: something is over its limit, or a field is not supported.
        """

    def check(self) -> None:
        """Checks fields against each other.

        Raises:
            InvalidRequest: two fields contradict each other.
        """

    def named(self, name: str) -> str:
        """Returns how the caller called a field."""
        return self._named.get(name, name)

    @property
    def ignored(self) -> list[str]:
        """The names of fields that are ignored: unknown ones, and second names with another value."""
        return self._ignored

    @property
    def left_out(self) -> list[str]:
        """The names of what the body has and its model does not get."""
        messages = getattr(self, "messages", None)
        return messages.left_out.names if isinstance(messages, MessageList) else []


Body = TypeVar("Body", bound=BaseModel)

LABEL_CHARACTERS_MAX = 1024
"""The longest id or name that a client may send back."""


def parse_body(kind: type[Body], data: bytes | bytearray, limits: Endpoint) -> Body:
    """Parses and validates a body of class `kind`, with or without a byte order mark before it. Large bodies take up to
    a second: call it in a worker thread.

    Raises:
        InvalidRequest: not JSON, not an object, over one of the `limits`, a wrong value, or an unsupported field.
    """
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    try:
        fields, values = parse(data, limits.body_values_max)
    except TooManyValues:
        raise _too_many_values(limits) from None
    except TooDeep:
        raise InvalidRequest(f"the body is nested deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:
        raise InvalidRequest(not_characters(data) or f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    if issubclass(kind, RequestBody):
        kind.check_fields(fields, values, limits)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
    if isinstance(body, RequestBody):
        body.check()
    return body


def wrong(where: str, what: str) -> InvalidRequest:
    """Returns the error that says `what` is wrong at the place `where`."""
    return InvalidRequest(f"{where} {what}", param=where)


def string_of(given: Mapping[str, Any], name: str, where: str) -> str:
    """Returns a string field of the object at `where`.

    Raises:
        InvalidRequest: it is not a string.
    """
    if not isinstance(value := given.get(name), str):
        raise wrong(f"{where}.{name}", "must be a string")
    return value


def label_of(given: Mapping[str, Any], name: str, where: str) -> str:
    """As `string_of`, for ids and names, which must be short and not empty."""
    value = string_of(given, name, where)
    if not 0 < len(value) <= LABEL_CHARACTERS_MAX:
        raise wrong(f"{where}.{name}", f"must have 1 to {LABEL_CHARACTERS_MAX} characters")
    return value


def arguments_text(given: Any, where: str, *, free: bool = False) -> str:
    """Returns the arguments of an earlier call as JSON. Some clients send them as an object, others as text.

    Args:
        free: whether text that is not JSON is accepted, because models sometimes write it.

    Raises:
        InvalidRequest: they are neither an object nor such text.
    """
    if isinstance(given, dict):
        return json.dumps(given, ensure_ascii=False)
    if isinstance(given, str) and (free or isinstance(called_with(given), dict)):
        return given
    raise wrong(where, "must be a string or an object" if free else "must be an object")


def check_counts(messages: Sequence[Any], parts: int, limits: Endpoint, name: str = "messages") -> None:
    """Checks the numbers of messages and of parts of content. `name` is the field that has them.

    Raises:
        InvalidRequest: one is over its limit.
    """
    if len(messages) > limits.messages_max:
        raise InvalidRequest(
            f"{name}: at most {limits.messages_max} go into one request (endpoint.messages_max)", param=name
        )
    if parts > limits.parts_max:
        raise InvalidRequest(
            f"{name}: at most {limits.parts_max} parts of content go into one request (endpoint.parts_max)",
            param=name,
        )


def check_nested(texts: Sequence[str], values: int, limits: Endpoint) -> None:
    """Checks the JSON values in `texts`, such as arguments of calls, together with the body's own `values`.

    Raises:
        InvalidRequest: there are too many.
    """
    try:
        check_values(texts, limits.body_values_max - values)
    except TooManyValues:
        raise _too_many_values(limits) from None


def _too_many_values(limits: Endpoint) -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {limits.body_values_max} JSON values and keys (endpoint.body_values_max)"
    )
