"""Protects against web pages: a browser sends the requests of any page that its user opens, also to this machine.

A page of another origin is refused by its `Origin` or `Sec-Fetch-Site`. A page whose host name was made to point here
(DNS rebinding) is refused by its `Host`. A browser's bodies must be declared as JSON, which a page cannot send without
a CORS preflight. If no header shows that a browser sent it, JSON may have any content type or none: `curl -d` declares
a form, and libraries that send bytes declare those. A form with a file is accepted from programs where one is expected;
there a page whose origin is allowed may send one too.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...cluster.config.config import Endpoint
from ...cluster.errors import NotAllowed, SatchelError, UnsupportedMediaType
from .error_shapes import error_response

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.ASCII)
_JSON = re.compile(r"application/([a-z0-9.-]+\+)?json *(;.*)?", re.ASCII)
_OF_BROWSERS = ("origin", "sec-fetch-site", "referer", "cookie")
"""Not Sec-Fetch-Mode: a browser sends it together with Sec-Fetch-Site (Fetch Metadata, W3C), Node's `fetch` alone."""
_OTHER_SITES = ("cross-site", "same-site")
_SATCHEL = re.compile(r"/satchel/?$")
FORMS = (
    "/v1/files",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/v1/images/variations",
)
"""The paths that take a form with files."""
_FORM = "multipart/form-data"
_METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE")


class Hosts:
    """The names and addresses that the endpoint answers to.

    These are `endpoint.hosts` and the address on which it listens. If that is a loopback address, `localhost` and every
    loopback address are included. If it listens on all addresses, the machine's name and every IP address are included:
    a page's host name is never an IP address.

    Args:
        certified: returns the names of the endpoint's certificate, which may be replaced.
    """

    def __init__(self, endpoint: Endpoint, certified: Callable[[], Sequence[str]] = tuple) -> None:
        self._certified = certified
        self._names = {host.lower().rstrip(".") for host in endpoint.hosts}
        listen = endpoint.listen.lower()
        self._address = _address(listen)
        if self._address is None:
            self._names.add(listen.rstrip("."))
        if self._address is None or not self._address.is_loopback:
            own = socket.gethostname().lower().removesuffix(".local")
            self._names |= {own, f"{own}.local"}
        if listen == "localhost" or (self._address is not None and (self._is_any or self._address.is_loopback)):
            self._names.add("localhost")

    @property
    def _is_any(self) -> bool:
        return self._address is not None and self._address.is_unspecified

    def __contains__(self, host: str) -> bool:
        """Returns whether `host`, without a port, is one of them."""
        address = _address(host)
        if host in self._names or host in self._certified():
            return True
        if address is None:
            return False
        if self._address is None:
            return address.is_loopback and "localhost" in self._names
        return self._is_any or address == self._address or (address.is_loopback and self._address.is_loopback)


class BrowserGuard:
    """Middleware: refuses requests of pages of other origins, requests to other hosts, and browsers' bodies that are
    not JSON, except the bytes of satchels and uploaded files.

    Args:
        origins: other origins whose pages may use the endpoint, as `http://localhost:3000`, lowercase; `*` for all.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts, origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope, Headers(scope=scope))) is not None:
            await error_response(scope, refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> SatchelError | None:
        method = scope["method"]
        # HTTP/1.0 has no Host header, and browsers do not use it.
        for host in (given := headers.getlist("host")):
            authority = _AUTHORITY.fullmatch(host.lower())
            if authority is None or authority[1].rstrip(".") not in self._hosts:
                return NotAllowed(f"this endpoint does not answer to the host {host[:200]!r} (endpoint.hosts)")
        for origin in headers.getlist("origin"):
            if not self._may(origin.lower(), given):
                return NotAllowed(f"pages of {origin[:200]!r} may not use this endpoint (endpoint.origins)")
        if (
            "origin" not in headers
            and headers.get("sec-fetch-site") in _OTHER_SITES
            and not (method == "GET" and headers.get("sec-fetch-mode") == "navigate")
        ):
            return NotAllowed("pages of other sites may not use this endpoint (endpoint.origins)")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").lower()
        browsed = any(name in headers for name in _OF_BROWSERS)
        # Satchels are plain bytes, for which a browser sends a preflight; unknown methods have no route.
        if (kind == "application/octet-stream" and _SATCHEL.search(scope["path"])) or method not in _METHODS:
            return None
        is_form, takes_form = kind.startswith(_FORM), scope["path"] in FORMS
        if is_form and takes_form and ("origin" in headers or not browsed):
            # The origin was checked above.
            return None
        # Old browsers send forms without any of these headers, but no page can change how they call themselves.
        by_page = browsed or headers.get("user-agent", "").startswith("Mozilla/")
        if has_body and not _JSON.fullmatch(kind) and (by_page or is_form or (kind and takes_form)):
            wanted = _FORM if takes_form and not is_form else "application/json"
            return UnsupportedMediaType(f"the body's Content-Type must be {wanted}")
        return None

    def _may(self, origin: str, hosts: Sequence[str]) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            port = parts.port
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not parts.netloc:
            return False
        port = port or (443 if parts.scheme == "https" else 80)
        return any(_authority(host.lower(), port) == (parts.hostname, port) for host in hosts)


def _authority(host: str, default_port: int) -> tuple[str, int] | None:
    """Returns the name and port of a Host header; without a port, the default of the scheme."""
    found = _AUTHORITY.fullmatch(host)
    return (found[1].strip("[]"), int(found[2] or default_port)) if found else None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
