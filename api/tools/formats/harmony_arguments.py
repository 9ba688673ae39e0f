"""The arguments of a call in OpenAI's Harmony format, read while they are written. Computation only."""

from __future__ import annotations

import json
from typing import Any

from ..lenient.declared import DeclaredTools
from ..lenient.values import LooseValue

_NAMING, _GIVING = ("name", "tool_name"), ("arguments", "parameters")


class HarmonyArguments:
    """Takes a message to a tool piece by piece, and returns its arguments as JSON. Models may repeat the call's name
    there, with the arguments beside it. A message that is not an object stays as it is.

    Args:
        name: the tool's name.

    Attributes:
        whole: the arguments as JSON text, once they have ended.
    """

    def __init__(self, declared: DeclaredTools, name: str) -> None:
        self._declared = declared
        self._name = name
        self._text = ""
        self._value = LooseValue(words=True)
        self._streams: bool | None = None
        self._said = ""
        self.whole = "{}"

    def add(self, text: str) -> str:
        """Returns the further part of the arguments that is known now."""
        self._text += text
        if self._streams is None and self._text.strip() and not self._text.lstrip().startswith("{"):
            self._streams = True
        if self._text.lstrip().startswith("{"):
            if not (self._value.over or self._value.failed):
                self._value.add(text)
            if self._streams is None and self._value.keys:
                # An object that begins with such a key may be the whole call.
                first, own = self._value.keys[0][1], self._declared.properties(self._name)
                self._streams = first not in (*_NAMING, *_GIVING) or first in own
            return self._tell(self._value.fresh()) if self._streams else ""
        return self._tell(text) if self._streams else ""

    def end(self, *, cut: bool) -> str:
        """Returns the rest of the arguments.

        Args:
            cut: whether the message has no end because the answer was cut. Then the arguments have no end either.
        """
        if self._streams:
            if self._text.lstrip().startswith("{"):
                rest = self._rest(cut=cut)
                self._tell(rest)
                self.whole = _normal(self._said)
                return rest
            self.whole = self._said
            return ""
        rest = self._rest(cut=cut)
        none = {} if not cut else None
        given = _inner(self._value.written + rest, self._declared, self._name) if self._text.strip() else none
        self.whole = self._value.written + rest if given is None else json.dumps(given, ensure_ascii=False)
        return self._tell(self.whole)

    def _rest(self, *, cut: bool) -> str:
        """Returns the closing brackets of an object, if only they are missing."""
        return "" if cut or self._value.failed else self._value.rest or ""

    def _tell(self, said: str) -> str:
        self._said += said
        return said


def _inner(written: str, declared: DeclaredTools, name: str) -> dict[str, Any] | None:
    """Returns the arguments. If the object is a whole call, these are the call's; else the object itself; None if the
    text is not an object."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    names, given = [key for key in _NAMING if key in value], [key for key in _GIVING if key in value]
    if len(given) != 1 or not value.keys() <= {*names, *given}:
        return value
    if any(not isinstance(value[key], str) or declared.name(value[key]) != name for key in names):
        return value
    inner = declared.arguments(name, value[given[0]])
    return value if inner is None else inner


def _normal(written: str) -> str:
    try:
        return json.dumps(json.loads(written), ensure_ascii=False)
    except (ValueError, RecursionError):
        return written
