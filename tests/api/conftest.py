"""A tiny tokenizer, a backend that plays scripts, and the application over both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from satchel.api.app import create_app
from satchel.api.http.server import HttpServer
from satchel.api.text.model import TextModel, load_text_model
from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.config.config import Config, parse_config
from tests.worlds.api.fake_backend import CONTEXT_TOKENS, Chat, FakeBackend, tiny_backend
from tests.worlds.api.served_models import served_model
from tests.worlds.models.tiny_tokenizers import write_sentencepiece, write_tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {markers: write_tokenizer(root / markers, markers=markers) for markers in ("added", "special", "none")}


@pytest.fixture(scope="session")
def thinking_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("thinking")
    return {m: write_tokenizer(root / m, markers=m, thinking=True) for m in ("added", "special")}


@pytest.fixture(scope="session")
def texts(folders: dict[str, Path]) -> dict[str, TextModel]:
    return {markers: load_text_model(folder, name=markers) for markers, folder in folders.items()}


@pytest.fixture(scope="session")
def thinking_texts(thinking_folders: dict[str, Path]) -> dict[str, TextModel]:
    return {markers: load_text_model(folder) for markers, folder in thinking_folders.items()}


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="session")
def text(texts: dict[str, TextModel]) -> TextModel:
    return texts["added"]


@pytest.fixture(scope="session")
def config() -> Config:
    return parse_config(
        {
            "models": [{"name": "satchel/tiny", "source": "x"}, {"name": "other", "source": "y"}],
            "endpoint": {"body_bytes_max": "1 MiB", "bodies_bytes_max": "2 MiB", "hosts": ["satchel"]},
            "timeouts": {"request_s": 20},
        }
    )


@pytest.fixture
def backend(folders: dict[str, Path], text: TextModel) -> FakeBackend:
    return tiny_backend(folders, text)


@pytest.fixture(params=["added", "special"])
def thinker(
    request: pytest.FixtureRequest,
    backend: FakeBackend,
    thinking_folders: dict[str, Path],
    thinking_texts: dict[str, TextModel],
) -> FakeBackend:
    """The backend with a default model with reasoning, whose markers are plain text or special tokens."""
    backend.text = thinking_texts[request.param]
    backend.served[0] = served_model(folder=thinking_folders[request.param], context_tokens=CONTEXT_TOKENS)
    return backend


@pytest.fixture
def app(backend: FakeBackend, config: Config) -> FastAPI:
    return create_app(backend, config)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    json_only = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=json_only) as client:
        yield client


@pytest.fixture
async def server(backend: FakeBackend, config: Config) -> AsyncIterator[str]:
    """The base URL of a real server on a free port."""
    port = free_port()
    server = HttpServer(create_app(backend, config), "127.0.0.1", port)
    await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.close(10)


@pytest.fixture
def api(client: httpx.AsyncClient) -> Chat:
    return Chat(client)
