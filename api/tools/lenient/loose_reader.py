"""Reads tool calls from text that has nothing else, in any of the forms that models write. Computation only.

::

    {"name": "f", "arguments": {"key": "value"}}      one or several, in a list, behind tags, in OpenAI's wrapper
    <function=f> <parameter=key> value </parameter> </function>
    f(key="value")                                    one or several, in a list
    f[ARGS]{"key": "value"}                           a name, marks, and the arguments

All readers raise `NoCall` if the text is not a call, whatever follows, and `Unfinished` if it may become one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .blocks import read_block
from .declared import DeclaredTools
from .reading import Calls, NoCall, Unfinished, begins_with
from .values import BRACKETS_MAX, LooseValue

MARKS = (
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<tools>", "</tools>"),
    *("<function_call>", "</function_call>", "<function_calls>", "</function_calls>"),
    *("<functions>", "</functions>", "<tool_code>", "</tool_code>", "<action>", "</action>", "<TOOLCALL>"),
    *("</TOOLCALL>", "<minimax:tool_call>", "</minimax:tool_call>", "</function>", "</parameter>", "</invoke>"),
    *("<|tool_call|>", "<|tool_calls|>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call_start|>", "<|tool_call_end|>"),
)
"""The markers that model families put around calls; any of them may be around any call."""

FENCES = ("", "json", "tool_call", "tool_code", "xml")
"""The language names of fences whose content is a call."""

_PYTHON_FENCES = ("tool_call", "tool_code")
_FENCE = re.compile(r"```([\w+-]*)[ \t]*(?:\n|$|(?=[{\[<]))")
_FENCE_END = re.compile(r"[ \t]*```[ \t]*(?=\n|$)")
_FENCE_CLOSED = re.compile(r"\s*```")
_SEPARATORS = re.compile(r"[\s,;]+")
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.:/-]*", re.ASCII)
_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CALL_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_LISTS = ("functools[", "[")
_BLOCKS = ("<function=", "<function name=", "<invoke name=")
_SPACED_BLOCK = re.compile(r"<[^\s<>/=\"']{1,16}[:|｜](?:function=|function name=|invoke name=)")
_BLOCK_LEAD = re.compile(r"<[^\s<>/=\"']{0,24}(?: n?a?m?e?)?$")
_NAMING = ("name", "tool_name")
_GIVING = ("arguments", "parameters")
_BESIDE = ("type", "id", "tool_call_id")
_RAW_QUOTES = ('"""', "'''")


class State(Enum):
    """What follows the calls that were read."""

    WHOLE = "nothing but white space"
    MORE = "what may become another call"
    OTHER = "something else"


@dataclass(frozen=True)
class Reading:
    """Calls that were read, where they end in the text, and what follows."""

    calls: Calls
    end: int
    state: State


