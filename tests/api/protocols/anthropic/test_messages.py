"""`/v1/messages`: what Anthropic's clients see, event by event, and what the replica gets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.cluster.errors import GenerationFailed
from tests.worlds.api.anthropic_client import HELLO, Messages, gathered
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model
from tests.worlds.models.tiny_tokenizers import write_tokenizer

WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def messages(client: httpx.AsyncClient) -> Messages:
    return Messages(client)


async def test_a_whole_answer(messages, backend):
    backend.say("Hello wörld 😀", cached=3)
    response = await messages.post(system="Be brief.")
    body = response.json()
    assert body.pop("id").startswith("msg_")
    tokens = len(backend.requests[0]["prompt"])
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-5",
        "content": [{"type": "text", "text": "Hello wörld 😀"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": tokens - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(backend.text.tokenizer.encode("Hello wörld 😀")),
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert response.headers["x-satchel-model"] == "satchel/tiny", "the one that answered"
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert backend.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream_event_by_event(messages, backend):
    backend.say("Hello 日本語", cached=2, step=100)
    start, ping, *rest = await messages.stream()
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    usage["input_tokens"] = len(backend.requests[0]["prompt"]) - 2
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": "claude-opus-5",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}},
        },
    }
    assert ping == {"type": "ping"}
    tokens = len(backend.text.tokenizer.encode("Hello 日本語"))
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello 日本語"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**usage, "output_tokens": tokens, "output_tokens_details": {"thinking_tokens": 0}},
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("said", ["", "x", " lead", "日本語", "a\u2028b\x85c\r\nd", f"Well. {CALL}", f"{CALL}\n{CALL}"])
async def test_stream_and_whole_answer_agree(messages, backend, said):
    backend.say(said)
    whole, streamed = await messages.say(tools=[WEATHER]), gathered(await messages.stream(tools=[WEATHER]))
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert whole == streamed


async def test_a_call_is_a_block_of_its_own(messages, backend):
    backend.say("Well. " + CALL)
    events = await messages.stream(tools=[WEATHER])
    message = gathered(events)
    text, call = message["content"]
    assert text == {"type": "text", "text": "Well."}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}
    assert message["stop_reason"] == "tool_use"


async def test_thinking_is_a_signed_block_before_the_answer(messages, thinker):
    thinker.say("<think>\nHm, well.\n</think>\n\nYes.")
    whole = await messages.say(thinking={"type": "adaptive"})
    thought, text = whole["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == "Hm, well." and thought["signature"]
    assert text == {"type": "text", "text": "Yes."}
    assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]
    events = await messages.stream()
    assert gathered(events)["content"] == whole["content"]
    signed = next(i for i, event in enumerate(events) if event.get("delta", {}).get("type") == "signature_delta")
    assert events[signed + 1]["type"] == "content_block_stop"
    history = [*HELLO, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": "Why?"}]
    redacted = {"type": "redacted_thinking", "data": "opaque"}
    history[1]["content"].insert(0, redacted)
    await messages.say(history)
    assert "<think>\nHm, well.\n</think>\n\nYes." in thinker.prompt and "opaque" not in thinker.prompt


@pytest.mark.parametrize(
    ("thinking", "closed"),
    [({"type": "enabled", "budget_tokens": 2000}, False), ({"type": "adaptive"}, False), ({"type": "disabled"}, True)],
)
async def test_thinking_is_the_templates_switch(messages, thinker, thinking, closed):
    await messages.say(thinking=thinking)
    assert thinker.prompt.endswith("<think>\n\n</think>\n\n") is closed
    budget = thinker.sampling.thinking
    assert (None if budget is None else budget.tokens) == thinking.get("budget_tokens")


@pytest.mark.parametrize(("effort", "known"), [("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")])
async def test_effort_goes_to_the_template(messages, thinker, effort, known):
    await messages.say(output_config={"effort": effort})
    assert f"effort: {known}\n" in thinker.prompt


async def test_why_an_answer_ended(messages, backend):
    backend.say("one two three")
    cut = await messages.say(stop_sequences=["never", " three"])
    assert (cut["content"][0]["text"], cut["stop_reason"], cut["stop_sequence"]) == (
        "one two",
        "stop_sequence",
        " three",
    )
    assert gathered(await messages.stream(stop_sequences=[" three"]))["stop_sequence"] == " three"
    tokens = len(backend.text.tokenizer.encode("one two three"))
    backend.say("one two three", finish="length")
    assert (await messages.say(max_tokens=tokens))["stop_reason"] == "max_tokens"
    assert backend.sampling.max_tokens == tokens
    assert (await messages.say(max_tokens=10**6))["stop_reason"] == "model_context_window_exceeded"


async def test_without_tokens_to_generate_the_prompt_is_read_all_the_same(messages, backend):
    backend.say("", finish="length")
    whole = await messages.say(max_tokens=0)
    assert backend.sampling.max_tokens == 0 and whole["content"] == [] and whole["stop_reason"] == "max_tokens"


async def test_sampling_fields_reach_the_replica(messages, backend):
    await messages.say(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"])
    assert (backend.sampling.temperature, backend.sampling.top_p, backend.sampling.top_k) == (0.5, 0.9, 7)
    await messages.say(temperature=None, top_p=None, top_k=None, stop_sequences=None, system=None, tools=None)


async def test_an_answer_that_is_begun_is_continued(messages, backend):
    backend.say("of course.")
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Yes, "}]}]
    assert (await messages.say(begun))["content"] == [{"type": "text", "text": "of course."}]
    assert backend.prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes, ")


async def test_an_answer_cannot_be_continued_before_any_message(messages):
    """The error says what is missing, not what the chat template raises."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "assistant", "content": "Yes, "}]}
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await messages.client.post(route, json=body)
        assert response.status_code == 400 and "there must be one before" in response.json()["error"]["message"]


