"""`/v1/chat/completions` and its stream: what a client sees, and what the replica gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.cluster.errors import GenerationFailed, QueueFull
from tests.worlds.api.served_models import served_model

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def test_a_whole_answer(api, backend):
    backend.say("Hello wörld 😀", cached=3)
    response = await api.chat("Hi", model="satchel/tiny")
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "satchel/tiny"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello wörld 😀"
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(backend.requests[0]["prompt"])
    assert usage["completion_tokens"] == len(backend.text.tokenizer.encode("Hello wörld 😀"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_the_prompt_is_the_rendered_template(api, backend):
    await api.post(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": ""},
            ]
        }
    )
    assert backend.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none two<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


SILENT = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, b": waiting\n\n"),
    "/v1/completions": ({"prompt": "Hi"}, b": waiting\n\n"),
    "/v1/responses": ({"input": "Hi"}, b": waiting\n\n"),
    "/api/chat": ({"messages": [{"role": "user", "content": "Hi"}]}, b" "),
    "/api/generate": ({"prompt": "Hi"}, b" "),
}


@pytest.mark.parametrize("path", SILENT)
async def test_a_stream_is_not_silent_while_its_prompt_is_read(api, backend, monkeypatch, path: str):
    """The pings during prefill are ignored by clients that read events or lines."""
    for name in ("PING_S", "HEADERS_WAIT_S"):
        monkeypatch.setattr(f"satchel.api.http.event_stream.{name}", 0.03)
    body, waiting = SILENT[path]
    hello = SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0)
    backend.play(0.3, hello, 0.2, SequenceUpdate("r", [], finish="stop"))
    answer = await api.client.post(path, json={"model": "satchel/tiny", "stream": True, **body})
    assert answer.status_code == 200
    assert answer.content.count(waiting) >= 6 and "Hello" in answer.text
    assert not path.startswith("/api") or answer.text.startswith("   "), "from the beginning"
    for line in answer.text.splitlines():
        if path.startswith("/api"):
            assert isinstance(json.loads(line), dict), "clients parse every line"
        else:
            assert not line or line.startswith(("data: ", "event: ", ": waiting"))


async def test_a_stream_is_role_then_text_then_finish_then_done(api, backend):
    backend.say("Hello 日本語 😀")
    *chunks, done = await api.stream()
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hello 日本語 😀"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_include_usage_adds_one_chunk_and_nulls(api, backend):
    backend.say("Hello", finish="length", cached=2)
    *chunks, last, done = await api.stream(stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["usage"]["completion_tokens"] == len(backend.text.tokenizer.encode("Hello"))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_tokens_that_arrive_together_are_one_chunk(api, backend):
    backend.say("the quick brown fox", step=100)
    *chunks, _ = await api.stream()
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "the quick brown fox", None]


async def test_stream_and_whole_answer_agree(api, backend):
    for text in ("", "x", " lead", "tail \n", "日本語", "a\u2028b\x85c\r\nd"):
        backend.say(text)
        whole = (await api.chat()).json()["choices"][0]["message"]["content"]
        *chunks, _ = await api.stream()
        assert whole == text == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_end_tokens_never_show(api, backend):
    ends = [backend.text.tokenizer.encode("<|im_end|>")[0], backend.text.tokenizer.encode("<|endoftext|>")[0]]
    hello = backend.text.tokenizer.encode("Hello")
    backend.play(SequenceUpdate("r", [*hello, ends[0], *hello, ends[1]], finish="length", cached_tokens=0))
    body = (await api.chat(ignore_eos=True)).json()
    assert body["choices"][0]["message"]["content"] == "HelloHello"
    assert body["usage"]["completion_tokens"] == 2 * len(hello) + 2
    assert backend.sampling.ignore_eos


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_answer_and_stops_the_sequence(api, backend, stream):
    waiting = asyncio.Event()
    tokens = backend.text.tokenizer.encode("one two STOP three")
    backend.play(*[SequenceUpdate("r", [token], cached_tokens=0) for token in tokens], waiting)
    if stream:
        *chunks, _ = await api.stream(stop=["never", "STOP"])
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await api.chat(stop="STOP")).json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("one two ", "stop")
    assert backend.generations[0].aborts == 1


async def test_a_stop_string_counts_only_if_it_ends_behind_min_tokens(api, backend, text):
    """As the model's own end does: the first one that ends in the text of a later token cuts the answer."""
    said, stops = "a STOP b STOPSTOP.", ["STOP", "PST"]
    tokens = text.tokenizer.encode(said)
    backend.say(said, step=2)
    for least in range(len(tokens)):
        passed = len(text.tokenizer.decode(tokens[:least]))
        ends = [(at + len(stop), at) for stop in stops for at in range(len(said)) if said.startswith(stop, at)]
        expected = said[: min((end for end in ends if end[0] > passed), default=(0, len(said)))[1]]
        choice = (await api.chat(stop=stops, min_tokens=least)).json()["choices"][0]
        assert choice["message"]["content"] == expected, least


