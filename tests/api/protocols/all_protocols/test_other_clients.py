"""Requests as clients of other servers send them: each field is used, or named as ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

HI: list[Any] = [{"role": "user", "content": "Hi"}]
MODEL = "satchel/tiny"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
}
CHATS = [route for route in ROUTES if route != "/v1/completions"]
BEGIN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def post(client: httpx.AsyncClient, route: str, status: Any = 200, /, **fields: Any) -> httpx.Response:
    answer = await client.post(route, json={"model": MODEL, **ROUTES[route], **fields})
    assert answer.status_code == status, answer.text
    return answer


def text_of(answer: httpx.Response) -> str:
    """Returns the answer's text, in any protocol."""
    body = answer.json()
    if "choices" in body:
        choice = body["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    if "output" in body:
        return body["output"][-1]["content"][0]["text"]
    if "message" in body:
        return body["message"]["content"]
    return body["response"] if "response" in body else body["content"][0]["text"]


@pytest.mark.parametrize("route", ROUTES)
async def test_stop_strings_end_answers_under_every_name(client, backend, route):
    backend.say("one two three four")
    for field in ({"stop": "three"}, {"stop_sequences": ["three"]}, {"options": {"stop": ["three"]}}):
        assert text_of(await post(client, route, **field)).strip() == "one two"


@pytest.mark.parametrize("route", ROUTES)
async def test_what_changes_nothing_is_named_whatever_becomes_of_the_request(client, backend, route):
    assert "x-satchel-ignored" not in (await post(client, route)).headers
    odd = {"unheard_of": 1, "x\r\nx-evil": 2, "keep": None}
    whole = await post(client, route, **odd)
    assert whole.headers["x-satchel-ignored"] == "unheard_of, x??x-evil"
    assert "x-evil" not in whole.headers
    streamed = await post(client, route, stream=True, unheard_of=1)
    assert streamed.headers["x-satchel-ignored"] == "unheard_of"
    refused = await post(client, route, 404, unheard_of=1, model="nobody") if route != "/v1/messages" else None
    assert refused is None or refused.headers["x-satchel-ignored"] == "unheard_of"


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/tokenize", {"prompt": "Hi"}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
    ],
)
async def test_routes_that_generate_nothing_name_it_too(client, route, fields):
    answer = await client.post(route, json={"model": MODEL, **fields, "unheard_of": 1})
    assert answer.headers["x-satchel-ignored"] == "unheard_of"


@pytest.mark.parametrize("route", ROUTES)
async def test_a_form_binds_the_answer_under_every_name(client, backend, route):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
        {"format": schema},
        {"output_format": {"type": "json_schema", "schema": schema}},
        {"guided_json": schema},
    ]
    for form in forms:
        await post(client, route, **form)
        assert '"n"' in backend.sampling.grammar, form


@pytest.mark.parametrize("route", ROUTES)
async def test_top_p_zero_takes_the_likeliest_token(client, backend, route):
    for fields in ({"top_p": 0}, {"options": {"top_p": 0.0}}):
        await post(client, route, **fields)
        assert (backend.sampling.temperature, backend.sampling.top_p) == (0.0, 1.0)
    for fields in ({"temperature": 0}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0}):
        await post(client, route, **fields)


@pytest.mark.parametrize("route", CHATS)
@pytest.mark.parametrize(
    "switch",
    [
        {"enable_thinking": False},
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ],
    ids=str,
)
async def test_thinking_is_off_in_the_prompt(client, thinker, route, switch):
    await post(client, route)
    assert "</think>" not in thinker.prompt
    await post(client, route, **switch)
    assert thinker.prompt.rstrip().endswith("</think>")


# Messages.


@pytest.mark.parametrize("mark", ["partial", "prefix"])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
async def test_a_marked_message_is_continued(client, backend, route, mark):
    backend.say(" friend")
    said = [*HI, {"role": "assistant", "content": "Hello", mark: True}]
    fields = {"input" if route == "/v1/responses" else "messages": said}
    for stream in (False, True):
        await post(client, route, **fields, stream=stream)
        assert backend.prompt == f"{BEGIN}Hello"
    assert text_of(await post(client, route, **fields)) == " friend"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
