"""What an endpoint measures of its sequences, by whichever protocol they came and however they end."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.pipeline.generation import Generator
from satchel.api.pipeline.streams import abort_all
from satchel.api.protocols.openai.messages import read_messages
from satchel.api.requests.requests import ChatRequest
from satchel.cluster.errors import GenerationFailed
from tests.worlds.api.fake_backend import PREFILL_S, QUEUED_S, FakeBackend

HI = [{"role": "user", "content": "Hi"}]

PROTOCOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
    "/api/chat": {"messages": HI, "model": "satchel/tiny"},
    "/api/generate": {"prompt": "Hi", "model": "satchel/tiny"},
}

CALL = 'A call: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Measured:
    """The samples of `/metrics`, summed over models and replicas."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        named = [sample for sample in self._samples if sample.name == f"vllm:{name}"]
        return sum(sample.value for sample in named if labels.items() <= sample.labels.items())

    def engines(self, name: str) -> dict[str, float]:
        return {s.labels["engine"]: s.value for s in self._samples if s.name == f"vllm:{name}"}

    @property
    def ends(self) -> dict[str, float]:
        reasons = {s.labels["finished_reason"] for s in self._samples if s.name == "vllm:request_success_total"}
        return {reason: self("request_success_total", finished_reason=reason) for reason in reasons}


async def measured(client: httpx.AsyncClient) -> Measured:
    return Measured((await client.get("/metrics")).text)


def of(generator: Generator) -> Measured:
    return Measured(generate_latest(generator.metrics.registry).decode())


@pytest.fixture
def generator(backend: FakeBackend, config: Any) -> Generator:
    return Generator(backend, config)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(read_messages(HI), **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PROTOCOLS)
async def test_a_sequence_of_any_protocol_is_measured_once(client, backend, path: str, stream: bool):
    backend.say("Hello there")
    answer = await client.post(path, json={**PROTOCOLS[path], "stream": stream})
    assert answer.status_code == 200, answer.text
    found = await measured(client)
    tokens = len(backend.text.tokenizer.encode("Hello there"))
    assert found.ends == {"stop": 1}
    assert found("time_to_first_token_seconds_count") == 1
    assert found("inter_token_latency_seconds_count") == tokens - 1
    assert found("request_generation_tokens_sum") == tokens
    assert found("request_prompt_tokens_sum") == len(backend.requests[-1]["prompt"])
    assert found("request_queue_time_seconds_sum") == QUEUED_S
    assert found("request_prefill_time_seconds_sum") == PREFILL_S
    decode_s = found("request_decode_time_seconds_sum")
    assert 0 < decode_s == pytest.approx(found("inter_token_latency_seconds_sum"))
    assert found("request_inference_time_seconds_sum") == pytest.approx(PREFILL_S + decode_s)
    assert found("request_time_per_output_token_seconds_sum") == pytest.approx(decode_s / (tokens - 1))
    whole_s = found("e2e_request_latency_seconds_sum")
    assert found("e2e_request_latency_seconds_count") == 1
    assert whole_s >= found("time_to_first_token_seconds_sum") + decode_s > 0
    assert found("time_to_first_token_seconds_count", model_name="satchel/tiny", engine="satchel/tiny#0") == 1


async def test_every_choice_of_every_prompt_is_a_sequence(client, backend):
    backend.say("one", "two", "three")
    for body in ({"prompt": ["a", "b"], "n": 3}, {"prompt": ["a", "b"], "n": 3, "stream": True}):
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    found = await measured(client)
    assert sum(found.ends.values()) == 12
    assert found("time_to_first_token_seconds_count") == found("e2e_request_latency_seconds_count") == 12


