"""A finding about a model at one load is not tested again at the next load, unless the model or the test changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from satchel.actors.replica.execution.media import bidirectional
from satchel.actors.replica.execution.media.bidirectional import Bidirectional, find_bidirectional
from satchel.actors.replica.loading import models
from satchel.actors.replica.proving.findings import Findings
from satchel.cluster.errors import ModelLoadError
from tests.zoo.vision_types import write

ONE, OTHER = bytes(32), bytes([1] * 32)


def test_findings_belong_to_a_model_a_question_and_its_version(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "trials.json", ONE)
    assert findings.read("trial", 1) is None
    findings.note("trial", 1, {"kv": "fp16"})
    findings.note("both_ways", 1, "pictures")
    again = Findings(tmp_path / "trials.json", ONE)
    assert (again.read("trial", 1), again.read("both_ways", 1)) == ({"kv": "fp16"}, "pictures")
    assert again.read("trial", 2) is None
    assert Findings(tmp_path / "trials.json", OTHER).read("trial", 1) is None


@pytest.mark.parametrize("damaged", ["{", "[]", "1", ""])
def test_a_damaged_file_is_written_anew(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "trials.json"
    path.write_text(damaged)
    findings = Findings(path, ONE)
    assert findings.read("trial", 1) is None
    findings.note("trial", 1, "found")
    assert findings.read("trial", 1) == "found"


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    for path in (None, tmp_path / "no such folder" / "trials.json"):
        findings = Findings(path, ONE)
        findings.note("trial", 1, "found")
        assert findings.read("trial", 1) is None


def test_bidirectional_attention_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def find(model: Any, *_: Any) -> Bidirectional:
        looked.append(model)
        if model == "short of memory":
            raise RuntimeError("out of memory")
        return Bidirectional.PICTURES

    monkeypatch.setattr(bidirectional, "_find", find)
    findings = Findings(tmp_path / "trials.json", ONE)
    processor: Any = None
    compute: Any = None
    # Why a probe failed may be another one's business, so it is not kept.
    assert find_bidirectional("short of memory", processor, compute, findings) is Bidirectional.NONE
    assert [find_bidirectional("model", processor, compute, findings) for _ in range(3)] == [Bidirectional.PICTURES] * 3
    assert (
        find_bidirectional("model", processor, compute, Findings(tmp_path / "trials.json", OTHER))
        is Bidirectional.PICTURES
    )
    assert looked == ["short of memory", "model", "model"]
    findings.note(bidirectional._WHAT, bidirectional._VERSION, "no such way")
    assert find_bidirectional("model", processor, compute, findings) is Bidirectional.PICTURES
    assert len(looked) == 4


def test_a_load_stores_it_with_the_findings_of_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, trials = write(tmp_path / "model", "paligemma"), tmp_path / "trials.json"

    def load() -> str:
        with pytest.raises(ModelLoadError) as refused:
            models.load(str(folder), context_tokens_max=None, progress=lambda *_: None, trials=trials)
        return str(refused.value)

    first = load()
    assert "attend to each other" in first
    monkeypatch.setattr(bidirectional, "_find", lambda *_: pytest.fail("it was found before"))
    assert load() == first
