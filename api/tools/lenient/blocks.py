"""Reads calls whose arguments are text between tags, as Qwen3-Coder, MiniMax and GLM write them, even if tags are
missing or of another model family. Computation only."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .declared import DeclaredTools
from .reading import Calls, NoCall, Unfinished
from .values import LooseValue

_NAMESPACE = r"(?P<space>[^\s<>/=\"']{0,16}[:|｜])?"
_HEAD = re.compile(rf"<{_NAMESPACE}(?P<tag>function|invoke)(?:=|\s+name=)[\"']?(?P<name>[^<>\"'\s]{{1,256}})[\"']?\s*>")
_HEAD_LEAD = re.compile(rf"<{_NAMESPACE}(?:function|invoke)(?:=|\s+name=)[\"']?(?P<name>[^<>\"'\s]*)[\"']?\s*$")
_KEY = re.compile(
    rf"<{_NAMESPACE}(?P<tag>parameter|param)(?:=|\s+name=)[\"']?(?P<key>[^<>\"']{{1,256}}?)[\"']?"
    r"(?:\s+\w+=[\"']?\w*[\"']?)*\s*>"
)
_ARGUMENT_KEY = re.compile(
    r"<arg_key(?P<after>:\w+)?>(?P<key>[^<>]{1,256})</arg_key(?:\w*:\w+)?>\s*<arg_value(?::\w+)?>"
)
_TAG_LEAD = re.compile(r"<[^<>]{0,400}>?[^<>]{0,256}(?:</?[^<>]{0,40}>?\s*){0,2}$")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class _Tags:
    """The tags of one call: for the arguments' keys, for a value's end, and for the call's end."""

    key: re.Pattern[str]
    end: str
    closing: str
    known: Collection[str]


def read_block(text: str, at: int, declared: DeclaredTools, *, final: bool, name: str = "") -> tuple[Calls, int]:
    """Reads one call from `at` on. It begins with its opening tag, or, if its `name` is given, with the first argument.

    Raises:
        NoCall, Unfinished: there is no call, or not yet.
    """
    if name:
        first = _ARGUMENT_KEY.match(text, at)
        after = "" if first is None else first["after"] or ""
        tags = _Tags(_ARGUMENT_KEY, f"</arg_value{after}>", f"</tool_call{after}>", ())
    else:
        head = _HEAD.match(text, at)
        if head is None:
            lead = _HEAD_LEAD.match(text, at)
            if final or lead is None or not declared.begins(lead["name"]):
                raise NoCall
            raise Unfinished
        found = declared.name(head["name"])
        if found is None:
            raise NoCall
        name, at = found, head.end()
        space = head["space"] or ""
        kind = "param" if f"<{space}param " in text[at:] else "parameter"
        tags = _Tags(_KEY, f"</{space}{kind}>", f"</{space}{head['tag']}>", declared.properties(name).keys())
    given: dict[str, Any] = {}
    while True:
        at = _after_space(text, at)
        if text.startswith(tags.closing, at):
            at += len(tags.closing)
            break
        if (key := tags.key.match(text, at)) is not None:
            written = key["key"].strip()
            if written in given:
                raise NoCall
            value, at = _value(text, key.end(), tags, final=final)
            given[written] = declared.typed(name, written, value)
            continue
        if text[at : at + 1] == "{" and not given:
            given, at = _json(text, at, final=final)
            continue
        if final and at == len(text) and given:
            break
        if not final and tags.closing.startswith(text[at:]):
            raise Unfinished
        if given and _ends_here(text, at, tags):
            break
        if not final and _TAG_LEAD.match(text, at):
            raise Unfinished
        raise NoCall
    call = declared.call(name, given)
    if call is None:
        raise NoCall
    return [call], at


def _ends_here(text: str, at: int, tags: _Tags) -> bool:
    """Returns whether a call without a closing tag ends here: at another call, or at its outer tag."""
    return not tags.closing.startswith("</tool_call") and text.startswith(
        ("</", "<function", "<invoke", "<tool_call"), at
    )


def _json(text: str, at: int, *, final: bool) -> tuple[dict[str, Any], int]:
    """Reads arguments that are an object, or that are in an object."""
    value = LooseValue()
    end = value.add(text, at)
    mended = value.rest if value.over or (final and not value.failed) or (value.failed and text[end] == "<") else None
    if mended is None:
        raise NoCall if value.failed or final else Unfinished
    given = json.loads(value.written + mended)
    if not isinstance(given, dict):
        raise NoCall
    return given, end


def _value(text: str, at: int, tags: _Tags, *, final: bool) -> tuple[str, int]:
    """Returns the text of a value without a line break at each end, and the index behind the value."""
    end = text.find(tags.end, at)
    stop = end if end >= 0 else len(text)
    # If the value's own end is missing, the next argument or the call's end follows.
    inner = _first_end(text, at, stop, tags)
    if inner is not None:
        return _bare(text[at:inner]), inner
    if end < 0:
        if final:
            raise NoCall
        raise Unfinished
    return _bare(text[at:end]), end + len(tags.end)


def _first_end(text: str, at: int, stop: int, tags: _Tags) -> int | None:
    """Returns where a value ends if its closing tag is missing; None if it has one."""
    if stop < len(text):
        between = text[at:stop]
        keys = (found for found in tags.key.finditer(between) if found["key"].strip() in tags.known)
        key = next((found for found in keys if between[: found.start()].endswith("\n")), None)
        closed = _closing_line(between, tags)
        places = [found for found in (None if key is None else key.start(), closed) if found is not None]
        return at + min(places) if places else None
    closed = _closing_line(text[at:], tags)
    return None if closed is None else at + closed


def _closing_line(value: str, tags: _Tags) -> int | None:
    """Returns where a line has the call's closing tag, if the text ends or another call begins behind it."""
    found = re.search(rf"(?<=\n){re.escape(tags.closing)}\s*(?=</|<function|<invoke|<tool_call|$)", value)
    return None if found is None else found.start()


def _bare(value: str) -> str:
    value = value.removeprefix("\n")
    return value.removesuffix("\n")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
