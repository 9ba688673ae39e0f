"""Kernels on a device that has them, or else those for Metal on this CPU, from their own text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from satchel.actors.replica.kernels import gpu_kernels
from tests.worlds.kernels import emulator, metal_source


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the test is to use kernels, which its parameter says; if so, they can be launched."""
    if not getattr(request, "param", True):
        yield False
    elif gpu_kernels.is_available():
        yield True
    elif lacks := emulator.lacks():
        pytest.skip(lacks)
    else:
        with metal_source.kernels(metal_source.emulated):
            yield True
