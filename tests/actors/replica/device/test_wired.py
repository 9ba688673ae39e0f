"""What macOS may not page out, on Metal as it is told here."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satchel.actors.replica.device import wired
from satchel.actors.replica.device.wired import RESERVE_BYTES, STEP_BYTES, Wired, wired_bytes

GIB = 2**30
sizes = st.integers(0, 2**40)


@given(held=sizes, recommended=sizes)
def test_no_more_is_wired_than_is_held_and_never_the_reserve(held: int, recommended: int):
    """A limit above the recommended working set would be an error."""
    made = wired_bytes(held, recommended)
    assert 0 <= made <= held and made <= max(0, recommended - RESERVE_BYTES)
    assert made == held or made <= recommended * 31 / 32 + 1


@pytest.mark.parametrize(
    ("held", "recommended", "made"),
    [(5 * GIB, 12 * GIB, 5 * GIB), (12 * GIB, 12 * GIB, 12 * GIB - GIB // 2), (90 * GIB, 96 * GIB, 90 * GIB)],
)
def test_a_model_that_fits_is_wired_whole(held: int, recommended: int, made: int):
    assert wired_bytes(held, recommended) == made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that MLX was told, on a Mac with 24 GiB for its GPU."""
    limits: list[int] = []
    monkeypatch.setattr(wired, "device_kind", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 24 * GIB})
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    return limits


def test_the_limit_follows_what_the_replica_may_hold(told: list[int]):
    kept = Wired()
    for held in (8 * GIB, 8 * GIB + STEP_BYTES // 2, 20 * GIB, 40 * GIB, 3 * GIB):
        kept.keep(held)
    assert told == [8 * GIB, 20 * GIB, 24 * GIB - 3 * GIB // 4, 3 * GIB]


def test_what_macos_refuses_is_said_once(
    told: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(_: int) -> Any:
        raise ValueError("[metal::set_wired_limit] not supported")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    kept = Wired()
    with caplog.at_level(logging.WARNING):
        for held in (GIB, 2 * GIB):
            kept.keep(held)
    assert len(caplog.records) == 1 and "page the model out" in caplog.text


def test_nothing_is_wired_elsewhere(told: list[int], monkeypatch: pytest.MonkeyPatch):
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(wired, "device_kind", lambda kind=kind: kind)
        Wired().keep(GIB)
    assert not told
