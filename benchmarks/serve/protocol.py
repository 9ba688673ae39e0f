"""How the harness talks to whatever makes load: one JSON object a line, a command in and its result out.

A driver is a process of its own: the HTTP client, or an engine without HTTP. All of them take the same commands and
give the same result, so that one piece of code measures servers and engines alike. Only the HTTP client takes `Agents`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class StreamedTimes:
    """One answer as its reader saw it. Times are in seconds by `time.perf_counter`.

    Attributes:
        times: when each piece of the answer arrived. A server may put several tokens into a piece.
        tokens: tokens of the answer by the server's own count; None where it gave none.
        error: why the answer is not whole; None where it is.
        text: the answer's content, if it is needed for the next turn.
    """

    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int | None = None
    prompt_tokens: int | None = None
    error: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Burst:
    """Send all prompts at once and read every answer to its end, at the latest after `timeout_s`."""

    prompts: list[Any]
    max_tokens: int
    timeout_s: float


@dataclass(frozen=True)
class Mix:
    """Start the `running` prompts; when each has given `after` tokens, send `long` and read its answer of `long_tokens`
    tokens to the end. Then drop the others."""

    running: list[Any]
    long: Any
    max_tokens: int
    timeout_s: float
    long_tokens: int = 8
    after: int = 16


@dataclass(frozen=True)
class Agents:
    """Start an agent for each list of `turns`, all at once. An agent sends its next turn once it has read the answer to
    the one before, and stops if one fails. A turn is a text and the number of tokens of its answer.

    If the conversation `grows`, a turn is added to it behind the last answer; otherwise its text replaces all that came
    before. `system` begins every conversation, `names` has the agents' ids. All is over after `timeout_s`.
    """

    system: str
    names: list[str]
    turns: list[list[tuple[str, int]]]
    grows: bool
    timeout_s: float


Command = Burst | Mix | Agents


@dataclass(frozen=True)
class Trace:
    """What came of a command. For a `Mix` the last stream is the long one; for `Agents` there is a stream for every
    turn, one agent's after the other's, also for those that were not sent. `cpu_share` is the part of one core that an
    HTTP client took while it read; None where the driver is the engine itself. `peak_bytes` is the peak of MLX's memory
    meanwhile, weights included; None where the driver is not the engine."""

    streams: list[StreamedTimes]
    cpu_share: float | None = None
    peak_bytes: int | None = None


COMMANDS: dict[str, type[Command]] = {"burst": Burst, "mix": Mix, "agents": Agents}


def to_line(command: Command) -> str:
    name = next(name for name, kind in COMMANDS.items() if isinstance(command, kind))
    return json.dumps([name, asdict(command)]) + "\n"


def from_line(line: str) -> Command:
    name, fields = json.loads(line)
    return COMMANDS[name](**fields)


def trace_of(line: str) -> Trace:
    fields = json.loads(line)
    if "failure" in fields:
        raise RuntimeError(fields["failure"])
    return Trace([StreamedTimes(**stream) for stream in fields.pop("streams")], **fields)


def answer_commands(run: Callable[[Any], Trace]) -> None:
    """A driver's main loop: says `ready`, then answers every line of the standard input until it ends."""
    # Libraries print; only this handle reaches the harness.
    out, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        try:
            result = asdict(run(from_line(line)))
        except Exception as error:
            result = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=out, flush=True)
