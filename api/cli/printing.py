"""What commands print: lines for people, or JSON with the lines on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def line_printer(*, as_json: bool) -> Callable[[str], None]:
    """Returns what prints a line for people at once: on standard error if standard output gets JSON."""

    def say(line: str) -> None:
        print(line, flush=True, file=sys.stderr if as_json else sys.stdout)

    return say
