"""How a model writes tool calls, read from what its chat template makes of two calls.

mlx-lm's parsers read calls; nothing in it writes them. A template does, for the calls of earlier turns, in the form
that the model was trained on. Two calls with known names and arguments tell what stands before, between and after
these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ...cluster.errors import InvalidRequest
from ..text.templates.bare_template import BareTemplate
from ..text.templates.template import Template
from ..text.tokenizer import Tokenizer
from .call_splitter import ToolCallSplitter, call_parser
from .formats import harmony
from .formats.call_format import (
    ARGUMENTS,
    NAMES,
    SHOWN_BY_NAME,
    Format,
    json_format,
    keyed_format,
    tagged_format,
)
from .formats.json_calls import find_calls
from .lenient.declared import DeclaredTools
from .lenient.loose_reader import CallBodies
from .pieces import ToolCall
from .shown_calls import IDS, calls_alone, conversation_with_calls, shown_calls

_MARK = re.compile(r"<[|｜]?[/A-Za-z_][^<>\s=\"']{0,40}>|\[/?[A-Z_]{3,20}\]|<\|[^|<>\s]{1,40}\|>|<[a-z_]{1,40}\|>")
_NO_MARK = ("arg_key", "arg_value", "parameter", "escape", "function=", '"')


class CallFormat:
    """How one model writes tool calls, as far as its template or mlx-lm's parser for it tells.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.

    Attributes:
        known: whether anything is known of it.
        start, end: the markers around calls, "" for none.
        parser: reads what stands between them; None if nothing is known.
        from_template: the format, if only the template tells it.
        shown: what the template writes for two calls, or for one; "" if it shows none.
        by_name: whether the template writes a call as an object whose only key is the name.
        is_harmony: whether the model answers in OpenAI's Harmony format.
    """

    def __init__(self, wrapper: Any, template: BareTemplate) -> None:
        self.parser: Callable[[str, Any], Any] | None = wrapper.tool_parser
        self.start: str = wrapper.tool_call_start or ""
        self.end: str = wrapper.tool_call_end or ""
        self.is_harmony = template.is_harmony
        self.known = bool(wrapper.has_tool_calling and self.parser)
        if self.is_harmony:
            self.known = harmony.has_calls(template.source())
        self.from_template: Format | None = None
        if not self.known and (calls := find_calls(template, self.end)) is not None:
            self.known, self.from_template = True, calls.format
            self.start, self.parser = calls.start, calls.parse
        self.shown = next((written for count in (2, 1) for written, _ in shown_calls(template, self.end, count)), "")
        self.by_name = SHOWN_BY_NAME in self.shown

    def read(self, tokenizer: Tokenizer, template: Template) -> Format | None:
        """Returns how the model writes calls; None if its template does not tell, or its parser would not read them
        so. Takes milliseconds."""
        if not self.known or self.parser is None:
            return None
        if self.from_template is not None:
            return self.from_template
        for ids in IDS:
            try:
                rendered = conversation_with_calls(template, ids)
            except InvalidRequest:
                continue
            begin = rendered.rfind(self.start, 0, rendered.find(NAMES[0]))
            if begin < 0:
                continue
            written = calls_alone(rendered[begin:], self.end, template.bare.turn_ends)
            if (keyed := keyed_format(written)) is not None:
                return keyed
            if not self._is_read(self.parser, tokenizer, written):
                continue
            found = json_format(written, ids) or tagged_format(written)
            if found is not None:
                return found
        return None

    def _is_read(self, parser: Callable[[str, Any], Any], tokenizer: Tokenizer, written: str) -> bool:
        """Whether the model's parser finds both calls in it, or they are found as in other forms than it reads."""
        splitter = ToolCallSplitter(self.start, self.end, call_parser(parser, []))
        pieces = [*splitter.add(written), *splitter.flush()]
        calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]
        expected = list(zip(NAMES, ARGUMENTS, strict=True))
        if calls == expected:
            return True
        declared = DeclaredTools({"function": {"name": name}} for name in NAMES)
        reading = CallBodies(declared, marks_in(tokenizer, written)).read(written, final=True)
        return [(name, json.loads(arguments)) for name, arguments in reading.calls] == expected


def marks_in(tokenizer: Tokenizer, written: str) -> tuple[str, ...]:
    """Returns the marks around calls that are `written`: special tokens, tags, words in brackets."""
    hidden = tokenizer.hidden_tokens - tokenizer.end_tokens
    special = [tokenizer.decode([token]) for token in tokenizer.encode(written) if token in hidden] if written else []
    found = dict.fromkeys(mark.strip() for mark in (*special, *_MARK.findall(written)))
    return tuple(mark for mark in found if mark and not any(part in mark for part in _NO_MARK))
