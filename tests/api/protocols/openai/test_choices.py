"""`n`: several answers to one prompt, whole or streamed; and the limits that a request sets itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import httpx
import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.cluster.errors import GenerationFailed, QueueFull, SlowReader

ANSWERS = ("one two", "three", "four five six")


async def test_choices_come_in_order_and_the_prompt_counts_once(api, backend):
    backend.scripts.clear()
    backend.scripts.extend(backend.sequence(text, cached=9 - i) for i, text in enumerate(ANSWERS))
    body = (await api.chat(n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert tuple(choice["message"]["content"] for choice in body["choices"]) == ANSWERS
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(backend.requests[0]["prompt"])
    assert usage["completion_tokens"] == sum(len(backend.text.tokenizer.encode(text)) for text in ANSWERS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 9}


@pytest.mark.parametrize("seed", [None, 5])
async def test_sequences_of_a_prompt_share_its_seed_and_are_told_apart_by_choice(api, backend, seed):
    await api.chat(n=3, seed=seed)
    sequences = backend.requests
    assert [sequence["sampling"].choice for sequence in sequences] == [0, 1, 2]
    assert [sequence["choices"] for sequence in sequences] == [3, 3, 3]
    assert len({sequence["sampling"].seed for sequence in sequences}) == 1
    assert seed is None or sequences[0]["sampling"].seed == seed
    assert len({sequence["request_id"] for sequence in sequences}) == 3


async def test_the_first_sequence_is_accepted_before_the_others_start_beside_it(api, backend):
    """So it is known which replica computes the prompt, and the others go there and share its blocks."""
    accept, accepted = backend.generate, []

    async def generate(model, sequence, **how):
        if how["beside"]:
            assert accepted == [0]
        await asyncio.sleep(0.02)
        if not how["beside"]:
            accepted.append(sequence.sampling.choice)
        return await accept(model, sequence, **how)

    backend.generate = generate
    await api.chat(n=3)
    assert [sequence["beside"] for sequence in backend.requests] == ["", "satchel/tiny#0", "satchel/tiny#0"]


async def test_n_and_several_prompts_make_a_table_prompt_by_prompt(api, backend):
    """Sequences start in another order than their answers have, so they are identified by prompt and choice."""
    accept = backend.generate

    async def generate(model, sequence, **how):
        prompt, choice = backend.text.tokenizer.decode(sequence.prompt), sequence.sampling.choice
        backend.say(f"{prompt}{choice}")
        return await accept(model, sequence, **how)

    backend.generate = generate
    body = (await api.complete(["a", "b"], n=3)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 2
    seeds = {
        backend.text.tokenizer.decode(sequence["prompt"]): sequence["sampling"].seed for sequence in backend.requests
    }
    assert seeds["a"] != seeds["b"], "equal prompts in one request must not get equal answers"


async def test_streamed_choices_interleave_with_a_role_and_a_finish_each(api, backend):
    backend.say(*ANSWERS, cached=2)
    *chunks, usage, done = await api.stream(n=3, stream_options={"include_usage": True})
    assert done == "[DONE]"
    texts, roles, reasons = ["", "", ""], [0, 0, 0], [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        roles[index] += choice["delta"].get("role") == "assistant"
        texts[index] += choice["delta"].get("content", "")
        reasons[index] += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert roles[index] == 1, "the role comes first"
    assert tuple(texts) == ANSWERS
    assert reasons == [["stop"]] * 3
    assert usage["usage"]["prompt_tokens"] == len(backend.requests[0]["prompt"])
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_when_one_choice_is_refused_none_runs(api, backend, stream):
    backend.play(asyncio.Event())
    accept = backend.generate

    async def generate(model, sequence, **how):
        if sequence.sampling.choice == 2:
            raise QueueFull("full")
        return await accept(model, sequence, **how)

    backend.generate = generate
    assert (await api.chat(n=3, stream=stream)).status_code == 503
    assert [generation.aborts for generation in backend.generations] == [1, 1]


async def test_when_one_choice_fails_the_others_are_stopped(api, backend):
    backend.scripts.clear()
    backend.scripts.extend([[asyncio.Event()], [GenerationFailed("no")], [asyncio.Event()]])
    assert (await api.chat(n=3)).status_code == 500
    assert [generation.aborts for generation in backend.generations][::2] == [1, 1]


async def test_best_of_may_repeat_n(api, backend):
    assert len((await api.complete("x", n=2, best_of=2)).json()["choices"]) == 2


async def with_scheduling(backend, config, body, path="chat/completions", **limits) -> httpx.Response:
    config = dataclasses.replace(config, scheduling=dataclasses.replace(config.scheduling, **limits))
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(f"/v1/{path}", json=body)


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("body", "path", "param"),
    [
        ({**CHAT, "n": 5}, "chat/completions", "n"),
        ({"prompt": "a", "n": 5}, "completions", "n"),
        ({"prompt": ["a", "b"], "n": 3}, "completions", "prompt"),
    ],
)
async def test_more_sequences_than_the_queue_could_ever_take_are_refused(backend, config, body, path, param):
    response = await with_scheduling(backend, config, body, path, queue_requests_max=4)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_tokens_than_a_request_may_ask_for_are_refused_by_the_name_that_was_used(backend, config, field):
    response = await with_scheduling(backend, config, {**CHAT, field: 51}, max_tokens_max=50)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert field in response.json()["error"]["message"]
    assert backend.requests == []
    assert (await with_scheduling(backend, config, {**CHAT, field: 50}, max_tokens_max=50)).status_code == 200


@pytest.mark.parametrize(
    ("body", "path", "limit", "expected"),
    [
        (CHAT, "chat/completions", 50, 50),
        ({"prompt": "a"}, "completions", 50, 16),
        ({"prompt": "a"}, "completions", 5, 5),
        ({"prompt": "a", "min_tokens": 30}, "completions", 50, 30),
    ],
)
async def test_a_silent_request_gets_no_more_tokens_than_one_may_ask_for(backend, config, body, path, limit, expected):
    assert (await with_scheduling(backend, config, body, path, max_tokens_max=limit)).status_code == 200
    assert backend.sampling.max_tokens == expected


async def test_the_limit_on_time_reaches_the_replica_and_is_at_most_the_configured_one(api, backend, config):
    limit_s = config.timeouts.request_s
    for given, most in ((None, limit_s), (3.5, 3.5), (10**6, limit_s)):
        await api.chat(timeout_s=given)
        assert most - 3 < backend.requests[-1]["deadline_s"] <= most


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_after_its_own_timeout(api, backend, stream):
    """In mid-stream it is an event; the sequence is removed from the batch."""
    await api.chat("so that the tokenizer is loaded")
    backend.play(SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0), asyncio.Event())
    response = await api.chat(timeout_s=0.3, stream=stream)
    assert response.status_code == (200 if stream else 504)
    assert '"code":"deadline_exceeded"' in response.text
    assert backend.generations[-1].aborts == 1


async def test_time_spent_before_the_sequence_starts_counts(api, backend):
    await api.chat("so that the tokenizer is loaded")
    accept = backend.generate

    async def generate(model, sequence, **how):
        await asyncio.sleep(0.2)
        return await accept(model, sequence, **how)

    backend.generate = generate
    backend.play(asyncio.Event())
    assert (await api.chat(timeout_s=0.1)).json()["error"]["code"] == "deadline_exceeded"
    assert backend.generations == backend.generations[:1]


async def test_time_spent_on_sending_the_body_counts(api, backend):
    async def slowly():
        yield json.dumps({**CHAT, "timeout_s": 0.1}).encode()
        await asyncio.sleep(0.2)

    response = await api.client.post("/v1/chat/completions", content=slowly())
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert backend.requests == []


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_reads_too_slowly_gets_the_errors_event(api, backend, n):
    tokenizer = backend.text.tokenizer
    backend.play(SequenceUpdate("r", tokenizer.encode("Hello"), cached_tokens=0), SlowReader("4096 tokens are unread"))
    events = await api.stream(n=n)
    assert "[DONE]" not in events
    assert events[-1]["error"]["code"] == "slow_reader"
    assert events[-1]["error"]["type"] == "invalid_request_error"
    assert (await api.chat(n=n)).status_code == 408
