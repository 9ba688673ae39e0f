"""The folders that `make test-real` was given; of each what mlx-lm computes, and a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from satchel.actors.model_files.speech_folders import speech_folder

from .reference import ON_CPU, Reference
from .served import Server

_NAMED = [Path(name) for name in os.environ.get("SATCHEL_REAL_MODELS", "").replace(",", " ").split()]
FOLDERS = [folder for folder in _NAMED if speech_folder(folder) is None]
SPEECH = [folder for folder in _NAMED if speech_folder(folder) is not None]
"""Models of speech."""

DTYPES = ("float32",) if ON_CPU else ("float32", "auto")
"""In which models are served. A CPU computes in float32 by itself."""


@cache
def reference_of(folder: Path, dtype: str) -> Reference:
    return Reference(folder.absolute(), dtype)


@pytest.fixture(scope="session", params=FOLDERS, ids=lambda folder: folder.name)
def exact(request: pytest.FixtureRequest) -> Reference:
    """In float32."""
    return reference_of(request.param, "float32")


@pytest.fixture(scope="session", params=product(FOLDERS, DTYPES), ids=lambda pair: f"{pair[0].name}-{pair[1]}")
def reference(request: pytest.FixtureRequest) -> Reference:
    """In the dtype of the server."""
    return reference_of(*request.param)


@pytest.fixture(scope="session")
def server(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(reference.folder, tmp_path_factory.mktemp("home"), reference.dtype) as running:
        yield running
