"""Anthropic's wire format on the way in: calls and results of server tools, as text.

Anthropic's servers run these tools (web search, code execution, MCP). If a conversation began there, clients send their
calls and results with the rest of it. A model here cannot call them, but it is shown what they said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...requests.documents import words_of
from ...requests.request_body import string_of, wrong

USES = ("server_tool_use", "mcp_tool_use")
RESULTS = (
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
)

_SAID = ("text", "stdout", "stderr", "content", "error_message")
"""Fields of results that have text, in the order in which it is shown."""


def used_name(block: Mapping[str, Any], where: str) -> str:
    """Returns the name of a called tool, with the name of its MCP server if it has one.

    Raises:
        InvalidRequest: it is malformed; `param` is the place.
    """
    name = string_of(block, "name", where)
    if block["type"] != "mcp_tool_use":
        return name
    return f"{string_of(block, 'server_name', where)}__{name}"


def result_text(block: Mapping[str, Any], where: str) -> str:
    """Returns a server tool's result as text: its texts, titles and addresses, a line for each.

    Raises:
        InvalidRequest: it is malformed; `param` is the place.
    """
    content, place = block.get("content"), f"{where}.content"
    if not isinstance(content, str | list | dict | None):
        raise wrong(place, "must be a string, a block or a list of blocks")
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise wrong(f"{where}.is_error", "must be a boolean")
    text = "\n".join(_lines(content, place))
    return f"Error: {text}" if failed else text


def _lines(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    if isinstance(content, list):
        return [line for index, part in enumerate(content) for line in _lines(part, f"{where}[{index}]")]
    if not isinstance(content, Mapping):
        return []
    if (words := words_of(content, where)) is not None:
        return [words]
    if isinstance(code := content.get("error_code"), str):
        return [f"Error: {code}"]
    if content.get("type") == "web_search_result":
        # The page's content is encrypted for Anthropic.
        return [f"{string_of(content, 'title', where)} ({string_of(content, 'url', where)})"]
    if "tool_references" in content:
        return _lines(content["tool_references"], f"{where}.tool_references")
    head = [url] if isinstance(url := content.get("url"), str) else []
    lines = [*head, *(line for name in _SAID for line in _lines(content.get(name), f"{where}.{name}"))]
    code = content.get("return_code")
    return [*lines, f"Exit code {code}"] if isinstance(code, int) and code else lines