async def test_held_back_text_comes_out_at_the_end(api, backend):
    backend.say("one ST")
    assert (await api.chat(stop="STOP")).json()["choices"][0]["message"]["content"] == "one ST"
    assert backend.generations[0].aborts == 0


async def test_sampling_fields_reach_the_replica(api, backend):
    await api.chat(temperature=0.5, top_p=0.9, top_k=7, seed=-5, max_tokens=11, priority=-2)
    sampling = backend.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.max_tokens, sampling.ignore_eos) == (-5, 11, False)
    assert backend.requests[0]["priority"] == -2


async def test_defaults(api, backend):
    await api.chat(temperature=None, top_k=-1, stop=None, stream=None, tools=None, seed=None)
    sampling = backend.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == 1000 - len(backend.requests[0]["prompt"])
    assert backend.requests[0]["model"] == "satchel/tiny"
    assert backend.requests[0]["agent"] == ""
    await api.chat()
    assert backend.requests[0]["sampling"].seed != backend.requests[1]["sampling"].seed


@pytest.mark.parametrize("limit", [-1, -1.0])
async def test_a_limit_of_minus_1_is_none(api, backend, limit):
    """LM Studio's own examples have `"max_tokens": -1`, and llama.cpp's server reads it in the same way."""
    for fields in ({"max_tokens": limit}, {"max_completion_tokens": limit}, {"prompt": "once", "max_tokens": limit}):
        await (api.complete(**fields) if "prompt" in fields else api.chat(**fields))
        assert backend.sampling.max_tokens == 1000 - len(backend.requests[-1]["prompt"])
    await api.chat(max_completion_tokens=limit, max_tokens=5)
    assert backend.sampling.max_tokens == 5


async def test_max_tokens_is_clamped_to_the_context_and_the_newer_name_wins(api, backend):
    await api.chat(max_tokens=10**9)
    assert backend.sampling.max_tokens == 1000 - len(backend.requests[0]["prompt"])
    await api.chat(max_tokens=5, max_completion_tokens=6)
    assert backend.sampling.max_tokens == 6


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1])
async def test_any_64_bit_seed_is_possible(api, backend, seed):
    assert (await api.chat(seed=seed)).status_code == 200
    assert backend.sampling.seed == seed


