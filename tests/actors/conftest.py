"""Engines over a tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from tests.worlds.replica.bench import Bench, load_tiny


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def bench(loaded: LoadedModel) -> Callable[..., Bench]:
    def make(**fields: Any) -> Bench:
        return Bench(loaded, **fields)

    return make


@pytest.fixture(scope="session")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    """Prompts around every border: one token, a block less one, a block, a block more, several blocks."""
    rng = random.Random(7)
    lengths = [1, 2, 40, 255, 256, 257, 300, 520]
    return [[rng.randrange(loaded.vocabulary_size - 20) for _ in range(length)] for length in lengths]
