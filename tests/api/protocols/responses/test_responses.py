"""`/v1/responses`: what OpenAI's clients see, event by event and in the official client's types, and what the replica
gets."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.cluster.errors import GenerationFailed
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.responses_client import Responses

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


@pytest.fixture
def asking(client: httpx.AsyncClient) -> Responses:
    return Responses(client)


@pytest.fixture
async def sdk(client: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    yield openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="none",
        max_retries=0,
        http_client=client,
        _strict_response_validation=True,
    )


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
TEXT.append("output_item.done")
THOUGHT = [kind.replace("output_text", "reasoning_text") for kind in TEXT]


async def test_a_whole_answer(asking, backend):
    backend.say("Hello wörld 😀", cached=3)
    response = await asking.say(instructions="Be brief.", model="satchel/tiny", metadata={"a": "b"}, temperature=0.5)
    assert response["id"].startswith("resp_") and response["object"] == "response"
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    (message,) = response["output"]
    assert message["id"].startswith("msg_") and (message["role"], message["status"]) == ("assistant", "completed")
    text = {"type": "output_text", "text": "Hello wörld 😀", "annotations": [], "logprobs": []}
    assert message["content"] == [text]
    tokens, drawn = len(backend.requests[0]["prompt"]), len(backend.text.tokenizer.encode("Hello wörld 😀"))
    assert response["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": drawn,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + drawn,
    }
    assert (response["model"], response["metadata"], response["temperature"]) == ("satchel/tiny", {"a": "b"}, 0.5)
    assert backend.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_event_by_event(asking, backend):
    backend.say("Hello 日本語", cached=2, step=100)
    events = await asking.stream()
    assert kinds(events) == ["created", "in_progress", *TEXT, "completed"]
    last = events[-1]["response"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {last["id"]}
    assert events[4]["delta"] == events[5]["text"] == "Hello 日本語"
    assert events[-2]["item"] == last["output"][0]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("said", ["", "x", " lead", "日本語", "a\u2028b\x85c\r\nd", f"Well. {CALL}", f"{CALL}\n{CALL}"])
async def test_stream_and_whole_answer_agree(asking, backend, said):
    backend.say(said)
    whole, events = await asking.say(tools=[WEATHER]), await asking.stream(tools=[WEATHER])
    streamed = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed["output"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    for got in (whole, streamed):
        got["output"] = without_ids(got["output"])
        for name in ("id", "created_at", "completed_at"):
            del got[name]
    assert whole == streamed


async def test_a_call_and_its_result(asking, backend):
    backend.say(f"Well. {CALL}")
    events = await asking.stream(tools=[WEATHER])
    call = events[-1]["response"]["output"][1]
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Köln"}
    more = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(more) == call["arguments"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    history = [{"role": "user", "content": "Hi"}, *events[-1]["response"]["output"], output]
    await asking.say(history, tools=[WEATHER])
    assert '"name": "weather"' in backend.prompt and "rain" in backend.prompt


async def test_free_text_and_namespaces_come_back_as_they_were_offered(asking, backend):
    tools = [PATCH, {"type": "namespace", "name": "mcp__git", "description": "", "tools": [{**WEATHER, "name": "log"}]}]
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'
    backend.say(call + '\n<tool_call>\n{"name": "mcp__git__log", "arguments": {}}\n</tool_call>')
    events = await asking.stream(tools=tools)
    custom, named = events[-1]["response"]["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", 'a\n"b"')
    assert "custom_tool_call_input.delta" in kinds(events)
    assert (named["type"], named["namespace"], named["name"]) == ("function_call", "mcp__git", "log")
    assert "this Lark grammar" in backend.prompt
    outputs = [
        {
            "type": "custom_tool_call_output",
            "call_id": custom["call_id"],
            "output": [{"type": "input_text", "text": "ok"}],
        },
        {"type": "function_call_output", "call_id": named["call_id"], "output": ""},
    ]
    await asking.say([{"role": "user", "content": "Hi"}, custom, named, *outputs], tools=tools)
    assert '"mcp__git__log"' in backend.prompt.rpartition("user")[2]


async def test_tools_of_openais_servers_are_left_out_and_named(asking, backend):
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "mcp", "server_label": "x"}, WEATHER]
    answer = await asking.post(
        [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "Hi"}],
        tools=hosted,
    )
    assert answer.status_code == 200 and answer.headers["x-satchel-left-out"] == "web_search, mcp, web_search_call"
    assert answer.json()["tools"] == hosted
    await asking.refused(tools=hosted, tool_choice={"type": "web_search"})
    await asking.refused(tools=hosted[:2], tool_choice="required")


async def test_reasoning_is_an_item_and_goes_back(asking, thinker):
    thinker.say("<think>\nHm, well.\n</think>\n\nYes.")
    events = await asking.stream(include=["reasoning.encrypted_content"], store=False)
    seen = list(dict.fromkeys(kinds(events)))
    assert seen[:8] == ["created", "in_progress", *THOUGHT] and seen[-3:] == [*TEXT[2:4], "completed"]
    thought, message = events[-1]["response"]["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, well."}]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    # Codex sends it back without its content.
    thought = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    theirs = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "so"}],
        "encrypted_content": "g",
    }
    history = [{"role": "user", "content": "Hi"}, theirs, thought, message, {"role": "user", "content": "Why?"}]
    await asking.say(history)
    assert "<think>\nHm, well.\n</think>\n\nYes." in thinker.prompt


@pytest.mark.parametrize(("effort", "known"), [("minimal", "low"), ("medium", "medium"), ("xhigh", "high")])
async def test_effort_goes_to_the_template(asking, thinker, effort, known):
    await asking.say(reasoning={"effort": effort, "summary": "auto"})
    assert f"effort: {known}\n" in thinker.prompt
    await asking.say(reasoning={"effort": "none"})
    assert thinker.prompt.endswith("<think>\n\n</think>\n\n")


async def test_an_answer_that_is_cut_is_incomplete(asking, backend):
    backend.say("one two", finish="length")
    events = await asking.stream(max_output_tokens=2)
    assert backend.sampling.max_tokens == 2
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert (await asking.say(max_output_tokens=2))["status"] == "incomplete"


async def test_a_failure_in_mid_stream_is_an_event(asking, backend):
    tokenizer = backend.text.tokenizer
    backend.play(SequenceUpdate("row", tokenizer.encode("Hello"), cached_tokens=0), GenerationFailed("it broke"))
    events = await asking.stream()
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"] == {"code": "server_error", "message": "it broke"}


async def test_too_long_in_words_that_make_clients_compact(asking, backend):
    long = "word " * 20_000
    error = await asking.refused(long)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    assert "truncation" in (await asking.refused(long, truncation="auto"))["message"]
    events = await asking.stream(long)
    assert kinds(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"


async def test_logprobs(asking, backend):
    backend.say("Hello")
    response = await asking.say(top_logprobs=2)
    given = response["output"][0]["content"][0]["logprobs"]
    assert "".join(each["token"] for each in given) == "Hello" and len(given[0]["top_logprobs"]) == 2
    events = await asking.stream(include=["message.output_text.logprobs"])
    assert [each["token"] for event in events for each in event.get("logprobs", ()) if "delta" in event]


async def test_the_official_client(sdk, backend):
    backend.say("Hello wörld 😀", cached=2)
    response = await sdk.responses.create(model="satchel/tiny", input="Hi", instructions="Be brief.")
    assert response.output_text == "Hello wörld 😀" and response.usage.input_tokens_details.cached_tokens == 2
    again = await sdk.responses.retrieve(response.id)
    assert again.output_text == response.output_text
    (item,) = (await sdk.responses.input_items.list(response.id)).data
    assert (item.role, item.content[0].text) == ("user", "Hi")
    counted = await sdk.responses.input_tokens.count(model="satchel/tiny", input="Hi", instructions="Be brief.")
    assert counted.input_tokens == response.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="background"):
        await sdk.responses.cancel(response.id)
    await sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        await sdk.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="satchel/tiny", input="Hi", previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"


async def test_the_official_clients_streams(sdk, backend):
    backend.say(f"Well. {CALL}")
    async with sdk.responses.stream(model="satchel/tiny", input="Hi", tools=[WEATHER]) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert seen[0] == "response.created" and seen[-1] == "response.completed"
    assert final.output_text == "Well." and final.output[1].name == "weather"
    stream = await sdk.responses.create(model="satchel/tiny", input="Hi", tools=[WEATHER], stream=True)
    assert [event.type async for event in stream] == seen


async def test_references_to_items_that_are_kept(asking, backend):
    backend.say(f"Well. {CALL}")
    first = await asking.say([{"role": "user", "content": "Hi", "id": "msg_mine"}], tools=[WEATHER])
    message, call = first["output"]
    refer = [{"type": "item_reference", "id": item["id"]} for item in (message, call)]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    await asking.say([{"id": "msg_mine"}, *refer, output], tools=[WEATHER], store=False)
    by_reference = backend.prompt
    await asking.say([{"role": "user", "content": "Hi"}, message, call, output], tools=[WEATHER], store=False)
    assert backend.prompt == by_reference and "rain" in by_reference


async def test_a_chain_says_all_that_was_said(asking, backend):
    backend.say("One.", "Two.", "Three.")
    first = await asking.say("a", instructions="First.")
    second = (await asking.stream("b", previous_response_id=first["id"]))[-1]["response"]
    await asking.say("c", previous_response_id=second["id"], instructions="Last.")
    said = [
        ("system", "Last."),
        ("user", "a"),
        ("assistant", "One."),
        ("user", "b"),
        ("assistant", "Two."),
        ("user", "c"),
    ]
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    assert backend.prompt == told + "<|im_start|>assistant\n"


async def test_what_is_not_stored_cannot_be_gone_on_with(asking, client):
    response = await asking.say(store=False)
    assert response["store"] is False
    assert (await client.get(f"/v1/responses/{response['id']}")).status_code == 404
    assert (await asking.refused(previous_response_id=response["id"]))["code"] == "previous_response_not_found"


async def test_the_least_recently_used_responses_are_dropped(backend, config):
    limits = replace(config.endpoint, responses_bytes_max=6_000)
    transport = httpx.ASGITransport(create_app(backend, replace(config, endpoint=limits)))
    asking = Responses(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
    ids = [(await asking.say())["id"] for _ in range(6)]
    found = [(await asking.client.get(f"/v1/responses/{id}")).status_code for id in ids]
    assert found[0] == 404 and found[-1] == 200
    large = await asking.say(metadata={"x": "y" * 7_000})
    assert (await asking.client.get(f"/v1/responses/{large['id']}")).status_code == 404, "more than all may be"
    assert (await asking.client.get(f"/v1/responses/{ids[-1]}")).status_code == 200


async def test_another_tenants_responses_are_not_there(backend, config, tmp_path):
    home = Home(tmp_path / "home")
    prepare_home(home)
    ann, bob = ({"Authorization": f"Bearer {create_key(home, name)[1]}"} for name in ("ann", "bob"))
    endpoint = Remembering(backend, config, keys=KeyRing(home, required=True))
    asking = Responses(endpoint.client)
    first = (await asking.post(headers=ann)).json()
    id, item = first["id"], first["output"][0]["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = await asking.client.request(method, f"/v1/responses/{id}{path}", headers=bob)
        assert answer.status_code == 404
    assert (await asking.refused(previous_response_id=id, headers=bob))["code"] == "previous_response_not_found"
    await asking.refused([{"type": "item_reference", "id": item}], headers=bob)
    assert (await asking.client.get(f"/v1/responses/{id}", headers=ann)).status_code == 200
    assert (await asking.post(previous_response_id=id, headers=ann)).status_code == 200


async def test_a_streaming_sequence_stops_with_its_client(server, backend):
    backend.play(SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0), asyncio.Event())
    body = {"input": "Hi", "stream": True}
    async with httpx.AsyncClient() as client, client.stream("POST", f"{server}/v1/responses", json=body) as answer:
        seen = [json.loads(line[6:]) async for line in _until_text(aiter(answer.aiter_lines()))]
    async with asyncio.timeout(20):
        await backend.generations[0].aborted.wait()
    async with httpx.AsyncClient() as client:
        id = seen[0]["response"]["id"]
        assert (await client.get(f"{server}/v1/responses/{id}")).status_code == 404, "it never ended"


async def _until_text(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    async for line in lines:
        if line.startswith("data: "):
            yield line
        if line.startswith("event: response.output_text.delta"):
            return


async def test_a_form_of_the_answer(asking, backend):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = await asking.say(text={"format": form, "verbosity": "low"})
    assert response["text"]["format"] == form and backend.sampling.grammar
    await asking.say(text={"format": {"type": "text"}})
    assert not backend.sampling.grammar
    error = await asking.refused(text={"format": {**form, "schema": {"type": "nothing"}}})
    assert error["param"].startswith("text.format.schema")


async def test_pictures_are_refused_by_models_without_eyes_and_have_a_place(asking):
    written = io.BytesIO()
    Image.new("RGB", (8, 8)).save(written, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    picture = {"type": "input_image", "image_url": url, "detail": "high"}
    error = await asking.refused([{"role": "user", "content": [picture]}])
    assert error["param"] == "input[0].content[0]"


async def test_whose_memory_it_is(backend, config):
    endpoint = Remembering(backend, config)
    asking = Responses(endpoint.client)

    async def whose(**fields: Any) -> str | None:
        return (await asking.post(**fields)).headers.get("x-satchel-agent")

    assert await whose(headers={"X-Agent-ID": "ann"}) == await whose(agent_id="ann") == "ann"
    assert await whose(headers={"thread-id": "t1", "session-id": "s1"}, prompt_cache_key="k") == "codex:t1"
    assert await whose(prompt_cache_key="k") == "cache-key:k"
    assert await whose(conversation={"id": "conv_1"}) == "conversation:conv_1"
    assert await whose(store=False) is None
    own = await asking.post()
    assert own.headers["x-satchel-agent"].startswith("response:")
    goes_on = await whose(previous_response_id=own.json()["id"])
    assert goes_on == own.headers["x-satchel-agent"]
    assert await whose(previous_response_id=own.json()["id"], headers={"X-Agent-ID": "ann"}) == "ann"


async def test_the_official_clients_conversations(backend, config):
    endpoint = Remembering(backend, config)
    http: Any = endpoint.client
    sdk = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
    made = await sdk.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Ada."}], metadata={"a": "b"}
    )
    assert made.id.startswith("conv_") and made.metadata == {"a": "b"}
    backend.say("Well.")
    response = await sdk.responses.create(model="satchel/tiny", input="Hi", conversation=made.id)
    assert "My name is Ada." in backend.prompt and response.conversation and response.conversation.id == made.id
    items: list[Any] = (await sdk.conversations.items.list(made.id, order="asc")).data
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "My name is Ada."),
        ("user", "Hi"),
        ("assistant", "Well."),
    ]
    assert (await sdk.conversations.retrieve(made.id)).created_at == made.created_at
    assert (await sdk.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    said = await Remembering(backend, config, endpoint.store).client.get(f"/v1/conversations/{made.id}")
    assert said.json()["id"] == made.id and said.json()["metadata"] == {}, "another endpoint knows what was said"
    assert (await sdk.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.conversations.retrieve(made.id)
    assert (await http.get("/v1/agents")).json()["data"] == []
    empty = await sdk.conversations.create()
    assert (await sdk.conversations.retrieve(empty.id)).metadata == {}
    for wrong in (
        {"metadata": 5},
        {"metadata": {"a": 5}},
        {"metadata": {"a": "x" * 513}},
        {"items": 5},
        {"items": [{}]},
    ):
        refused = await http.post("/v1/conversations", json=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(next(iter(wrong)))
