"""What processes find in their environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from satchel.cluster import environment
from satchel.cluster.config import Home

NAMES = {"MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def child(tmp_path: Path) -> dict[str, str]:
    return environment.child_environment(Home(tmp_path), tmp_path / "token")


def test_mlx_is_told_how_to_use_cuda_unless_somebody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert child(tmp_path).keys() >= NAMES and child(tmp_path)["MLX_MAX_OPS_PER_BUFFER"] == "100"
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "50")
    assert child(tmp_path)["MLX_MAX_OPS_PER_BUFFER"] == "50"


def test_metal_keeps_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not child(tmp_path).keys() & NAMES
