"""Tests whose findings an earlier load stored are not run again, unless model, libraries or Satchel changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.execution import hidden_states
from satchel.actors.replica.execution.hidden_states import HiddenStates
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading import joined, model_id, models, quirks
from satchel.actors.replica.loading.ways import decode_ways
from satchel.actors.replica.proving import findings
from tests.worlds.models.families import write_model

TOKENS = mx.array([[3, 1, 4, 1, 5]], mx.uint32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("kept") / "qwen2", "qwen2")


def load(folder: Path, trials: Path | None) -> LoadedModel:
    return models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, kv="q4", trials=trials)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tests that ran, by name."""
    names: list[str] = []

    def watch(where: Any, name: str) -> None:
        plain = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *given, **named: (names.append(name), plain(*given, **named))[1])

    for where, name in ((quirks, "_try_batched"), (models, "shares_kv"), (decode_ways, "_why_not")):
        watch(where, name)
    watch(hidden_states, "_tried")
    return names


def test_the_next_load_looks_for_nothing_and_is_the_same(folder: Path, tmp_path: Path, looked: list[str]) -> None:
    trials = tmp_path / "trials.json"
    first = load(folder, trials)
    assert {*looked} == {"_try_batched", "shares_kv", "_why_not", "_tried"}
    looked.clear()
    again = load(folder, trials)
    assert looked == []
    assert (again.way, again.spec, again.model_id) == (first.way, first.spec, first.model_id)
    assert again.way.reads is Reads.IN_PLACE
    one, other = first.hidden, again.hidden
    assert isinstance(one, HiddenStates) and isinstance(other, HiddenStates)
    assert (other.dimensions, other.batched, other.exact) == (one.dimensions, one.batched, one.exact)
    assert other.spec == one.spec
    assert mx.array_equal(one(TOKENS), other(TOKENS)) and mx.array_equal(one.head(one(TOKENS)), other.head(one(TOKENS)))


def test_nothing_is_taken_from_another_version_device_or_model(
    folder: Path, tmp_path: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MLX, of Satchel, of the device; and of files that differ in one byte."""
    trials = tmp_path / "trials.json"
    load(folder, trials)

    def count(folder: Path) -> int:
        looked.clear()
        load(folder, trials)
        return len({*looked})

    assert count(folder) == 0
    with monkeypatch.context() as patch:
        patch.setattr(model_id, "version", lambda library: f"another {library}")
        assert count(folder) == 4
    with monkeypatch.context() as patch:
        patch.setattr(findings, "version_of", lambda _: "another Satchel")
        assert count(folder) == 4
    with monkeypatch.context() as patch:
        patch.setattr(findings, "device_name", lambda: "another device")
        assert count(folder) == 4
    other = shutil.copytree(folder, tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.rstrip() + "\n\n\n")
    assert count(other) == 4
    assert count(folder) == 0


@pytest.mark.parametrize("spoiled", [{}, {"which": "nobody", "reads": "by magic"}, "?", 7, ["model"], None])
def test_a_damaged_finding_is_found_again(folder: Path, tmp_path: Path, looked: list[str], spoiled: Any) -> None:
    trials = tmp_path / "trials.json"
    first = load(folder, trials)
    whole = json.loads(trials.read_text())
    trials.write_text(json.dumps(dict.fromkeys(whole, spoiled)))
    looked.clear()
    again = load(folder, trials)
    assert {*looked} == {"_try_batched", "shares_kv", "_why_not", "_tried"}
    assert again.way == first.way and isinstance(again.hidden, HiddenStates)
    assert json.loads(trials.read_text()) == whole


def test_what_failed_for_a_reason_of_the_moment_is_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may have been short."""
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(decode_ways, "_step", fail)
        failed = load(folder, tmp_path / "trials.json")
    assert failed.way.reads is Reads.DEQUANTIZED and "out of memory" in failed.way.reason
    assert load(folder, tmp_path / "trials.json").way.reads is Reads.IN_PLACE


def test_joined_layers_are_joined_again_without_a_run(folder: Path, tmp_path: Path) -> None:
    """On a CPU nothing is joined at a load, so it is asked for here."""
    kept = findings.Findings(tmp_path / "trials.json", bytes(32))
    first, again, other = (load(folder, None) for _ in range(3))
    count = joined.join(first.model, first.model, kept)
    assert count > 0
    assert joined.join(again.model, None, kept) == count
    logits = [each.model(TOKENS) for each in (first, again, other)]
    assert mx.array_equal(logits[0], logits[1])
    kept.note(joined._WHAT, joined._VERSION, [["no", "such layers"]])
    assert joined.join(other.model, other.model, kept) == count
