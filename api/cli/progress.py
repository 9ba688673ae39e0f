"""Progress output of the commands: lines, and in a terminal a bar for each running step."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from ...cluster.bring_up.launch import SENTENCE
from ...cluster.errors import SatchelError


def print_error(error: SatchelError, output: TextIO | None = None) -> None:
    """Prints the sentence that a command ends with; None is standard error. A reader that has gone away is no error."""
    with suppress(OSError):
        print(f"{SENTENCE}{error.message}", file=output or sys.stderr, flush=True)


class _Output(Console):
    """A console that stays silent once its reader has gone away. Rich's own would end the process, or the thread."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressDisplay:
    """Lines and steps, from any thread. A reader that goes away (`| head`) does not stop the server.

    Args:
        output: where they are written; None is standard output.
    """

    def __init__(self, output: TextIO | None = None) -> None:
        self._console = _Output(file=output, highlight=False, soft_wrap=True, markup=False)
        self._guard = threading.Lock()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._steps: dict[str, str] = {}
        self._closed = False

    def say(self, *lines: str) -> None:
        """Prints lines."""
        with self._guard:
            for line in lines:
                self._print(line)

    def report(self, step: str, fraction: float | None) -> None:
        """Shows which step runs and how far it is: 0 to 1, or None if unknown.

        Steps written as `NAME: TEXT` run in parallel, one for each name. A step without a name ends all of them.
        """
        name, colon, _ = step.partition(": ")
        name = name if colon else ""
        with self._guard:
            if self._closed:
                return
            new = self._steps.get(name) != step
            if new and not name:
                self._steps.clear()
            self._steps[name] = step
            if self._console.is_terminal:
                self._show(name, step, fraction, new)
            elif new:
                self._print(step)

    def close(self) -> None:
        """Removes the bar. Later steps are not shown."""
        with self._guard:
            self._closed = True
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def _print(self, line: str) -> None:
        try:
            self._console.print(line)
        except OSError:
            self._console.quiet = True

    def _show(self, name: str, step: str, fraction: float | None, new: bool) -> None:
        if self._bars is None:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._bars.start()
        if new:
            for other in [other for other in self._tasks if other == name or not name or not other]:
                self._bars.remove_task(self._tasks.pop(other))
                if other != name:
                    self._steps.pop(other, None)
            self._tasks[name] = self._bars.add_task(step, total=None if fraction is None else 1.0)
        if fraction is not None:
            self._bars.update(self._tasks[name], total=1.0, completed=fraction)
