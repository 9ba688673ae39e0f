"""Fields under the names that other protocols ("neighbours") have for them.

Clients send a protocol's fields to another protocol's route: `stop` to Anthropic's, `max_tokens` to the Responses API.
If the meaning is clear, the field is used. If one thing is set under several names, the protocol's own name counts,
then the first one in the order of this file. The header `x-satchel-ignored` names the fields that are not used: unknown
ones, and second names with another value.

Computation only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...cluster.errors import InvalidRequest
from .options import whole

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_UNLIMITED = ("num_predict", "n_predict")
_OPTIONS = "options"

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max_tokens": (
            *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"),
            *("options.num_predict", "num_predict", "n_predict"),
        ),
        "stop": ("stop", "stop_sequences", "options.stop"),
        "repetition_penalty": ("repetition_penalty", "repeat_penalty", "options.repeat_penalty"),
        "system": ("system", "instructions"),
        **{name: (name, f"{_OPTIONS}.{name}") for name in _SAMPLING},
    }
)
"""All names of each thing that has several. A point leads into an object."""

FORMS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "grammar", "text.format", "format", "output_format", "output_config.format"),
)
"""The names of fields that set an answer's form."""

SWITCHES = (
    *("chat_template_kwargs", "enable_thinking", "think", "thinking", "reasoning", "reasoning_effort"),
    *("output_config.effort", "thinking_budget", "reasoning_budget"),
)
"""The names of fields that set whether and how much a model thinks."""

_NAME_CHARACTERS_MAX = 64
_HEADER_CHARACTERS_MAX = 900


@dataclass
class Translated:
    """A body's `fields` under its own names; how the caller `named` those that had other names; the values of fields
    that the body reads under neighbours' names (`beside`), by path; and which fields were `ignored`."""

    fields: dict[str, Any]
    named: dict[str, str] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def translated(
    given: Mapping[str, Any],
    known: Iterable[str],
    own: Mapping[str, Sequence[str]],
    beside: Sequence[str] = (),
) -> Translated:
    """Returns a body's raw fields under its own names.

    Args:
        known: the body's fields.
        own: the body's names of each thing in `NAMES`, in the order in which they count; values of neighbours' names
            move to the last one.
        beside: fields under neighbours' names that the body reads by itself.

    Raises:
        InvalidRequest: a value under another name has no meaning in this protocol.
    """
    known = frozenset(known)
    read = Translated(dict(given))
    used: set[str] = set()
    for what, mine in own.items():
        _translate(what, mine, read, given, used)
    for path in beside:
        if (value := _at(given, path)) is not None:
            read.beside[path] = value
            used.add(path)
    for name, value in given.items():
        if name in known or value is None or name in used:
            continue
        inside = {path for path in used if path.startswith(f"{name}.")}
        if inside and isinstance(value, dict):
            read.ignored += [
                path for key, each in value.items() if each is not None and (path := f"{name}.{key}") not in inside
            ]
        else:
            read.ignored.append(name)
        read.fields.pop(name, None)
    return read


def _translate(what: str, mine: Sequence[str], read: Translated, given: Mapping[str, Any], used: set[str]) -> None:
    """Moves a value from a neighbour's name to the body's own name, if that has none."""
    counts = next((value for path in mine if (value := _at(given, path)) is not None), None)
    for path in NAMES[what]:
        if path in mine or (value := _meant(path, _at(given, path), mine[-1])) is None:
            # A field without a meaning changes nothing.
            used.add(path)
            continue
        used.add(path)
        read.fields.pop(path, None)
        if counts is None:
            counts = value
            _put(read.fields, mine[-1], value)
            read.named[mine[-1]] = path
        elif value != counts:
            read.ignored.append(path)


def _meant(path: str, value: Any, mine: str) -> Any:
    """Translates a value from a neighbour's name to the body's own name; None if it means nothing there.

    Raises:
        InvalidRequest: its own protocol would refuse it, and in this one it means something else.
    """
    last, value = path.rpartition(".")[2], whole(value)
    if mine == "stop_sequences" and isinstance(value, str):
        return [value]
    if path == "system":
        return joined_texts(value)
    number = type(value) is int
    if last in _UNLIMITED and number and value <= 0:
        return None
    if path == f"{_OPTIONS}.seed" and value == -1:
        return None
    if mine.rpartition(".")[2] in _UNLIMITED and number and value <= 0:
        raise InvalidRequest(f"{path} must be at least 1", param=path)
    return value


def joined_texts(value: Any) -> Any:
    """Returns blocks of text as one text, other values as they are."""
    if not isinstance(value, list):
        return value
    texts = [block.get("text") for block in value if isinstance(block, dict)]
    whole = len(texts) == len(value) and all(isinstance(text, str) for text in texts)
    return "\n\n".join(map(str, texts)) if whole else value


def _at(fields: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a path, None if there is none."""
    name, _, inner = path.partition(".")
    value = fields.get(name)
    if not inner:
        return value
    return value.get(inner) if isinstance(value, dict) else None


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    name, _, inner = path.partition(".")
    if inner:
        before = fields.get(name)
        value = {**(before if isinstance(before, dict) else {}), inner: value}
    fields[name] = value


def names_for_header(names: Sequence[str]) -> str:
    """Returns names as a header's value: printable ASCII, `?` for other characters, each name at most 64 characters
    long, and how many more there are than fit."""
    shown: list[str] = []
    length = 0
    for name in dict.fromkeys(names):
        text = "".join(character if "!" <= character <= "~" and character != "," else "?" for character in name)
        text = text[:_NAME_CHARACTERS_MAX] or "?"
        length += len(text) + 2
        if length > _HEADER_CHARACTERS_MAX:
            return ", ".join([*shown, f"and {len(set(names)) - len(shown)} more"])
        shown.append(text)
    return ", ".join(shown)
