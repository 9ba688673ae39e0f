"""Reads a batch's input: a JSON object a line, each a request. Computation and reading only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, BinaryIO

ERRORS_MAX = 100
NAME_MAX = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a file: its name, and where its line is, in bytes."""

    custom_id: str
    offset: int
    length: int


def read_lines(file: BinaryIO, endpoint: str, requests_max: int) -> tuple[list[Line], list[dict[str, Any]]]:
    """Returns the requests of a file, and what is wrong with its lines, at most `ERRORS_MAX`; a file with errors is not
    run at all. Empty lines are left out.

    Args:
        endpoint: the path that all of them must ask.
    """
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    offset = 0
    for number, data in enumerate(file, 1):
        start, offset = offset, offset + len(data)
        if not data.strip():
            continue
        custom_id, wrong = _read(data, endpoint)
        if not wrong and custom_id in seen:
            wrong = "duplicate_custom_id", f"The custom_id {custom_id[:100]!r} is used twice.", "custom_id"
        if not wrong and len(lines) >= requests_max:
            wrong = "too_many_tasks", f"The file has more than {requests_max} requests.", ""
        if wrong:
            code, message, param = wrong
            errors.append({"code": code, "message": message, "param": param or None, "line": number})
            if len(errors) >= ERRORS_MAX or code == "too_many_tasks":
                break
            continue
        seen.add(custom_id)
        lines.append(Line(custom_id, start, len(data)))
    if not lines and not errors:
        errors.append({"code": "empty_file", "message": "The file has no requests.", "param": None, "line": None})
    return lines, errors


def _read(data: bytes, endpoint: str) -> tuple[str, tuple[str, str, str] | None]:
    """Returns a line's name, and code, message and field of what is wrong with it; None if nothing is."""
    try:
        read = json.loads(data)
    except (ValueError, RecursionError):
        return "", ("invalid_json_line", "This line is not parseable as valid JSON.", "")
    if not isinstance(read, dict):
        return "", ("invalid_request", "The line is not an object.", "")
    custom_id = read.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= NAME_MAX:
        missing = f"custom_id must be a text of 1 to {NAME_MAX} characters."
        return "", ("missing_required_parameter", missing, "custom_id")
    if read.get("method") != "POST":
        return custom_id, ("invalid_method", "method must be POST.", "method")
    if read.get("url") != endpoint:
        return custom_id, ("mismatched_endpoint", f"url must be {endpoint}, as in the batch.", "url")
    if not isinstance(read.get("body"), dict):
        return custom_id, ("missing_required_parameter", "body must be an object.", "body")
    return custom_id, None
