"""Finds places where a marker in an answer does not count: in a code fence, or inside an argument. Computation only."""

from __future__ import annotations

import re

_VALUE_TAGS = re.compile(r"<(?:parameter|param)(?:=|\s+name=)[^<>]*>|</(?:parameter|param)>|<arg_value>|</arg_value>")
_CALL_CLOSED = re.compile(r"</(?:function|invoke)>\s*$")
_RAW_QUOTES = ('<|"|>', "<escape>", '"""', "'''")
_BEFORE_STRING = "{[,:(="


class FenceLines:
    """Counts the lines that open and close code fences, in text that arrives in pieces."""

    def __init__(self) -> None:
        self._open = False
        self._line = ""
        self._counted = False

    def add(self, text: str) -> None:
        self._open, self._line, self._counted = self._after(text)

    def open_after(self, text: str) -> bool:
        """Returns whether a fence is open after this further text."""
        return self._after(text)[0]

    def _after(self, text: str) -> tuple[bool, str, bool]:
        opened, line, counted = self._open, self._line, self._counted
        for index, part in enumerate(text.split("\n")):
            if index:
                line, counted = "", False
            # The beginning of a line is enough to recognise a fence.
            line = (line + part).lstrip(" \t")[:3]
            if line == "```" and not counted:
                opened, counted = not opened, True
        return opened, line, counted


def inside_value(body: str) -> bool:
    """Returns whether the text of a call ends inside a string, or in an argument between tags, so that an end marker
    does not end the call."""
    if tags := _VALUE_TAGS.findall(body):
        return not tags[-1].startswith("</") and _CALL_CLOSED.search(body) is None
    quote, escaped, before, at = "", False, "", 0
    while at < len(body):
        if not quote:
            quote = next((each for each in _RAW_QUOTES if body.startswith(each, at)), "")
            if not quote and (body[at] == '"' or (body[at] == "'" and before in _BEFORE_STRING)):
                quote = body[at]
            before = before if body[at].isspace() else body[at]
            at += len(quote) or 1
        elif len(quote) == 1 and not escaped and body[at] == "\\":
            escaped, at = True, at + 1
        elif not escaped and body.startswith(quote, at):
            at, quote, before = at + len(quote), "", quote[-1:]
        else:
            escaped, at = False, at + 1
    return bool(quote)