async def test_an_answer_that_is_begun_has_been_thought_about(messages, thinker):
    thinker.say("of course.")
    begun = [*HELLO, {"role": "assistant", "content": "Yes, "}]
    await messages.say(begun, thinking={"type": "enabled", "budget_tokens": 1024})
    assert thinker.prompt.endswith("assistant\nYes, ")
    await messages.say(begun, thinking={"type": "disabled"})
    assert thinker.prompt.endswith("<think>\n\n</think>\n\nYes, ")


async def test_what_an_agent_began_and_what_the_model_added_are_one_message(messages, backend, config):
    endpoint = Remembering(backend, config)
    asking = Messages(endpoint.client)
    backend.say("of course.")
    await asking.say([*HELLO, {"role": "assistant", "content": "Yes, "}], headers={"X-Agent-ID": "ann"})
    assert (await endpoint.transcript())[-1] == {"role": "assistant", "content": "Yes, of course."}
    first = endpoint.prompt
    await asking.say(
        [*HELLO, {"role": "assistant", "content": "Yes, of course."}, *HELLO], headers={"X-Agent-ID": "ann"}
    )
    assert endpoint.prompt[: len(first)] == first
    assert len(await endpoint.branches()) == 1
    await endpoint.client.aclose()


async def test_a_tool_loop(messages, backend):
    backend.say(CALL)
    asked = await messages.say(tools=[WEATHER])
    backend.say("Sunny.")
    (call,) = asked["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "22 degrees"}
    blocks = [result, {"type": "text", "text": "And?"}]
    loop = [*HELLO, {"role": "assistant", "content": asked["content"]}, {"role": "user", "content": blocks}]
    answer = await messages.say(loop, tools=[WEATHER])
    assert answer["content"] == [{"type": "text", "text": "Sunny."}]
    shown = backend.prompt.partition("</tools><|im_end|>\n")[2]
    assert shown == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n22 degrees<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_tools_of_anthropics_servers_are_left_out_and_said(messages, backend):
    web = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    servers = [{"type": "url", "url": "https://mcp.example", "name": "m"}]
    for stream in (False, True):
        response = await messages.post(tools=[web, {**WEATHER, "type": "custom"}], mcp_servers=servers, stream=stream)
        assert response.status_code == 200, response.text
        assert response.headers["x-satchel-left-out"] == "web_search_20250305, mcp_servers"
    assert "weather" in backend.prompt and "web_search" not in backend.prompt
    assert "x-satchel-left-out" not in (await messages.post(tools=[WEATHER], mcp_servers=[])).headers


async def test_without_a_tool_choice_call_text_is_content(messages, backend):
    backend.say(CALL)
    answer = await messages.say(tools=[WEATHER], tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": CALL}] and "weather" not in backend.prompt
    choice = {"type": "auto", "disable_parallel_tool_use": False}
    assert (await messages.say(tools=[WEATHER], tool_choice=choice))["stop_reason"] == "tool_use"


async def test_hints_for_the_cache_change_no_prompt(messages, backend):
    """They move from turn to turn, and a text with a hint is sent as a block."""
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "Hi", **hint}
    await messages.say(HELLO, system="Be brief.", tools=[WEATHER])
    plain = backend.prompt
    await messages.say(
        [{"role": "user", "content": [text]}],
        system=[{"type": "text", "text": "Be brief.", **hint}],
        tools=[{**WEATHER, **hint, "defer_loading": False}],
        **hint,
    )
    assert backend.prompt == plain


async def test_the_billing_header_is_dropped(messages, backend):
    rest = [{"type": "text", "text": "You are a scribe."}, {"type": "text", "text": "Be brief."}]
    prompts = set()
    for build in ("1", "2"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={build}; cch=0{build};"}
        await messages.say(system=[billing, *rest])
        prompts.add(backend.prompt)
    (prompt,) = prompts
    assert prompt.startswith("<|im_start|>system\nYou are a scribe.\n\nBe brief.<|im_end|>\n")


async def test_what_concerns_anthropics_service_is_tolerated(messages, backend):
    response = await messages.post(
        headers={"anthropic-beta": "claude-code-20250219,unheard-of-2030", "anthropic-version": "2023-06-01"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="auto",
        container=None,
        inference_geo="us",
        speed="fast",
        betas=["x"],
        metadata={"user_id": "u"},
        output_config={"effort": None, "format": None, "task_budget": 5},
        invented=[1, 2],
    )
    assert response.status_code == 200, response.text
    assert response.json()["context_management"] == {"applied_edits": []}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/", "/v1/messages/?beta=true"])
async def test_slashes_and_betas(client, path):
    response = await client.post(path, json={"max_tokens": 5, "messages": HELLO})
    assert response.status_code == 200 and response.json()["model"] == "satchel/tiny"


async def test_claude_code_sees_that_something_answers(client):
    assert (await client.head("/")).status_code == 200
    assert (await client.get("/")).text == "Satchel is running"


async def test_a_failure_in_mid_stream_is_an_error_event(messages, backend):
    hello = SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0)
    for failure, kind in ((GenerationFailed("numbers ran out"), "api_error"), (KeyError("secret"), "api_error")):
        backend.play(hello, failure)
        *_, last = await messages.stream()
        assert last["type"] == "error" and last["error"]["type"] == kind and last["request_id"]
        assert "secret" not in json.dumps(last)


STRICT = """\
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('the system speaks first') }}{% endif -%}
{%- if not loop.first and message.role == messages[loop.index0 - 1].role %}{{- raise_exception('turns') }}{% endif -%}
{{- '[' + message.role + '] ' + message.content + ' ' -}}
{%- endfor -%}
"""


async def test_the_system_may_speak_in_between(messages, backend, tmp_path):
    """Claude Code lists agents in such messages, and not every template accepts them."""
    said = [
        {"role": "system", "content": [{"type": "text", "text": "First."}]},
        *HELLO,
        {"role": "user", "content": "you"},
        {"role": "system", "content": "Be kind."},
    ]
    await messages.say(said, system="Be brief.")
    turns = ["system\nBe brief.\n\nFirst.", "user\nHi\nyou", "system\nBe kind."]
    assert backend.prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    folder = write_tokenizer(tmp_path, markers="none")
    (folder / "chat_template.jinja").write_text(STRICT)
    backend.served[0] = served_model(backend.served[0], folder=folder, files_id=b"4" * 32)
    await messages.say(said, system="Be brief.")
    assert backend.prompt == "[system] Be brief.\n\nFirst. [user] Hi\nyou\nBe kind. "
    twice = [*HELLO, {"role": "assistant", "content": "x"}, {"role": "assistant", "content": [], "name": 5}, *HELLO]
    assert (await messages.post(twice)).status_code == 200, "what one says in turn is one message"


async def test_a_silent_stream_has_pings(messages, backend, monkeypatch):
    monkeypatch.setattr("satchel.api.http.event_stream.PING_S", 0.05)
    hello = SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0)
    backend.play(hello, 0.3, SequenceUpdate("r", [], finish="stop"))
    events = await messages.stream()
    pings = [index for index, event in enumerate(events) if event["type"] == "ping"]
    assert len(pings) >= 3 and pings[-1] > 3, "after the first words too"
    assert gathered(events)["content"] == [{"type": "text", "text": "Hello"}]


async def test_a_stream_begins_while_the_prompt_is_read(messages, backend, monkeypatch):
    monkeypatch.setattr("satchel.api.http.event_stream.HEADERS_WAIT_S", 0.02)
    hello = SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=4)
    backend.play(0.2, hello, SequenceUpdate("r", [], finish="stop"))
    events = await messages.stream()
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 0, "not known yet"
    assert gathered(events)["usage"]["cache_read_input_tokens"] == 4


