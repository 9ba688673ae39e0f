"""What requests to replicas say of the callers' requests that they belong to, in all kinds of work but text."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from ..requests.requests import Request


def sent_fields(request: Request, kind: str, deadline: float) -> dict[str, Any]:
    """Returns the fields `request_id`, `deadline_s`, `tenant` and `flow` of a request to a replica.

    Args:
        kind: begins the id if the caller gave none.
        deadline: by the event loop's clock.
    """
    caller = request.caller
    return {
        # Callers choose request ids and may repeat them.
        "request_id": f"{request.request_id or kind}/{secrets.token_hex(8)}",
        "deadline_s": max(0.001, deadline - asyncio.get_running_loop().time()),
        "tenant": caller.tenant,
        "flow": f"{caller.tenant}/ {caller.host}",
    }
