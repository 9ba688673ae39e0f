"""Requests to `/v1/messages`, and the message that a client builds from its events."""

from __future__ import annotations

import json
from typing import Any

import httpx

HELLO = [{"role": "user", "content": "Hi"}]


class Messages:
    """Shorthand for requests to the route."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, messages: Any = HELLO, *, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": "claude-opus-5", "max_tokens": 100, "messages": messages, **fields}
        return await self.client.post("/v1/messages?beta=true", json=body, headers=headers)

    async def say(self, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
        response = await self.post(messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, messages: Any = HELLO, **fields: Any) -> list[dict[str, Any]]:
        response = await self.post(messages, stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def events_of(body: str) -> list[dict[str, Any]]:
    events = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client builds from a stream; checks the order in which blocks open, grow and close."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    opened, written = -1, ""
    for event in events[2:-2]:
        if event["type"] == "ping":
            continue
        assert event["index"] == (opened + 1 if event["type"] == "content_block_start" else opened)
        if event["type"] == "content_block_start":
            opened, written = event["index"], ""
            message["content"].append(event["content_block"])
            continue
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(written)
            continue
        (kind,) = set(event["delta"]) - {"type"}
        assert event["delta"]["type"] == ("input_json_delta" if kind == "partial_json" else f"{kind}_delta")
        if kind == "partial_json":
            written += event["delta"][kind]
        else:
            block[kind] += event["delta"][kind]
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}
