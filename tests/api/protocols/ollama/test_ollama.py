"""Ollama's API: what its clients see, line by line, what the replica gets, and what is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.actors.model_files.weights import Tensor
from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.api.app import create_app
from satchel.api.protocols.ollama.models import ModelFacts, level_of, listed_body, parameters_of
from satchel.cluster.errors import GenerationFailed, QueueFull
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.remembering import Remembering
from tests.worlds.api.served_models import served_model

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def post(client: httpx.AsyncClient, route: str = "chat", **fields: Any) -> httpx.Response:
    said = {"messages": HELLO} if route == "chat" else {"prompt": "Hi"}
    return await client.post(f"/api/{route}", json={"model": "satchel/tiny", **said, **fields})


async def whole(client: httpx.AsyncClient, route: str = "chat", **fields: Any) -> dict[str, Any]:
    response = await post(client, route, stream=False, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def lines(client: httpx.AsyncClient, route: str = "chat", **fields: Any) -> list[dict[str, Any]]:
    response = await post(client, route, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"} and response.headers["x-request-id"]
    return response.json()["error"]


def untimed(body: dict[str, Any]) -> dict[str, Any]:
    assert body.pop("created_at").endswith("Z")
    for name in DURATIONS if body["done"] else ():
        assert body.pop(name) >= 0
    return body


@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_a_whole_answer_and_its_lines(client, backend, route):
    def part(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if route == "chat" else {"response": text}

    backend.say("Hello 日本\u2028 😀", cached=3, step=100)
    answer = untimed(await whole(client, route))
    end = {
        "model": "satchel/tiny",
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": len(backend.requests[0]["prompt"]),
        "prompt_eval_cached_count": 3,
        "eval_count": len(backend.text.tokenizer.encode("Hello 日本\u2028 😀")),
    }
    assert answer == {**end, **part("Hello 日本\u2028 😀")}
    first, last = map(untimed, await lines(client, route))
    assert first == {"model": "satchel/tiny", **part("Hello 日本\u2028 😀"), "done": False}
    assert last == {**end, **part("")}
    cut = await whole(client, route, options={"stop": ["lo"]})
    assert cut["done_reason"] == "stop" and untimed(cut) | part("Hel") == cut
    backend.say("Hello", finish="length")
    assert (await whole(client, route))["done_reason"] == "length"


async def test_calls_are_whole_and_their_arguments_objects(client, backend):
    backend.say("Well. " + CALL)
    for tools in ([TOOL], [{"function": TOOL["function"]}]):
        message = (await whole(client, tools=tools))["message"]
        (call,) = message["tool_calls"]
        assert call.pop("id").startswith("call_") and message["content"] == "Well."
        assert call == {"function": {"index": 0, "name": "weather", "arguments": {"city": "Köln"}}}
    parts = [part["message"] for part in await lines(client, tools=[TOOL])]
    assert "".join(part["content"] for part in parts).strip() == "Well."
    (streamed,) = [call for part in parts for call in part.get("tool_calls", ())]
    assert streamed["function"] == call["function"]
    asked = {"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]}
    said = [*HELLO, asked, {"role": "Tool", "content": "rain", "tool_name": "weather"}]
    await whole(client, messages=said, tools=[TOOL])
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in backend.prompt and "rain" in backend.prompt
    assert backend.prompt.endswith("<|im_start|>assistant\n")


async def test_thinking_is_apart(client, thinker):
    thinker.say("<think>\nHm, well.\n</think>\n\nYes.")
    message = (await whole(client, think=True))["message"]
    assert message == {"role": "assistant", "content": "Yes.", "thinking": "Hm, well."}
    text = await whole(client, "generate")
    assert (text["response"], text["thinking"]) == ("Yes.", "Hm, well.")
    parts = [part["message"] for part in await lines(client)]
    assert "".join(part.get("thinking", "") for part in parts) == "Hm, well."
    assert "".join(part["content"] for part in parts) == "Yes."
    await whole(client, messages=[*HELLO, message, {"role": "user", "content": "Why?"}])
    assert "<think>\nHm, well.\n</think>\n\nYes." in thinker.prompt
    shown = await client.post("/api/show", json={"model": "satchel/tiny"})
    assert "thinking" in shown.json()["capabilities"]


@pytest.mark.parametrize(("think", "closed"), [(True, False), (False, True), ("low", False), ("max", False)])
async def test_think_is_the_templates_switch(client, thinker, think, closed):
    await whole(client, think=think)
    assert thinker.prompt.endswith("<think>\n\n</think>\n\n") is closed


async def test_what_is_begun_is_continued(client, backend):
    await whole(client, messages=[*HELLO, {"role": "assistant", "content": "Good "}])
    assert backend.prompt.endswith("<|im_start|>assistant\nGood ")


async def test_a_text_is_a_chat_unless_raw(client, backend):
    await whole(client, "generate", system="Be brief.", context=[], template="")
    assert backend.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    await whole(client, "generate", raw=True)
    assert backend.prompt == "Hi"
    assert "has no fill-in-the-middle tokens" in refused(await post(client, "generate", suffix="there"))


async def test_without_words_a_model_is_only_loaded(client, backend):
    for route, empty in (("chat", {"messages": []}), ("chat", {"messages": None}), ("generate", {"prompt": ""})):
        body = (await post(client, route, **empty, keep_alive=0)).json()
        assert body.pop("created_at") and body["done_reason"] == "load" and body["done"] is True
    assert refused(await post(client, model="llama9", messages=[]), 404) == "model 'llama9' not found"
    assert backend.requests == []


async def test_options_are_the_replicas(client, backend):
    given = {"num_predict": 7, "temperature": 0.5, "top_k": 5.0, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": "x"}
    given |= {"repeat_penalty": 1.1, "repeat_last_n": 64, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    tolerated = {"num_ctx": 4096, "num_gpu": 99, "use_mmap": True, "num_keep": 5, "numa": False, "f16_kv": None}
    off = {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "tfs_z": 1, "penalize_newline": True, "unknown": "x"}
    await whole(client, options={**given, **tolerated, **off}, truncate=True, shift=False, keep_alive="5m")
    sampling = backend.requests[0]["sampling"]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (7, 0.5, 5, 3)
    assert (sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.9, 0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    await whole(client, options={**given, "repeat_last_n": 0, "seed": -1, "num_predict": -2})
    sampling = backend.requests[1]["sampling"]
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    assert penalties == (1, 0, 0) and sampling.seed >= 0
    assert sampling.max_tokens == 1000 - len(backend.requests[1]["prompt"])


async def test_logprobs_beside_their_words(client, backend):
    backend.say("Hi you", step=100)
    shown = (await whole(client, logprobs=True, top_logprobs=2))["logprobs"]
    assert "".join(token["token"] for token in shown) == "Hi you" and len(shown[0]["top_logprobs"]) == 2
    streamed = await lines(client, logprobs=True, top_logprobs=2)
    assert streamed[0]["logprobs"] == shown and "logprobs" not in streamed[-1]
    assert "logprobs" not in await whole(client, top_logprobs=2)


async def test_names_of_models(client, backend, config):
    backend.served[1] = served_model(backend.served[1], name="qwen:7b")
    backend.configured[1] = "qwen:7b"
    for name, served in (("satchel/tiny:latest", "satchel/tiny"), ("qwen:7b", "qwen:7b")):
        answer = await whole(client, model=name)
        assert answer["model"] == name and backend.requests[-1]["model"] == served
    assert refused(await post(client, model="qwen"), 404) == "model 'qwen' not found"
    app = create_app(backend, replace(config, endpoint=replace(config.endpoint, unknown_model="default")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as lenient:
        response = await post(lenient, model="llama9:70b")
        assert response.status_code == 200 and response.headers["x-satchel-model"] == "satchel/tiny"


async def test_an_agent_goes_on(backend, config):
    endpoint = Remembering(backend, config)
    endpoint.client.headers["X-Agent-ID"] = "ann"
    await whole(endpoint.client)
    response = await post(endpoint.client, agent_continue=True, messages=[{"role": "user", "content": "And?"}])
    assert response.headers["x-satchel-agent"] == "ann"
    said = [(message["role"], message["content"]) for message in await endpoint.transcript()]
    assert said == [("user", "Hi"), ("assistant", "Hello there"), ("user", "And?"), ("assistant", "Hello there")]
    endpoint.store.down.add("commit")
    endpoint.memory.timing = replace(endpoint.memory.timing, answer_s=0.1)
    unkept = {"kept": False, "reason": "unanswered"}
    assert (await whole(endpoint.client))["satchel"] == (await lines(endpoint.client))[-1]["satchel"] == unkept
    await endpoint.client.aclose()


async def test_a_failure_in_the_middle_is_a_line(client, backend):
    tokenizer = backend.text.tokenizer
    backend.play(SequenceUpdate("r", tokenizer.encode("Hello"), cached_tokens=0), GenerationFailed("numbers ran out"))
    assert (await lines(client))[-1] == {"error": "numbers ran out"}


async def test_a_sequence_stops_with_its_client(server, backend):
    backend.play(SequenceUpdate("r", backend.text.tokenizer.encode("Hello"), cached_tokens=0), asyncio.Event())
    async with (
        httpx.AsyncClient(base_url=server) as client,
        client.stream("POST", "/api/chat", json={"model": "satchel/tiny", "messages": HELLO}) as response,
    ):
        await anext(response.aiter_lines())
    async with asyncio.timeout(20):
        await backend.generations[0].aborted.wait()


FIELDS: list[tuple[str, list[Any]]] = [
    ("model", [None, "", 5, ["m"]]),
    ("messages", ["Hi", {}, 5]),
    ("stream", ["true", 1]),
    ("format", ["xml", 5, ["json"], True]),
    ("think", ["often", 1, [], {}]),
    ("keep_alive", [True, [], {}]),
    ("truncate", ["yes", 1]),
    ("shift", ["yes", 1]),
    ("logprobs", ["yes", 1]),
    ("top_logprobs", [-1, 21, "2", 1.5]),
    ("tools", ["x", {}, ["x"], [{}], [{"function": {}}], [{"type": "code", "function": {"name": "f"}}]]),
    ("agent_id", [5, "", "a b"]),
    ("agent_continue", [5, True]),
    ("_debug_render_only", [True, "x"]),
    ("options", ["x", [], 5]),
]
OPTIONS: list[tuple[str, list[Any]]] = [
    ("num_predict", ["5", 1.5, True, 2**63]),
    ("temperature", ["0.5", True, -0.1, 10.1, 1e999]),
    ("top_k", [-2, 1.5, "3"]),
    ("top_p", [-0.1, 1.1, "1"]),
    ("min_p", [-0.1, 1.1]),
    ("repeat_penalty", [0, 11, "1"]),
    ("repeat_last_n", [-2, "64"]),
    ("presence_penalty", [-2.1, "0"]),
    ("frequency_penalty", [2.1, []]),
    ("seed", ["1", 0.5, 2**63]),
    ("stop", [5, [5], [""], ["x"] * 17]),
    ("mirostat", [1, 2, "1"]),
    ("typical_p", [0.5, []]),
    ("tfs_z", [0.5, {}]),
    ("num_ctx", ["4096", []]),
]


@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_a_wrong_field_is_named(client, backend, route):
    wrong = [({name: value}, name) for name, values in FIELDS for value in values]
    wrong += [({"options": {name: value}}, f"options.{name}") for name, values in OPTIONS for value in values]
    if route == "generate":
        wrong = [(fields, name) for fields, name in wrong if name not in ("messages", "tools")]
        more = [("prompt", [5, []]), ("system", [5]), ("suffix", [5]), ("raw", ["yes"]), ("images", ["x", [5]])]
        wrong += [({name: value}, name) for name, values in more for value in values]
        more = [("template", ["{{ .Prompt }}", 5]), ("context", [[1], 5])]
        wrong += [({name: value}, name) for name, values in more for value in values]
        wrong += [({"raw": True, name: value}, name) for name, value in (("system", "x"), ("think", True))]
        wrong += [({"raw": True, "images": ["AAAA"]}, "images")]
    for fields, name in wrong:
        body = {"model": "satchel/tiny", "messages": HELLO, "prompt": "Hi", **fields}
        response = await client.post(f"/api/{route}", content=json.dumps(body).replace("Infinity", "1e999"))
        assert refused(response).startswith(name), (fields, response.text)
    penalized = {"repeat_last_n": 32, "repeat_penalty": 1.1}
    assert refused(await post(client, route, options=penalized)).startswith("options.repeat_last_n")
    assert backend.requests == []


USE = {"function": {"name": "f", "arguments": {}}}
MESSAGES = [
    ([5], "messages[0] must"),
    ([{}], "messages[0].role"),
    ([*HELLO, {"role": "robot", "content": "x"}], "messages[1].role"),
    ([{"role": ["user"]}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "messages[0].content"),
    ([{"role": "user", "images": "x"}], "messages[0].images must"),
    ([{"role": "user", "images": [5]}], "messages[0].images[0]"),
    ([{"role": "user", "images": ["AAAA"]}], "messages[0].images[0]: this model does not support images"),
    ([{"role": "user", "tool_calls": [USE]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "thinking": 5}], "messages[0].thinking"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls must"),
    ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}], "messages[0].tool_calls[0].function.name"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        "messages[0].tool_calls[0].function.arguments must be an object",
    ),
    ([{"role": "assistant", "tool_calls": [{**USE, "id": 5}]}], "messages[0].tool_calls[0].id"),
    ([{"role": "tool", "content": "x", "tool_name": "n" * 2000}], "messages[0].tool_name"),
    ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ([*HELLO, {"role": "assistant", "tool_calls": [USE]}], "messages end with a call"),
    ([{"role": "assistant", "content": "Good "}], "messages begin with"),
    ([{"role": "user", "content": "refuse me"}], "the model's chat template refused"),
]


async def test_a_wrong_message_is_named(client, backend):
    for messages, said in MESSAGES:
        assert refused(await post(client, messages=messages)).startswith(said), said
    assert backend.requests == []


async def test_errors_of_every_kind_have_ollamas_shape(client, backend, config, tmp_path: Path):
    for data in (b"", b"{", b"[]", b"null"):
        refused(await client.post("/api/chat", content=data))
    refused(await client.post("/api/chat", content=b"x", headers={"Content-Type": "text/plain", "Referer": "x"}), 415)
    refused(await client.get("/api/chat"), 405)
    refused(await client.get("/api/nothing"), 404)
    assert refused(await client.post("/api/show", json={"verbose": True})) == "model is required"
    refused(await client.post("/api/show", json={"model": 5}))
    long = [{"role": "user", "content": "word " * 1000}]
    said = refused(await post(client, messages=long, truncate=True))
    assert said.startswith("the input length exceeds the context length: ") and said.endswith(" tokens > 999 maximum")
    big = refused(await post(client, messages=[{"role": "user", "content": "x" * 2**20}]), 413)
    assert "endpoint.body_bytes_max" in big
    assert "endpoint.messages_max" in refused(await post(client, messages=HELLO * (config.endpoint.messages_max + 1)))
    pictures = [{"role": "user", "images": ["A"] * (config.endpoint.parts_max + 1)}]
    assert "endpoint.parts_max" in refused(await post(client, messages=pictures))
    schema = refused(await post(client, format={"type": "thing"}))
    assert schema.startswith("format")
    for path in ("pull", "push", "create", "copy", "delete"):
        method = "DELETE" if path == "delete" else "POST"
        assert "is not supported" in refused(await client.request(method, f"/api/{path}", json={"model": "x"}), 501)
    assert (await client.head("/api/blobs/sha256:00")).status_code == 501
    backend.refusal = QueueFull("full", retry_after_s=2.2)
    for stream in (False, True):
        response = await post(client, stream=stream)
        assert refused(response, 503) == "full" and response.headers["retry-after"] == "3"
    home = Home(tmp_path / "home")
    prepare_home(home)
    secret = create_key(home, "ann", models=("other",))[1]
    app = create_app(backend, config, keys=KeyRing(home, required=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as stranger:
        refused(await stranger.get("/api/tags"), 401)
        stranger.headers["Authorization"] = f"Bearer {secret}"
        (listed,) = (await stranger.get("/api/tags")).json()["models"]
        assert listed["name"] == "other"
        refused(await post(stranger), 404)
    assert "code" in (await client.post("/v1/nothing", json={})).json()["error"], "OpenAI's shape everywhere else"


async def test_what_files_do_not_say_is_left_out(client, backend, tmp_path: Path):
    shown = (await client.post("/api/show", json={"name": "satchel/tiny:latest"})).json()
    assert shown["model_info"]["qwen3.context_length"] == backend.served[0].info.context_tokens
    assert "general.parameter_count" not in shown["model_info"], "the tiny model has no weights"
    backend.served[0] = served_model(backend.served[0], folder=str(tmp_path))
    listed, _ = (await client.get("/api/tags/")).json()["models"]
    assert listed["modified_at"] == "2023-11-14T22:13:20.000000Z" and listed["digest"] == "31" * 32
    assert listed["size"] == 0 and not any(listed["details"].values())
    version = (await client.get("/api/version")).json()["version"]
    assert [int(part) for part in version.split(".")] > [0, 6, 4], "less is refused by VS Code"


def test_weights_are_counted_as_they_were_before_they_were_quantized(backend):
    packed = {
        "a.weight": Tensor("U32", (8, 16), 512),
        "a.scales": Tensor("BF16", (8, 2), 32),
        "a.biases": Tensor("BF16", (8, 2), 32),
        "b.weight": Tensor("U32", (8, 32), 1024),
        "b.scales": Tensor("BF16", (8, 2), 32),
        "norm.weight": Tensor("BF16", (128,), 256),
    }
    quantization = {"bits": 4, "group_size": 64, "b": {"bits": 8}}
    assert parameters_of(packed, quantization) == 8 * 128 + 8 * 128 + 128
    assert (level_of(packed, quantization), level_of(packed, {**quantization, "mode": "mxfp4"})) == ("int4", "mxfp4")
    assert parameters_of({"a": Tensor("F8_E4M3", (8, 8), 64)}, {}) is None
    assert (level_of({"a": Tensor("F8_E4M3", (8, 8), 64)}, {}), level_of({}, {})) == ("", "")
    for count, shown in ((8_030_261_248, "8.0B"), (596_049_920, "596.0M"), (83_000, "83.0K"), (None, "")):
        details = listed_body(backend.served[0], ModelFacts(parameters=count))["details"]
        assert details["parameter_size"] == shown


async def test_texts_are_embedded_in_both_forms(client: httpx.AsyncClient, backend: FakeBackend):
    async def embed(path: str = "embed", **fields: Any) -> httpx.Response:
        return await client.post(f"/api/{path}", json={"model": "satchel/tiny", **fields})

    one, two = backend.text.tokenizer.encode("Hello"), backend.text.tokenizer.encode("b")
    response = await embed(input=["Hello", "b"], keep_alive="5m", options={"num_ctx": 8})
    body = response.json()
    assert response.headers["x-satchel-replica"] == "satchel/tiny#0"
    assert list(body) == ["model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"]
    assert backend.pooled[-1].texts == [one, two] and body["prompt_eval_count"] == len(one) + len(two)
    assert body["model"] == "satchel/tiny" and body["load_duration"] == 0 < body["total_duration"]
    (first, _) = body["embeddings"]
    assert (await embed(input="Hello")).json()["embeddings"] == [first]
    assert (await embed("embeddings", prompt="Hello")).json() == {"embedding": first}
    assert [len(vector) for vector in (await embed(input="Hello", dimensions=5.0)).json()["embeddings"]] == [5]
    asked = len(backend.pooled)
    empty: Any
    for empty in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert (await embed(**empty)).json()["embeddings"] == []
    assert (await embed("embeddings", prompt="")).json() == {"embedding": []}
    assert len(backend.pooled) == asked, "the model is only loaded"
    long = "word " * 900
    assert (await embed(input=long)).json()["prompt_eval_count"] == 1000
    assert (await embed("embeddings", prompt=long)).status_code == 200
    said = refused(await embed(input=["a", long], truncate=False))
    assert said.startswith("the input length exceeds the context length: ") and said.endswith(" tokens > 1000 maximum")
    for given, where in (([5], "input"), (5, "input"), (["a", ""], "input[1]")):
        assert refused(await embed(input=given)).startswith(where)
    assert refused(await embed(input="a", dimensions=100)).startswith("dimensions")
    assert refused(await embed(input="a", model="other"))
    assert refused(await embed(input="a", model="llama9"), 404) == "model 'llama9' not found"
    assert (await embed(input="a", model="satchel/tiny:latest")).json()["model"] == "satchel/tiny:latest"