async def test_an_answer_says_how_it_ended(client, backend):
    backend.say("Hello", finish="length")
    await client.post("/v1/completions", json={"prompt": "Hi"})
    backend.say("Hello there")
    # The endpoint finds the stop string, and aborts the sequence itself.
    await client.post("/v1/completions", json={"prompt": "Hi", "stop": "lo t"})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    backend.say(CALL)
    called = await client.post("/v1/chat/completions", json={"messages": HI, "tools": tools})
    assert called.json()["choices"][0]["finish_reason"] == "tool_calls"
    found = await measured(client)
    assert found.ends == {"length": 1, "stop": 2}
    assert found("e2e_request_latency_seconds_count") == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sequence_that_fails_is_counted_and_its_end_is_not_timed(client, backend, stream: bool):
    backend.play(SequenceUpdate("r", [5], cached_tokens=0, queued_s=1.0, prefill_s=1.0), GenerationFailed("broken"))
    await client.post("/v1/chat/completions", json={"messages": HI, "stream": stream})
    found = await measured(client)
    assert found.ends == {"error": 1}
    assert found("time_to_first_token_seconds_count") == 1
    assert found("e2e_request_latency_seconds_count") == found("request_queue_time_seconds_count") == 0


async def test_a_refused_request_is_no_sequence(client, backend):
    backend.refusal = GenerationFailed("broken")
    await client.post("/v1/chat/completions", json={"messages": HI})
    assert (await measured(client)).ends == {}


async def test_a_sequence_whose_reader_left_is_aborted(generator, backend):
    (stream,) = await generator.start_chats(chat())
    async with aclosing(aiter(stream)) as events:
        await anext(events)
    (unread,) = await generator.start_chats(chat())
    await abort_all([unread])
    backend.play(asyncio.Event())
    (waiting,) = await generator.start_chats(chat())
    task = asyncio.create_task(waiting.collect())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert of(generator).ends == {"abort": 3}


async def test_a_sequence_stopped_by_its_id_is_aborted(generator, backend):
    backend.play(asyncio.Event())
    (stream,) = await generator.start_chats(chat(request_id="r"))
    task = asyncio.create_task(stream.collect())
    await asyncio.sleep(0.01)
    assert generator.running.stop("r", "") == 1
    await asyncio.wait({task})
    assert of(generator).ends == {"abort": 1}


async def test_waiting_for_acceptance_counts_to_the_first_token(generator):
    await (await generator.start_chat(chat(arrived=time.perf_counter() - 10))).collect()
    found = of(generator)
    assert found("time_to_first_token_seconds_sum") >= 10
    assert found("e2e_request_latency_seconds_sum") >= 10
    assert found("inter_token_latency_seconds_sum") < 10


async def test_a_sequence_that_fails_over_is_measured_as_one_and_ends_at_its_last_replica(generator, backend):
    first, second = asyncio.Event(), asyncio.Event()
    told = {"cached_tokens": 0, "queued_s": 3.0, "prefill_s": 4.0}
    backend.play(
        SequenceUpdate("r", [5], **told), first, SequenceUpdate("r", [5], queued_s=9.0, prefill_s=9.0), second,
        SequenceUpdate("r", [], finish="stop"),
    )  # fmt: skip
    stream = await generator.start_chat(chat())
    task = asyncio.create_task(stream.collect())
    await asyncio.sleep(0.01)
    backend.generations[0].replica = "other"
    first.set()
    second.set()
    await task
    found = of(generator)
    assert found.engines("time_to_first_token_seconds_count") == {"satchel/tiny#0": 1, "other": 0}
    assert found.engines("inter_token_latency_seconds_count") == {"satchel/tiny#0": 0, "other": 1}
    assert found.engines("request_success_total") == {"other": 1}
    assert (found("request_queue_time_seconds_sum"), found("request_prefill_time_seconds_sum")) == (3.0, 4.0)


async def test_a_sequence_without_a_token_has_no_time_to_it(generator, backend):
    backend.play(SequenceUpdate("r", [], finish="length", cached_tokens=0, queued_s=1.0, prefill_s=2.0))
    await (await generator.start_chat(chat())).collect()
    found = of(generator)
    assert found.ends == {"length": 1}
    assert found("request_prefill_time_seconds_sum") == 2.0
    for name in ("time_to_first_token", "request_decode_time", "request_inference_time"):
        assert found(f"{name}_seconds_count") == 0
