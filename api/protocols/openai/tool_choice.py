"""OpenAI's wire format on the way in: which tools an answer calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...requests.requests import ToolUse


def read_tool_choice(choice: Any, *, parallel: bool | None = None) -> ToolUse:
    """Returns the `ToolUse` for a value of `tool_choice`. `parallel` is the value of `parallel_tool_calls`, None if not
    given. Then an answer that must call a tool has one call, because models that are forced to call go on calling.

    Raises:
        ValueError: it has none of OpenAI's forms.
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
