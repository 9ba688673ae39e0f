"""The tools that may be called: matches names as models write them, and checks arguments against schemas. Computation
only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .schemas import fits, named
from .values import loads

_PREFIXES = ("functions.", "functions_", "tools.", "default_api.", "default_api:")
_INDEXED = re.compile(r"(?:functions)?[._]?(?P<name>.+?)(?::\d+|(?<=\D)\d+)", re.DOTALL)
_NAMESPACE = re.compile(r"(?:[A-Za-z_][\w-]*(?:\.|::?|/))+(?P<name>[\w-]+)", re.ASCII)
_JSON_SUFFIX = "json"
_NAMES_TRIED_CHARACTERS = 256


class DeclaredTools:
    """Tools that an answer may call.

    Args:
        tools: as chat templates take them.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            parameters = tool["function"].get("parameters")
            self._schemas[tool["function"]["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def name(self, written: str, *, with_json: bool = False) -> str | None:
        """Returns the declared name that the model means by a written one; None if there is none.

        Args:
            with_json: whether `json` may follow the name, as in Harmony's headers.
        """
        written = written.strip()
        if written in self._schemas:
            return written
        if len(written) > _NAMES_TRIED_CHARACTERS:
            return None
        tried = [written.removeprefix(prefix) for prefix in _PREFIXES if written.startswith(prefix)]
        if (found := _NAMESPACE.fullmatch(written)) is not None:
            tried.append(found["name"])
        if written.startswith("functions") or ":" in written:
            tried.append(written.removeprefix("functions"))
            for each in (written, *tried):
                if (found := _INDEXED.fullmatch(each)) is not None:
                    tried.append(found["name"])
        if with_json and written.endswith(_JSON_SUFFIX):
            shorter = self.name(written.removesuffix(_JSON_SUFFIX))
            tried += [shorter] if shorter else []
        return next((each for each in tried if each in self._schemas), None)

    def begins(self, written: str) -> bool:
        """Returns whether a declared name may begin in this way, if more follows."""
        return any(name.startswith(written) for name in self._schemas) or any(
            prefix.startswith(written) or written.startswith(prefix) for prefix in _PREFIXES
        )

    def properties(self, name: str) -> Mapping[str, Any]:
        """Returns the schemas of a tool's arguments, by their keys."""
        found = self._schemas.get(name, {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def typed(self, name: str, key: str, text: str) -> Any:
        """Returns the value of an argument that was written as bare text."""
        root = self._schemas.get(name, {})
        schema = self.properties(name).get(key)
        if isinstance(schema, Mapping) and "type" in named(schema, root):
            return text if fits(text, schema, root) else _converted(text, schema, root)
        try:
            value = loads(text)
        except ValueError:
            return text
        return value if isinstance(value, dict | list) else text

    def arguments(self, name: str, given: Any) -> dict[str, Any] | None:
        """Returns a call's arguments, repaired; None if they do not fit the tool's schema."""
        schema = self._schemas[name]
        if isinstance(given, str) and given.strip():
            try:
                given = loads(given.strip())
            except ValueError:
                return None
        if given is None or given == "":
            given = {}
        if not isinstance(given, dict):
            return None
        required = schema.get("required")
        if isinstance(required, Sequence) and not set(map(str, required)) <= given.keys():
            return None
        properties = self.properties(name)
        repaired: dict[str, Any] = {}
        for key, value in given.items():
            of_key = properties.get(key)
            if isinstance(of_key, Mapping) and not fits(value, of_key, schema):
                value = _converted(value, of_key, schema) if isinstance(value, str) else value
                if not fits(value, of_key, schema):
                    return None
            repaired[key] = value
        return repaired

    def call(self, written: str, given: Any) -> tuple[str, str] | None:
        """Returns a call's name and its arguments as JSON; None if it is not a valid call of a declared tool."""
        name = self.name(written)
        arguments = None if name is None else self.arguments(name, given)
        if name is None or arguments is None:
            return None
        try:
            return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            return None


def _converted(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Converts text to the type that a schema wants; returns the text itself if that is not possible."""
    try:
        said = loads(text.strip())
    except ValueError:
        return text
    return said if fits(said, schema, root) else text
