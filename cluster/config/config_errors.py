"""What is told of wrong values in a config: pydantic's errors in the words of YAML, and what a person meant by a key
that the config does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "unexpected_keyword_argument": "there is no such field",
        "extra_forbidden": "there is no such field",
        "missing": "must be given",
        "tuple_type": "must be a list",
        "dict_type": "must have fields",
        "dataclass_type": "must have fields",
    }
)


def told(kind: type, errors: Sequence[Any]) -> list[tuple[str, str]]:
    """Returns where each error is, as a path such as `models[0].kv`, and what is wrong there.

    Args:
        kind: the dataclass of the whole tree.
        errors: pydantic's.
    """
    places = [error["loc"] for error in errors]
    return [
        (_path(error["loc"]), _words(error) + _key_hint(kind, error["type"], error["loc"]))
        for error in errors
        # Pydantic also says that a list is too short whose only items are wrong.
        if error["type"] != "too_short" or not any(_inside(place, error["loc"]) for place in places)
    ]


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "(top level)"


def _inside(place: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(place) > len(outer) and place[: len(outer)] == outer


def _words(error: Any) -> str:
    if error["type"] == "too_short":
        return f"must have at least {error['ctx']['min_length']}"
    return _WORDS.get(error["type"], error["msg"].removeprefix("Value error, "))


def _key_hint(kind: type, error_type: str, location: tuple[int | str, ...]) -> str:
    """Returns "; did you mean …?" for an unknown key, "" if it is another error or no key is similar."""
    if error_type not in _UNKNOWN or not location:
        return ""
    *path, wrong = location
    group: Any = kind
    for step in path:
        group = _inner(group if isinstance(step, int) else _hints(group).get(step))
    wrong = str(wrong)
    if close := get_close_matches(wrong, list(_hints(group)), n=1, cutoff=0.7):
        return f"; did you mean {close[0]}?"
    # The right name in the wrong place.
    places = [place for place in _places(kind) if place.rpartition(".")[2] == wrong]
    return f"; did you mean {places[0]}?" if places else ""


def _hints(group: Any) -> dict[str, Any]:
    """Returns the types of a group's fields; {} if it is no group."""
    if not is_dataclass(group) or not isinstance(group, type):
        return {}
    hints = get_type_hints(group)
    return {field.name: hints[field.name] for field in fields(group)}


def _inner(hint: Any) -> Any:
    """Returns the group in a field's type: of `Group | None` and of `tuple[Group, ...]`."""
    if get_origin(hint) is None:
        return hint
    groups = (_inner(argument) for argument in get_args(hint))
    return next((group for group in groups if is_dataclass(group)), None)


def _places(kind: Any, path: str = "") -> Iterator[str]:
    """Yields the paths of all keys, such as `endpoint.port` and `models[].name`."""
    for name, hint in _hints(kind).items():
        yield f"{path}{name}"
        if is_dataclass(inner := _inner(hint)):
            many = "[]" if "tuple" in str(hint) else ""
            yield from _places(inner, f"{path}{name}{many}.")
