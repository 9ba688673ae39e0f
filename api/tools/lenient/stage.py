"""Finds calls in an answer's text that are not in the form of the model's template. Computation only.

Calls must be at the end of an answer: the whole answer, its last code fence, its last paragraph, or text that begins
with a tag at the start of a line. Text that may become such a call is held back. So the output does not depend on how
the text is chunked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..answer_pieces import Piece, Skipped, ToolCall, longest_held, new_call_id
from .loose_reader import FENCES, MARKS, LooseReader, Reading, State
from .reading import Calls

HELD_CHARACTERS_MAX = 64 * 1024
"""The most text that is held back; longer text is not a call."""

_OPENINGS = (
    *("<function=", "<function name=", "<invoke name="),
    *(mark for mark in MARKS if mark.startswith(("<", "[")) and not mark.startswith("</")),
)
_FENCE_LINE = re.compile(r"[ \t]*```[ \t]*([^\s`]*)[^\n]*(?P<end>\n|$)")
_INDENT = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:^|\n)[ \t]*\n[ \t]*$")
_BLANK_CHARACTERS = 64

TRIED_ALWAYS_CHARACTERS, GROWTH = 1024, 1.25
"""Longer held text is read again only after it has grown by this much."""


@dataclass(frozen=True)
class OwnMarks:
    """The markers that a model family puts before its calls.

    Attributes:
        starts: markers that begin a call at any place.
        bare: the beginning of a call without a marker; "" if the family has one.
        certain: whether text that begins with the first of `starts`, or an answer that begins with `bare`, is a call
            whatever follows.
        hidden: markers that are removed from text.
    """

    starts: Sequence[str] = ()
    bare: str = ""
    certain: bool = False
    hidden: Sequence[str] = ()


class LenientCalls:
    """A stage that splits text into text and calls.

    Args:
        enough: returns whether calls end the answer, whatever follows.

    Attributes:
        cut: whether the answer was cut: by a limit, a stop string or a stop token; to be set before `flush`.
        forced: whether the answer must call a tool. Then a possible call that was cut does not become text.
    """

    def __init__(
        self,
        loose: LooseReader,
        own: OwnMarks,
        *,
        forced: bool = False,
        enough: Callable[[Calls], bool] = lambda calls: False,
    ) -> None:
        self._loose = loose
        self._enough = enough
        self._own = own
        marks = "|".join(re.escape(mark) for mark in own.hidden)
        self._hidden = re.compile(f"({marks})") if marks else None
        self._anywhere = tuple(dict.fromkeys(mark for mark in (*own.starts, own.bare) if mark))
        self._buffer = ""
        self._at = 0
        self._before = ""
        self._begun = False
        self._fence: str | None = None
        self._tried = 0
        self._after_call = False
        self._closed = False
        self.cut = False
        self.forced = forced

    @property
    def holding(self) -> bool:
        """Whether text is held back that may become a call."""
        return bool(self._buffer.strip())

    def add(self, text: str) -> list[Piece]:
        self._buffer += text
        out: list[Piece] = []
        self._scan(out, final=False)
        return out

    def flush(self) -> list[Piece]:
        """Returns the held pieces at the end of the answer."""
        out: list[Piece] = []
        self._scan(out, final=True)
        self._say(len(self._buffer), out)
        return out

    def release(self) -> list[Piece]:
        """Returns all held text, because something else follows. The text after that is a new one."""
        out: list[Piece] = []
        self._say(len(self._buffer), out)
        self._at, self._tried, self._before = 0, 0, "\n\n"
        return out

    def _scan(self, out: list[Piece], *, final: bool) -> None:
        """Emits text that is not a call, up to where one may begin."""
        while not self._closed and self._at < len(self._buffer):
            if self._new_line(self._at):
                held = self._line(out, final=final)
            else:
                held = self._inside_line(out, final=final)
            if held:
                break
        if self._closed:
            self._at = len(self._buffer)
        if not final:
            # White space before a call belongs to the call.
            self._say(len(self._buffer[: self._at].rstrip()), out)

    def _new_line(self, at: int) -> bool:
        return self._buffer[at - 1] == "\n" if at else not self._begun or self._before.endswith("\n")

    def _begun_at(self, at: int) -> bool:
        """Returns whether the answer has text before this place."""
        return self._begun or bool(self._buffer[:at].strip())

    def _line(self, out: list[Piece], *, final: bool) -> bool:
        """Checks the beginning of a line for a call. Returns whether it must wait for more text."""
        indent = _INDENT.match(self._buffer, self._at)
        at = self._at if indent is None else indent.end()
        if at == len(self._buffer):
            return not final or self._pass(at)
        if self._buffer[at] == "\n":
            return self._pass(at + 1)
        kind = self._opening(at, final=final)
        if kind and self._try(at, kind, out, final=final):
            return True
        if self._closed:
            return False
        if not final and "```".startswith(self._buffer[at:]):
            return True
        fence = _FENCE_LINE.match(self._buffer, self._at)
        if fence is not None:
            if not fence["end"] and not final:
                return True
            if self._fence is None:
                self._fence = fence[1]
            elif not fence[1]:
                self._fence = None
            return self._pass(fence.end())
        return self._next_place(at + 1 if kind else at, final=final)

    def _inside_line(self, out: list[Piece], *, final: bool) -> bool:
        marked = any(self._buffer.startswith(mark, self._at) for mark in self._anywhere)
        if marked and self._try(self._at, "mark", out, final=final):
            return True
        return not self._closed and self._next_place(self._at + marked, final=final)

    def _next_place(self, after: int, *, final: bool) -> bool:
        """Moves on to the next line, or to a marker of the model family before it."""
        buffer = self._buffer
        line = buffer.find("\n", after)
        stop = len(buffer) if line < 0 else line + 1
        places = [at for mark in self._anywhere if (at := buffer.find(mark, after, stop)) >= 0]
        if places:
            return self._pass(min(places))
        if line < 0 and not final:
            held = longest_held(buffer[after:], self._anywhere) if self._anywhere else 0
            self._pass(len(buffer) - held)
            return True
        return self._pass(stop)

    def _pass(self, at: int) -> bool:
        self._at, self._tried = at, 0
        return False

    def _opening(self, at: int, *, final: bool) -> str:
        """Returns the kind of call that may begin at the start of a line; "" for none."""
        rest = self._buffer[at : at + 64]

        def begins(openings: Sequence[str]) -> bool:
            if rest.startswith(tuple(openings)):
                return True
            return not final and any(opening.startswith(rest) for opening in openings if opening)

        if begins(self._anywhere) or begins(_OPENINGS):
            return "mark"
        if self._fence is not None:
            return ""
        if begins(tuple(f"```{info}" for info in FENCES)):
            return "fence"
        paragraph = not self._begun_at(at) or _BLANK.search(self._before + self._buffer[:at])
        return "text" if paragraph else ""

    def _try(self, at: int, kind: str, out: list[Piece], *, final: bool) -> bool:
        """Reads a possible call. Returns whether it may still become one."""
        size = len(self._buffer) - at
        if not final and size < self._tried:
            return True
        whole = not self._begun_at(at)
        certain = self._certain(at, whole=whole)
        fenced = self._fence is not None
        python = fenced and self._fence not in FENCES
        reading = self._loose.read(
            self._buffer,
            at,
            final=final and not self.cut,
            bare=whole and kind == "text",
            fenced=fenced and not python,
        )
        if reading.calls and (certain or size <= HELD_CHARACTERS_MAX):
            cut = final and reading.state is State.MORE
            if self._enough(reading.calls) or (certain and reading.state is State.OTHER):
                self._call(at, reading, out)
                return False
            if final and (reading.state is State.WHOLE or cut):
                self._call(at, Reading(reading.calls, len(self._buffer), reading.state), out)
                return False
        if reading.state is State.OTHER or final or size > HELD_CHARACTERS_MAX:
            if final and self.cut and self.forced and reading.state is State.MORE and not fenced:
                self._call(at, Reading([], len(self._buffer), reading.state), out)
            return False
        self._tried = 0 if size < TRIED_ALWAYS_CHARACTERS else int(size * GROWTH)
        return True

    def _certain(self, at: int, *, whole: bool) -> bool:
        own = self._own
        if not own.certain or self._fence is not None:
            return False
        marked = bool(own.starts) and self._buffer.startswith(own.starts[0], at)
        return marked or (whole and bool(own.bare) and self._buffer.startswith(own.bare, at))

    def _call(self, at: int, reading: Reading, out: list[Piece]) -> None:
        """Emits calls, and the text before them."""
        before = len(self._buffer[:at].rstrip())
        self._say(before, out)
        self._skip(reading.end - before, out)
        self._closed, self._after_call = True, bool(reading.calls)
        out += [ToolCall(index, new_call_id(), *call) for index, call in enumerate(reading.calls)]

    def _say(self, end: int, out: list[Piece]) -> None:
        """Emits the first characters as text, without the model family's markers."""
        text = self._buffer[:end]
        if self._after_call and text:
            shown = text.lstrip()
            self._skip(len(text) - len(shown), out)
            self._after_call, text, end = not shown, shown, len(shown)
        for index, part in enumerate(self._hidden.split(text) if self._hidden is not None else [text]):
            if part:
                out.append(Skipped(part) if index % 2 else part)
        self._drop(end)

    def _skip(self, end: int, out: list[Piece]) -> None:
        if end > 0:
            out.append(Skipped(self._buffer[:end]))
            self._drop(end)

    def _drop(self, end: int) -> None:
        gone, self._buffer = self._buffer[:end], self._buffer[end:]
        self._begun = self._begun or bool(gone.strip())
        self._before = (self._before + gone)[-_BLANK_CHARACTERS:]
        self._at = max(0, self._at - end)