async def test_a_message_without_a_mark_or_behind_which_others_stand_is_not_continued(client, backend, route):
    name = "input" if route == "/v1/responses" else "messages"
    begun = {"role": "assistant", "content": "Hello", "partial": True}
    for said in ([*HI, {**begun, "partial": False}], [*HI, begun, *HI], [*HI, {**begun, "partial": None}]):
        await post(client, route, **{name: said})
        assert backend.prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "said",
    [
        [{"role": "user", "content": "Hi", "partial": True}],
        [{"role": "assistant", "content": "Hello", "prefix": True}],
        [*HI, {"role": "assistant", "content": "Hello", "prefix": "yes"}],
    ],
    ids=str,
)
async def test_a_mark_that_cannot_be_obeyed_is_refused_by_its_place(client, backend, route, said):
    name = "input" if route == "/v1/responses" else "messages"
    error = (await post(client, route, 400, **{name: said})).json()["error"]
    mark = next(mark for mark in ("partial", "prefix") if mark in said[-1])
    assert error["message"].startswith(f"{name}[{len(said) - 1}].{mark}") and backend.requests == []


async def test_a_chain_goes_on_with_a_continued_answer_as_one_message(client, backend):
    backend.say(" friend")
    said = [*HI, {"role": "assistant", "content": "Hello", "partial": True}]
    first = (await post(client, "/v1/responses", input=said)).json()
    await post(client, "/v1/responses", input="And?", previous_response_id=first["id"])
    assert "assistant\nHello friend<|im_end|>\n<|im_start|>user\nAnd?" in backend.prompt


@pytest.mark.parametrize(
    ("route", "turn"),
    [
        *(("/v1/chat/completions", turn) for turn in ({"content": None}, {}, {"content": None, "tool_calls": []})),
        ("/v1/chat/completions", {"content": None, "reasoning_content": ""}),
        ("/v1/chat/completions", {"content": []}),
        *(("/v1/messages", turn) for turn in ({"content": None}, {}, {"content": []})),
        *(("/v1/responses", turn) for turn in ({"content": None}, {}, {"content": []})),
        *(("/api/chat", turn) for turn in ({"content": None}, {})),
    ],
)
async def test_an_empty_turn_of_the_assistants_is_an_empty_text(client, backend, route, turn):
    said = [*HI, {"role": "assistant", **turn}, *HI]
    await post(client, route, **{"input" if route == "/v1/responses" else "messages": said})
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in backend.prompt


def called(route: str, ids: list[str], order: list[str], said: dict[str, Any]) -> dict[str, Any]:
    """Returns fields of a request: calls with these ids, and their results in this order."""
    if route == "/v1/messages":
        calls = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in ids]
        results = [{"type": "tool_result", "tool_use_id": id, "content": said[id]} for id in order]
        return {
            "messages": [*HI, {"role": "assistant", "content": calls}, {"role": "user", "content": results}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        }
    if route == "/v1/responses":
        calls = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in ids]
        results = [{"type": "function_call_output", "call_id": id, "output": said[id]} for id in order]
        tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
        return {"input": [*HI, *calls, *results], "tools": tools}
    arguments: Any = {} if route == "/api/chat" else "{}"
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": said[id]} for id in order]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, *results], "tools": tools}


CALLING = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"]


@pytest.mark.parametrize("route", CALLING)
async def test_results_stand_in_the_order_of_their_calls(client, backend, route):
    ids, said = ["k1", "k2", "k3"], {"k1": "first", "k2": "second", "k3": "third"}
    prompts = []
    for order in (ids, ["k3", "k1", "k2"]):
        await post(client, route, **called(route, ids, order, said))
        prompts.append(backend.prompt)
        places = [backend.prompt.index(each) for each in said.values()]
        assert places == sorted(places)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("route", CALLING)
async def test_a_result_of_nothing_is_an_empty_text(client, backend, route):
    await post(client, route, **called(route, ["k1", "k2"], ["k2", "k1"], {"k1": None, "k2": "second"}))
    assert "second" in backend.prompt and "None" not in backend.prompt and "null" not in backend.prompt


async def test_calls_without_ids_take_results_by_name(client, backend):
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    results = [{"role": "tool", "tool_name": name, "content": f"of {name}"} for name in ("g", "f")]
    said = [*HI, {"role": "assistant", "tool_calls": calls}, *results]
    await post(client, "/api/chat", messages=said)
    assert 0 < backend.prompt.index("of f") < backend.prompt.index("of g")


async def test_a_prompt_is_counted_as_it_is_generated(client, backend):
    fields = {"messages": [*HI, {"role": "assistant", "content": "Hello", "partial": True}], "system": "Be kind."}
    await post(client, "/v1/chat/completions", **fields)
    tokens = (await client.post("/v1/tokenize", json={"model": MODEL, **fields})).json()["tokens"]
    assert tokens == backend.requests[-1]["prompt"]
    ask = {"input": fields["messages"], "instructions": "Be kind."}
    counted = (await client.post("/v1/responses/input_tokens", json={"model": MODEL, **ask})).json()
    assert counted["input_tokens"] == len(tokens)
