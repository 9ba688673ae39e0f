"""Finds a model's calls in its answers: in its own format, and in other formats that models write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .call_splitter import Parse, ToolCallSplitter, call_parser
from .call_stage import CallLimit, CallStage
from .formats.call_format import CallFormat
from .formats.harmony_splitter import HarmonySplitter
from .lenient.declared import DeclaredTools
from .lenient.loose_reader import LooseReader, State
from .lenient.reading import Calls
from .lenient.stage import LenientCalls, OwnMarks
from .lenient.thought_calls import ThoughtCalls
from .model_calls import ModelCalls, marks_in
from .model_text import Encoder

_BEGINS = re.compile(r"\{|\[\{|<function|<invoke")
"""Matches a marker that is the beginning of the call itself."""


class CallFinder:
    """Finds the calls of one request's answers.

    Args:
        tools: the tools that the model is shown, as chat templates take them.
        calls: how the model writes calls; `known` is the format that `calls.read` returned.
        forced: whether an answer must call a tool.
        calls_max: after this many calls an answer is over; None for no limit.
    """

    def __init__(
        self,
        calls: ModelCalls,
        tokenizer: Encoder,
        tools: Sequence[Mapping[str, Any]],
        known: CallFormat,
        *,
        forced: bool = False,
        calls_max: int | None = None,
    ) -> None:
        self._declared = DeclaredTools(tools)
        self._forced = forced
        self._calls_max = calls_max
        tools = [dict(tool) for tool in tools]
        own = known.parse(calls.marks, tools, forced=forced)
        # The markers that the model's template puts around calls, without those between the parts of a call.
        written = (own.start.strip(), own.end.strip(), *marks_in(tokenizer, known.parts))
        marks = tuple(mark for mark in dict.fromkeys(written) if mark not in ("", "[") and not _BEGINS.match(mark))
        self._loose = LooseReader(self._declared, marks, calls.by_name, known.quote)
        self._own = own
        self._parse: Parse | None = None
        if own.parser is not None and (own.end or own.reader is not None):
            self._parse = self._parser(call_parser(own.parser, tools))
        bare = own.start if own.start.startswith(("{", "[")) and own.start not in marks else own.bare
        hidden = tuple(mark for mark in marks if mark not in (own.start, own.end))
        certain = self._parse is None and bool(own.start)
        starts = tuple(mark for mark in marks if "/" not in mark and mark != own.end)
        self._own_marks = OwnMarks(starts, bare, certain, hidden)

    def stage(self, harmony: HarmonySplitter | None = None) -> CallStage:
        """Returns the stage for one answer; `harmony` finds calls in that format."""
        limit = CallLimit(forced=self._forced, calls_max=self._calls_max)
        lenient = LenientCalls(self._loose, self._own_marks, forced=self._forced, enough=limit.ended_by)
        return CallStage(self._splitter() if harmony is None else harmony, lenient, limit)

    def _splitter(self) -> ToolCallSplitter | None:
        """Returns what finds calls in the model's own format; None if it is not known, or the lenient stage reads
        it."""
        own = self._own
        if self._parse is None:
            return None
        return ToolCallSplitter(
            own.start,
            own.end,
            self._parse,
            self._calls_max,
            own.reader,
            whole_calls=lambda body: self._loose.read(body, final=False).calls,
            forced=self._forced,
        )

    def in_thought(self) -> ThoughtCalls | None:
        """Returns what finds a call in an answer's reasoning; None if the model family has no markers before its
        calls."""
        starts = self._own_marks.starts
        return ThoughtCalls(self._loose, starts) if starts else None

    def _parser(self, own: Parse) -> Parse:
        """Returns a parser of the text between the model's markers: the model's own, with the lenient one if that reads
        more."""
        declared = self._declared

        def parse(body: str) -> Calls:
            try:
                found = own(body)
            except ValueError:
                found = []
            reading = self._loose.read(body, final=True)
            calls = reading.calls if reading.state is State.WHOLE else []
            if calls and (not self._sound(found) or _size(calls) > _size(found)):
                return calls
            # Some parsers turn any text into a call.
            if not found or any(name not in declared and given.startswith('{"raw": ') for name, given in found):
                raise ValueError("no call")
            return found

        return parse

    def _sound(self, calls: Calls) -> bool:
        """Returns whether all calls are of declared tools, with arguments that fit these tools."""
        declared = self._declared
        return bool(calls) and all(name in declared and declared.call(name, given) is not None for name, given in calls)


def _size(calls: Calls) -> tuple[int, int]:
    return len(calls), sum(arguments.count('": ') for _, arguments in calls)
