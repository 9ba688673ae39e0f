"""Authenticates callers. Every request except `/health` and those for the page's files needs a key, if keys were made
or other machines can reach the endpoint. Pure ASGI."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.audit import Audit
from ...cluster.errors import InvalidRequest, KeyRefused, NotAllowed, RateLimited, SatchelError, Unavailable, quoted
from ...cluster.keys import KEY_BEGINS, NAME, OWNER, Key, KeyLimits, KeyRing
from ..requests.callers import Caller, Meter
from .error_shapes import error_response

CHECKS_MAX = 32
"""The most unknown keys that may wait for their check at a time, each with any number of requests; known keys do not
wait."""

HEALTH = "/health"
GREETING = "/"
DOCS = "/docs"
PAGE = "/page/"
"""These paths, and those that begin with `PAGE`, answer without a key: files that are the same on every server."""

EVERY = "*"
"""The value of `?tenant=` for all tenants."""

_SECRET_MAX = 256


class KeyGuard:
    """Middleware: puts a `Caller` into the request's state as `caller`, or refuses the request.

    Args:
        keys: None allows everybody.
        audit: records refused keys.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None, audit: Audit | None = None) -> None:
        self._app = app
        self._keys = keys
        self._audit = audit
        self._meters: dict[str, Meter] = {}
        self._checks: dict[str, asyncio.Task[Key | None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        host = client[0] if client else ""
        try:
            caller = await self._caller(scope, host)
        except SatchelError as error:
            response = error_response(scope, error)
            if isinstance(error, KeyRefused):
                self._note(scope, host)
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        scope["state"]["caller"] = caller
        if (meter := caller.meter) is None or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(meter.headers())
            await send(message)

        try:
            meter.take_request()
        except RateLimited as error:
            await error_response(scope, error)(scope, receive, send_with_limits)
            return
        await self._app(scope, receive, send_with_limits)

    async def _caller(self, scope: Scope, host: str) -> Caller:
        keys = self._keys
        if keys is None or keys.is_open:
            return Caller(host=host)
        secret = _secret(Headers(scope=scope))
        path = scope["path"]
        if not secret and (path in (HEALTH, GREETING, DOCS) or path.startswith(PAGE)):
            return Caller(tenant="", host=host, admin=False)
        if not secret:
            raise KeyRefused("this endpoint needs a key: Authorization: Bearer KEY, or x-api-key: KEY")
        key = keys.remembered(secret)
        if key is None:
            key = await self._check(keys, secret)
        if not isinstance(key, Key):
            raise KeyRefused("this key is not known here, or has been revoked")
        return Caller(key.name, host, key.id, key.admin, self._meter(key))

    async def _check(self, keys: KeyRing, secret: str) -> Key | None:
        """Checks a secret, once for all requests that wait for it."""
        if (check := self._checks.get(secret)) is None:
            if len(self._checks) >= CHECKS_MAX:
                raise Unavailable("too many keys are being checked now")
            check = self._checks[secret] = asyncio.create_task(asyncio.to_thread(keys.check, secret))
            check.add_done_callback(lambda _: self._checks.pop(secret))
        # Others still wait for it if this client goes away.
        return await asyncio.shield(check)

    def _meter(self, key: Key) -> Meter | None:
        if key.limits == KeyLimits():
            return None
        meter = self._meters.get(key.id)
        if meter is None or meter.limits != key.limits:
            meter = self._meters[key.id] = Meter(key.limits, time.monotonic)
        return meter

    def _note(self, scope: Scope, host: str) -> None:
        if self._audit is not None:
            shown = _secret(Headers(scope=scope))
            details = {"key": shown[:19]} if shown.startswith(KEY_BEGINS) else {}
            self._audit.note_refusal("key refused", host=host, path=scope["path"][:200], **details)


def _secret(headers: Headers) -> str:
    """Returns the key of a request, "" for none."""
    given = [headers.get("x-api-key", "")]
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        given.insert(0, token.strip())
    # Clients configured for one header often put a placeholder into the other.
    return max(
        (secret[:_SECRET_MAX] for secret in given), key=lambda secret: (secret.startswith(KEY_BEGINS), bool(secret))
    )


def tenant_of(request: Request, *, every: bool = False) -> str:
    """Returns the tenant whose agents a request is about: the caller's, or for an administrator `?tenant=NAME`.

    Args:
        every: whether `*` means all tenants; "" is returned for it.

    Raises:
        NotAllowed: it is another tenant, and the caller is not an administrator. InvalidRequest: it is not a tenant's
            name.
    """
    caller: Caller = request.state.caller
    named = request.query_params.get("tenant")
    if named is None or named == caller.tenant:
        return caller.tenant
    require_admin(caller)
    if named == EVERY and every:
        return ""
    if NAME.fullmatch(named) is None:
        raise InvalidRequest(f"tenant: {quoted(named)} is no key's name", param="tenant")
    return named


def check_owner(keys: KeyRing | None, name: str) -> None:
    """Checks that a name can own agents: it must be a key's name, or the name of the server's owner.

    Raises:
        InvalidRequest: there is no such key.
    """
    if name != OWNER and (keys is None or not keys.has(name)):
        raise InvalidRequest(f"to: there is no key {quoted(name)}; `satchel keys list` names them", param="to")


def require_admin(caller: Caller) -> None:
    """Refuses callers who are not administrators.

    Raises:
        NotAllowed: the caller's key is not an administrator's.
    """
    if not caller.admin:
        raise NotAllowed("this needs a key made with --admin")
