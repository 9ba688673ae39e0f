"""What a chat template does with tools, calls and results, found by rendering short conversations; and the texts that
describe them if the template has no place for them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.errors import InvalidRequest
from .formats.call_format import CallFormat
from .model_text import ChatTemplate

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

_ASKED: dict[str, Any] = {"role": "user", "content": "Quixotry?"}
_SYSTEM = {"role": "system", "content": "Salmagundi."}
_NAME, _RESULT = "gongoozle", "Lagniappe."
_IDS = ("call00001", f"functions.{_NAME}:0")
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Pettifogs.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}

_TOLD = """You can call these tools. Each line describes one as JSON:

{tools}

To call a tool, answer with nothing but its name and its arguments, written so:

{example}"""
_EXAMPLE_NAME, _EXAMPLE_ARGUMENTS = "name_of_the_tool", '{"name_of_the_argument": "its value"}'


@dataclass(frozen=True)
class TemplateTools:
    """What a template does with tools.

    Attributes:
        shows_tools, shows_calls, shows_results: whether it shows them.
        takes_system: whether it accepts a system message.
        arguments_as_text: whether it accepts a call's arguments only as text.
        example: the example call that the model is shown.
    """

    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    takes_system: bool = True
    arguments_as_text: bool = False
    example: str = f'{{"name": "{_EXAMPLE_NAME}", "arguments": {_EXAMPLE_ARGUMENTS}}}'

    def shown(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        """Returns messages with their calls and results in the form in which the template shows them."""
        if self.shows_calls and self.shows_results and not self.arguments_as_text:
            return [dict(message) for message in messages]
        names: dict[Any, str] = {}
        shown: Messages = []
        # Whether the last message has a result as text; then the user's next text is joined to it.
        told = False
        for message in messages:
            said = dict(message)
            calls = said.get("tool_calls") or ()
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            if calls:
                said = self._with_calls(said, calls)
            if said["role"] == "tool" and not self.shows_results:
                name = said.get("name") or names.get(said.get("tool_call_id"), "")
                told, result = True, _joined(f"The result of {name}:\n" if name else "The result:\n", said["content"])
                if shown and shown[-1]["role"] == "user":
                    shown[-1] = {**shown[-1], "content": _joined(_joined(shown[-1]["content"], "\n\n"), result)}
                    continue
                said = {"role": "user", "content": result}
            elif said["role"] == "user" and told:
                told = False
                shown[-1] = {**said, "content": _joined(_joined(shown[-1]["content"], "\n\n"), said["content"])}
                continue
            else:
                told = False
            shown.append(said)
        return shown

    def _with_calls(self, message: dict[str, Any], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not self.shows_calls:
            said = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
            written = "\n".join(json.dumps(each, ensure_ascii=False) for each in said)
            del message["tool_calls"]
            return {**message, "content": _joined(message.get("content") or "", written, "\n\n")}
        if self.arguments_as_text:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments_text(call["function"])}}
                for call in calls
            ]
        return message

    def with_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Messages:
        """Returns messages that describe tools, for a template that has no place for them."""
        listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        told = _TOLD.format(tools=listed, example=self.example)
        said: Messages = [dict(message) for message in messages]
        if said and said[0]["role"] == "system":
            said[0] = {**said[0], "content": _joined(said[0]["content"] or "", told, "\n\n")}
        elif self.takes_system:
            said.insert(0, {"role": "system", "content": told})
        else:
            at = next((at for at, message in enumerate(said) if message["role"] == "user"), None)
            if at is None:
                said.insert(0, {"role": "user", "content": told})
            else:
                said[at] = {**said[at], "content": _joined(told, said[at]["content"], "\n\n")}
        return said


def tools_of(template: ChatTemplate, known: CallFormat | None) -> TemplateTools:
    """Returns what a chat template does with tools. Takes milliseconds. Never raises.

    Args:
        known: the model's call format, if its template shows it.
    """
    if template.is_harmony or not template.source():
        return TemplateTools()
    try:
        return _found(template, known)
    except Exception:
        # A template is a foreign program; its failure is no reason not to serve the model.
        logger.warning("the chat template of %r could not be tried with tools", template.name, exc_info=True)
        return TemplateTools()


def _found(template: ChatTemplate, known: CallFormat | None) -> TemplateTools:
    shows_tools = _NAME in _rendered(template, [_ASKED], [_TOOL])
    as_text = next(
        (
            as_text
            for as_text in (False, True)
            for id in _IDS
            if _NAME in _rendered(template, _conversation(id, as_text=as_text), generation_prompt=False)
        ),
        None,
    )
    shows_results, tools = False, [_TOOL] if shows_tools else None
    for id in _IDS:
        said = {"role": "assistant", "content": "Brouhaha."}
        called = [_ASKED, said] if as_text is None else _conversation(id, as_text=as_text)
        result = {"role": "tool", "content": _RESULT, "tool_call_id": id, "name": _NAME}
        shows_results = shows_results or _RESULT in _rendered(template, [*called, result], tools)
    example = None if known is None else known.example(_EXAMPLE_NAME, _EXAMPLE_ARGUMENTS)
    return TemplateTools(
        shows_tools,
        as_text is not None,
        shows_results,
        bool(_rendered(template, [_SYSTEM, _ASKED])),
        bool(as_text),
        TemplateTools.example if example is None else example,
    )


def _conversation(id: str, *, as_text: bool) -> Messages:
    given: Any = {"what": "canals"}
    function = {"name": _NAME, "arguments": json.dumps(given) if as_text else given}
    return [
        _ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]},
    ]


def _rendered(
    template: ChatTemplate, messages: Messages, tools: Messages | None = None, *, generation_prompt: bool = True
) -> str:
    """Returns the rendered text, "" if the template refuses it."""
    try:
        return template.render(messages, tools, {}, generation_prompt=generation_prompt)
    except InvalidRequest:
        return ""


def _arguments_text(function: Mapping[str, Any]) -> str:
    given = function["arguments"]
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _joined(first: Any, second: Any, between: str = "") -> Any:
    """Joins contents, which are text or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}" if first and second else first or second
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else [*each] for each in (first, second) if each]
    return [part for each in parts for part in each]
