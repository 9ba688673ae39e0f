"""Notes in the audit log about what a caller did."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from ...cluster.audit import Audit
from ..requests.callers import Caller


def note(audit: Audit | None, request: Request, what: str, **details: Any) -> None:
    """Writes what the caller of a request did, and who that is; nothing without an audit log."""
    if audit is None:
        return
    caller: Caller = request.state.caller
    who = {"tenant": caller.tenant, "key": caller.key, "host": caller.host}
    audit.note(what, **who, request_id=request.state.request_id, **details)
