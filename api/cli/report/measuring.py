"""Measures a model in processes of its own, so that neither a crash nor a hang of the device ends the report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

LIMIT_S = 1800.0
"""How long a process may take: loading a large model from a slow disk takes minutes."""

_LAST_LINES, _LINE_CHARACTERS_MAX = 20, 500


@dataclass
class Measured:
    """What a process told.

    Attributes:
        facts: by name, as `device_report.tell_all` tells them.
        last_step: what ran when it ended; empty if it came to its end.
        ended: how it ended, in words; empty if it came to its end.
        output: the last lines of its other output, if it did not.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    last_step: str = "starting"
    ended: str = ""
    output: list[str] = field(default_factory=list)

    @property
    def crashed(self) -> bool:
        return bool(self.ended)


def child_command(source: str) -> list[str]:
    """Returns the command of a process that measures a model: a Hub id, a folder, or `embedded:NAME`."""
    return [sys.executable, "-P", "-m", "satchel.api.cli.report.child", source]


def measure(
    command: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None], limit_s: float = LIMIT_S
) -> list[Measured]:
    """Measures a model. If the process crashes or hangs, a second one does so without Satchel's kernels.

    Args:
        command: of the process.
        environment: of the processes.
        say: is called with each step.
    """
    first = _measured(command, environment, say, limit_s)
    if not first.crashed or environment.get("SATCHEL_KERNELS") == "0":
        return [first]
    say(f"the process ended ({first.ended}); once more without kernels")
    return [first, _measured(command, {**environment, "SATCHEL_KERNELS": "0"}, say, limit_s)]


def _measured(
    command: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None], limit_s: float
) -> Measured:
    found = Measured()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, env=dict(environment), text=True
        ) as process:
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                _read(process.stdout, found, say)
                code = process.wait()
            finally:
                overdue = not timer.is_alive()
                timer.cancel()
                process.kill()
        if found.last_step or code:
            found.ended = f"it took longer than {limit_s:.0f} s" if overdue else _in_words(code)
            output.seek(0)
            lines = output.read().splitlines()[-_LAST_LINES:]
            found.output = [line[:_LINE_CHARACTERS_MAX] for line in lines]
    return found


def _read(lines: IO[str], found: Measured, say: Callable[[str], None]) -> None:
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            # It was ended while it wrote.
            continue
        match line:
            case {"fact": str(name), "value": value}:
                found.facts[name] = value
            case {"step": str(step)}:
                found.last_step = step
                if step:
                    say(step)
            case _:
                pass


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