async def test_a_client_that_goes_stops_its_sequence(server, backend):
    hello = SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0)
    backend.play(hello, asyncio.Event())
    body = {"max_tokens": 5, "messages": HELLO, "stream": True}
    async with (
        httpx.AsyncClient(base_url=server) as client,
        client.stream("POST", "/v1/messages", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if "Hello" in line:
                break
    async with asyncio.timeout(20):
        await backend.generations[0].aborted.wait()
    assert backend.generations[0].aborts == 1


@pytest.mark.parametrize("unknown", ["default", "refuse", None])
async def test_models_that_are_not_served(backend, config, unknown):
    config = replace(config, endpoint=replace(config.endpoint, unknown_model=unknown))
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        messages = Messages(client)
        assert (await messages.post(model="nobody")).status_code == (404 if unknown == "refuse" else 200)
        chat = {"model": "nobody", "messages": HELLO}
        response = await client.post("/v1/chat/completions", json=chat)
        assert response.status_code == (200 if unknown == "default" else 404)
        served = await messages.post(model="other")
        assert served.json()["model"] == "other" and "x-satchel-model" not in served.headers
        assert backend.requests[-1]["model"] == "other"


async def test_counting_is_what_a_message_reads(messages, backend):
    thread = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
    ]
    thread.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]})
    fields = {"messages": thread, "system": "Be brief.", "tools": [WEATHER], "model": "claude-opus-5"}
    counted = await asyncio.gather(
        *(messages.client.post("/v1/messages/count_tokens?beta=true", json=fields) for _ in range(14))
    )
    assert {response.status_code for response in counted} == {200}
    assert backend.requests == []
    usage = (await messages.say(**fields))["usage"]
    assert {response.text for response in counted} == {f'{{"input_tokens":{usage["input_tokens"]}}}'}
    prefill = {"messages": [*HELLO, {"role": "assistant", "content": "Yes, "}]}
    counted = (await messages.client.post("/v1/messages/count_tokens", json=prefill)).json()["input_tokens"]
    assert counted == (await messages.say(**prefill))["usage"]["input_tokens"]


