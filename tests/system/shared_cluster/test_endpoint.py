"""The endpoint as its users meet it: the official client, many agents, people who hang up, bad input, full queues."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from satchel.api.serve import Deployment

from .conftest import QUEUE_MAX, SEQUENCES_MAX

MODEL = "satchel/recall"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_code",
        "description": "Looks up the code of a name.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
ENDLESS = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 6000, "ignore_eos": True}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def running(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def wait_until(what: Callable[[], object], timeout_s: float = 20.0) -> None:
    ends = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def client(deployment: Deployment) -> OpenAI:
    return OpenAI(base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0)


def test_a_chat_recalls_and_each_turn_reuses_the_last(client: OpenAI):
    messages: list[Any] = []
    last_total = 0
    for text, expected in [
        ("Remember: the code of marlow is 4821.", "Noted."),
        ("Remember: the code of zubin is 0937.", "Noted."),
        ("What is the code of marlow?", "The code of marlow is 4821."),
        ("What is the code of zubin?", "The code of zubin is 0937."),
        ("What is the code of tessa?", "I do not know the code of tessa."),
    ]:
        messages.append(user(text))
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, extra_headers={"X-Agent-ID": "recaller"}
        )
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        # Everything that was read or said before is found again; only the new words are computed.
        assert answer.usage.prompt_tokens_details.cached_tokens == last_total or last_total == 0
        last_total = answer.usage.total_tokens
        messages.append({"role": "assistant", "content": expected})


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI):
    question: list[Any] = [user("Repeat after me: the 🦊 jumps över 42 fences.")]
    whole = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == "the 🦊 jumps över 42 fences."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_tool_is_called_and_its_result_told(client: OpenAI):
    messages: list[Any] = [user("Look up the code of marlow.")]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)  # type: ignore
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_code", {"name": "marlow"})  # type: ignore
    messages += [
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "7310"},
    ]
    told = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)  # type: ignore
    assert told.choices[0].message.content == "The code of marlow is 7310."


async def test_sixteen_parallel_agents_each_get_their_own_code_back(deployment: Deployment):
    async with AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0) as client:

        async def agent(index: int) -> tuple[bool, dict[str, str]]:
            name, code = f"agent{'abcdefghijklmnop'[index]}", f"{1000 + index * 397}"
            messages: list[Any] = []
            # With the id of a request there.
            replicas: dict[str, str] = {}
            for text in (f"Remember: the code of {name} is {code}.", f"What is the code of {name}?"):
                messages.append(user(text))
                answer = await client.chat.completions.with_raw_response.create(
                    model=MODEL, messages=messages, temperature=0, extra_headers={"X-Agent-ID": f"parallel-{index}"}
                )
                replicas[answer.headers["x-satchel-replica"]] = answer.headers["x-request-id"]
                content = answer.parse().choices[0].message.content or ""
                messages.append({"role": "assistant", "content": content})
            return content == f"The code of {name} is {code}.", replicas

        results = await asyncio.gather(*(agent(index) for index in range(16)))
        moved = [id for _, replicas in results if len(replicas) > 1 for id in replicas.values()]
        why = [await client.get(f"/cluster/decisions/{id}", cast_to=dict[str, Any]) for id in moved]
    assert [right for right, _ in results] == [True] * 16
    assert all(len(replicas) == 1 for _, replicas in results), f"an agent returns to its replica: {why}"
    assert len(set().union(*(replicas for _, replicas in results))) == 2, "agents spread"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_sequence(http: httpx.Client, stream: bool):
    """The sequence would run for minutes."""
    wait_until(lambda: running(http) == 0)
    with httpx.Client(base_url=http.base_url, timeout=None, trust_env=False) as leaver:
        if stream:
            with leaver.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True}) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                assert running(http) == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaver.post("/v1/chat/completions", json=ENDLESS, timeout=2.0)
    wait_until(lambda: running(http) == 0)


async def test_a_full_queue_is_a_503_and_nobody_else_is_disturbed(deployment: Deployment, http: httpx.Client):
    """More requests than two replicas' places and queues: some are refused with Retry-After, none fails otherwise.

    One caller can fill four fifths of a queue: the rest stays free for others."""
    most = 2 * (SEQUENCES_MAX + QUEUE_MAX)
    least = 2 * (SEQUENCES_MAX + QUEUE_MAX * 4 // 5)
    body = {"messages": [user("Say the numbers from one to thirty.")], "max_tokens": 40, "temperature": 0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False, limits=limits) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for _ in range(most + 20)), return_exceptions=False
        )
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == most + 20
    assert refused and len(served) >= least
    for answer in refused:
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in served}) == 1
    wait_until(lambda: running(http) == 0)


def test_headers_say_who_answered_and_why(http: httpx.Client):
    answer = http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [user("Hello.")], "max_tokens": 2, "agent_id": "header-reader"},
        headers={"x-request-id": "mine-1"},
    )
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert answer.headers["x-satchel-replica"] in {"satchel-recall-0", "satchel-recall-1"}
    assert answer.headers["x-satchel-why"]


def test_models_health_and_metrics(http: httpx.Client):
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").status_code == 200
    metrics = http.get("/metrics").text
    for replica in ("satchel-recall-0", "satchel-recall-1"):
        assert f'vllm:num_requests_running{{engine="{replica}",model_name="{MODEL}"}}' in metrics
        assert f'vllm:num_requests_waiting{{engine="{replica}",model_name="{MODEL}"}}' in metrics


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        ({"messages": []}, 400, "messages"),
        ({"messages": [user("Hi")], "temperature": 11}, 400, "temperature"),
        ({"messages": [user("Hi")], "max_tokens": -2}, 400, "max_tokens"),
        ({"messages": [user("Hi")], "model": "nobody/knows"}, 404, "model"),
        ({"messages": [user("word " * 9000)]}, 400, "messages"),
        ({"messages": [user("x" * 2_000_000)]}, 413, None),
        ({"messages": [user("Hi")], "agent_id": "no spaces"}, 400, "agent_id"),
    ],
)
def test_bad_input_is_a_clear_error_in_openais_shape(http: httpx.Client, body: Any, status: int, param: str | None):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "Traceback" not in error["message"]


def test_text_completions(client: OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["one, two,", "The code"], max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_an_agent_that_is_packed_right_after_its_turn_goes_on_elsewhere_with_nothing_computed_twice(http: httpx.Client):
    def ask(agent: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        body = {"model": MODEL, "messages": messages, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": agent}).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]

    messages = [user("Remember: the code of orrin is 5530. " + "The harbour is quiet today. " * 60)]
    said, before = ask("packed", messages)
    satchel = http.get("/v1/agents/packed/satchel").content
    http.put("/v1/agents/unpacked/satchel", content=satchel).raise_for_status()
    http.delete("/v1/cache").raise_for_status()
    messages += [{"role": "assistant", "content": said}, user("What is the code of orrin?")]
    answer, after = ask("unpacked", messages)
    assert answer == "The code of orrin is 5530."
    assert after["prompt_tokens_details"]["cached_tokens"] >= before["total_tokens"] - 2
