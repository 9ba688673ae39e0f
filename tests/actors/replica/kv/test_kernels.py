"""Which way a decode step attends to sealed blocks: measured once, kept, and never in the way of serving."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from satchel.actors.replica.kv import kernels
from satchel.actors.replica.kv.kernels import BUDGET_S, ROWS, TOKENS, Table, choose_from, measure, measured_choice
from satchel.actors.replica.kv.sealing import POLICIES

SHAPE = (2, 1, 64, 64)
Q4 = POLICIES["q4"]


def test_the_nearest_measured_point_that_is_not_smaller_decides():
    choose = choose_from({(1, 256): 0.5, (1, 1024): 2.0, (4, 256): 2.0, (4, 1024): 0.5})
    assert [choose(rows, tokens) for rows, tokens in ((1, 1), (1, 257), (2, 9), (3, 1024), (9, 9000))] == [
        True, False, False, True, True
    ]  # fmt: skip


def test_every_point_is_measured_or_taken_from_its_neighbour():
    table = measure(SHAPE, Q4, mx.float32)
    assert table.keys() == {(rows, tokens) for rows in ROWS for tokens in TOKENS} and min(table.values()) > 0
    ticks = iter(range(10**6))
    hurried = measure(SHAPE, Q4, mx.float32, clock=lambda: BUDGET_S * next(ticks))
    assert len(set(hurried.values())) == 1, "there was no time"


def test_what_was_measured_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "home" / "kernels.json"
    calls: list[object] = []

    def measured(*arguments: object) -> Table:
        calls.append(arguments)
        return {(1, 256): 0.5}

    monkeypatch.setattr(kernels, "measure", measured)
    for shape, policy, count in ((SHAPE, Q4, 1), (SHAPE, Q4, 1), (SHAPE, POLICIES["k8v4"], 2), ((4, 1, 64, 64), Q4, 3)):
        choose = measured_choice(path, shape, policy, mx.float32)
        assert choose is not None and choose(1, 100) and len(calls) == count
    path.write_text("{")
    assert measured_choice(path, SHAPE, Q4, mx.float32) is not None and len(calls) == 4


def test_a_device_without_such_a_product_dequantizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*arguments: object) -> Table:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(kernels, "measure", fails)
    assert measured_choice(tmp_path / "kernels.json", SHAPE, Q4, mx.float32) is None
