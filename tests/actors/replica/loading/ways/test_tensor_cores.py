"""Tensor cores read sealed blocks only if they are right and faster on this device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kernels import decode_kernel
from satchel.actors.replica.loading import models
from satchel.actors.replica.loading.ways import decode_ways
from satchel.actors.replica.loading.ways.decode_ways import is_faster
from tests.worlds.models.families import write_model
from tests.worlds.replica import fake_kernels
from tests.worlds.replica.bench import Bench


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model on a device that has kernels and tensor cores."""
    # Not with `monkeypatch`, which would outlast the kernels, and with it what tests patch.
    with fake_kernels.kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "has_tensor_cores", lambda: True)
        yield write_model(tmp_path / "model", "llama")
    decode_kernel.use_tensor_cores(False)


def load(folder: Path, trials: Path | None = None) -> LoadedModel:
    how: dict[str, Any] = {"kv": "q4", "dtype": "float32", "trials": trials}
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, **how)


def test_they_are_used_if_they_were_right_and_faster_at_this_load_or_an_earlier_one(folder: Path, tmp_path: Path):
    trials = tmp_path / "trials.json"
    told = load(folder, trials)
    assert told.way.tensor and "with tensor cores" in told.way.describe()
    decode_kernel.use_tensor_cores(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_ways, "_found", lambda *_, **__: pytest.fail("it is known"))
        assert load(folder, trials).way == told.way
    launched: list[bool] = []
    attend = decode_kernel.attend

    def noted(*given: Any) -> mx.array:
        launched.append(decode_kernel._tensor_cores)
        return attend(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "attend", noted)
        assert len(Bench(told).run("one", list(range(5, 300)), max_tokens=4).tokens) == 4
    assert launched and all(launched)


def test_a_model_that_does_not_use_them_launches_none_after_one_that_does(folder: Path, tmp_path: Path):
    assert load(folder).way.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "has_tensor_cores", lambda: False)
        assert not load(write_model(tmp_path / "other", "qwen2")).way.tensor
    assert not decode_kernel._tensor_cores


def test_what_they_compute_otherwise_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    attend = decode_kernel.attend

    def off(*given: Any) -> mx.array:
        out = attend(*given)
        return out * 1.5 if decode_kernel._tensor_cores else out

    monkeypatch.setattr(decode_kernel, "attend", off)
    way = load(folder).way
    assert way.compiled and not way.tensor and not decode_kernel._tensor_cores


@pytest.mark.parametrize(
    ("rounds", "faster"),
    [
        ([(1.0, 0.9), (1.0, 5.0), (1.0, 0.9)], True),
        ([(1.0, 1.1), (9.0, 0.1), (1.0, 1.1)], False),
        ([(1.0, 1.0), (1.0, 1.0), (1.0, 0.9)], False),
    ],
)
def test_most_rounds_decide_what_takes_less_time(rounds: list[tuple[float, float]], faster: bool):
    """A round may be slow for other reasons."""
    assert is_faster(rounds) == faster


def test_they_are_not_used_if_they_save_no_time(folder: Path, monkeypatch: pytest.MonkeyPatch):
    timed: list[int] = []

    def recorded(model: Any, steps: Any, caches: Any, *, tensor: bool = False) -> list[tuple[float, float]]:
        timed.append(len(caches[0].lengths))
        return [(1.0, 1.1 if tensor else 0.9)]

    monkeypatch.setattr(decode_ways, "is_faster", is_faster)
    monkeypatch.setattr(decode_ways, "_recorded_steps_s", recorded)
    way = load(folder).way
    assert way.summed and not way.tensor
    assert timed == [1, decode_ways.LONG_SEQUENCES]


def test_what_raised_is_tried_again_at_the_next_load(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    attend = decode_kernel.attend

    def broken(*given: Any) -> mx.array:
        if decode_kernel._tensor_cores:
            raise RuntimeError("out of memory")
        return attend(*given)

    trials = tmp_path / "trials.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "attend", broken)
        assert not load(folder, trials).way.tensor
    assert load(folder, trials).way.tensor
