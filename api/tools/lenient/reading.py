"""Types and functions that the readers of calls share. Computation only."""

from __future__ import annotations

Calls = list[tuple[str, str]]
"""Calls as names and arguments, the arguments as JSON."""


class NoCall(Exception):
    """The text is not a call, whatever follows."""


class Unfinished(Exception):
    """The text may become a call if more follows. `calls` are the complete calls of an unfinished list."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls: Calls = calls or []


def begins_with(text: str, at: int, opening: str, *, final: bool) -> bool:
    """Returns whether the text has `opening` at `at`.

    Raises:
        Unfinished: the text ends within it.
    """
    if text.startswith(opening, at):
        return True
    if not final and len(text) - at < len(opening) and opening.startswith(text[at:]):
        raise Unfinished
    return False
