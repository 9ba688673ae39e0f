"""The form that an answer must have, read from the fields of all protocols, and of vLLM and llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ....cluster.errors import InvalidRequest, quoted
from ...text.answers.grammars import AnswerForm
from ...text.json_slices import TooDeep, TooManyValues, parse
from ..field_aliases import FORMS
from ..request_body import wrong

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_TITLE = re.compile(r"(?s).{1,64}")

_SCHEMA_VALUES_MAX = 100_000
"""The most JSON values and keys in a schema that comes as text."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_PLAIN = MappingProxyType(
    {
        **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
        "json_schema": "json",
        "grammar": "grammar",
    }
)
"""Fields of vLLM and llama.cpp that are a form by themselves, with the kind of form."""

_STRICT = ("output_config.format", "output_format")
"""Anthropic's."""

# Fields of vLLM's `structured_outputs` that choose how it works, with the values that are accepted.
_NEUTRAL = ("disable_additional_properties", "whitespace_pattern", "structural_tag")
# There is only one layout of JSON here, and no other backend to fall back to.
_IGNORED = ("disable_any_whitespace", "disable_fallback")


@dataclass(frozen=True)
class Forms:
    """The `form` of an answer, None for any, and the names of fields that ask for another form and are ignored."""

    form: AnswerForm | None = None
    ignored: list[str] = field(default_factory=list)


def read_form(given: Mapping[str, Any], own: Sequence[str]) -> Forms:
    """Returns the form that an answer must have.

    Args:
        given: values by the names in `FORMS`.
        own: the protocol's own names, which count before those of other protocols.

    Raises:
        InvalidRequest: a field is malformed, or two of the protocol's own fields ask for a form; `param` is the place.
    """
    forms = [form for name in own for form in _read(name, given.get(name), own=True)]
    if len(forms) > 1:
        where = forms[1].where
        raise InvalidRequest(f"{where}: the answer's form is already set by {forms[0].where}", param=where)
    form, ignored = next(iter(forms), None), list[str]()
    for name in FORMS:
        if name in own:
            continue
        for other in _read(name, given.get(name), own=False):
            if form is None:
                form = other
            elif (other.kind, other.value) != (form.kind, form.value):
                ignored.append(name)
    return Forms(form, ignored)


def _read(name: str, value: Any, *, own: bool) -> list[AnswerForm]:
    """Returns the forms that a field asks for: none or one, for `structured_outputs` perhaps several."""
    if value is None:
        return []
    if name == "structured_outputs":
        return _structured_outputs(value)
    if (kind := _PLAIN.get(name)) is not None:
        return [_form(kind, value, name)]
    if name == "format":
        form = _schema_or_json(value, name)
    else:
        form = _described(value, name, own=own)
    return [] if form is None else [form]


def _schema_or_json(value: Any, where: str) -> AnswerForm | None:
    """Ollama's: "json", or a schema. Other protocols' forms are told apart by their `type`, which no schema has."""
    if value == "":
        return None
    if value == "json":
        return AnswerForm("json", {"type": "object"}, where)
    if not isinstance(value, Mapping):
        raise wrong(where, "must be 'json' or a JSON schema")
    kind = value.get("type")
    if kind in ("text", "json_object") or (kind == "json_schema" and ("schema" in value or "json_schema" in value)):
        return _described(value, where, own=False)
    return AnswerForm("json", value, where)


def _described(wanted: Any, where: str, *, own: bool) -> AnswerForm | None:
    """A form by its `type`. The Chat API has the schema and its name inside `json_schema`, the others beside the type.
    Anthropic's form has no name, and is strict."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    anthropic = where in _STRICT
    if anthropic and own and kind != "json_schema":
        raise wrong(f"{where}.type", "can only be 'json_schema'")
    if kind == "json_object":
        # OpenAI has no schema here; llama.cpp and many hosts of open models do.
        if (schema := wanted.get("schema")) is not None:
            return AnswerForm("json", _schema(schema, f"{where}.schema"), f"{where}.schema")
        return AnswerForm("json", {"type": "object"}, where)
    if kind != "json_schema":
        place = f"{where}.type" if isinstance(wanted, Mapping) else where
        raise wrong(place, f"is {quoted(kind)}; possible are 'text', 'json_object' and 'json_schema'")
    given = wanted
    if "json_schema" in wanted or (where == "response_format" and "schema" not in wanted):
        where, given = f"{where}.json_schema", wanted.get("json_schema")
        if not isinstance(given, Mapping):
            raise wrong(where, "must be an object with name and schema")
    name, needed = given.get("name"), own and not anthropic
    chat = where.startswith("response_format")
    if (name is not None or needed) and not (isinstance(name, str) and (_NAME if chat else _TITLE).fullmatch(name)):
        kinds = "the characters A-Z a-z 0-9 _ -" if chat else "any characters"
        raise wrong(f"{where}.name", f"must be a string of 1 to 64 of {kinds}")
    if not isinstance(strict := given.get("strict"), bool | None):
        raise wrong(f"{where}.strict", "must be a boolean")
    if not isinstance(schema := given.get("schema"), Mapping):
        raise wrong(f"{where}.schema", "must be an object")
    return AnswerForm("json", schema, f"{where}.schema", anthropic if strict is None else strict)


def _structured_outputs(wanted: Any) -> list[AnswerForm]:
    where = "structured_outputs"
    if not isinstance(wanted, Mapping):
        raise wrong(where, "must be an object")
    for name, value in wanted.items():
        if name in _NEUTRAL and value not in (None, False):
            raise wrong(f"{where}.{name}", "is not supported")
        if name not in (*_KINDS, *_NEUTRAL, *_IGNORED):
            raise wrong(f"{where}.{name}", f"is not known; possible are {', '.join(_KINDS)}")
    given = {kind: value for kind in _KINDS if (value := wanted.get(kind)) is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    return [_form(kind, value, f"{where}.{kind}") for kind, value in given.items()]


def _form(kind: str, value: Any, where: str) -> AnswerForm:
    if kind == "json_object":
        if value is not True:
            raise wrong(where, "must be a boolean")
        return AnswerForm("json", {"type": "object"}, where)
    if kind == "json":
        return AnswerForm("json", _schema(value, where), where)
    if kind == "choice":
        if not isinstance(value, Sequence) or not value or not all(isinstance(each, str) for each in value):
            raise wrong(where, "must be a list of strings")
        if isinstance(value, str):
            raise wrong(where, "must be a list of strings")
        return AnswerForm("choice", list(value), where)
    if not isinstance(value, str):
        raise wrong(where, "must be a string")
    return AnswerForm("regex" if kind == "regex" else "grammar", value, where)


def _schema(value: Any, where: str) -> Mapping[str, Any]:
    """Reads a schema, which may be JSON text."""
    if isinstance(value, str):
        try:
            value, _ = parse(value.encode(), _SCHEMA_VALUES_MAX)
        except (ValueError, TooDeep, TooManyValues):
            raise wrong(where, "is not JSON, or is too large") from None
    if not isinstance(value, Mapping):
        raise wrong(where, "must be a JSON schema")
    return value
