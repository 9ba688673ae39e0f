"""One application for all refused requests of a file: making one takes longer than refusing a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI

from satchel.api.app import create_app
from satchel.api.text.model import TextModel
from satchel.cluster.config.config import Config
from tests.worlds.api.fake_backend import FakeBackend, tiny_backend


@pytest.fixture(scope="module")
def lasting(folders: dict[str, Path], text: TextModel, config: Config) -> tuple[FakeBackend, FastAPI]:
    backend = tiny_backend(folders, text)
    return backend, create_app(backend, config)


@pytest.fixture
def backend(lasting: tuple[FakeBackend, FastAPI]) -> FakeBackend:
    backend, _ = lasting
    vars(backend).update(vars(FakeBackend(backend.text, backend.served)))
    return backend


@pytest.fixture
def app(lasting: tuple[FakeBackend, FastAPI]) -> FastAPI:
    return lasting[1]
