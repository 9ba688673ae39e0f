"""How a model's calls are found in its answers: in its own form, and in those that models write beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from ..text.tokenizer import Tokenizer
from .call_splitter import Parse, ToolCallSplitter, call_parser, first_of
from .call_stage import CallLimit, CallStage
from .formats.call_format import ID, Format, KeyedFormat, TaggedFormat
from .formats.harmony_splitter import HarmonySplitter
from .formats.json_calls import IN_JSON
from .formats.json_reader import reader_of
from .formats.keyed_reader import keyed_parser
from .formats.tagged_reader import tagged_reader_of
from .lenient.declared import DeclaredTools
from .lenient.loose_reader import CallBodies, State
from .lenient.reading import Calls
from .lenient.stage import LenientCalls, OwnMarks
from .lenient.thought_calls import ThoughtCalls
from .model_calls import CallFormat, marks_in
from .readers import Reader


def family_marks(calls: CallFormat, tokenizer: Tokenizer, known: Format | None) -> tuple[str, ...]:
    """Returns what a model's template puts around its calls, but for what is between their parts."""
    parts = [part for part in astuple(known) if isinstance(part, str)] if known is not None else []
    written = "\n".join(parts).replace(ID, "") or calls.shown
    own = [calls.start.strip(), calls.end.strip()]
    marks = dict.fromkeys(mark for mark in (*own, *marks_in(tokenizer, written)) if mark)
    return tuple(mark for mark in marks if not mark.startswith(("{", "[{", "<function", "<invoke")) and mark != "[")


class CallFinder:
    """Finds the calls of one request's answers.

    Args:
        tools: those that the model is told of, as chat templates take them.
        calls: how the model writes calls, and `known` what `calls.read` says of that.
        forced: whether an answer must call a tool.
        calls_max: after so many calls an answer is over; None for no limit.
    """

    def __init__(
        self,
        calls: CallFormat,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        known: Format | None,
        *,
        forced: bool = False,
        calls_max: int | None = None,
    ) -> None:
        self._tools = [dict(tool) for tool in tools]
        self._declared = DeclaredTools(tools)
        self._forced = forced
        self._calls_max = calls_max
        if known is None and not calls.is_harmony:
            known = calls.from_template
        marks = () if calls.is_harmony else family_marks(calls, tokenizer, known)
        quote = known.quote if isinstance(known, KeyedFormat) else ""
        self._bodies = CallBodies(self._declared, marks, calls.by_name, quote)
        in_json = known is None and forced and not calls.is_harmony
        reader, parse = (None, None) if in_json else self._own(calls, known)
        start, end = ("", "") if calls.is_harmony else (calls.start, calls.end)
        self._make_own: Callable[[], ToolCallSplitter] | None = None
        if parse is not None and (end or reader is not None):
            self._make_own = lambda: ToolCallSplitter(
                start, end, parse, calls_max, reader, whole_calls=self._whole, forced=forced
            )
        bare = start if start.startswith(("{", "[")) and start not in marks else IN_JSON.start if in_json else ""
        hidden = tuple(mark for mark in marks if mark not in (start, end))
        certain = self._make_own is None and bool(start)
        starts = tuple(mark for mark in marks if "/" not in mark and mark != end)
        self._own_marks = OwnMarks(starts, bare, certain, hidden)

    def stage(self, harmony: HarmonySplitter | None = None) -> CallStage:
        """Returns the stage of one answer, in which `harmony` finds what is in that format."""
        limit = CallLimit(forced=self._forced, calls_max=self._calls_max)
        lenient = LenientCalls(self._bodies, self._own_marks, forced=self._forced, enough=limit.ended_by)
        own = harmony if harmony is not None or self._make_own is None else self._make_own()
        return CallStage(own, lenient, limit)

    def in_thought(self) -> ThoughtCalls | None:
        """Returns what finds a call in one answer's thought; None if the family has no marks before its calls."""
        starts = self._own_marks.starts
        return ThoughtCalls(self._bodies, starts) if starts else None

    def _own(self, calls: CallFormat, known: Format | None) -> tuple[Callable[[], Reader] | None, Parse | None]:
        """Returns what reads the model's own form while it is written, and as a whole."""
        if calls.parser is None or calls.is_harmony:
            return None, None
        start, end, parser = calls.start, calls.end, calls.parser
        if isinstance(known, KeyedFormat):
            parser = first_of(keyed_parser(known, start), parser)
        parse = self._parser(call_parser(parser, self._tools))
        # Calls are read while they are written, or as a whole.
        if isinstance(known, TaggedFormat):
            return tagged_reader_of(known, start, end, parser, self._tools), parse
        return reader_of(known, start, end, frozenset(self._declared)), parse

    def _parser(self, own: Parse) -> Parse:
        """Returns a parser of the text between the model's markers: its own, unless more can be read otherwise."""
        declared = self._declared

        def parse(body: str) -> Calls:
            try:
                found = own(body)
            except ValueError:
                found = []
            reading = self._bodies.read(body, final=True)
            calls = reading.calls if reading.state is State.WHOLE else []
            if calls and (not self._sound(found) or _size(calls) > _size(found)):
                return calls
            # Some parsers make a call of any text.
            if not found or any(name not in declared and given.startswith('{"raw": ') for name, given in found):
                raise ValueError("no call")
            return found

        return parse

    def _whole(self, body: str) -> Calls:
        return self._bodies.read(body, final=False).calls

    def _sound(self, calls: Calls) -> bool:
        """Whether all calls are of declared tools, with arguments that these take."""
        declared = self._declared
        return bool(calls) and all(name in declared and declared.call(name, given) is not None for name, given in calls)


def _size(calls: Calls) -> tuple[int, int]:
    return len(calls), sum(arguments.count('": ') for _, arguments in calls)
