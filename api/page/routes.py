"""The routes of the page: files, the same for everybody. What they show they ask of the API, with the reader's key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse, Response

from ..http.adding import add_route
from ..http.guard import DOCS, GREETING, PAGE

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}

_HEADERS = {
    # Scripts and styles are files of this server only; pictures of a chat are in the page's memory.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks again each time, and usually hears that nothing has changed.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    tag: str


class PageRoutes:
    """Handlers for the page's files, read once."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        static = Path(__file__).parent / "static"
        for folder in (static, static / "vendor"):
            for file in folder.iterdir():
                if (kind := _KINDS.get(file.name.rpartition(".")[2])) is not None:
                    content = file.read_bytes()
                    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                    self._files[file.name] = _File(content, kind, tag)

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "GET", GREETING, self.greet, shown=False)
        add_route(app, "GET", DOCS, self.docs, shown=False)
        add_route(app, "GET", f"{PAGE}{{name}}", self.file, shown=False)

    async def greet(self, request: Request) -> Response:
        """Sends browsers the page. Tells programs that the server runs: Claude Code and those for Ollama check this."""
        if "text/html" in request.headers.get("accept", ""):
            return self._sent(request, "index.html", {"Vary": "Accept"})
        return PlainTextResponse("Satchel is running", headers={"Vary": "Accept"})

    async def docs(self, request: Request) -> Response:
        """Sends the page that shows the API's description (`/openapi.json`)."""
        return self._sent(request, "docs.html")

    async def file(self, request: Request, name: str) -> Response:
        """Sends one file of the page."""
        return self._sent(request, name)

    def _sent(self, request: Request, name: str, headers: dict[str, str] | None = None) -> Response:
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404)
        sent = {**_HEADERS, **(headers or {}), "ETag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=sent)
        return Response(found.content, headers=sent, media_type=found.kind)
