"""What the readers of calls share. Computation only."""

from __future__ import annotations

Calls = list[tuple[str, str]]
"""Names, and arguments as JSON."""


class NoCall(Exception):
    """Text is no call, whatever follows."""


class Unfinished(Exception):
    """Text may become a call if more follows. `calls` are those of a list that are whole."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls: Calls = calls or []


def begins_with(text: str, at: int, opening: str, *, final: bool) -> bool:
    """Whether `opening` stands at `at`.

    Raises:
        Unfinished: only a part of it does, because the text ends.
    """
    if text.startswith(opening, at):
        return True
    if not final and len(text) - at < len(opening) and opening.startswith(text[at:]):
        raise Unfinished
    return False
