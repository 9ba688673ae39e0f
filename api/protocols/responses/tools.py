"""The Responses API on the way in: tools, and which of them an answer may or must call.

The model is shown a tool with free text as a function with one argument, and a tool of a namespace under a name that
has both names. The client gets calls in its own form and with its own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from ....cluster.errors import InvalidRequest, quoted
from ...requests.request_body import wrong
from ...requests.requests import ToolUse
from ..openai.tool_choice import read_tool_choice

INPUT = "input"
"""The one argument of a function that stands for a tool with free text."""

TOOL_SEARCH = "tool_search"
"""The function that stands for the client's search for further tools."""

_DEFAULT_NAMESPACE = "functions"
"""The default namespace; names of its tools have no namespace in front."""

_CHOSEN = ("function", "custom", TOOL_SEARCH)
_NAME_CHARACTERS_MAX = 128
_TOOLS_MAX = 1024
_JOINT = "__"


@dataclass(frozen=True)
class OfferedTool:
    """How the client knows a tool."""

    kind: Literal["function", "custom", "tool_search"]
    name: str
    namespace: str = ""


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request.

    Attributes:
        given: the tools as the client sent them.
        tools: the tools that the client runs, as chat templates take them.
        places: the place of each one's schema in the body.
        known: how the client knows these tools, by the names that the model is shown.
        left_out: the types of the other tools, which OpenAI's servers run or describe, each once.
    """

    given: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    known: dict[str, OfferedTool] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def called(self, name: str) -> OfferedTool:
        """Returns the tool that the model called; if the model invented the name, a function of that name."""
        return self.known.get(name) or OfferedTool("function", name)


def flat_name(namespace: str, name: str) -> str:
    """Returns the name under which the model is shown a tool of a namespace, "" for none."""
    if namespace in ("", _DEFAULT_NAMESPACE):
        return name
    return f"{namespace}{name}" if namespace.endswith(_JOINT) else f"{namespace}{_JOINT}{name}"


def read_tools(value: Any) -> OfferedTools:
    """Checks and converts tools.

    Raises:
        InvalidRequest: one is malformed, or two have the same name and one of them a namespace; `param` is the place.
    """
    if value is None:
        return OfferedTools()
    if not isinstance(value, list):
        raise wrong("tools", "must be a list")
    reader = _Reader(OfferedTools(given=value))
    for index, given in enumerate(value):
        reader.read(given, f"tools[{index}]")
    return reader.all


def with_tools(tools: OfferedTools, more: Sequence[tuple[Any, str]]) -> OfferedTools:
    """Returns tools together with further lists of tools, each with its place. If two have the same name, the later one
    counts, because clients send a tool again when it changes.

    Raises:
        InvalidRequest: one is malformed; `param` is the place.
    """
    if not more:
        return tools
    reader = _Reader(
        OfferedTools(tools.given, [*tools.tools], [*tools.places], {**tools.known}, [*tools.left_out]), replaces=True
    )
    for given, where in more:
        if not isinstance(given, list):
            raise wrong(where, "must be a list")
        for index, tool in enumerate(given):
            reader.read(tool, f"{where}[{index}]")
    return reader.all


def names_in(value: Any, where: str) -> list[str]:
    """Returns the names under which the model is shown a list of tools. Raises as `with_tools`."""
    return [tool["function"]["name"] for tool in with_tools(OfferedTools(), [(value, where)]).tools]


class _Reader:
    """Reads tools one by one. With `replaces` a tool replaces an earlier one of the same name."""

    def __init__(self, offered: OfferedTools, *, replaces: bool = False) -> None:
        self._offered = offered
        self._replaces = replaces
        self._at = {tool["function"]["name"]: at for at, tool in enumerate(offered.tools)}
        self._left_out = dict.fromkeys(offered.left_out)

    @property
    def all(self) -> OfferedTools:
        """All tools that were read."""
        return replace(self._offered, left_out=list(self._left_out))

    def read(self, given: Any, where: str, namespace: str = "") -> None:
        if not isinstance(given, Mapping):
            raise wrong(where, "must be an object with a type")
        if not isinstance(kind := given.get("type"), str) or not kind:
            raise wrong(f"{where}.type", f"is {quoted(kind)}; known are 'function', 'custom' and 'namespace'")
        if kind == "namespace" and not namespace:
            name, tools = _name(given, where), given.get("tools")
            _description(given, where)
            if not isinstance(tools, list):
                raise wrong(f"{where}.tools", "must be a list")
            for index, tool in enumerate(tools):
                self.read(tool, f"{where}.tools[{index}]", name)
        elif kind in ("function", "custom"):
            self._take(kind, given, where, namespace)
        elif kind == TOOL_SEARCH and given.get("execution") == "client":
            self._take(TOOL_SEARCH, {"name": TOOL_SEARCH, **given}, where, "")
        else:
            self._left_out[kind] = None

    def _take(
        self, kind: Literal["function", "custom", "tool_search"], given: Mapping[str, Any], where: str, namespace: str
    ) -> None:
        name = _name(given, where)
        shown, offered = flat_name(namespace, name), self._offered
        if len(shown) > _NAME_CHARACTERS_MAX:
            raise wrong(f"{where}.name", f"with its namespace has more than {_NAME_CHARACTERS_MAX} characters")
        other = offered.known.get(shown)
        offered.known[shown] = OfferedTool(kind, name, namespace)
        function = _free_text(given, where) if kind == "custom" else _function(given, where)
        tool = {"type": "function", "function": {"name": shown, **function}}
        place = f"{where}.format" if kind == "custom" else f"{where}.parameters"
        if other is not None and self._replaces:
            at = self._at[shown]
            offered.tools[at], offered.places[at] = tool, place
            return
        if other is not None and (namespace or other.namespace):
            raise wrong(f"{where}.name", f"is {quoted(name)}, and with its namespace the name of another tool")
        if len(offered.tools) >= _TOOLS_MAX:
            raise wrong("tools", f"are too many; at most {_TOOLS_MAX} go into one request")
        self._at[shown] = len(offered.tools)
        offered.tools.append(tool)
        offered.places.append(place)


def _function(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a function as a tool, with only the fields that describe it to a model."""
    schema, strict = given.get("parameters"), given.get("strict")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise wrong(f"{where}.parameters", "must be an object")
    if not isinstance(strict, bool | None):
        raise wrong(f"{where}.strict", "must be a boolean")
    described = {"description": text} if (text := _description(given, where)) else {}
    return {**described, "parameters": schema, **({"strict": True} if strict else {})}


