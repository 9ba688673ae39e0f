"""OpenAI's wire format on the way in: what an answer must look like, also in vLLM's words, and which tools it calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...cluster.errors import InvalidRequest, quoted
from ..generation.bodies import wrong
from ..generation.requests import ToolUse
from ..text.answers.grammars import AnswerForm
from ..text.json_slices import TooDeep, TooManyValues, parse

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)

_SCHEMA_VALUES_MAX = 100_000
"""JSON values and keys in a schema that comes as text."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Fields of vLLM's and llama.cpp's that are a form by themselves.
_PLAIN = (
    *((kind, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")),
    *(("json", "json_schema"), ("grammar", "grammar")),
)
# Fields of vLLM's `structured_outputs` that choose how it works, and what they may be.
_NEUTRAL = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag")
_IGNORED = ("disable_fallback",)


def read_form(fields: Mapping[str, Any]) -> AnswerForm | None:
    """Returns the form that `response_format`, `structured_outputs`, one of vLLM's older fields or one of llama.cpp's
    (`json_schema`, `grammar`) asks for.

    Raises:
        InvalidRequest: a field is malformed, or two ask for a form; `param` is the place.
    """
    forms: list[AnswerForm] = []
    if (wanted := fields.get("response_format")) is not None and (form := _response_format(wanted)) is not None:
        forms.append(form)
    if (wanted := fields.get("structured_outputs")) is not None:
        forms += _structured_outputs(wanted)
    for kind, name in _PLAIN:
        if (value := fields.get(name)) is not None:
            forms.append(_form(kind, value, name))
    if len(forms) > 1:
        where = forms[1].where
        raise InvalidRequest(f"{where}: the answer's form is set by {forms[0].where} already", param=where)
    return forms[0] if forms else None


def _response_format(wanted: Any) -> AnswerForm | None:
    where = "response_format"
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        # OpenAI has no schema here; llama.cpp and many hosts of open models do.
        if (schema := wanted.get("schema")) is not None:
            return AnswerForm("json", _schema(schema, f"{where}.schema"), f"{where}.schema")
        return AnswerForm("json", {"type": "object"}, where)
    if kind != "json_schema":
        place = f"{where}.type" if isinstance(wanted, Mapping) else where
        raise wrong(place, f"is {quoted(kind)}; possible are 'text', 'json_object' and 'json_schema'")
    where = f"{where}.json_schema"
    given = wanted.get("json_schema")
    if not isinstance(given, Mapping):
        raise wrong(where, "must be an object with name and schema")
    if not isinstance(name := given.get("name"), str) or _NAME.fullmatch(name) is None:
        raise wrong(f"{where}.name", "must be 1 to 64 of the characters A-Z a-z 0-9 _ -")
    if not isinstance(strict := given.get("strict"), bool | None):
        raise wrong(f"{where}.strict", "must be a boolean")
    if not isinstance(schema := given.get("schema"), Mapping):
        raise wrong(f"{where}.schema", "must be an object")
    return AnswerForm("json", schema, f"{where}.schema", bool(strict))


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
            raise wrong(where, "is no JSON, or too much of it") from None
    if not isinstance(value, Mapping):
        raise wrong(where, "must be a JSON schema")
    return value


def read_tool_choice(choice: Any, *, parallel: bool | None = None) -> ToolUse:
    """Returns what `tool_choice` says; `parallel` is what `parallel_tool_calls` does, None if it is not given: then an
    answer that must call a tool has one call, for models that are made to call go on calling.

    Raises:
        ValueError: it is none of OpenAI's forms.
    """
    if choice in (None, "auto"):
        return ToolUse(parallel=parallel is not False)
    if choice == "none":
        return ToolUse(shown=False)
    if choice == "required":
        return ToolUse(forced=True, parallel=bool(parallel))
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return ToolUse(forced=True, names=[_function(choice)], parallel=bool(parallel))
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required"):
            raise ValueError("allowed_tools needs a mode, 'auto' or 'required'")
        if not isinstance(tools, list) or not tools:
            raise ValueError("allowed_tools needs a list of tools")
        forced = mode == "required"
        several = bool(parallel) if forced else parallel is not False
        return ToolUse(forced=forced, names=[_function(tool) for tool in tools], parallel=several)
    raise ValueError("must be 'auto', 'none', 'required', a function, or allowed_tools")


def _function(named: Any) -> str:
    """Returns the name in `{"type": "function", "function": {"name": …}}`; the Responses API has it beside the type."""
    if isinstance(named, Mapping) and named.get("type") == "function":
        function = named.get("function", named)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name:
            return name
    raise ValueError("a function needs type 'function' and a function with a name")
