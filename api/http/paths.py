"""Normalizes the paths that clients send: with `/v1`, without it or with it twice, and with extra slashes. So a
client's base URL may end with `/v1` or a slash, whatever the client appends to it.

A path is normalized before anything else reads it, so that keys, error shapes, metrics and routes see one form. There
is no redirect, because some clients do not repeat a POST's body after one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_VERSION = "v1"


class Paths:
    """Middleware: replaces every request's path by the path of its route.

    Args:
        heads: the first parts of the routes below `/v1`, such as `chat`.
    """

    def __init__(self, app: ASGIApp, heads: Iterable[str]) -> None:
        self._app = app
        self._heads = frozenset(heads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": self._canonical(scope["path"])}
        await self._app(scope, receive, send)

    def _canonical(self, path: str) -> str:
        parts = path.strip("/").split("/")
        rest = list(dropwhile(lambda part: part in ("", _VERSION), parts))
        versioned = _VERSION in parts[: len(parts) - len(rest)]
        if versioned or (rest and rest[0] in self._heads):
            rest = [_VERSION, *rest]
        return f"/{'/'.join(rest)}"


def heads_of(routes: Iterable[BaseRoute]) -> frozenset[str]:
    """Returns the first parts of the routes below `/v1`."""
    paths = (route.path for route in routes if isinstance(route, Route))
    parts = (path.split("/") for path in paths)
    return frozenset(part[2] for part in parts if len(part) > 2 and part[1] == _VERSION)