def _free_text(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool with free text as a tool. If calls are constrained, a regular expression constrains the text; a
    Lark grammar is only described to the model."""
    form, place = given.get("format"), f"{where}.format"
    if form is None:
        form = {"type": "text"}
    kind = form.get("type") if isinstance(form, Mapping) else None
    if not isinstance(form, Mapping) or kind not in ("text", "grammar"):
        raise wrong(place, "must be an object of type 'text' or 'grammar'")
    described, argument = _description(given, where), {"type": "string"}
    if kind == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex"):
            raise wrong(f"{place}.syntax", f"is {quoted(syntax)}; known are 'lark' and 'regex'")
        if not isinstance(definition, str):
            raise wrong(f"{place}.definition", "must be a string")
        said = "this Lark grammar" if syntax == "lark" else "this regular expression"
        described = f"{described}\n\nThe input follows {said}:\n{definition}".strip()
        if syntax == "regex":
            argument["pattern"] = definition
    schema = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT], "additionalProperties": False}
    return {**({"description": described} if described else {}), "parameters": schema}


def _description(given: Mapping[str, Any], where: str) -> str:
    text = given.get("description")
    if not isinstance(text, str | None):
        raise wrong(f"{where}.description", "must be a string")
    return text or ""


def _name(given: Mapping[str, Any], where: str) -> str:
    name = given.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARACTERS_MAX:
        raise wrong(f"{where}.name", f"must be a string of 1 to {_NAME_CHARACTERS_MAX} characters")
    return name


def read_choice(choice: Any, tools: OfferedTools, *, parallel: bool | None) -> ToolUse:
    """Returns the `ToolUse` for a value of `tool_choice`; `parallel` is as in `read_tool_choice`.

    Raises:
        InvalidRequest: it is malformed, or forces a tool that OpenAI's servers would run.
    """
    if isinstance(choice, Mapping):
        choice = _functions(choice)
    try:
        use = read_tool_choice(choice, parallel=parallel)
    except ValueError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from None
    if use.forced and not tools.tools and tools.left_out:
        said = ", ".join(map(quoted, tools.left_out))
        raise InvalidRequest(f"tool_choice: the tools that are left out cannot be called: {said}", param="tool_choice")
    return use


def _functions(choice: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Returns a choice with every tool named as a function, and without allowed tools that OpenAI's servers would
    run."""
    kind = choice.get("type")
    if kind in _CHOSEN:
        return {"type": "function", "name": _chosen_name(choice)}
    if kind != "allowed_tools":
        known = "'auto', 'none', 'required', a function, a custom tool, or allowed_tools"
        raise InvalidRequest(
            f"tool_choice: {quoted(kind)} cannot be called here; possible are {known}", param="tool_choice"
        )
    given = choice.get("allowed_tools", choice)
    tools = given.get("tools") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(tools, list) or not tools:
        return choice
    ours = [tool for tool in tools if isinstance(tool, Mapping) and tool.get("type") in _CHOSEN]
    if not ours and all(isinstance(tool, Mapping) and isinstance(tool.get("type"), str) for tool in tools):
        # All allowed tools are left out, so no tool may be called.
        return "none"
    named = [{"type": "function", "name": _chosen_name(tool)} for tool in ours]
    return {"type": "allowed_tools", "mode": given.get("mode"), "tools": named}


def _chosen_name(tool: Mapping[str, Any]) -> Any:
    name, namespace = tool.get("name"), tool.get("namespace")
    if tool.get("type") == TOOL_SEARCH:
        return TOOL_SEARCH
    if isinstance(name, str) and isinstance(namespace, str):
        return flat_name(namespace, name)
    return name


Tools = Annotated[
    OfferedTools, PlainValidator(read_tools), WithJsonSchema({"type": "array", "items": {"type": "object"}})
]
