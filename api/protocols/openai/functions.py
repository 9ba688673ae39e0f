"""OpenAI's older form of tools, `functions` and `function_call`. On the way in they become tools, of which an answer
calls at most one. On the way out the call gets the older form again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from ...requests.requests import ToolUse
from ...tools.answer_pieces import ToolCall


def _function_call(value: Any) -> Any:
    named = isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]
    if value not in (None, "auto", "none") and not named:
        raise ValueError("must be 'auto', 'none', or an object with a name")
    return value


FunctionCall = Annotated[Literal["auto", "none"] | dict[str, Any] | None, BeforeValidator(_function_call)]


def tools_of(functions: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns functions as tools."""
    return [{"type": "function", "function": {**function}} for function in functions]


def tool_use_of(choice: FunctionCall) -> ToolUse:
    """Returns the `ToolUse` for a value of `function_call`."""
    if isinstance(choice, dict):
        return ToolUse(forced=True, names=[choice["name"]], parallel=False)
    return ToolUse(shown=choice != "none", parallel=False)


def called_body(call: ToolCall) -> dict[str, str]:
    """Returns a call in the older form."""
    return {"name": call.name, "arguments": call.arguments}


def reason_of(reason: str) -> str:
    """Returns why an answer ended, in the older form."""
    return "function_call" if reason == "tool_calls" else reason