async def test_sequences_have_unique_ids_even_when_callers_repeat_theirs(api, backend):
    for _ in range(2):
        response = await api.post({"messages": [{"role": "user", "content": "Hi"}]}, headers={"X-Request-ID": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
    first, second = (request["request_id"] for request in backend.requests)
    assert first != second
    assert first.startswith("mine-1")


async def test_generation_responses_say_where_and_why(api, backend):
    for stream in (False, True):
        response = await api.chat(stream=stream)
        assert response.headers["x-satchel-replica"].startswith("satchel/tiny#")
        assert response.headers["x-satchel-why"] == "test: scripted"
        assert response.headers["x-request-id"]
    assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("markers", ["satchel/tiny", "other"])
async def test_tool_calls(api, backend, markers):
    """With markers that are special tokens, and with markers that are plain text."""
    tokens = api_tokens(backend, markers)
    backend.play(*[SequenceUpdate("r", [t], cached_tokens=0) for t in tokens], SequenceUpdate("r", [], finish="stop"))
    body = (await api.chat(tools=[WEATHER], model=markers)).json()
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ""
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}

    *chunks, _ = await api.stream(tools=[WEATHER], model=markers)
    first, begun, *more, end = (chunk["choices"][0]["delta"] for chunk in chunks)
    assert (first["role"], end) == ("assistant", {})
    (head,) = begun["tool_calls"]
    assert head.pop("id").startswith("call_")
    assert head == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    # The arguments as they are written, token by token.
    pieces = [each for delta in more for each in delta["tool_calls"]]
    assert len(pieces) > 3 and all(piece.keys() == {"index", "function"} and piece["index"] == 0 for piece in pieces)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def api_tokens(backend: Any, model: str) -> list[int]:
    from satchel.api.text.model import load_text_model

    folder = next(served.info.folder for served in backend.served if served.info.name == model)
    return load_text_model(folder).tokenizer.encode(CALL)


async def test_special_tool_markers_are_seen_and_never_shown(api, backend, folders, texts):
    text = texts["special"]
    backend.served[0] = served_model(folder=folders["special"])
    backend.play(SequenceUpdate("r", text.tokenizer.encode("Well. " + CALL), finish="stop", cached_tokens=0))
    choice = (await api.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["message"]["content"] == "Well."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_without_tools_or_with_tool_choice_none_call_text_is_content(api, backend):
    backend.say(CALL)
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = (await api.chat(**fields)).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert "tools" not in backend.prompt
    await api.chat(tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False)
    assert '"name": "weather"' in backend.prompt


async def test_a_tool_conversation_renders_arguments_as_a_mapping(api, backend):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    assert (await api.post({"messages": messages})).status_code == 200
    assert '{"name": "f", "arguments": {"a": 1}}' in backend.prompt
    assert "<|im_start|>tool\n42" in backend.prompt


@pytest.mark.parametrize("header", [False, True])
async def test_the_agent_comes_from_header_or_body(api, backend, header):
    messages = [{"role": "user", "content": "Hi"}]
    if header:
        await api.post({"messages": messages}, headers={"X-Agent-ID": "ann@home:1"})
    else:
        await api.post({"messages": messages, "agent_id": "ann@home:1"})
    assert backend.requests[0]["agent"] == "default/ann@home:1"


async def test_agent_given_twice_must_agree(api, backend):
    body = {"messages": [{"role": "user", "content": "Hi"}], "agent_id": "ann"}
    assert (await api.post(body, headers={"X-Agent-ID": "ann"})).status_code == 200
    response = await api.post(body, headers={"X-Agent-ID": "bob"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "agent_id"


@pytest.mark.parametrize("agent", ["", " ", "a b", "ä", "x" * 129, "a/b", "a\n"])
async def test_bad_agent_ids_are_named(api, backend, agent):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await api.post({**body, "agent_id": agent})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "agent_id")
    if agent.isascii() and "\n" not in agent:
        response = await api.post(body, headers={"X-Agent-ID": agent})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Agent-ID")
    assert backend.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_byte_is_an_http_error(api, backend, stream):
    backend.refusal = QueueFull("256 requests are waiting", retry_after_s=2.2)
    response = await api.chat(stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"] == {
        "message": "256 requests are waiting",
        "type": "service_unavailable",
        "param": None,
        "code": "queue_full",
    }
    backend.refusal = None
    backend.play(GenerationFailed("numbers ran out"))
    response = await api.chat(stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (GenerationFailed("numbers ran out"), "generation_failed"),
        (
            SequenceUpdate("r", [], finish="error", error=GenerationFailed("numbers ran out").to_wire()),
            "generation_failed",
        ),
        (SequenceUpdate("r", [], finish="abort"), "generation_failed"),
        (KeyError("secret"), "internal_error"),
    ],
)
async def test_an_error_in_mid_stream_is_one_event_and_the_end(api, backend, failure, code):
    backend.play(SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0), failure)
    events = await api.stream()
    assert "[DONE]" not in events
    assert events[-1]["error"]["code"] == code
    assert "secret" not in events[-1]["error"]["message"]
    assert not any("error" in event for event in events[:-1])


async def test_a_sequence_that_ends_without_an_end_is_an_error(api, backend):
    backend.play(SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0))
    assert (await api.chat()).status_code == 500
    assert "error" in (await api.stream())[-1]


async def test_a_request_ends_at_its_deadline_and_so_does_its_sequence(backend, config):
    import dataclasses

    import httpx

    from satchel.api.app import create_app

    config = dataclasses.replace(config, timeouts=dataclasses.replace(config.timeouts, request_s=0.15))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(backend, config))) as client:
        backend.say("warm up")
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        for _ in range(20):
            # The tokenizer's loading counts too; wait for it.
            if (await client.post("http://satchel/v1/chat/completions", json=body)).status_code == 200:
                break
            await asyncio.sleep(0.1)
        backend.play(asyncio.Event())
        response = await client.post("http://satchel/v1/chat/completions", json=body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert backend.generations[-1].aborts == 1
