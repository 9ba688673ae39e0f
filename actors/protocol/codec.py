"""Messages as bytes: msgpack lists, field by field, behind the one version number.

Fields that are messages, or lists or tables of messages, are nested. A class with `to_wire` and `from_wire` has its own
form, which is checked on arrival.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from ...cluster.errors import SatchelError, from_wire
from .messages import VERSION

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """Returns `message`, a dataclass or None, as bytes."""
    packed = msgpack.packb([VERSION, _plain(message)])
    assert packed is not None
    return packed


def encode_error(error: SatchelError) -> bytes:
    """Returns bytes that take an answer's place: `decode` raises the error."""
    packed = msgpack.packb([VERSION, None, error.to_wire()])
    assert packed is not None
    return packed


def decode(cls: type[T], data: bytes) -> T:
    """Returns the message of class `cls` in `data`.

    Raises:
        SatchelError: the error that `encode_error` encoded; `InvalidRecord` for a damaged KV entry.
        ValueError: another protocol version, or no message.
    """
    message = decode_any(cls, data)
    if message is None:
        raise ValueError(f"no {cls.__name__}")
    return message


def decode_any(cls: type[T], data: bytes) -> T | None:
    """As `decode`, but returns None if there is no message."""
    # Tables by branch have integer keys.
    version, values, *error = msgpack.unpackb(data, strict_map_key=False)
    if version != VERSION:
        raise ValueError(f"message version {version}, this process speaks {VERSION}")
    if error:
        raise from_wire(error[0])
    return None if values is None else _build(cls, values)


def _plain(value: Any) -> Any:
    flatten = _flattener(type(value))
    if flatten is not None:
        return flatten(value)
    if isinstance(value, list):
        return [_plain(v) for v in value] if value and _flattener(type(value[0])) is not None else value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


@cache
def _flattener(cls: type[Any]) -> Callable[[Any], Any] | None:
    """Returns the function that turns a message of this class into plain data; None if it is not a message class."""
    if not is_dataclass(cls):
        return None
    names = [each.name for each in fields(cls)]
    return getattr(cls, "to_wire", None) or (lambda value: [_plain(getattr(value, name)) for name in names])


def _build(cls: type[T], values: Any) -> T:
    make = getattr(cls, "from_wire", None)
    if make is not None:
        return make(values)
    readers = _readers(cls)
    if readers:
        values = list(values)
        for index, read in readers:
            if index < len(values):
                values[index] = read(values[index])
    return cls(*values)


@cache
def _readers(cls: type[Any]) -> list[tuple[int, Callable[[Any], Any]]]:
    """Returns (position, function that builds the field's value) of the fields that hold messages."""
    hints = get_type_hints(cls)
    readers = [(index, _reader(hints[each.name])) for index, each in enumerate(fields(cls))]
    return [(index, read) for index, read in readers if read is not None]


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    if is_dataclass(hint) and isinstance(hint, type):
        return lambda value: _build(hint, value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        read = next((reader for each in inner if (reader := _reader(each)) is not None), None)
        return None if read is None else (lambda value: None if value is None else read(value))
    if origin is list and (one := _reader(inner[0])) is not None:
        return lambda values: [one(value) for value in values]
    if origin in (dict, Mapping) and (one := _reader(inner[1])) is not None:
        return lambda values: {key: one(value) for key, value in values.items()}
    return None
