"""Writes the two pages of docs/reference/ that are made from the code: `python -m docs.reference`.

The configuration is read from the config's dataclasses (types, limits and defaults by pydantic's JSON schema, the rest
from the text below each field), the commands from the typer application. A test compares the pages with the code.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter

from satchel.api.cli.main import app
from satchel.cluster.config import config, nodes, stages
from satchel.cluster.config.timing import Timing

PAGES = Path(__file__).parent / "reference"
GROUPS = (
    config.Model,
    config.Drafting,
    stages.Split,
    nodes.Node,
    nodes.Link,
    config.Endpoint,
    config.Tls,
    config.Scheduling,
    config.Routing,
)
GROUPS += (config.Media, config.Timeouts, config.Logs, config.Traces)


def described_fields(group: type) -> dict[str, str]:
    """The text below each field of a class, in one line."""
    (body,) = [node.body for node in ast.parse(inspect.getsource(group)).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def value_of(schema: dict[str, Any], name: str) -> str:
    """What a field takes, in words."""
    if "anyOf" in schema:
        return " or ".join(value_of(each, name) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        group = schema["$ref"].rpartition("/")[2]
        return f"[{group.lower()}](#{group.lower()})" if group != "Timing" else "[timing](../timing.md)"
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {value_of(schema['items'], name)}"
        case "boolean":
            return "`true` or `false`"
        case "integer" if "bytes" in name:
            return "size" + limits(schema)
        case "integer":
            return "whole number" + limits(schema)
        case "number":
            return ("seconds" if re.search("_s(_|$)|wait", name) else "number") + limits(schema)
        case "object":
            return "mapping"
        case _:
            return "text"


def limits(schema: dict[str, Any]) -> str:
    """The bounds of a number, but for "more than 0", which nearly all have."""
    said = []
    if (least := schema.get("minimum")) is not None:
        said.append(f"from {least:g}")
    most = schema.get("maximum", schema.get("le"))
    if most is not None:
        said.append(f"to {most}")
    if (below := schema.get("exclusiveMaximum")) is not None:
        said.append(f"below {below:g}")
    if (step := schema.get("multipleOf")) is not None:
        said.append(f"a multiple of {step}")
    return f" ({', '.join(said)})" if said else ""


def default_of(schema: dict[str, Any], name: str, required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    if default is None:
        return ""
    if "bytes" in name:
        return f"`{in_bytes(default)}`"
    if default == []:
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def in_bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number % size == 0:
            return f"{number // size} {unit}"
    return str(number)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def first_sentence(group: type) -> str:
    return (inspect.getdoc(group) or "").partition(".")[0] + "."


def table(group: type, schema: dict[str, Any]) -> Iterator[str]:
    said = {one.__name__.lower(): first_sentence(one) for one in GROUPS if group is config.Config}
    said |= {"timing": first_sentence(Timing), **described_fields(group)}
    yield "| field | value | default | |"
    yield "| --- | --- | --- | --- |"
    for field in fields(group):
        own = schema["properties"][field.name]
        default = default_of(own, field.name, field.name in schema.get("required", ()))
        cells = (f"`{field.name}`", value_of(own, field.name), default, said[field.name])
        yield f"| {' | '.join(cell(each) for each in cells)} |"


def configuration() -> str:
    """The page of the configuration."""
    tree = TypeAdapter(config.Config).json_schema()
    lines = [
        "# Configuration",
        "",
        "<!-- Generated from the code by `make docs`. Change the text below the fields in cluster/. -->",
        "",
        "`satchel serve --config FILE` reads one YAML file, once. Only `models` is required. An unknown field or a",
        "wrong value stops the start, and the error names its path, such as `models[0].replicas`. The folder",
        "`configs/` has examples.",
        "",
        "The last word of a name is its unit: `_s` is seconds, `_bytes` bytes, `_tokens` tokens. A size may have a",
        "unit: `512 MiB`, `2 GB`. None in a text means that the field is left out.",
        "",
    ]
    lines += ["## The whole file", "", *table(config.Config, tree), ""]
    for group in GROUPS:
        lines += [f"## {group.__name__}", "", inspect.getdoc(group) or "", ""]
        lines += [*table(group, tree["$defs"][group.__name__]), ""]
    times = "[Its fields, and what must hold between them](../timing.md)."
    lines += ["## Timing", "", inspect.getdoc(Timing) or "", times]
    return "\n".join(lines) + "\n"


def commands(command: Any, path: str) -> Iterator[str]:
    """The sections of a command and of those below it."""
    context = command.context_class(command, info_name=path)
    yield f"## {path}" if path.count(" ") < 2 else f"### {path}"
    yield ""
    yield inspect.cleandoc(command.help or "")
    yield ""
    yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```"
    yield ""
    rows = [row for parameter in command.get_params(context) if (row := parameter_row(parameter, context)) is not None]
    if rows:
        yield from ("| | |", "| --- | --- |", *rows, "")
    if hasattr(command, "commands"):
        for name in command.commands:
            yield from commands(command.commands[name], f"{path} {name}")


def parameter_row(parameter: Any, context: Any) -> str | None:
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return None
    name, said = record
    return f"| `{cell(name)}` | {cell(' '.join(said.split()))} |"


def command_line() -> str:
    """The page of the commands."""
    lines = [
        "# Command line",
        "",
        "<!-- Generated from the code by `make docs`. Change the text of the commands in api/cli/. -->",
        "",
        "`make serve` installs the command as `.venv/bin/satchel`. A failure is one sentence on standard error and",
        "exit code 1, a wrong command line exit code 2. `--json` prints what programs read.",
        "",
    ]
    root: Any = typer.main.get_command(app)
    for name in sorted(root.commands):
        lines += commands(root.commands[name], f"satchel {name}")
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[Path, str]:
    return {PAGES / "configuration.md": configuration(), PAGES / "command-line.md": command_line()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
