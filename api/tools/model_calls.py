"""How a model writes tool calls, recognised by its chat template's text for two calls.

mlx-lm has parsers that read calls, but nothing that writes them. A template writes the calls of earlier turns, in the
format that the model was trained on. If two calls have known names and arguments, the text shows what comes before,
between and after these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...cluster.errors import InvalidRequest
from .answer_pieces import ToolCall
from .call_splitter import ToolCallSplitter, call_parser
from .formats.call_format import ARGUMENTS, NAMES, CallFormat, CallMarks, Parser
from .formats.harmony_calls import HarmonyCalls
from .formats.harmony_splitter import HarmonySplitter
from .formats.json_calls import JsonCalls
from .formats.keyed_calls import KeyedCalls
from .formats.tagged_calls import TaggedCalls
from .formats.untold_calls import UntoldCalls
from .lenient.declared import DeclaredTools
from .lenient.loose_reader import LooseReader
from .model_text import ChatTemplate, Encoder, Render
from .shown_calls import IDS, calls_alone, conversation_with_calls, shown_calls

FORMATS: tuple[type[CallFormat], ...] = (KeyedCalls, JsonCalls, TaggedCalls)
"""The formats that can be recognised, in the order in which they are tried."""

_SHOWN_BY_NAME = f'{{"{NAMES[0]}": {{'
_MARK = re.compile(r"<[|｜]?[/A-Za-z_][^<>\s=\"']{0,40}>|\[/?[A-Z_]{3,20}\]|<\|[^|<>\s]{1,40}\|>|<[a-z_]{1,40}\|>")
_NO_MARK = ("arg_key", "arg_value", "parameter", "escape", "function=", '"')


class ModelCalls:
    """How one model writes tool calls, as far as its template or mlx-lm's parser for it shows.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.

    Attributes:
        known: whether anything is known about that.
        marks: how calls are told apart from text; without a parser if nothing is known.
        from_template: the format, if only the template shows it.
        shown: the template's text for two calls, or for one; "" if it shows none.
        by_name: whether the template writes a call as an object whose only key is the name.
    """

    def __init__(self, wrapper: Any, template: ChatTemplate) -> None:
        self._turn_ends = template.turn_ends
        self.marks = CallMarks.of(wrapper)
        self.known = bool(wrapper.has_tool_calling and self.marks.parser)
        if template.is_harmony:
            self.known = all(word in template.source() for word in ("tools", "functions."))
        self.from_template: CallFormat | None = None
        if not self.known and (found := self._in_template(template)) is not None:
            self.known = True
            self.from_template, self.marks = found
        if template.is_harmony:
            self.from_template = HarmonyCalls()
        shown = (written for count in (2, 1) for written, _ in shown_calls(template, self.marks.end, count))
        self.shown = next(shown, "")
        self.by_name = _SHOWN_BY_NAME in self.shown

    def _in_template(self, template: ChatTemplate) -> tuple[CallFormat, CallMarks] | None:
        """Returns the format in the template if mlx-lm has no parser for it, and how its calls are found; None if the
        template shows no calls that can be told apart from text. Takes milliseconds."""
        for count in (2, 1):
            for written, ids in shown_calls(template, self.marks.end, count):
                for known in _formats_of(written, ids):
                    if (marks := known.found_alone(written, self.marks.end)) is not None:
                        return known, marks
        return None

    def read(self, tokenizer: Encoder, render: Render) -> CallFormat:
        """Returns the format in which the model writes calls. Takes milliseconds."""
        if self.from_template is not None:
            return self.from_template
        parser = self.marks.parser
        if not self.known or parser is None:
            return UntoldCalls.read(self.shown, ())
        for ids in IDS:
            try:
                rendered = conversation_with_calls(render, ids)
            except InvalidRequest:
                continue
            begin = rendered.rfind(self.marks.start, 0, rendered.find(NAMES[0]))
            if begin < 0:
                continue
            written = calls_alone(rendered[begin:], self.marks.end, self._turn_ends)
            known = next(_formats_of(written, ids), None)
            if known is not None and (known.parses or self._is_read(parser, tokenizer, written)):
                return known
        return UntoldCalls.read(self.shown, ())

    def _is_read(self, parser: Parser, tokenizer: Encoder, written: str) -> bool:
        """Returns whether the model's parser finds both calls, or they are found without it."""
        splitter = ToolCallSplitter(self.marks.start, self.marks.end, call_parser(parser, []))
        pieces = [*splitter.add(written), *splitter.flush()]
        calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]
        expected = list(zip(NAMES, ARGUMENTS, strict=True))
        if calls == expected:
            return True
        declared = DeclaredTools({"function": {"name": name}} for name in NAMES)
        reading = LooseReader(declared, marks_in(tokenizer, written)).read(written, final=True)
        return [(name, json.loads(arguments)) for name, arguments in reading.calls] == expected

    def channels(
        self, tools: Sequence[Mapping[str, Any]], *, answering: bool = False, calls_max: int | None = None
    ) -> HarmonySplitter | None:
        """As `CallFormat.channels`, for the model's format."""
        known = self.from_template
        return None if known is None else known.channels(tools, answering=answering, calls_max=calls_max)


def _formats_of(written: str, ids: Sequence[str]) -> Iterator[CallFormat]:
    """Yields the formats in which the known calls may be `written`."""
    for kind in FORMATS:
        if (known := kind.read(written, ids)) is not None:
            yield known


def marks_in(tokenizer: Encoder, written: str) -> tuple[str, ...]:
    """Returns the markers in a text with calls: special tokens, tags, words in brackets."""
    hidden = tokenizer.hidden_tokens - tokenizer.end_tokens
    special = [tokenizer.decode([token]) for token in tokenizer.encode(written) if token in hidden] if written else []
    found = dict.fromkeys(mark.strip() for mark in (*special, *_MARK.findall(written)))
    return tuple(mark for mark in found if mark and not any(part in mark for part in _NO_MARK))
