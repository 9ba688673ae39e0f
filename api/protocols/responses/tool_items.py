"""The Responses API on the way in: items for calls and their results.

The client runs functions and tools with free text. It also runs some built-in tools (shells, patches, searches for
tools); OpenAI's servers run the others. Clients send the items of all of them. Each becomes a call with its result, so
that the model is shown what was done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ...requests.history import Message, MessageCall
from ...requests.left_out import LeftOut
from ...requests.request_body import arguments_text, label_of, string_of, wrong
from .content import read_content
from .tools import INPUT, TOOL_SEARCH, flat_name, names_in


@dataclass(frozen=True)
class SpokenPart:
    """A part of an answer, or the id of a stored item; `where` is its place."""

    kind: Literal["text", "thought", "call", "reference"]
    where: str
    text: str = ""
    call: MessageCall | None = None


Parts = list[Message | SpokenPart]


def read_tool_item(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts | None:
    """Returns an item as a call, a result or both; None if it is neither, or has nothing that a model could read.

    Raises:
        InvalidRequest: it is malformed; `param` is the place.
    """
    read = _READERS.get(item["type"])
    return None if read is None else read(item, where, left_out)


def _function_call(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    arguments = arguments_text(item.get("arguments"), f"{where}.arguments", free=True)
    return [_call(label_of(item, "call_id", where), _named(item, where), arguments, where)]


def _custom_call(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    arguments = _json({INPUT: string_of(item, "input", where)})
    return [_call(label_of(item, "call_id", where), _named(item, where), arguments, where)]


def _output(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    given = item.get("output", {})
    content = read_content("" if given is None else given, f"{where}.output", left_out, pictures=True)
    return [_result(label_of(item, "call_id", where), content)]


def _tool_search_call(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts | None:
    if item.get("call_id") is None:
        # A search that OpenAI's servers ran has no `call_id`.
        return None
    arguments = arguments_text(item.get("arguments"), f"{where}.arguments", free=True)
    return [_call(label_of(item, "call_id", where), TOOL_SEARCH, arguments, where)]


def _tool_search_output(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    """Returns the names of the found tools as a result. The tools themselves are read with those of the request."""
    if item.get("call_id") is None:
        return []
    names = names_in(item.get("tools"), f"{where}.tools")
    return [_result(label_of(item, "call_id", where), f"Tools found: {', '.join(names) or 'none'}")]


def _shell_call(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    name = item["type"].removesuffix("_call")
    field = "operation" if name == "apply_patch" else "action"
    action = item.get(field)
    if not isinstance(action, Mapping):
        raise wrong(f"{where}.{field}", "must be an object")
    # A patch's type says what it does; commands have only one type.
    said = {key: value for key, value in action.items() if value is not None and (key, value) != ("type", "exec")}
    return [_call(_id(item, where), name, _json(said), where)]


def _shell_output(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    given = item.get("output")
    if isinstance(given, list) and all(isinstance(part, Mapping) and "stdout" in part for part in given):
        text = "\n".join(filter(None, (_ran(part, f"{where}.output[{index}]") for index, part in enumerate(given))))
    elif given is None:
        text = item["status"] if isinstance(item.get("status"), str) else ""
    else:
        text = read_content(given, f"{where}.output", left_out)
    return [_result(_id(item, where), text)]


def _ran(part: Mapping[str, Any], where: str) -> str:
    """Returns a shell command's output, and how it ended if it failed."""
    outcome = part.get("outcome")
    code = outcome.get("exit_code") if isinstance(outcome, Mapping) else None
    texts = [string_of(part, name, where) for name in ("stdout", "stderr") if part.get(name) is not None]
    if isinstance(outcome, Mapping) and outcome.get("type") == "timeout":
        texts.append("It took too long.")
    elif isinstance(code, int) and code:
        texts.append(f"Exit code {code}")
    return "\n".join(filter(None, texts))


def _mcp_call(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    id, name = label_of(item, "id", where), label_of(item, "name", where)
    server = label_of(item, "server_label", where)
    arguments = arguments_text(item.get("arguments"), f"{where}.arguments", free=True)
    call = _call(id, flat_name(server, name), arguments, where)
    if (error := item.get("error")) is not None:
        return [call, _result(id, f"Error: {error if isinstance(error, str) else _json(error)}")]
    if item.get("output") is None:
        return [call]
    return [call, _result(id, string_of(item, "output", where))]


def _code_call(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts | None:
    if item.get("code") is None:
        return None
    id, outputs = label_of(item, "id", where), item.get("outputs")
    call = _call(id, "code_interpreter", _json({"code": string_of(item, "code", where)}), where)
    if not isinstance(outputs, list | None):
        raise wrong(f"{where}.outputs", "must be a list")
    logs = [
        string_of(output, "logs", f"{where}.outputs[{index}]")
        for index, output in enumerate(outputs or ())
        if isinstance(output, Mapping) and output.get("type") == "logs"
    ]
    return [call, _result(id, "\n".join(logs))]


def _file_search(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts | None:
    results = item.get("results")
    if not results:
        return None
    if not isinstance(results, list):
        raise wrong(f"{where}.results", "must be a list")
    texts: list[str] = []
    for index, result in enumerate(results):
        place = f"{where}.results[{index}]"
        if not isinstance(result, Mapping):
            raise wrong(place, "must be an object")
        head = [string_of(result, "filename", place)] if result.get("filename") is not None else []
        texts += [*head, *([string_of(result, "text", place)] if result.get("text") is not None else [])]
    id = label_of(item, "id", where)
    return [_call(id, "file_search", _json({"queries": item.get("queries")}), where), _result(id, "\n".join(texts))]


def _program(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    arguments = _json({"code": string_of(item, "code", where)})
    return [_call(label_of(item, "call_id", where), "program", arguments, where)]


def _program_output(item: Mapping[str, Any], where: str, left_out: LeftOut) -> Parts:
    return [_result(label_of(item, "call_id", where), string_of(item, "result", where))]


def _named(item: Mapping[str, Any], where: str) -> str:
    name, namespace = label_of(item, "name", where), item.get("namespace")
    if not isinstance(namespace, str | None):
        raise wrong(f"{where}.namespace", "must be a string")
    return flat_name(namespace or "", name)


def _id(item: Mapping[str, Any], where: str) -> str:
    """Returns the `call_id`, which ties an item to another one, or else the item's id."""
    alone = item.get("call_id") is None and item.get("id") is not None
    return label_of(item, "id" if alone else "call_id", where)


def _call(id: str, name: str, arguments: str, where: str) -> SpokenPart:
    function = {"name": name, "arguments": arguments}
    return SpokenPart("call", where, call={"id": id, "type": "function", "function": function})


def _result(id: str, content: str | list[Any]) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": id}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, LeftOut], Parts | None]] = MappingProxyType(
    {
        "function_call": _function_call,
        "function_call_output": _output,
        "custom_tool_call": _custom_call,
        "custom_tool_call_output": _output,
        "tool_search_call": _tool_search_call,
        "tool_search_output": _tool_search_output,
        "local_shell_call": _shell_call,
        "local_shell_call_output": _shell_output,
        "shell_call": _shell_call,
        "shell_call_output": _shell_output,
        "apply_patch_call": _shell_call,
        "apply_patch_call_output": _shell_output,
        "mcp_call": _mcp_call,
        "code_interpreter_call": _code_call,
        "file_search_call": _file_search,
        "program": _program,
        "program_output": _program_output,
    }
)
