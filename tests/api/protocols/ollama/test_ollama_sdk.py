"""Ollama's own client, unmodified, against the application: with the scripted model on a real engine, and with a vision
model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
import pytest_asyncio
from PIL import Image

from satchel.actors.protocol.media_ids import is_media_token
from satchel.api.app import create_app
from satchel.api.text.model import load_text_model
from satchel.cluster.config.config import Config, parse_config
from tests.worlds.api.engine_backend import remembering_app
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.vision_families import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "satchel/script:latest"
ASKED = {"role": "user", "content": "Please read the file /tmp/note.txt"}
HELLO = {"role": "user", "content": "Say 'good evening'"}


def read(file_path: str) -> str:
    """Reads a file.

    Args:
        file_path: the file
    """
    return file_path


def sdk(app: Any, **more: Any) -> ollama.AsyncClient:
    return ollama.AsyncClient("http://localhost", transport=httpx.ASGITransport(app), **more)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ollama.AsyncClient]:
    config = parse_config({"models": [{"name": "satchel/script", "source": "embedded:script"}]})
    async with remembering_app(config, tmp_path_factory.mktemp("kv")) as app:
        yield sdk(app, headers={"X-Agent-ID": "desk"})


async def test_a_tool_is_called_and_its_result_answered_from_memory(client: ollama.AsyncClient) -> None:
    said: list[Any] = [{"role": "system", "content": "You help. " * 200}, ASKED]
    first = await client.chat(MODEL, said, tools=[read])
    (call,) = list(first.message.tool_calls or ())
    assert (call.function.name, call.function.arguments) == ("read", {"file_path": "/tmp/note.txt"})
    assert first.model == MODEL and first.done and first.done_reason == "stop"
    said += [first.message, {"role": "tool", "content": "a heron sleeps", "tool_name": "read"}]
    answers: list[dict[str, Any]] = []

    async def note(response: httpx.Response) -> None:
        answers.append(json.loads(await response.aread()))

    client._client.event_hooks = {"response": [note]}
    second = await client.chat(MODEL, said, tools=[read])
    client._client.event_hooks = {}
    assert second.message.content == "It says: a heron sleeps"
    # The client drops fields that it does not know yet.
    assert answers[0]["prompt_eval_cached_count"] >= 0.9 * answers[0]["prompt_eval_count"]


async def test_a_stream_is_the_same_answer(client: ollama.AsyncClient) -> None:
    parts = [part async for part in await client.chat(MODEL, [ASKED], tools=[read], stream=True)]
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.arguments == {"file_path": "/tmp/note.txt"}
    assert "".join(part.message.content or "" for part in parts).strip() == "I read the file."
    last = parts[-1]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert last.prompt_eval_count and last.eval_count and last.load_duration == 0
    assert last.total_duration and last.prompt_eval_duration and last.eval_duration is not None
    assert last.prompt_eval_duration + last.eval_duration <= last.total_duration


async def test_texts_and_loading(client: ollama.AsyncClient) -> None:
    answer = await client.generate(MODEL, "Say 'good evening'", system="You help.", keep_alive="5m")
    assert answer.response == "good evening" and answer.done_reason == "stop" and answer.context is None
    short = await client.generate(MODEL, "Say 'good evening'", options={"num_predict": 1, "temperature": 0})
    assert short.done_reason == "length" and short.eval_count == 1
    pieces = [part.response or "" async for part in await client.generate(MODEL, "Say 'good evening'", stream=True)]
    assert "".join(pieces) == "good evening" and len(pieces) > 2
    assert (await client.generate(MODEL)).done_reason == (await client.chat(MODEL)).done_reason == "load"


async def test_models_are_what_their_files_say(client: ollama.AsyncClient) -> None:
    (listed,) = (await client.list()).models
    assert listed.model == "satchel/script" and listed.modified_at and len(listed.digest or "") == 64
    assert listed.details is not None and listed.details.family == "qwen3"
    assert (listed.details.format, listed.details.quantization_level) == ("safetensors", "BF16")
    shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    info = dict(shown.modelinfo or {})
    assert info["general.architecture"] == "qwen3" and info["qwen3.context_length"] == 131_072
    # BF16 has two bytes; the rest of the file is its header.
    count = info["general.parameter_count"]
    assert 2 * count < (listed.size or 0) < 2 * count + 10_000
    assert listed.details.parameter_size == f"{count / 1000:.1f}K"
    (running,) = (await client.ps()).models
    assert (running.digest, running.context_length) == (listed.digest, 131_072)


async def test_texts_are_embedded(client: ollama.AsyncClient) -> None:
    made = await client.embed(MODEL, ["Say 'good evening'", "x", "Say 'good evening'"], dimensions=16)
    assert [len(vector) for vector in made.embeddings] == [16] * 3
    assert made.embeddings[0] == pytest.approx(made.embeddings[2], abs=1e-6) != pytest.approx(made.embeddings[1])
    assert made.prompt_eval_count and made.total_duration and made.load_duration == 0
    whole = list((await client.embeddings(MODEL, "x")).embedding)
    assert sum(number * number for number in whole) == pytest.approx(1, abs=1e-5) and len(whole) == 64


async def test_a_served_model_need_not_be_pulled(client: ollama.AsyncClient) -> None:
    """Programs pull their model when they start."""
    assert (await client.pull(MODEL)).status == "success"
    assert [part.status async for part in await client.pull("satchel/script", stream=True)] == ["success"]


async def test_errors_are_the_clients_own(client: ollama.AsyncClient) -> None:
    long = [{"role": "user", "content": "word " * 200_000}]
    for asked, status, said in (
        (client.chat("llama9:70b", [HELLO]), 404, "model 'llama9:70b' not found"),
        (client.show("llama9"), 404, "model 'llama9' not found"),
        (client.chat(MODEL, long), 400, "the input length exceeds the context length: "),
        (client.pull("llama9"), 501, "POST /api/pull is not supported"),
        (client.delete("llama9"), 501, "DELETE /api/delete is not supported"),
        (client.embed("llama9", "x"), 404, "model 'llama9' not found"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            await asked
        assert caught.value.status_code == status and caught.value.error.startswith(said)
    with pytest.raises(ollama.ResponseError, match="not found"):
        async for _ in await client.chat("llama9", [HELLO], stream=True):
            pass


async def test_an_answer_follows_a_schema(client: ollama.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    for answer in (
        (await client.chat(MODEL, [{"role": "user", "content": "Where?"}], format=schema)).message.content,
        (await client.generate(MODEL, "Where?", format=schema, raw=True)).response,
    ):
        assert json.loads(answer or "") == {"city": "Oslo"}


async def test_pictures_reach_the_model(tmp_path: Path, config: Config) -> None:
    folder = write_model(tmp_path / "qwen3_vl", "qwen3_vl")
    served = served_model(folder=folder, context_tokens=4000, vocabulary_size=4000, pictures=True)
    backend = FakeBackend(load_text_model(folder), [served])
    client = sdk(create_app(backend, config))
    written = BytesIO()
    Image.new("RGB", (64, 48), "red").save(written, "PNG")
    picture = ollama.Image(value=written.getvalue())
    await client.chat("satchel/tiny", [{"role": "user", "content": "What is it?", "images": [picture]}])
    await client.generate("satchel/tiny", "What is it?", images=[written.getvalue()])
    chat, text = (list(request["prompt"]) for request in backend.requests)
    assert chat == text and any(map(is_media_token, chat)) and len(backend.requests[0]["media"]) == 1
    assert "vision" in ((await client.show("satchel/tiny")).capabilities or ())
    body = {"model": "satchel/tiny", "messages": [{"role": "user", "images": ["AAAA"]}]}
    for images, said in (
        (["AAAA"], "messages[0].images[0] is no picture"),
        (["!"], "messages[0].images[0] "),
        (["data:image/png;base64,AAAA"], "messages[0].images[0] must be"),
        (["http://127.0.0.1/x.png"], "messages[0].images[0] "),
        (["/etc/passwd"], "messages[0].images[0] "),
    ):
        body["messages"][0]["images"] = images
        refused = await client._client.post("/api/chat", json=body)
        assert refused.status_code == 400 and refused.json()["error"].startswith(said), refused.text
