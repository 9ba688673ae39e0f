"""Requests to `/v1/responses`, and its events, checked against the official client's types."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def check_event(event: dict[str, Any]) -> None:
    if event["type"] == "response.failed" and event["response"]["error"]["code"] == "context_length_exceeded":
        # The client's types lack this code, which OpenAI's servers send and Codex looks for.
        event = {**event, "response": {**event["response"], "error": None}}
    _EVENTS.validate_python(event)


class Responses:
    """Shorthand for requests to the route."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, input: Any = "Hi", *, headers: Any = None, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/responses", json={"input": input, **fields}, headers=headers)

    async def say(self, input: Any = "Hi", **fields: Any) -> dict[str, Any]:
        answer = await self.post(input, **fields)
        assert answer.status_code == 200, answer.text
        Response.model_validate(answer.json())
        return answer.json()

    async def stream(self, input: Any = "Hi", **fields: Any) -> list[dict[str, Any]]:
        answer = await self.post(input, stream=True, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = []
        for written in answer.text.removesuffix("\n\n").split("\n\n"):
            name, data = written.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
            check_event(event)
            events.append(event)
        return events

    async def refused(self, input: Any = "Hi", *, status: int = 400, **fields: Any) -> dict[str, Any]:
        answer = await self.post(input, **fields)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]