@dataclass(frozen=True)
class LooseReader:
    """Reads calls of declared tools.

    Args:
        declared: the tools.
        marks: the model family's own markers.
        keyed_by_name: whether the model family writes a call as an object whose only key is the name.
        quote: the model family's own quotation mark, which has no escape.
    """

    declared: DeclaredTools
    marks: Sequence[str] = ()
    keyed_by_name: bool = False
    quote: str = ""
    _all: Sequence[str] = field(default=(), init=False)

    def __post_init__(self) -> None:
        marks = dict.fromkeys(mark for mark in (*self.marks, *MARKS) if mark)
        object.__setattr__(self, "_all", sorted(marks, key=len, reverse=True))

    def read(self, text: str, at: int = 0, *, final: bool, bare: bool = True, fenced: bool = False) -> Reading:
        """Reads calls from `at` on, as many as there are.

        Args:
            final: whether the text is complete; else more may come.
            bare: whether a call may be a name and its arguments without a marker before them.
            fenced: whether a fence is already open.
        """
        calls: Calls = []
        end, marked = at, bare
        while True:
            try:
                opened = not fenced
                at, passed, fenced = self._skip(text, at, fenced=fenced, final=final)
                marked = marked or passed
                if at == len(text) and calls and opened and fenced:
                    # The end of a fence that was already open.
                    return Reading(calls, end, State.OTHER if final else State.MORE)
                if at == len(text):
                    return Reading(calls, at if calls else end, State.WHOLE if calls else State.MORE)
                found, at = self._unit(text, at, final=final, marked=marked)
            except Unfinished as unfinished:
                return Reading([*calls, *unfinished.calls], end, State.MORE)
            except NoCall:
                return Reading(calls, end, State.OTHER)
            calls += found
            end = at = self._surplus(text, at)
            # Closing markers belong to the calls, whatever follows.
            with suppress(Unfinished):
                end, _, _ = self._skip(text, at, fenced=fenced, final=True)

    def _skip(self, text: str, at: int, *, fenced: bool, final: bool) -> tuple[int, bool, bool]:
        """Skips white space, separators, markers and fences. Returns where they end, whether there were markers or
        fences, and whether a fence is open there."""
        passed = False
        while at < len(text):
            if (found := _SEPARATORS.match(text, at)) is not None:
                at = found.end()
            elif (mark := self._mark_at(text, at)) != "":
                longer = (more for more in self._all if more.startswith(text[at:]))
                if not final and any(len(mark) < len(text) - at < len(more) for more in longer):
                    raise Unfinished
                at = self._past_id(text, at + len(mark), final=final)
                passed, fenced = True, fenced or "```" in mark
            elif fenced and (found := _FENCE_END.match(text, at)) is not None:
                at, fenced = found.end(), False
            elif not fenced and (found := _FENCE.match(text, at)) is not None and found[1] in FENCES:
                at, fenced, passed = found.end(), True, passed or found[1] in _PYTHON_FENCES
            elif not final and self._may_be_mark(text[at:]):
                raise Unfinished
            else:
                break
        return at, passed, fenced

    def _past_id(self, text: str, at: int, *, final: bool) -> int:
        """Skips a call's id, which is between two markers and is not a tool's name."""
        found = _CALL_ID.match(text, at)
        if found is None or self.declared.name(found[0]) is not None or found[0] == "function":
            return at
        if not final and self._may_be_mark(text[found.end() :]):
            raise Unfinished
        return found.end() if self._mark_at(text, found.end()) else at

    def _may_be_mark(self, text: str) -> bool:
        if text.startswith("```"):
            return any(info.startswith(text[3:]) for info in FENCES)
        return "```".startswith(text) or any(mark.startswith(text) for mark in self._all)

    @staticmethod
    def _surplus(text: str, at: int) -> int:
        """Skips surplus brackets."""
        for _ in range(BRACKETS_MAX):
            place = _SPACE.match(text, at)
            after = at if place is None else place.end()
            if text[after : after + 1] not in ("}", "]"):
                break
            at = after + 1
        return at

    def _unit(self, text: str, at: int, *, final: bool, marked: bool) -> tuple[Calls, int]:
        """Reads one call, or one list of calls."""
        if text[at] == "{":
            return self._object(text, at, final=final)
        for opening in _LISTS:
            if begins_with(text, at, opening, final=final):
                return self._list(text, at + len(opening), final=final)
        for opening in _BLOCKS:
            if begins_with(text, at, opening, final=final):
                return read_block(text, at, self.declared, final=final)
        if not final and _BLOCK_LEAD.match(text, at):
            raise Unfinished
        if _SPACED_BLOCK.match(text, at):
            return read_block(text, at, self.declared, final=final)
        return self._named(text, at, final=final, marked=marked)

    # Objects.

    def _object(self, text: str, at: int, *, final: bool) -> tuple[Calls, int]:
        value = LooseValue()
        end = value.add(text, at)
        self._check_shape(value)
        if value.over:
            whole = value.written
        elif (value.failed and text[end] in "<{[`;") or (final and not value.failed):
            if (rest := value.rest) is None:
                raise NoCall
            whole = value.written + rest
        elif value.failed:
            raise NoCall
        else:
            raise Unfinished
        try:
            return self._calls_of(json.loads(whole)), end
        except (ValueError, RecursionError):
            raise NoCall from None

    def _check_shape(self, value: LooseValue) -> None:
        """Raises `NoCall` if the object has a key or a name that no call has."""
        outer = ""
        for depth, key in value.keys:
            outer = key if depth == 1 else outer
            known = (*_NAMING, *_GIVING, *_BESIDE, "function", "tool_calls")
            named = depth == 1 and self.keyed_by_name and self.declared.name(key) is not None
            inner = depth == 2 and outer == "function"
            if not named and (depth == 1 or inner) and key not in known[: 4 if inner else None]:
                raise NoCall
        for depth, key, said in value.texts:
            if depth == 1 and key in _NAMING and self.declared.name(said) is None:
                raise NoCall

    def _calls_of(self, value: Any) -> Calls:
        """Returns the calls in an object or in a list of objects."""
        if isinstance(value, list):
            return [call for each in value for call in self._calls_of(each)]
        if not isinstance(value, dict):
            raise NoCall
        if isinstance(wrapped := value.get("function"), dict) and value.keys() <= {"function", *_BESIDE}:
            return self._calls_of(wrapped)
        if isinstance(listed := value.get("tool_calls"), list) and len(value) == 1 and listed:
            return self._calls_of(listed)
        names, given = [key for key in _NAMING if key in value], [key for key in _GIVING if key in value]
        if self.keyed_by_name and not names and len(value) == 1:
            ((name, arguments),) = value.items()
            return self._checked(name, arguments)
        if len(names) != 1 or len(given) > 1 or not value.keys() <= {*names, *given, *_BESIDE}:
            raise NoCall
        return self._checked(value[names[0]], value[given[0]] if given else None)

    def _checked(self, name: Any, given: Any) -> Calls:
        call = self.declared.call(name, given) if isinstance(name, str) else None
        if call is None:
            raise NoCall
        return [call]

    # Lists.

    def _list(self, text: str, at: int, *, final: bool) -> tuple[Calls, int]:
        """Reads the elements of a list: objects, or calls as Python writes them."""
        calls: Calls = []
        while True:
            at = _after_space(text, at)
            if at == len(text):
                break
            if text[at] == "]":
                if not calls:
                    raise NoCall
                return calls, at + 1
            if calls:
                if text[at] == "," or text[at] == ";":
                    at = _after_space(text, at + 1)
                    if at == len(text):
                        break
                elif text[at] in "}":
                    at += 1
                    continue
                else:
                    # The list's end is missing.
                    return calls, at
            try:
                found, at = self._element(text, at, final=final)
            except Unfinished:
                raise Unfinished(calls) from None
            calls += found
        if final and calls:
            return calls, at
        raise Unfinished(calls)

    def _element(self, text: str, at: int, *, final: bool) -> tuple[Calls, int]:
        if text[at] == "{":
            return self._object(text, at, final=final)
        return self._named(text, at, final=final, marked=True, called=True)

    # Names and their arguments.

    def _named(self, text: str, at: int, *, final: bool, marked: bool, called: bool = False) -> tuple[Calls, int]:
        """Reads a name and its arguments, written as Python or as JSON.

        Args:
            marked: whether the name may stand alone, because there is a marker before it.
            called: whether its arguments must be in round brackets.
        """
        for lead in ("call:", "function"):
            after = at + len(lead)
            if text.startswith(lead, at) and (lead == "call:" or self._mark_at(text, after)):
                at, marked = after + len(self._mark_at(text, after)), True
                break
            if not final and (
                lead.startswith(text[at:]) or (text.startswith(lead, at) and self._may_be_mark(text[after:]))
            ):
                raise Unfinished
        found = _NAME.match(text, at)
        if found is None:
            raise NoCall if at < len(text) or final else Unfinished
        if found.end() == len(text):
            between = any(text.endswith(mark, 0, at) for mark in self._all)
            if not final and (between or self.declared.begins(found[0].partition(":")[0])):
                raise Unfinished
            raise NoCall
        name = self.declared.name(found[0])
        if name is None:
            raise NoCall
        at, joined, fenced = self._joint(text, found.end(), final=final)
        if not (marked or joined or found[0].startswith("functions")):
            raise NoCall
        if at == len(text):
            raise NoCall if final else Unfinished
        if text[at] == "(":
            return self._pairs(text, at + 1, name, ")", final=final)
        if called:
            raise NoCall
        if begins_with(text, at, "<arg_key", final=final):
            return read_block(text, at, self.declared, final=final, name=name)
        if text[at] != "{":
            raise NoCall
        calls, at = self._json_arguments(text, at, name, final=final)
        if fenced and (end := _FENCE_CLOSED.match(text, at)) is not None:
            at = end.end()
        return calls, at

    def _mark_at(self, text: str, at: int) -> str:
        return next((mark for mark in self._all if text.startswith(mark, at)), "")

    def _joint(self, text: str, at: int, *, final: bool) -> tuple[int, bool, bool]:
        """Skips what may be between a name and its arguments. Returns where that ends, whether there were markers, and
        whether a fence is open there."""
        joined = fenced = False
        while at < len(text):
            at = _after_space(text, at)
            if mark := self._mark_at(text, at):
                at, joined = at + len(mark), True
                # An id is between two markers.
                found = _CALL_ID.match(text, at)
                if found is not None and self._mark_at(text, found.end()):
                    at = found.end()
                elif found is not None and not final and self._may_be_mark(text[found.end() :]):
                    raise Unfinished
            elif (fence := _FENCE.match(text, at)) is not None and fence[1] in FENCES:
                at, joined, fenced = fence.end(), True, True
            elif not final and at < len(text) and text[at] not in "({" and self._may_be_mark(text[at:]):
                raise Unfinished
            else:
                break
        return at, joined, fenced

    def _json_arguments(self, text: str, at: int, name: str, *, final: bool) -> tuple[Calls, int]:
        key = _KEY.match(text, _after_space(text, at + 1))
        if key is not None:
            return self._pairs(text, at + 1, name, "}", final=final)
        value = LooseValue()
        end = value.add(text, at)
        if not value.over and not (final and not value.failed and value.rest is not None):
            raise NoCall if value.failed or final else Unfinished
        return self._checked(name, json.loads(value.written + (value.rest or ""))), end

    def _pairs(self, text: str, at: int, name: str, closing: str, *, final: bool) -> tuple[Calls, int]:
        """Reads keys and values up to `closing`, written as Python's keyword arguments."""
        given: dict[str, Any] = {}
        while True:
            at = _after_space(text, at)
            if at == len(text):
                break
            if text[at] == closing:
                return self._checked(name, given), at + 1
            if given:
                if text[at] != ",":
                    raise NoCall
                at = _after_space(text, at + 1)
                if text[at : at + 1] == closing:
                    continue
            key = _KEY.match(text, at)
            if key is None:
                if at < len(text):
                    raise NoCall
                break
            at = _after_space(text, key.end())
            if at == len(text):
                break
            if text[at] not in "=:" or key[0] in given:
                raise NoCall
            at = _after_space(text, at + 1)
            if at == len(text):
                break
            given[key[0]], at = self._value(text, at)
        raise NoCall if final else Unfinished

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        for quote in (*_RAW_QUOTES, *([self.quote] if len(self.quote) > 1 else ())):
            if text.startswith(quote, at):
                end = text.find(quote, at + len(quote))
                if end < 0:
                    raise Unfinished
                return text[at + len(quote) : end], end + len(quote)
            if quote.startswith(text[at:]):
                raise Unfinished
        value = LooseValue()
        end = value.add(text, at)
        if value.over and not value.failed and end < len(text):
            return json.loads(value.written), end
        if value.failed:
            raise NoCall
        raise Unfinished


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
