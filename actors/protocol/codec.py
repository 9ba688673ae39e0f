"""Messages as bytes: msgpack lists, field by field, behind the one version number.

A field that is a message, or a list or a table of messages, travels within it. What names its own form (`to_wire` and
`from_wire`) travels in that one, and is checked where it arrives.
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
    """`message`, a dataclass or None, as bytes."""
    packed = msgpack.packb([VERSION, _plain(message)])
    assert packed is not None
    return packed


def encode_error(error: SatchelError) -> bytes:
    """An error in the place of an answer: `decode` raises it."""
    packed = msgpack.packb([VERSION, None, error.to_wire()])
    assert packed is not None
    return packed


def decode(cls: type[T], data: bytes) -> T:
    """The message of class `cls` in `data`.

    Raises:
        SatchelError: the one that `encode_error` put there; `InvalidRecord` for a damaged entry of KV.
        ValueError: another protocol version, or no message.
    """
    found = decode_any(cls, data)
    if found is None:
        raise ValueError(f"no {cls.__name__}")
    return found


def decode_any(cls: type[T], data: bytes) -> T | None:
    """As `decode`, where there may be no message."""
    # Branches are named by numbers.
    version, values, *error = msgpack.unpackb(data, strict_map_key=False)
    if version != VERSION:
        raise ValueError(f"message version {version}, this process speaks {VERSION}")
    if error:
        raise from_wire(error[0])
    return None if values is None else _build(cls, values)


def _plain(value: Any) -> Any:
    take_apart = _taken_apart(type(value))
    if take_apart is not None:
        return take_apart(value)
    if isinstance(value, list):
        return [_plain(v) for v in value] if value and _taken_apart(type(value[0])) is not None else value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


@cache
def _taken_apart(cls: type[Any]) -> Callable[[Any], Any] | None:
    """What makes plain data of a message of this class; None where it is none."""
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
    """What makes messages of the fields that are such, by position."""
    hints = get_type_hints(cls)
    found = [(index, _reader(hints[each.name])) for index, each in enumerate(fields(cls))]
    return [(index, read) for index, read in found if read is not None]


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    if is_dataclass(hint) and isinstance(hint, type):
        return lambda value: _build(hint, value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        read = next((found for each in inner if (found := _reader(each)) is not None), None)
        return None if read is None else (lambda value: None if value is None else read(value))
    if origin is list and (one := _reader(inner[0])) is not None:
        return lambda values: [one(value) for value in values]
    if origin in (dict, Mapping) and (one := _reader(inner[1])) is not None:
        return lambda values: {key: one(value) for key, value in values.items()}
    return None
