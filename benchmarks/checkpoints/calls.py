"""How models call tools and keep to schemas: what 16 requests with six tools and four with a schema come to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..parts import Budget, ResultTable, Say
from .server import Server, user

TOOLS = {
    "read_file": ("Reads a file", {"path": "string"}),
    "write_file": ("Writes a text into a file", {"path": "string", "text": "string"}),
    "list_folder": ("Lists the files in a folder", {"path": "string"}),
    "run_command": ("Runs a shell command", {"command": "string"}),
    "search_text": ("Searches the files of a folder for a text", {"folder": "string", "text": "string"}),
    "weather": ("Tells the weather of a city for some days", {"city": "string", "days": "integer"}),
}
ASKED = (
    ("Read the file /etc/hosts.", "read_file"),
    ("What is in README.md? Read it first.", "read_file"),
    ("Show me the content of src/main.py.", "read_file"),
    ("Write 'hello' into /tmp/hello.txt.", "write_file"),
    ("Create the file notes.md with the text '# Notes'.", "write_file"),
    ("Save the word 'done' to status.txt.", "write_file"),
    ("List the files in /var/log.", "list_folder"),
    ("Which files are in the folder src?", "list_folder"),
    ("Show what the folder tests has in it.", "list_folder"),
    ("Run `git status`.", "run_command"),
    ("Run the tests with pytest.", "run_command"),
    ("Find out how much disk space is free; use a shell command.", "run_command"),
    ("Search the folder src for the text 'TODO'.", "search_text"),
    ("Where in docs is the text 'install' mentioned? Search for it.", "search_text"),
    ("What will the weather be in Paris for the next 3 days?", "weather"),
    ("Will it rain in Tokyo tomorrow? Look at the weather for 1 day.", "weather"),
)
KINDS = (
    "one call, the tool asked for",
    "one call, another tool",
    "several calls",
    "a call without all it requires",
    "text",
)

WAYS = ("auto", "never")
"""Of telling a model its schema."""

CALL_TOKENS, ANSWER_TOKENS = 256, 400

SCHEMAS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Name three fruits.", {"fruits": {"type": "array", "items": {"type": "string"}}}),
    (
        "Describe a person you make up.",
        {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "hobbies": {"type": "array", "items": {"type": "string"}},
        },
    ),
    (
        "Plan a short trip to Rome.",
        {
            "city": {"type": "string"},
            "days": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"day": {"type": "integer"}, "todo": {"type": "string"}},
                    "required": ["day", "todo"],
                    "additionalProperties": False,
                },
            },
        },
    ),
    ("What are the primary colours?", {"colours": {"type": "array", "items": {"type": "string"}}}),
)


def calls(name: str, server: Server, budget: Budget, say: Say) -> ResultTable:
    """Asks for tools to be called, where the model may answer with a text and where it must call."""
    table = ResultTable(f"{name}: {len(ASKED)} requests with {len(TOOLS)} tools")
    for choice in ("auto", "required"):
        found = Counter(_called(server, text, tool, choice) for text, tool in ASKED if budget.left_s > 0)
        row = {kind: found.pop(kind, 0) for kind in KINDS}
        table.rows.append({"tool_choice": choice, **row, "refused": found.total()})
        say(f"  {choice}: {row}, {dict(found)}")
    table.notes.append("A call counts only if its arguments are a JSON object with all that the tool requires.")
    return table


def schemas(
    name: str, servers: Mapping[str, Callable[[], AbstractContextManager[Server]]], budget: Budget, say: Say
) -> ResultTable:
    """Asks for answers by a schema, of servers that tell the model the schema and that do not.

    Args:
        servers: starts each, by its `schema_in_prompt`.
    """
    table = ResultTable(f"{name}: {len(SCHEMAS)} answers by a schema, of at most {ANSWER_TOKENS} tokens")
    for way, start in servers.items():
        with start() as server:
            found = Counter(_ends(server, text, properties) for text, properties in SCHEMAS if budget.left_s > 0)
        table.rows.append({"schema_in_prompt": way, "ended": found["stop"], "cut": found["length"]})
        table.rows[-1]["refused"] = found.total() - found["stop"] - found["length"]
        say(f"  {way}: {dict(found)}")
    return table


def _ends(server: Server, text: str, properties: dict[str, Any]) -> str:
    """Returns the finish reason of an answer by a schema, or why it was refused."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _object(properties)}}
    answer = server.ask(messages=[user(text)], response_format=form, max_tokens=ANSWER_TOKENS, temperature=0)
    return answer["error"]["message"] if "error" in answer else answer["choices"][0]["finish_reason"]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": _object({key: {"type": kind} for key, kind in arguments.items()}),
            },
        }
        for name, (description, arguments) in TOOLS.items()
    ]


def _called(server: Server, text: str, tool: str, choice: str) -> str:
    """Returns which of `KINDS` an answer is, or why it was refused."""
    asked = {"messages": [user(text)], "tools": _tools(), "tool_choice": choice}
    answer = server.ask(**asked, max_tokens=CALL_TOKENS, temperature=0)
    if "error" in answer:
        return answer["error"]["message"]
    made = answer["choices"][0]["message"].get("tool_calls") or []
    if not made:
        return "text"
    if len(made) > 1:
        return "several calls"
    function = made[0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        # Cut.
        arguments = None
    if not isinstance(arguments, dict) or not TOOLS[function["name"]][1].keys() <= arguments.keys():
        return "a call without all it requires"
    return "one call, the tool asked for" if function["name"] == tool else "one call, another tool"
