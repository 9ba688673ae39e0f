"""The folders that `make test-real` was given; of each what mlx-lm computes, and a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .reference import Reference
from .served import Server

FOLDERS = [Path(name) for name in os.environ.get("SATCHEL_REAL_MODELS", "").replace(",", " ").split()]


@pytest.fixture(scope="session", params=FOLDERS, ids=lambda folder: folder.name)
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param.absolute())


@pytest.fixture(scope="session")
def server(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(reference.folder, tmp_path_factory.mktemp("home")) as running:
        yield running
