"""Values as bytes: msgpack behind the one version number. A message, which is a dataclass, is the list of its fields.

Messages may be in lists, in tables and in fields of messages. A class with `to_wire` and `from_wire` has its own form,
which is checked on arrival.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from ...cluster.errors import SatchelError, from_wire

VERSION = 33
"""Of all methods and messages: both sides must run the same one."""

PACK_BYTES = 4096
"""The memory with which a value is packed at first; it grows. By default it is so much that the system has to be asked
for it each time."""

T = TypeVar("T")


def encode(value: Any) -> bytes:
    """Returns a value as bytes."""
    return _packed([VERSION, _plain(value)])


def encode_call(values: Iterable[Any], context: Sequence[str] = ()) -> bytes:
    """Returns a call's arguments as bytes.

    Args:
        context: what travels with a call besides its arguments.
    """
    return _packed([VERSION, [_plain(value) for value in values], *([list(context)] if context else [])])


def encode_error(error: SatchelError) -> bytes:
    """Returns bytes that take an answer's place: `unpack` raises the error."""
    return _packed([VERSION, None, error.to_wire()])


def _packed(value: Any) -> bytes:
    packed = msgpack.Packer(buf_size=PACK_BYTES).pack(value)
    assert packed is not None
    return packed


def decode(cls: type[T], data: bytes) -> T:
    """Returns the value of class `cls` in `data`.

    Raises:
        SatchelError: as `unpack`.
        ValueError: as `unpack`, or there is no such value.
    """
    return reader(cls)(unpack(data))


def unpack(data: bytes) -> Any:
    """Returns what a `reader` builds a value from.

    Raises:
        SatchelError: the error that `encode_error` encoded.
        ValueError: another protocol version, or no message.
    """
    values, error = _parts(data)
    if error is not None:
        raise from_wire(error)
    return values


def unpack_call(data: bytes) -> tuple[Any, list[str]]:
    """Returns what readers build a call's arguments from, and its context.

    Raises:
        ValueError: another protocol version, or no call.
    """
    values, context = _parts(data)
    return values, context or []


def _parts(data: bytes) -> tuple[Any, Any]:
    """Returns what is packed, and what comes with it, None for nothing."""
    # Tables by branch have integer keys.
    version, values, *more = msgpack.unpackb(data, strict_map_key=False)
    if version != VERSION:
        raise ValueError(f"message version {version}, this process speaks {VERSION}")
    return values, more[0] if more else None


_FORMS: dict[Any, type | tuple[type, ...]] = {
    bool: bool,
    int: int,
    float: (float, int),
    str: str,
    bytes: bytes,
    list: list,
    Sequence: list,
    tuple: list,
    dict: dict,
    Mapping: dict,
}
"""The Python type in which msgpack returns values of each type."""


@cache
def reader(hint: Any) -> Callable[[Any], Any]:
    """Returns the function that builds values of a type from what `unpack` returns. It raises `ValueError` or
    `TypeError` if they are of another type, and `InvalidRecord` for a damaged KV entry."""
    members = get_args(hint) if _is_union(hint) else (hint,)
    optional = types.NoneType in members
    named = [each for each in members if each is not types.NoneType]
    if not named:
        return lambda value: None
    form, build = _FORMS.get(get_origin(named[0]) or named[0]), _builder(named[0])

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        if value is None or (form is not None and not isinstance(value, form)):
            raise ValueError(f"no {getattr(named[0], '__name__', named[0])}")
        return value if build is None else build(value)

    return read


_ATOMS = frozenset((types.NoneType, bool, int, float, str, bytes))


def _plain(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if value and _flattener(type(value[0])) is not None else value
    flatten = _flattener(type(value))
    if flatten is not None:
        return flatten(value)
    if isinstance(value, (dict, Mapping)):
        return {k: _plain(v) for k, v in value.items()}
    return value


@cache
def _flattener(cls: type[Any]) -> Callable[[Any], Any] | None:
    """Returns the function that turns a message of this class into plain data; None if it is not a message class."""
    if not is_dataclass(cls):
        return None
    if (to_wire := getattr(cls, "to_wire", None)) is not None:
        return to_wire
    names = [each.name for each in fields(cls)]
    if len(names) < 2:
        return lambda value: [_plain(getattr(value, name)) for name in names]
    values = attrgetter(*names)
    return lambda value: [one if type(one) in _ATOMS else _plain(one) for one in values(value)]


def _build(cls: type[T], values: Any) -> T:
    make = getattr(cls, "from_wire", None)
    if make is not None:
        return make(values)
    builders = _builders(cls)
    if builders:
        values = list(values)
        for index, build in builders:
            if index < len(values):
                values[index] = build(values[index])
    return cls(*values)


@cache
def _builders(cls: type[Any]) -> list[tuple[int, Callable[[Any], Any]]]:
    """Returns (position, function that builds the field's value) of the fields that hold messages."""
    hints = get_type_hints(cls)
    builders = [(index, _builder(hints[each.name])) for index, each in enumerate(fields(cls))]
    return [(index, build) for index, build in builders if build is not None]


def _builder(hint: Any) -> Callable[[Any], Any] | None:
    """Returns the function that builds a value with messages in it; None if there are none in a value of this type."""
    if is_dataclass(hint) and isinstance(hint, type):
        return lambda value: _build(hint, value)
    origin, inner = get_origin(hint), get_args(hint)
    if _is_union(hint):
        build = next((builder for each in inner if (builder := _builder(each)) is not None), None)
        return None if build is None else (lambda value: None if value is None else build(value))
    if origin in (list, Sequence) and (one := _builder(inner[0])) is not None:
        return lambda values: [one(value) for value in values]
    if origin in (dict, Mapping) and (one := _builder(inner[1])) is not None:
        return lambda values: {key: one(value) for key, value in values.items()}
    return None


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)
