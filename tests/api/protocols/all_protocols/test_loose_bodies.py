"""Small deviations that clients send, in every protocol: numbers with a decimal point, a byte order mark, lone
surrogates."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import pytest

CHAT = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/tokenize": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/api/chat": {"model": "satchel/tiny", "messages": CHAT, "stream": False},
    "/api/generate": {"model": "satchel/tiny", "prompt": "Hi", "stream": False},
}
LIMITS = {"/v1/responses": "max_output_tokens", "/api/chat": "options", "/api/generate": "options"}
GENERATING = [path for path in BODIES if path not in ("/v1/tokenize", "/v1/embeddings") and "tokens" not in path]
DRAWING = {"seed": 7.0, "top_k": 5.0, "min_tokens": 1.0, "priority": 0.0, "stop_token_ids": [3.0], "temperature": 1.0}


async def send(client: httpx.AsyncClient, path: str, data: bytes) -> httpx.Response:
    return await client.post(path, content=data, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("path", GENERATING)
async def test_a_whole_number_may_have_a_point(client, backend, path):
    limit: dict[str, Any] = {LIMITS.get(path, "max_tokens"): 5.0}
    if "options" in limit:
        limit = {"options": {"num_predict": 5.0, "repeat_last_n": -1.0}}
    drawing = DRAWING if "options" not in limit else {name: DRAWING[name] for name in DRAWING if name != "priority"}
    if "options" in limit:
        limit["options"] |= {name: drawing[name] for name in ("seed", "top_k")}
        drawing = {name: value for name, value in drawing.items() if name not in ("seed", "top_k")}
    answer = await client.post(path, json={**BODIES[path], **limit, **drawing})
    assert answer.status_code == 200, answer.text
    assert "x-satchel-ignored" not in answer.headers
    sampling = backend.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.min_tokens) == (5, 7, 5, 1)
    assert list(sampling.stop_token_ids) == [3] and all(type(token) is int for token in sampling.stop_token_ids)
    assert all(type(value) is int for value in (sampling.max_tokens, sampling.seed, sampling.top_k))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"n": 1.0, "logprobs": True, "top_logprobs": 2.0, "truncate_prompt_tokens": -1.0}),
        ("/v1/chat/completions", {"max_completion_tokens": 5.0, "thinking_budget": 0.0, "beam_width": 1.0}),
        ("/v1/chat/completions", {"options": {"num_predict": 5.0, "seed": 1.0}, "allowed_token_ids": [1.0, 2.0]}),
        ("/v1/completions", {"prompt": [1.0, 2.0], "best_of": 1.0, "logprobs": 1.0}),
        ("/v1/completions", {"prompt": [[1.0], [2.0]], "echo": True}),
        ("/v1/responses", {"top_logprobs": 1.0, "max_tool_calls": 3.0, "reasoning": {"max_tokens": 0.0}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024.0}}),
        ("/v1/embeddings", {"input": [1.0, 2.0]}),
        ("/v1/detokenize", {"tokens": [1.0, 2.0]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1.0}),
    ],
)
async def test_every_other_whole_number_too(client, path, fields):
    answer = await client.post(path, json={**BODIES.get(path, {}), **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_mark_before_the_body_says_nothing(client, path):
    data = json.dumps(BODIES[path]).encode()
    marked = await send(client, path, codecs.BOM_UTF8 + data)
    assert marked.status_code == 200, marked.text
    twice = await send(client, path, codecs.BOM_UTF8 * 2 + data)
    assert twice.status_code == 400


def said(path: str, answer: httpx.Response) -> str:
    """Returns an error's message from the protocol's own shape."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error if path.startswith("/api") else error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_half_a_character_is_refused_in_a_sentence(client, backend, path):
    for half in (rb"\ud83d", rb"\ude00", rb"\ud83d\ud83d", b"\xed\xa0\xbd"):
        data = json.dumps(BODIES[path]).encode().replace(b"Hi", b"Hi" + half)
        assert "the body has half of a surrogate pair" in said(path, await send(client, path, data))
    whole = json.dumps(BODIES[path]).encode().replace(b"Hi", rb"Hi\ud83d\ude00")
    assert (await send(client, path, whole)).status_code == 200
    data = json.dumps(BODIES[path]).encode()
    assert "UTF-16" in said(path, await send(client, path, data.decode().encode("utf-16")))
    assert "not UTF-8 at byte" in said(path, await send(client, path, data.replace(b"Hi", b"\xff")))


HALF = r'{"city": "K\ud83dln"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {HALF}}}\n</tool_call>'
TOOL = {"name": "weather", "parameters": {"type": "object"}}


async def test_a_call_in_which_the_model_cut_a_character_ends_no_conversation(client, backend):
    """The client sends back what it got. Arguments are JSON inside a string, so the first parser does not see the lone
    surrogate."""
    backend.say(CALL)
    body: dict[str, Any] = {"messages": CHAT, "tools": [{"type": "function", "function": TOOL}]}
    message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])
    again = await client.post("/v1/chat/completions", json={**body, "messages": [*CHAT, message, *CHAT]})
    assert again.status_code == 200, again.text
    items = (await client.post("/v1/responses", json={"input": CHAT, "tools": [{"type": "function", **TOOL}]})).json()
    again = await client.post("/v1/responses", json={"input": [*CHAT, *items["output"], *CHAT]})
    assert again.status_code == 200, again.text
    anthropic = {"name": "weather", "input_schema": {"type": "object"}}
    body = {"messages": CHAT, "max_tokens": 100, "tools": [anthropic]}
    for stream in (False, True):
        whole = await client.post("/v1/messages", json={**body, "stream": stream})
        assert whole.status_code == 200 and "weather" in whole.text
    ollama = {"model": "satchel/tiny", "messages": CHAT, "stream": False, "tools": [{"function": TOOL}]}
    message = (await client.post("/api/chat", json=ollama)).json()["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "K\ufffdln"}
    again = await client.post("/api/chat", json={**ollama, "messages": [*CHAT, message, *CHAT]})
    assert again.status_code == 200, again.text
