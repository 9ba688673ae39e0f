"""Transcriptions and translations in OpenAI's form, by models that take audio in chats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from satchel.api.app import create_app
from satchel.api.text.model import TextModel, load_text_model
from satchel.cluster.config.config import Config
from tests.worlds.api.fake_backend import FakeBackend
from tests.worlds.api.served_models import served_model
from tests.worlds.sounds import tone, wav
from tests.zoo.vision_types import write

FILE = wav(tone(440, 1.0))
SAID = "  The code of ada is 1815.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("omni") / "qwen3_omni_moe", "qwen3_omni_moe")


@pytest.fixture(scope="module")
def text_model(folder: Path) -> TextModel:
    return load_text_model(folder)


@pytest.fixture
def backend(folder: Path, text_model: TextModel, folders: dict[str, Path]) -> FakeBackend:
    served = [
        served_model(folder=folder, audio=True, context_tokens=4000, vocabulary_size=4000),
        served_model(name="text", folder=folders["none"], vocabulary_size=1000),
    ]
    backend = FakeBackend(text_model, served)
    backend.say(SAID)
    return backend


@pytest.fixture
async def client(backend: FakeBackend, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
async def official(client: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    http: Any = client
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
    ) as official:
        yield official


async def send(client: httpx.AsyncClient, path: str = "transcriptions", /, **fields: Any) -> httpx.Response:
    return await client.post(f"/v1/audio/{path}", data=fields, files={"file": ("speech.wav", FILE, "audio/wav")})


def prompt_of(backend: FakeBackend) -> str:
    return backend.text.tokenizer.decode(backend.text.plain(backend.requests[-1]["prompt"]))


async def test_a_transcript(official: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    made = await official.audio.transcriptions.create(
        model="satchel/tiny", file=("speech.wav", FILE), language="de", prompt="Ada Lovelace", temperature=0.5
    )
    assert made.text == SAID.strip()
    assert made.usage is not None and made.usage.type == "tokens" and made.usage.total_tokens > 13
    request = backend.requests[-1]
    assert request["sampling"].temperature == 0.5 and [one.audio_rate for one in request["media"]] == [16_000]
    prompt = prompt_of(backend)
    assert "<|audio_pad|><|audio_end|>Transcribe the speech" in prompt and "code de." in prompt
    assert "may occur: Ada Lovelace" in prompt


async def test_a_streamed_transcript(official: openai.AsyncOpenAI) -> None:
    events = [
        event
        async for event in await official.audio.transcriptions.create(
            model="satchel/tiny", file=("speech.wav", FILE), stream=True
        )
    ]
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1] if event.type == "transcript.text.delta") == SAID.lstrip()
    done = events[-1]
    assert done.type == "transcript.text.done" and done.text == SAID.strip()
    assert done.usage is not None and done.usage.output_tokens > 0


async def test_a_translation(official: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    made = await official.audio.translations.create(model="satchel/tiny", file=("speech.wav", FILE))
    assert made.text == SAID.strip() and "Translate the speech in this audio into English" in prompt_of(backend)
    assert backend.requests[-1]["sampling"].temperature == 0.0


async def test_plain_text(client: httpx.AsyncClient) -> None:
    answer = await send(client, model="satchel/tiny", response_format="text")
    assert answer.text == f"{SAID.strip()}\n" and answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "fields", "param", "why"),
    [
        ("transcriptions", {"response_format": "srt"}, "response_format", "state no times"),
        ("transcriptions", {"response_format": "verbose_json"}, "response_format", "state no times"),
        ("transcriptions", {"response_format": "xml"}, "response_format", "Input should be"),
        ("transcriptions", {"timestamp_granularities[]": "word"}, "timestamp_granularities", "state no times"),
        ("transcriptions", {"include[]": "logprobs"}, "include", "not supported"),
        ("transcriptions", {"language": "the one of Bavaria"}, "language", "match pattern"),
        ("transcriptions", {"temperature": "hot"}, "temperature", "valid number"),
        ("transcriptions", {"stream": "maybe"}, "stream", "valid boolean"),
        ("transcriptions", {"mood": "good"}, "mood", "not permitted"),
        ("transcriptions", {"model": "text"}, "file", "does not support audio"),
        ("translations", {"language": "de"}, "language", "translations do not have it"),
        ("translations", {"stream": "true"}, "stream", "translations do not have it"),
    ],
)
async def test_what_is_not_supported_is_named(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, fields: dict[str, str], param: str, why: str
) -> None:
    answer = await send(client, path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert why in error["message"] and not backend.requests


async def test_forms_without_audio_are_refused(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    path = "/v1/audio/transcriptions"
    forms: list[dict[str, Any]] = [
        {"data": {"model": "satchel/tiny"}, "files": {"other": ("a", b"x")}},
        {"data": {"model": "satchel/tiny"}, "files": [("file", ("a", FILE)), ("file", ("b", FILE))]},
        {"files": {"file": ("a.wav", b"hello")}},
        {"files": {"file": ("a.wav", wav(tone(440, 0.001)))}},
    ]
    for sent in forms:
        answer = await client.post(path, **sent)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "file", answer.text
    answer = await client.post(path, json={"model": "satchel/tiny"})
    assert answer.status_code == 415 and "form" in answer.json()["error"]["message"]
    assert not backend.requests


async def test_nothing_speaks(official: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="makes text, and makes no audio") as refused:
        await official.audio.speech.create(model="satchel/tiny", input="Hello", voice="alloy")
    assert refused.value.param == "model"