async def test_what_does_not_fit_is_counted_and_what_is_far_too_long_roughly(messages, backend, text, monkeypatch):
    async def count(words: int) -> int:
        body = {"messages": [{"role": "user", "content": "word " * words}]}
        return (await messages.client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]

    rendered = text.template.render([{"role": "user", "content": "word " * 1000}])
    assert await count(1000) == len(text.tokenizer.encode(rendered)) > 1000
    real = type(text.tokenizer).encode
    monkeypatch.setattr(
        type(text.tokenizer),
        "encode",
        lambda self, given, **how: real(self, given, **how) if len(given) < 10**5 else 1 / 0,
    )
    assert await count(100_000) >= 4000


async def test_an_agent_that_goes_on_hears_its_rules_once(backend, config):
    endpoint = Remembering(backend, config)
    asking = Messages(endpoint.client)
    for headers, fields in (({"X-Agent-Continue": "1"}, {}), ({}, {"agent_continue": True})):
        await asking.say(system="Be brief.", headers={"X-Agent-ID": "ann", **headers}, **fields)
    said = [(message["role"], message["content"]) for message in await endpoint.transcript()]
    assert said == [("system", "Be brief."), *[("user", "Hi"), ("assistant", "Hello there")] * 2]
    await endpoint.client.aclose()


async def test_what_is_not_kept_is_said(backend, config):
    endpoint = Remembering(backend, config)
    asking = Messages(endpoint.client)
    endpoint.store.down.add("commit")
    endpoint.memory.timing = replace(endpoint.memory.timing, answer_s=0.1)
    agent = {"X-Agent-ID": "ann"}
    response = await asking.post(headers=agent)
    assert response.json()["satchel"] == {"kept": False, "reason": "unanswered"}
    assert response.headers["x-satchel-memory"] == "not-kept; reason=unanswered"
    events = await asking.stream(headers=agent)
    assert events[-2]["satchel"] == {"kept": False, "reason": "unanswered"}
    await endpoint.client.aclose()


async def test_routes_of_both_protocols_know_an_agent_by_what_its_program_sends(backend, config):
    endpoint = Remembering(backend, config)
    response = await Messages(endpoint.client).post(headers={"X-Claude-Code-Session-Id": "one"})
    assert response.headers["x-satchel-agent"] == "claude-code:one"
    assert backend.requests[-1]["agent"] == "default/claude-code:one"
    agents = [each["id"] for each in (await endpoint.client.get("/v1/agents")).json()["data"]]
    assert agents == ["claude-code:one"]
    body = {"messages": HELLO, "prompt_cache_key": "a b", "metadata": {"user_id": 5}, "conversation": [1]}
    for path, fields in (("chat/completions", body), ("completions", {**body, "prompt": "x"})):
        response = await endpoint.client.post(f"/v1/{path}", json=fields)
        assert response.status_code == 200, response.text
        assert response.headers["x-satchel-agent"].startswith("cache-key:sha256.")
    # A salt is only for requests without an agent, and this request names none.
    salted = await endpoint.client.post("/v1/chat/completions", json={**body, "cache_salt": "pepper"})
    assert salted.status_code == 200 and "x-satchel-agent" not in salted.headers
    await endpoint.client.aclose()
