"""Paths as clients write them: with `/v1`, without or with one too many, with slashes before it and at the end. So a
client's base URL may have `/v1` or a slash at its end, whatever the client puts behind it.

A path is put right before anything else looks at it, so that keys, error shapes, metrics and routes see one form. A
redirect would lose the body of clients that do not follow one with a POST.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_VERSION = "v1"


class Paths:
    """Middleware: gives every request the path under which its route is known.

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
