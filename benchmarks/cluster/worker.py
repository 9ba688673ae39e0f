"""A process that answers a line of JSON with a line of JSON, so that it can run on another host and be asked in turns.

Its standard error goes into a file. It ends when its standard input closes.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..programs import ROOT

END_S = 20.0


class Worker:
    """One such process.

    Args:
        command: what to run, in `ROOT`.
        log: where its standard error goes.
        environment: of the process; None takes this one's.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT
            )
        self._rest = b""

    def ask(self, question: Any, timeout_s: float = 120.0) -> Any:
        """
        Raises:
            RuntimeError: it has ended, or does not answer in time.
        """
        self.tell(question)
        return json.loads(self._line(timeout_s))

    def tell(self, question: Any) -> None:
        """As `ask`, without waiting for the answer, which must be the last."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"it has ended: {self._last_words()}") from None

    def close(self) -> None:
        """Let it end by itself, or end it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = ends - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(0.0, left_s))[0]
            if not ready:
                raise RuntimeError(f"no answer in {timeout_s:g} s: {self._last_words()}")
            # Not through the buffer, of which `select` knows nothing.
            part = self._process.stdout.raw.read(65536)  # pyright: ignore[reportAttributeAccessIssue]
            if not part:
                raise RuntimeError(f"it has ended: {self._last_words()}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-5:]) or "without a word"


def answer(reply: Callable[[Any], Any]) -> None:
    """Be such a process, until standard input closes."""
    for line in sys.stdin:
        print(json.dumps(reply(json.loads(line))), flush=True)


def methods_of(part: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns what `answer` needs, if questions are the name of a method and its arguments."""
    return lambda question: getattr(part, question[0])(*question[1:])


def start_answering() -> None:
    """Keeps standard output for answers: what libraries print as they start goes to the log, with the log's lines."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = answers
    logging.basicConfig(level=logging.INFO)
