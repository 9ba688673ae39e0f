"""The Responses API on the way out: lists of items, page by page."""

from __future__ import annotations

import hashlib
from typing import Any

from ....cluster.errors import InvalidRequest
from ...requests.paging import page_of

PAGE_MAX = 100

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def item_page(items: list[dict[str, Any]], response_id: str, limit: int, order: str, after: str) -> dict[str, Any]:
    """Returns a page of items, as a list in OpenAI's form. Items without an id get one made from their place.

    Raises:
        InvalidRequest: `limit` is out of range, or no item has the id `after`.
    """
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"limit must be 1 to {PAGE_MAX}", param="limit")
    shown = [_shown(item, response_id, index) for index, item in enumerate(items)]
    if order == "desc":
        shown.reverse()
    return page_of(shown, after, limit, "item")


def _shown(item: dict[str, Any], response_id: str, index: int) -> dict[str, Any]:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    shown = {**item, "type": kind}
    if not isinstance(shown.get("id"), str):
        digits = hashlib.sha256(f"{response_id}/{index}".encode()).hexdigest()[:48]
        shown["id"] = f"{_PREFIXES.get(kind, 'item')}_{digits}"
    if kind == "message":
        content = shown.get("content")
        if isinstance(content, str):
            part = "output_text" if shown["role"] == "assistant" else "input_text"
            more = {"annotations": []} if part == "output_text" else {}
            shown["content"] = [{"type": part, "text": content, **more}]
    if kind != "item_reference" and shown.get("status") is None:
        shown["status"] = "completed"
    return shown
