"""Tools offered to the model in OpenAI's format, calls of them and their results."""

from __future__ import annotations

import json
import random
from typing import Any

from .words import ALL_WORDS, NOUNS

CHAT_TOOLS_HEAD = "You may call these tools:\n<tools>"
CHAT_TOOLS_TAIL = '\n</tools>\nTo call one, reply with:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
_DESCRIPTIONS = """
Look up the code of a name.
Get the code of a person.
Returns the code for the given name.
Find a four-digit code by name.
Code lookup
Fetches a code from the database. Use it whenever the user asks to look up a code.
""".strip().splitlines()
_OTHERS = (
    "get_weather|search|calculator|read_file|write_file|send_mail|get_time|list_files|translate|run_query|get_name"
)
_PARAMETERS = ["name", "query", "city", "path", "text", "value", "count", "language", "unit"]


def _shuffled(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.5:
        return fields
    keys = list(fields)
    rng.shuffle(keys)
    return {key: fields[key] for key in keys}


def _parameters(rng: random.Random, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        schema["required"] = required
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    return _shuffled(rng, schema)


def _tool(rng: random.Random, name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.9:
        function["description"] = description
    function["parameters"] = parameters
    if rng.random() < 0.1:
        function["strict"] = True
    return _shuffled(rng, {"type": "function", "function": _shuffled(rng, function)})


def get_code_tool(rng: random.Random) -> dict[str, Any]:
    """The one tool that the model calls; its wording and the order of its keys vary."""
    name: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.5:
        name = _shuffled(
            rng, {**name, "description": rng.choice(["The name.", "Whose code", "name to look up", "A word"])}
        )
    return _tool(rng, "get_code", rng.choice(_DESCRIPTIONS), _parameters(rng, {"name": name}, ["name"]))


def _other_tool(rng: random.Random, name: str) -> dict[str, Any]:
    described = " ".join(rng.choices(ALL_WORDS, k=rng.randint(2, 9))).capitalize()
    chosen = rng.sample(_PARAMETERS, rng.randint(0, 3))
    properties: dict[str, Any] = {}
    for parameter in chosen:
        properties[parameter] = {"type": rng.choice(["string", "string", "integer", "number"])}
        if rng.random() < 0.4:
            properties[parameter]["description"] = " ".join(rng.choices(NOUNS, k=rng.randint(1, 5)))
    return _tool(rng, name, described, _parameters(rng, properties, chosen[:1]))


def any_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Mostly `get_code`, often with other tools beside it; sometimes only others."""
    others = [_other_tool(rng, name) for name in rng.sample(_OTHERS.split("|"), rng.choice([0, 0, 1, 1, 2, 4]))]
    if rng.random() < 0.85 or not others:
        others.insert(rng.randint(0, len(others)), get_code_tool(rng))
    return others


def text_of_tools(offered: list[dict[str, Any]]) -> str:
    """The tools exactly as the chat template renders them; empty without tools."""
    if not offered:
        return ""
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in offered)
    return f"<|im_start|>system\n{CHAT_TOOLS_HEAD}{lines}{CHAT_TOOLS_TAIL}<|im_end|>\n"


def call(rng: random.Random, name: str) -> dict[str, Any]:
    """A call of `get_code`."""
    function = {"name": "get_code", "arguments": {"name": name}}
    return {"id": f"call_{rng.randrange(10**9)}", "type": "function", "function": function}


def result(rng: random.Random, name: str, code: str | None) -> str:
    """What the tool answers, in one of several shapes; no code means that it found none."""
    if code is None:
        return rng.choice(["not found", '{"error": "not found"}', '{"code": null}', "unknown", "Error: no such name"])
    shapes = [
        code, code, f"The code is {code}", f"The code is {code}.", f"The code of {name} is {code}.", f"code: {code}",
        json.dumps({"code": code}), json.dumps({"code": code}), json.dumps({"name": name, "code": code}),
        json.dumps({"code": code, "name": name}), json.dumps({"code": code}, separators=(",", ":")),
        json.dumps({"result": code}), json.dumps(code),
    ]  # fmt: skip
    return rng.choice(shapes)
