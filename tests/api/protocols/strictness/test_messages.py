"""Wrong requests to `/v1/messages`: every one is refused, by name, in Anthropic's shape, and nothing runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.api.app import create_app
from satchel.cluster.errors import (
    AgentBusy,
    DeadlineExceeded,
    GenerationFailed,
    MemoryFull,
    NotAllowed,
    QueueFull,
    RateLimited,
)
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.anthropic_client import HELLO, Messages

BODY = {"model": "claude-opus-5", "max_tokens": 50, "messages": HELLO}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def check(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert body["error"]["message"]
    return body["error"]["message"]


FIELDS = [
    ("model", [5, ["m"]]),
    ("max_tokens", [None, -1, 1.5, "5", True, 2**63]),
    ("messages", [None, "Hi", {}, 5, []]),
    ("system", [5, {}, ["x"], [{"type": "text"}], [{"type": "image"}]]),
    ("stream", ["true", 1, "yes"]),
    ("temperature", ["0.5", True, -0.1, 10.1, [], 1e999]),
    ("top_p", [-0.1, 1.1, "1", True]),
    ("top_k", [-2, 1.5, "3", True]),
    ("stop_sequences", ["x", [""], [1], 5, {}, ["x"] * 17, ["x" * 2000]]),
    ("thinking", ["x", {}, {"type": "often"}, {"type": "enabled", "budget_tokens": "5"}, {"type": 5}]),
    ("output_config", ["x", [], {"effort": "much"}, {"effort": 5}, {"format": "json"}]),
    ("metadata", ["x", [], {"user_id": 5}]),
    ("tools", ["x", {}, 5, ["x"], [{}], [{"name": "f"}], [{"type": 5}], [{**TOOL, "name": ""}]]),
    ("tools", [[{**TOOL, "name": "n" * 200}], [{**TOOL, "input_schema": "x"}], [{**TOOL, "description": 5}]]),
    ("tools", [[{**TOOL, "strict": value}] for value in (5, "yes")]),
    ("tool_choice", ["auto", "any", {}, {"type": "some"}, {"type": "tool"}, {"type": "tool", "name": "g"}]),
    ("tool_choice", [{"type": "auto", "name": 5}]),
    ("tool_choice", [{"type": "auto", "disable_parallel_tool_use": value} for value in (1, "x")]),
    ("agent_id", [5, "", "a b", "ä", "x" * 129]),
    ("agent_continue", [5, True]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in FIELDS for value in values])
async def test_a_wrong_field_is_named(client, backend, field, value):
    fields = {**BODY, "tools": [TOOL]} if field == "tool_choice" else BODY
    data = json.dumps({**fields, field: value}).replace("Infinity", "1e999")
    message = check(await client.post("/v1/messages", content=data), 400, "invalid_request_error")
    assert message.startswith(field), message
    assert backend.requests == []


@pytest.mark.parametrize("field", ["max_tokens", "messages"])
async def test_what_is_missing_is_named(client, field):
    body = {name: value for name, value in BODY.items() if name != field}
    assert check(await client.post("/v1/messages", json=body), 400, "invalid_request_error").startswith(field)


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}

MESSAGES = [
    ([5], "messages[0] must"),
    ([{}], "messages[0].role"),
    ([*HELLO, {"role": "robot", "content": "x"}], "messages[1].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "assistant", "content": 5}], "messages[0].content"),
    (user("x"), "messages[0].content[0] must"),
    (user({}), "messages[0].content[0].type"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "audio"}), "messages[0].content[0].type"),
    (user({"type": "document", "source": {}}), "messages[0].content[0]: only text documents are supported"),
    (user({"type": "search_result"}), "messages[0].content[0].title"),
    (user(USE), "messages[0].content[0].type"),
    (user({"type": "image"}), "messages[0].content[0].source"),
    (user(image(type="file", file_id="f")), "messages[0].content[0].source files are not supported"),
    (user(image(**{**PNG, "media_type": "image/bmp"})), "messages[0].content[0].source.media_type"),
    (user(image(**{**PNG, "data": 5})), "messages[0].content[0].source.data"),
    (user(image(type="url")), "messages[0].content[0].source.url"),
    ([*HELLO, {"role": "system", "content": [image(**PNG)]}], "messages[1].content[0].type"),
    ([*HELLO, *user(image(**PNG))], "messages[1].content[0]: this model does not support images"),
    ([{"role": "assistant", "content": [image(**PNG)]}], "messages[0].content[0].type"),
    ([{"role": "assistant", "content": [{**USE, "input": "x"}]}], "messages[0].content[0].input"),
    ([{"role": "assistant", "content": [{**USE, "id": ""}]}], "messages[0].content[0].id"),
    ([{"role": "assistant", "content": [{**USE, "name": 5}]}], "messages[0].content[0].name"),
    ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages[0].content[0].thinking"),
    ([{"role": "assistant", "content": [{"type": "server_tool_use"}]}], "messages[0].content[0].id"),
    ([*HELLO, {"role": "assistant", "content": [USE]}], "messages: the last one calls a tool"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (user({**RESULT, "content": 5}), "messages[0].content[0].content"),
    (user({**RESULT, "is_error": "yes"}), "messages[0].content[0].is_error"),
    (user({**RESULT, "content": [{"type": "document"}]}), "messages[0].content[0].content[0].source"),
    ([{"role": "user", "content": "refuse me"}], "the model's chat template refused: no such message, please"),
]


@pytest.mark.parametrize(("messages", "said"), MESSAGES)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_wrong_message_is_named(client, backend, messages, said, path):
    message = check(await client.post(path, json={**BODY, "messages": messages}), 400, "invalid_request_error")
    assert message.startswith(said), message
    assert backend.requests == []


@pytest.mark.parametrize(
    "form", [{}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "json_schema", "schema": "x"}]
)
async def test_a_format_that_is_none_is_refused(client, form):
    bound = {"output_config": {"format": form}}
    message = check(await client.post("/v1/messages", json={**BODY, **bound}), 400, "invalid_request_error")
    assert message.startswith("output_config.format")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": ' + b"[" * 50_000])
async def test_a_body_that_is_no_json_object_is_refused(client, backend, data):
    check(await client.post("/v1/messages", content=data), 400, "invalid_request_error")
    assert backend.requests == []


async def test_errors_before_the_route_have_its_shape(client, backend):
    text = {"Content-Type": "text/plain", "Referer": "x"}
    check(await client.post("/v1/messages", content=b"x", headers=text), 415, "invalid_request_error")
    check(await client.post("/v1/messages", json=BODY, headers={"Host": "evil"}), 403, "permission_error")
    check(await client.get("/v1/messages"), 405, "invalid_request_error")
    check(await client.post("/v1/messages/batches", json=BODY), 404, "not_found_error")
    large = {**BODY, "messages": [{"role": "user", "content": "x" * 2**20}]}
    check(await client.post("/v1/messages", json=large), 413, "request_too_large")
    assert "code" in (await client.post("/v1/nothing", json=BODY)).json()["error"], "OpenAI's shape everywhere else"
    assert backend.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("full", retry_after_s=2.2), 529, "overloaded_error"),
        (MemoryFull("full"), 529, "overloaded_error"),
        (RateLimited("slowly", retry_after_s=2.2), 429, "rate_limit_error"),
        (NotAllowed("no"), 403, "permission_error"),
        (AgentBusy("busy"), 409, "conflict_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (GenerationFailed("numbers ran out"), 500, "api_error"),
        (ZeroDivisionError("secret detail"), 500, "api_error"),
    ],
)
async def test_every_failure_has_its_kind_and_status(client, backend, error, status, kind, stream):
    backend.refusal = error
    response = await client.post("/v1/messages", json={**BODY, "stream": stream})
    assert "secret" not in check(response, status, kind)
    if status in (429, 529):
        assert response.headers["retry-after"] == ("1" if isinstance(error, MemoryFull) else "3")


async def test_too_long_is_told_in_the_words_that_make_clients_compact(client, backend, text):
    long = [{"role": "user", "content": "word " * 1000}]
    tokens = len(text.tokenizer.encode(text.template.render(long)))
    message = check(await client.post("/v1/messages", json={**BODY, "messages": long}), 400, "invalid_request_error")
    assert message == f"prompt is too long: {tokens} tokens > 999 maximum"
    longer = {**BODY, "messages": [{"role": "user", "content": "word " * 100_000}], "stream": True}
    message = check(await client.post("/v1/messages", json=longer), 400, "invalid_request_error")
    assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 999 maximum")
    chat = await client.post("/v1/chat/completions", json={"messages": long})
    assert chat.json()["error"]["code"] == "context_length_exceeded"


async def test_a_key_may_be_in_either_header(backend, config, tmp_path: Path):
    home = Home(tmp_path / "home")
    prepare_home(home)
    secret = create_key(home, "ann", requests_per_minute=4)[1]
    app = create_app(backend, config, keys=KeyRing(home, required=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for headers in ({}, {"x-api-key": "sk-ant-unknown"}, {"Authorization": "Bearer x"}):
            response = await client.post("/v1/messages", json=BODY, headers=headers)
            check(response, 401, "authentication_error")
        for headers in ({"x-api-key": secret}, {"Authorization": f"Bearer {secret}"}):
            assert (await client.post("/v1/messages", json=BODY, headers=headers)).status_code == 200
        assert backend.requests[-1]["tenant"] == "ann"
        for method in ("HEAD", "GET"):
            assert (await client.request(method, "/")).status_code == 200, "says nothing, and needs no key"
        for _ in range(3):
            response = await client.post("/v1/messages", json=BODY, headers={"x-api-key": secret})
        check(response, 429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1


async def test_what_a_body_may_have_is_bounded(backend, config):
    limits = replace(config.endpoint, messages_max=6, parts_max=8)
    app = create_app(backend, replace(config, endpoint=limits))
    text = {"type": "text", "text": "Hi"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        messages = Messages(client)
        nested = user(*[{**RESULT, "content": [text] * 3}] * 2)
        for most, beyond in ((HELLO * 6, HELLO * 7), (user(*[text] * 8), user(*[text] * 9)), (nested, nested * 2)):
            assert (await messages.post(most)).status_code == 200
            assert "at most" in check(await messages.post(beyond), 400, "invalid_request_error")


async def test_the_description_has_the_bodies(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"max_tokens", "messages"} <= set(schema["required"]) and "stop_sequences" in schema["properties"]
    assert "/v1/messages/count_tokens" in paths and "/v1/messages/" not in paths
