"""Wrong requests to `/v1/responses`: every one is refused, by name, in OpenAI's shape, and nothing runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from satchel.api.app import create_app
from satchel.cluster.errors import AgentBusy, DeadlineExceeded, MemoryFull, NotAllowed, QueueFull, RateLimited
from tests.worlds.api.responses_client import Responses

TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SPACE: dict[str, Any] = {"type": "namespace", "name": "s", "tools": [TOOL]}
HOSTED: dict[str, Any] = {"type": "web_search"}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def check(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "Traceback" not in error["message"]
    return error


FIELDS: list[tuple[str, list[Any]]] = [
    ("model", [5, ["m"]]),
    ("input", [None, 5, {}, [], [5], ["x"], [{}], [{"type": 5}], [{"type": "thing"}], [{"id": 5}]]),
    ("input[0].role", [[{"role": "tool", "content": "x"}], [{"role": 5, "content": "x"}], [{"type": "message"}]]),
    ("input[0].content", [[{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": None}]]),
    ("input[0].content[0]", [user(5), user({}), user({"type": 5}), user({"type": "input_text"}), user({"type": "x"})]),
    ("input[0].content[0]", [user({"type": "input_text", "text": 5}), user({"type": "refusal", "text": "no"})]),
    ("input[0].content[0]", [user({"type": "input_file", "file_id": "x"}), user({"type": "input_audio"})]),
    ("input[0].content[0].image_url", [user({"type": "input_image"}), user({"type": "input_image", "image_url": 5})]),
    ("input[0].content[0].file_id", [user({"type": "input_image", "file_id": "file_1"})]),
    ("input[0].content[0]", [[{"role": "system", "content": [{"type": "input_image", "image_url": "data:x"}]}]]),
    ("input[0].call_id", [[{"type": "function_call_output", "output": "x"}]]),
    ("input[0].call_id", [[{"type": "function_call_output", "output": "x", "call_id": "x" * 2000}]]),
    ("input[0].output", [[{"type": "function_call_output", "call_id": "c"}]]),
    ("input[0].output", [[{"type": "custom_tool_call_output", "call_id": "c", "output": {"a": 1}}]]),
    ("input[0].arguments", [[{"type": "function_call", "call_id": "c", "name": "f", "arguments": [5]}]]),
    ("input[0].arguments", [[{"type": "function_call", "call_id": "c", "name": "f"}]]),
    ("input[0].name", [[{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]]),
    ("input[0].namespace", [[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "namespace": 5}]]),
    ("input[0].input", [[{"type": "custom_tool_call", "call_id": "c", "name": "f"}]]),
    ("input[0].encrypted_content", [[{"type": "reasoning", "encrypted_content": 5}]]),
    ("input[0].content", [[{"type": "reasoning", "content": 5}]]),
    ("input[0].summary", [[{"type": "reasoning", "summary": 5}]]),
    ("input[0]", [[{"type": "item_reference", "id": "msg_x"}], [{"id": "msg_x"}], [{"type": "item_reference"}]]),
    ("instructions", [5, [], {}]),
    ("previous_response_id", [5, "", "x" * 2000]),
    ("conversation", [5, "", {}, {"id": 5}, "x" * 2000]),
    ("stream", ["true", 1, "yes"]),
    ("stream_options", ["x", {"include_obfuscation": "x"}]),
    ("temperature", ["0.5", True, -0.1, 10.1, [], 1e999]),
    ("top_p", [-0.1, 1.1, "1", True]),
    ("max_output_tokens", [0, -1, 1.5, "5", True, 2**63]),
    ("max_tool_calls", [0, "x"]),
    ("top_logprobs", [-1, 21, "x", True]),
    ("include", ["x", [5], ["x"] * 65]),
    ("metadata", ["x", [], {str(i): "" for i in range(65)}]),
    ("store", ["x", 1]),
    ("background", ["x", 1]),
    ("truncation", ["some", 5]),
    ("prompt", [{"id": "pmpt_1"}, "x"]),
    ("reasoning", ["x", [], {"effort": "much"}, {"effort": 5}, {"summary": "long"}]),
    ("text", ["x", [], {"verbosity": "much"}, {"format": "json"}, {"format": {}}, {"format": {"type": "xml"}}]),
    ("text.format.name", [{"format": {"type": "json_schema", "schema": {}}}]),
    ("text.format.schema", [{"format": {"type": "json_schema", "name": "n"}}]),
    ("text.format.strict", [{"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": "x"}}]),
    ("tools", ["x", {}, 5, ["x"], [{}], [{"type": 5}], [{"type": ""}], [{**TOOL, "name": ""}], [{**TOOL, "name": 5}]]),
    ("tools", [[{**TOOL, "name": "n" * 129}], [{**TOOL, "parameters": "x"}], [{**TOOL, "description": 5}]]),
    ("tools", [[{**TOOL, "strict": "x"}], [{**SPACE, "tools": "x"}], [{**SPACE, "name": ""}], [TOOL] * 1025]),
    ("tools[1].tools[0].name", [[{**TOOL, "name": "s__f"}, SPACE]]),
    ("tools[0].format", [[{"type": "custom", "name": "c", "format": form}] for form in ("x", "", 0, [], {})]),
    ("tools[0].description", [[{**SPACE, "description": 5}]]),
    ("tools[0].format", [[{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "ebnf"}}]]),
    ("tools[0].format", [[{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark"}}]]),
    ("tool_choice", ["any", 5, {}, {"type": "some"}, {"type": "function"}, {"type": "function", "name": "g"}]),
    (
        "tool_choice",
        [{"type": "allowed_tools", "mode": "x", "tools": [TOOL]}, {"type": "allowed_tools", "mode": "auto"}],
    ),
    ("tool_choice", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}]),
    ("parallel_tool_calls", ["x", 1]),
    ("safety_identifier", [5]),
    ("prompt_cache_key", [5]),
    ("agent_id", [5, "", "a b", "ä", "x" * 129]),
    ("agent_continue", [5, True]),
]


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in FIELDS for value in values])
async def test_a_wrong_field_is_named(client, backend, place, value):
    field = place.partition("[")[0].partition(".")[0]
    body = {"input": "Hi", field: value}
    if field == "tool_choice":
        body["tools"] = [TOOL]
    data = json.dumps(body).replace("Infinity", "1e999")
    error = check(await client.post("/v1/responses", content=data))
    assert error["type"] == "invalid_request_error" and error["message"].startswith(place), error
    assert error["param"] is None or error["param"].startswith(field)
    assert backend.requests == []


@pytest.mark.parametrize("value", [None, 5, "x", [], {"a": "b"}])
async def test_what_is_openais_own_or_unknown_is_ignored(client, backend, value):
    fields = ["context_management", "prompt_cache_retention", "client_metadata", "moderation", "nobody_knows"]
    body = {"input": "Hi", **dict.fromkeys(fields, value), "service_tier": "flex", "stream_options": None}
    assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_null_means_the_default(asked: Responses):
    fields = ["model", "instructions", "previous_response_id", "conversation", "tools", "tool_choice", "reasoning"]
    fields += ["text", "truncation", "prompt", "temperature", "top_p", "max_output_tokens", "top_logprobs", "include"]
    fields += [
        "metadata",
        "store",
        "background",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    ]
    await asked.say("Hi", **dict.fromkeys(fields))


@pytest.fixture
def asked(client: httpx.AsyncClient) -> Responses:
    return Responses(client)


async def test_a_response_and_a_conversation_are_not_both_gone_on_with(asked: Responses, backend):
    error = await asked.refused(previous_response_id="resp_1", conversation="conv_1")
    assert error["param"] == "conversation"
    first = await asked.say()
    error = await asked.refused(previous_response_id=first["id"], agent_continue=True)
    assert error["param"] == "agent_continue"


@pytest.mark.parametrize("id", ["resp_x", "x", "resp_" + "0" * 48, "resp_" + "f" * 48, "ä", "../agents"])
async def test_a_response_that_is_not_there(client, asked: Responses, id):
    error = await asked.refused(previous_response_id=id)
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    if "/" not in id:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert check(await client.request(method, f"/v1/responses/{id}{path}"), 404)["param"] == "response_id"


async def test_pages_of_input(client, asked: Responses):
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    id = (await asked.say(items))["id"]

    async def page(**how: Any) -> dict[str, Any]:
        return (await client.get(f"/v1/responses/{id}/input_items", params=how)).json()

    everything = await page(order="asc")
    assert [item["content"][0]["text"] for item in everything["data"]] == list("01234")
    assert everything["first_id"] == everything["data"][0]["id"] and everything["has_more"] is False
    some = await page(limit=2)
    assert [item["content"][0]["text"] for item in some["data"]] == ["4", "3"] and some["has_more"]
    rest = await page(limit=3, after=some["last_id"])
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"] and not rest["has_more"]
    for how in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_x"}):
        (name,) = how
        error = check(await client.get(f"/v1/responses/{id}/input_items", params=how))
        assert error["param"] == name
    assert check(await client.get(f"/v1/responses/{id}", params={"stream": "true"}))["param"] == "stream"


async def test_too_much_of_something(config, backend):
    limits = replace(config.endpoint, body_values_max=400, messages_max=6, parts_max=8)
    transport = httpx.ASGITransport(create_app(backend, replace(config, endpoint=limits)))
    asked = Responses(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
    part = {"type": "input_text", "text": "x"}
    assert "messages_max" in (await asked.refused([{"role": "user", "content": "x"}] * 7))["message"]
    assert "parts_max" in (await asked.refused(user(*[part] * 9)))["message"]
    output = {"type": "function_call_output", "call_id": "c", "output": [part] * 9}
    assert "parts_max" in (await asked.refused([output]))["message"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps([1] * 500)}
    assert "body_values_max" in (await asked.refused([call]))["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (QueueFull("full"), 503),
        (RateLimited("slowly", retry_after_s=3), 429),
        (NotAllowed("not here"), 403),
        (AgentBusy("busy"), 409),
        (MemoryFull("full"), 507),
        (DeadlineExceeded("late"), 504),
        (RuntimeError("secret"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_cluster(config, backend, raised, status, stream):
    transport = httpx.ASGITransport(create_app(backend, config), raise_app_exceptions=False)
    backend.refusal = raised
    asked = Responses(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
    answer = await asked.post(stream=stream)
    error = check(answer, status)
    assert "secret" not in error["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503, 507))


@pytest.mark.parametrize("where", ["metadata", "instructions", "tools", "user", "id"])
@pytest.mark.parametrize("odd", ['"\\ud800"', "1e999", "NaN"])
@pytest.mark.parametrize("stream", ["true", "false"])
async def test_what_is_shown_again_can_be_written(client, where, odd, stream):
    more = {
        "metadata": f'{{"a": {odd}}}',
        "instructions": odd,
        "user": odd,
        "tools": f'[{{"type": "web_search", "x": {odd}}}]',
        "id": "null",
    }
    item = f'{{"role": "user", "content": "Hi", "id": {odd if where == "id" else "null"}}}'
    data = f'{{"input": [{item}], "stream": {stream}, "{where}": {more[where]}}}'
    answer = await client.post("/v1/responses", content=data)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200 and stream == "false":
        id = answer.json()["id"]
        assert (await client.get(f"/v1/responses/{id}/input_items")).status_code == 200
