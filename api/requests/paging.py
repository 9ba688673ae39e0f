"""Lists page by page, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...cluster.errors import InvalidRequest, quoted


def page_of(shown: Sequence[dict[str, Any]], after: str, limit: int, what: str) -> dict[str, Any]:
    """Returns the part of a list that begins behind the id `after`, or at its beginning if that is "".

    Args:
        shown: all of the list; each has an `id`.
        what: one of them is called, for errors.

    Raises:
        InvalidRequest: none has the id `after`.
    """
    start = 0
    if after:
        start = next((index + 1 for index, one in enumerate(shown) if one["id"] == after), 0)
        if not start:
            raise InvalidRequest(f"after: there is no {what} {quoted(after)}", param="after")
    data = list(shown[start : start + limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(shown) > start + limit,
    }
