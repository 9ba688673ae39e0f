"""Wrong requests: every one is refused, by name, in OpenAI's shape, and nothing runs."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from satchel.api.app import create_app
from satchel.cluster.errors import NoReplica

USER = {"role": "user", "content": "Hi"}
BODY = {"messages": [USER]}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else error["type"])
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert response.headers["x-request-id"]
    return error


FIELDS = [
    ("temperature", ["0.5", True, -0.1, 10.1, [], {}, 1e999, 10**400]),
    ("top_p", [-0.1, 1.1, -1, "1", True]),
    ("top_k", [-2, 1.5, "3", True]),
    ("seed", [2**63, -(2**63) - 1, 1.5, 1e300, "1", True]),
    ("max_tokens", [0, -2, 1.5, 0.0, "5", True]),
    ("max_completion_tokens", [0, -2, "5"]),
    ("stop", ["", [""], ["a", ""], [1], 5, {}, ["x"] * 17, "x" * 2000]),
    ("stream", ["true", 1, "yes"]),
    ("stream_options", ["x", [], {str(i): 1 for i in range(101)}]),
    ("ignore_eos", [1, "true"]),
    ("priority", [1.5, "high", True]),
    ("model", [5, ["m"]]),
    ("user", [5]),
    ("agent_id", [5, ["a"]]),
    ("messages", [None, "Hi", {}, 5, []]),
    ("tools", ["x", {}, 5]),
    (
        "tool_choice",
        ["required", "all", {"type": "function", "function": {"name": "f"}}, {"type": "function"}, True, 5, [], {}],
    ),
    ("parallel_tool_calls", ["x", 1]),
    ("n", [17, 0, -1, True, 1.5, 17.0, "1"]),
    ("best_of", [2, 0, "1", True]),
    ("min_p", [-0.1, 1.1, "0", True, 1e999]),
    ("repetition_penalty", [0, -1, 10.1, "1", True]),
    ("min_tokens", [-1, 1.5, "1", True]),
    ("stop_token_ids", [5, "5", [1.5], ["5"], [True], [-1], [10**6], [1] * 65, {}]),
    ("timeout_s", [0, -1, "5", True, 1e999, 1e-300, 1e300]),
    ("logprobs", [1, 0, "true", []]),
    ("top_logprobs", [5, 21, -1, 1.5, "1", True]),
    ("reasoning_effort", ["much", 5, True]),
    (
        "chat_template_kwargs",
        ["x", [], 5, {"tokenize": True}, {"chat_template": "x"}, {"messages": []}, {str(i): 1 for i in range(101)}],
    ),
    ("echo", [True, 1]),
    ("suffix", ["end"]),
    ("presence_penalty", [2.1, -2.1, "0", True]),
    ("frequency_penalty", [2.1, -2.1, "0", True]),
    (
        "logit_bias",
        [
            *([], "5", {"x": 1}, {"-1": 1}, {"05": 1}, {"5.0": 1}, {"": 1}, {"1000000": 1}, {"9" * 20: 1}),
            *({"5": 101}, {"5": -100.5}, {"5": "1"}, {"5": True}, {"5": None}, {str(i): 1 for i in range(1025)}),
        ],
    ),
    ("response_format", ["text", 5, []]),
    ("json_schema", [5, "{", []]),
    ("grammar", [5, "start: x"]),
    ("repeat_penalty", [0, 11, "1"]),
    ("mirostat", [2]),
    ("structured_outputs", ["x", 5, []]),
    ("guided_json", [5, "{", []]),
    ("guided_regex", [5, "(", ["a"]]),
    ("guided_grammar", [5, "start: x"]),
    ("mm_processor_kwargs", [{"max_pixels": 5}]),
    ("guided_choice", ["yes", 5, [5], []]),
    ("functions", [5, {}]),
    ("function_call", ["required", 5, {}, {"name": 5}, {"name": "f"}]),
    ("allowed_token_ids", [[], 5, "5", [1.5], [True], [-1], [10**6], [1] * 1025, {}]),
    ("bad_words", ["x", 5, [5], [""], [" "], ["x" * 129], ["x"] * 65]),
    ("include_stop_str_in_output", [1, "true"]),
    ("skip_special_tokens", [0, "false"]),
    ("return_token_ids", [1, "true"]),
    ("truncate_prompt_tokens", [-2, 1.5, "5", True]),
    ("add_generation_prompt", [False, 1, "x"]),
    ("continue_final_message", [True, 1]),
    ("add_special_tokens", [True]),
    ("chat_template", ["{{ messages }}"]),
    ("documents", [[{"text": "x"}]]),
    ("prompt_logprobs", [0, 1, True]),
    ("prompt_embeds", ["x"]),
    ("logits_processors", [["x"]]),
    ("use_beam_search", [True, 1]),
    ("beam_width", [2]),
    ("length_penalty", [0.5]),
    ("early_stopping", [True]),
    ("detokenize", [False]),
    ("return_tokens_as_token_ids", [True]),
    ("include_reasoning", [False]),
    ("modalities", [["text", "audio"], ["audio"], "text"]),
    ("audio", [{"voice": "alloy", "format": "wav"}]),
    ("web_search_options", [{}, {"search_context_size": "low"}]),
    ("agent_continue", [True]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in FIELDS for value in values])
async def test_a_wrong_field_is_named(api, backend, field, value):
    # json.dumps writes 1e999 as Infinity; the wire form of such a number is 1e999.
    data = json.dumps({**BODY, field: value}).replace("Infinity", "1e999")
    error = check(await api.client.post("/v1/chat/completions", content=data), 400, field)
    assert field in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "spaces_between_special_tokens"),
        ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]}, "functions"),
        ({"functions": [FUNCTION], "tool_choice": "auto"}, "functions"),
        ({"functions": [FUNCTION], "function_call": {"name": "g"}}, "function_call"),
        ({"truncate_prompt_tokens": 5, "agent_id": "ann"}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": [5], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ],
)
async def test_fields_that_do_not_go_together_are_named(api, backend, fields, param):
    error = check(await api.chat(**fields), 400, param)
    assert param in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize("logprobs", [True, False, 21, -1, "5", 1.5])
async def test_a_completions_logprobs_are_a_small_number(api, logprobs):
    check(await api.complete("x", logprobs=logprobs), 400, "logprobs")


@pytest.mark.parametrize("option", ["include_usage", "continuous_usage_stats"])
async def test_options_of_a_stream_must_be_booleans(api, option):
    response = await api.chat(stream=True, stream_options={option: "yes"})
    check(response, 400, f"stream_options.{option}")


async def test_options_of_a_stream_need_one(api):
    """As at OpenAI and in vLLM."""
    for stream in (None, False):
        check(await api.chat(stream=stream, stream_options={"include_usage": True}), 400, "stream_options")
        check(await api.complete("x", stream=stream, stream_options={"include_usage": False}), 400, "stream_options")
    for options in (None, {}):
        assert (await api.chat(stream_options=options)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "echo": True, "logprobs": 1}, "best_of"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"suffix": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": [5], "guided_choice": ["a"]}, "allowed_token_ids"),
        ({"bad_words": ["a"], "guided_choice": ["a"]}, "bad_words"),
    ],
)
async def test_a_wrong_field_of_a_completion_is_named(api, backend, fields, param):
    check(await api.complete("x", **fields), 400, param)
    assert backend.requests == []


async def test_neutral_values_and_unknown_fields_are_accepted(api, backend):
    response = await api.chat(
        n=1,
        best_of=1,
        logprobs=False,
        top_logprobs=0,
        min_p=0,
        repetition_penalty=1,
        min_tokens=0,
        stop_token_ids=[],
        reasoning_effort=None,
        chat_template_kwargs={},
        timeout_s=None,
        echo=False,
        suffix=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        stop=[],
        model="",
        user="somebody",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        prediction={"type": "content", "content": "Hello"},
        verbosity="low",
        safety_identifier="x",
        prompt_cache_retention="24h",
        modalities=["text"],
        audio=None,
        function_call="auto",
        use_beam_search=False,
        length_penalty=1.0,
        detokenize=True,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        add_generation_prompt=True,
        continue_final_message=False,
        include_stop_str_in_output=False,
        allowed_token_ids=None,
        bad_words=[],
        prompt_logprobs=None,
        invented=[1, 2],
    )
    assert response.status_code == 200, response.text


MESSAGES = [
    ([5], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [5]}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    ([{"role": "assistant", "content": "x", "reasoning_content": 5}], "messages[0].reasoning_content"),
    ([{"role": "user", "content": "x", "name": "n" * 2000}], "messages[0].name"),
    ([{"role": "tool", "content": "x", "tool_call_id": "i" * 2000}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "refuse me"}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
async def test_a_wrong_message_is_named(api, backend, messages, param):
    check(await api.post({"messages": messages}), 400, param)
    assert backend.requests == []


async def test_an_image_is_refused_in_words(api):
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert "does not support images" in check(await api.chat(parts), 400, "messages[0].content[0]")["message"]


async def test_a_template_that_raises_shows_its_message(api):
    assert "no such message, please" in check(await api.chat("refuse me"), 400, "messages")["message"]


TOOLS = [
    ([5], "tools[0]"),
    ([{}], "tools[0].type"),
    ([{"type": "web_search"}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0].function.description"),
    ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
]


@pytest.mark.parametrize(("tools", "param"), TOOLS)
@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_wrong_tool_is_named(api, tools, param, choice):
    check(await api.chat(tools=tools, tool_choice=choice), 400, param)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "Hi"}]} x',
        b'{"messages": ' + b"[" * 50_000,
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(api, backend, data):
    check(await api.client.post("/v1/chat/completions", content=data), 400, None)
    assert backend.requests == []


async def test_surrogate_pairs_are_one_character(api, backend):
    data = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert (await api.client.post("/v1/chat/completions", content=data)).status_code == 200
    assert "😀" in backend.prompt


async def test_a_prompt_longer_than_the_context_says_the_numbers(api):
    error = check(await api.chat("word " * 2000), 400, "messages", "context_length_exceeded")
    # Clients look for this text, and compact.
    said = (
        r"This model's maximum context length is 1000 tokens\. However, your messages resulted in (at least )?\d+ tok"
    )
    assert re.match(said, error["message"])
    error = check(await api.complete([7] * 1234), 400, "prompt", "context_length_exceeded")
    assert "maximum context length is 1000 tokens. However, your prompt resulted in 1234 tokens" in error["message"]


async def test_a_prompt_that_cannot_fit_is_refused_without_encoding_it(api, text, monkeypatch):
    length = len(text.tokenizer.encode("x " * 400_000))
    assert text.tokenizer.tokens_min("x " * 400_000, 10**9) <= length
    monkeypatch.setattr("satchel.api.text.tokenizer.Tokenizer.encode", None)
    check(await api.chat("x " * 400_000), 400, "messages", "context_length_exceeded")
    check(await api.complete("x " * 400_000), 400, "prompt", "context_length_exceeded")


async def test_a_body_over_the_limit_is_refused_announced_or_not(api, backend):
    data = json.dumps({"messages": [{"role": "user", "content": "x" * 2**20}]}).encode()
    check(await api.client.post("/v1/chat/completions", content=data), 413, None, "request_too_large")

    sent = 0

    async def chunks():
        nonlocal sent
        for start in range(0, 64 * 2**20, 2**16):
            sent = start
            yield b"x" * 2**16

    response = await api.client.post("/v1/chat/completions", content=chunks())
    check(response, 413, None, "request_too_large")
    assert sent < 4 * 2**20
    assert backend.requests == []


async def test_unknown_models_routes_and_methods(api, backend, config):
    check(await api.chat(model="nobody"), 404, "model", "model_not_found")
    check(await api.complete("x", model="nobody"), 404, "model", "model_not_found")
    check(await api.client.get("/v1/models/nobody/at/all"), 404, "model", "model_not_found")
    check(await api.client.get("/v1/nothing"), 404, None, "not_found")
    check(await api.client.get("/v1/chat/completions"), 405, None, "method_not_allowed")
    check(await api.client.delete("/v1/models"), 405, None, "method_not_allowed")


async def test_a_configured_model_that_is_not_loaded_yet_is_a_503(api, backend):
    backend.served.pop()
    response = await api.chat(model="other")
    check(response, 503, "model", "no_replica")
    assert int(response.headers["retry-after"]) >= 1


async def test_every_503_says_when_to_come_back(api, backend):
    backend.refusal = NoReplica("none", retry_after_s=None)
    assert (await api.chat()).headers["retry-after"] == "1"


async def test_an_unexpected_exception_shows_the_request_id_and_nothing_else(api, backend, caplog):
    backend.refusal = ZeroDivisionError("secret detail")
    response = await api.chat()
    error = check(response, 500, None, "internal_error")
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ä".encode(), "a/b"])
async def test_an_invalid_request_id_is_replaced(api, given):
    response = await api.client.get("/v1/models", headers={"X-Request-ID": given})
    assert len(response.headers.get_list("x-request-id")) == 1
    assert response.headers["x-request-id"] not in (given, "")


def nested(depth: int) -> list[Any]:
    return json.loads("[" * depth + "]" * depth)


@pytest.fixture
def narrow(backend, config) -> httpx.AsyncClient:
    """An endpoint with small limits on bodies."""
    limits = replace(config.endpoint, body_values_max=VALUES, messages_max=6, parts_max=8)
    app = create_app(backend, replace(config, endpoint=limits))
    json_only = {"Content-Type": "application/json"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=json_only)


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


VALUES = 400
PART = {"type": "text", "text": "Hi"}
CHAT = "/v1/chat/completions"
# The body's values besides those that fill it: opening brackets, colons and commas.
BARE = len(re.findall(r"[{\[:,]", json.dumps({**BODY, "x": []})))


@pytest.mark.parametrize(
    ("path", "most", "beyond", "param", "said"),
    [
        (CHAT, {"messages": [USER] * 6}, {"messages": [USER] * 7}, "messages", "at most 6 .*messages_max"),
        (
            *(CHAT, {"messages": [{"role": "user", "content": [PART] * 4}] * 2}),
            *({"messages": [{"role": "user", "content": [PART] * 9}]}, "messages", "at most 8 parts.*parts_max"),
        ),
        (
            *(CHAT, {**BODY, "x": [0] * (VALUES - BARE + 1)}),
            *({**BODY, "x": [0] * (VALUES - BARE + 2)}, None, "400 .*body_values_max"),
        ),
        (
            *(CHAT, {"messages": [USER, called("[" + "1," * 350 + "1]")]}),
            *({"messages": [USER, *[called("[" + "1," * 190 + "1]")] * 2]}, None, "400 .*body_values_max"),
        ),
        ("/v1/completions", {"prompt": [5] * 390}, {"prompt": [5] * 410}, None, "400 .*body_values_max"),
        (CHAT, {**BODY, "x": nested(199)}, {**BODY, "x": nested(200)}, None, "deeper than 200"),
    ],
)
async def test_what_a_body_may_have_is_bounded(narrow, backend, path, most, beyond, param, said):
    response = await narrow.post(path, json=most)
    assert response.status_code == 200, response.text
    backend.requests.clear()
    error = check(await narrow.post(path, json=beyond), 400, param)
    assert re.search(said, error["message"])
    assert backend.requests == []


@pytest.mark.parametrize("path", ["/v1/agents/ann/inject", "/v1/agents/ann/fork", "/v1/agents/ann/move"])
async def test_every_body_is_bounded(narrow, path):
    assert "body_values_max" in check(await narrow.post(path, json={"x": [0] * 500}), 400, None)["message"]
    assert "deeper" in check(await narrow.post(path, content=b"[" * 300), 400, None)["message"]


@pytest.mark.parametrize("arguments", ["[" * 190 + "]" * 190, "[1," * 150, '{"a": "' + "[,{:" * 200 + '"}'])
async def test_arguments_that_are_odd_are_text(narrow, arguments):
    assert (await narrow.post(CHAT, json={"messages": [USER, called(arguments)]})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**BODY, "model": "m" * 500_000}, "model"),
        ({**BODY, "logit_bias": {"k" * 500_000: 1}}, "logit_bias"),
        ({"messages": [{"role": "r" * 500_000, "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "t" * 500_000}]}]}, "messages[0].content[0].type"),
    ],
)
async def test_an_error_does_not_repeat_what_is_long(api, body, param):
    response = await api.client.post(CHAT, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000


async def test_a_large_body_is_parsed_in_pieces(api, backend):
    said = "".join(random.Random(1).choices('ab "\\\n\u0000é漢😀', k=60_000))
    body = {"messages": [{"role": "user", "content": "Hi"}], "user": said, "x": [[said[:9]] * 9] * 1500}
    assert 256 * 2**10 < len(json.dumps(body)) < 2**20
    assert (await api.post(body)).status_code == 200
    assert (await api.post({**body, "messages": [{"role": "user", "content": 5}]})).status_code == 400
    assert len(backend.requests) == 1
