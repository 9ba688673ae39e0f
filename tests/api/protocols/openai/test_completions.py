"""`/v1/completions`: four forms of prompt, several choices, streamed or not."""

from __future__ import annotations

import asyncio

import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.cluster.errors import GenerationFailed, QueueFull


async def test_one_text(api, backend):
    backend.say(" and more", cached=1)
    body = (await api.complete("once upon")).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": " and more", "logprobs": None, "finish_reason": "stop"}]
    assert backend.prompt == "once upon"
    assert backend.sampling.max_tokens == 16
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


async def test_every_form_of_prompt(api, backend):
    tokens = backend.text.tokenizer.encode("once upon")
    for prompt, sequences in (("once upon", 1), (["once", "upon"], 2), (tokens, 1), ([tokens, tokens, tokens], 3)):
        backend.requests.clear()
        body = (await api.complete(prompt)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(sequences))
        assert len(backend.requests) == sequences
        assert body["usage"]["prompt_tokens"] == sum(len(request["prompt"]) for request in backend.requests)
    assert [request["prompt"] for request in backend.requests] == [tokens] * 3


async def test_answers_keep_the_order_of_their_prompts(api, backend):
    slow, fast = asyncio.Event(), backend.sequence("fast")
    backend.scripts.clear()
    backend.scripts.extend([[slow, *backend.sequence("slow")], [*fast[:-1], fast[-1]]])
    asyncio.get_running_loop().call_later(0.05, slow.set)
    body = (await api.complete(["a", "b"])).json()
    assert [choice["text"] for choice in body["choices"]] == ["slow", "fast"]


async def test_streams_of_several_prompts_interleave_by_index(api, backend):
    backend.say("one two", "three four")
    *chunks, usage, done = await api.complete_stream(["a", "b"], stream_options={"include_usage": True})
    assert done == "[DONE]"
    texts, reasons = ["", ""], [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["finish_reason"] is None or choice["text"] == ""
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    assert texts == ["one two", "three four"]
    assert reasons == [["stop"], ["stop"]]
    assert usage["usage"]["completion_tokens"] == sum(len(backend.text.tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize("stream", [False, True])
async def test_when_one_sequence_fails_the_others_are_stopped(api, backend, stream):
    backend.scripts.clear()
    backend.scripts.extend([[asyncio.Event()], [GenerationFailed("no")], [asyncio.Event()]])
    response = await api.complete(["a", "b", "c"], stream=stream)
    assert response.status_code == 500
    assert [generation.aborts for generation in backend.generations][::2] == [1, 1]


async def test_when_one_sequence_is_refused_none_runs(api, backend):
    backend.play(asyncio.Event())
    accept, left = backend.generate, 2

    async def generate(model, sequence, **how):
        nonlocal left
        left -= 1
        if left < 0:
            raise QueueFull("full")
        return await accept(model, sequence, **how)

    backend.generate = generate
    response = await api.complete(["a", "b", "c"])
    assert response.status_code == 503
    assert [generation.aborts for generation in backend.generations] == [1, 1]


async def test_stop_strings_work_across_tokens(api, backend):
    backend.say("line one\n\nline two")
    body = (await api.complete("x", stop=["\n\n"])).json()
    assert body["choices"][0]["text"] == "line one"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([""], "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([5, "a"], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([[1], [1, "a"]], "prompt[1][1]"),
        ([-1], "prompt[0]"),
        ([5, 10**6], "prompt[1]"),
        ([[5], [2**70]], "prompt[1][0]"),
        ([[1]] * 300, "prompt"),
        ("word " * 2000, "prompt"),
        ([7] * 1000, "prompt"),
    ],
)
async def test_bad_prompts_are_named(api, backend, prompt, param):
    response = await api.complete(prompt)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert backend.requests == []


async def test_a_prompt_may_fill_all_of_the_context_but_one(api, backend):
    backend.play(SequenceUpdate("r", [5], finish="length", cached_tokens=0))
    assert (await api.complete([7] * 999)).status_code == 200
    assert backend.sampling.max_tokens == 1
