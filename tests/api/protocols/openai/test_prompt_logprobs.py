"""`echo` with `logprobs`: each token of a prompt has a logprob, as programs that compare likelihoods need it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.protocol.replica_messages import SequenceUpdate
from tests.worlds.api.fake_backend import FakeBackend


def own(token: int) -> Any:
    return pytest.approx(FakeBackend.logprobs_of(token, 0)[0])


async def test_every_token_of_a_prompt_has_a_logprob(api, backend):
    """The first has none, for nothing comes before it. Offsets count from the prompt's first character."""
    backend.say(" and more")
    tokenizer = backend.text.tokenizer
    prompts = [tokenizer.encode(text) for text in ("once upon a time", "a")]
    body = (await api.complete(prompts, echo=True, logprobs=2)).json()
    assert backend.pooled[0].texts == prompts and backend.pooled[0].logprobs == 2
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        found, text = choice["logprobs"], choice["text"]
        tokens = [*prompt, *tokenizer.encode(" and more")]
        assert found["token_logprobs"] == [None, *map(own, tokens[1:])]
        assert found["tokens"] == [tokenizer.token_bytes(token).decode() for token in tokens]
        assert found["top_logprobs"][0] is None
        best = found["top_logprobs"][1]
        assert best[tokenizer.token_bytes(tokens[1] + 1).decode()] == pytest.approx(own(tokens[1]).expected - 1)
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert text[offset : offset + len(token)] == token


async def test_the_token_that_ends_an_answer_is_told_too(api, backend):
    """So that a client that wants only the prompt's can take away as many as it had generated."""
    end = min(backend.text.tokenizer.end_tokens)
    backend.play(SequenceUpdate("r", [end], finish="stop", cached_tokens=0))
    prompt = backend.text.tokenizer.encode("once upon")
    choice = (await api.complete(prompt, echo=True, logprobs=1, max_tokens=1)).json()["choices"][0]
    assert choice["text"] == "once upon"
    assert choice["logprobs"]["token_logprobs"] == [None, *map(own, prompt[1:]), own(end)]


async def test_only_the_prompts_logprobs(api, backend):
    backend.play(SequenceUpdate("r", [], finish="length", cached_tokens=0))
    prompt = backend.text.tokenizer.encode("once upon")
    choice = (await api.complete(prompt, echo=True, logprobs=0, max_tokens=0)).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, *map(own, prompt[1:])]
    chunks = await api.complete_stream(prompt, echo=True, logprobs=0, max_tokens=0)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [value for each in told if each for value in each["token_logprobs"]] == [None, *map(own, prompt[1:])]


async def test_special_tokens_and_parts_of_characters_count(api, backend):
    """There is one entry for each token, whatever it is in the text."""
    backend.say("ok")
    tokenizer = backend.text.tokenizer
    end = min(tokenizer.end_tokens)
    prompt = [end, *tokenizer.encode("é€"), end]
    found = (await api.complete(prompt, echo=True, logprobs=0)).json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + len(tokenizer.encode("ok"))
    assert not any(math.isnan(value) for value in found["token_logprobs"][1:])


async def test_a_model_that_has_none_says_so(api, backend):
    embedding = replace(backend.served[0].info.embedding, refusal="its layers are divided")
    backend.served[0] = replace(backend.served[0], info=replace(backend.served[0].info, embedding=embedding))
    response = await api.complete("once", echo=True, logprobs=1)
    assert response.status_code == 400 and "its layers are divided" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "echo"
    assert (await api.complete("once", echo=True)).status_code == 200
