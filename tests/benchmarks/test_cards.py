"""Parts of the papers' page are measured on all cards, each part once."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.cards import MEANWHILE, groups_of, measure_on_cards


def measured(options: argparse.Namespace) -> None:
    """Stands for the program in a process of its own."""
    card = os.environ["CUDA_VISIBLE_DEVICES"]
    parts = {part: {"notes": [], "card": card, "models": str(options.models)} for part in options.parts}
    options.out.mkdir()
    assert (options.cards, options.resume) == (1, False) and options.budget_s <= 60
    (options.out / "papers-part.json").write_text(json.dumps({"parts": parts}))
    if "fails" in parts:
        raise SystemExit(1)


def test_parts_of_a_model_stay_together() -> None:
    parts = ["x speed a", "x speed b", "x planning a", "x activations", "y images", "y speed b"]
    assert groups_of(parts) == [
        ["x speed a", "x planning a"],
        ["x speed b", "y speed b"],
        ["x activations"],
        ["y images"],
    ]


def test_each_part_is_measured_once_on_one_of_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    parts = ["x speed a", "x planning a", "fails", "y images"]
    options = argparse.Namespace(parts=parts, cards=2, resume=True, budget_s=60.0, models=None, out=tmp_path)
    found: dict[str, Any] = {}

    assert measure_on_cards(options, measured, tmp_path, found.update) == ["fails"]
    assert found.keys() == {*parts} and {part["card"] for part in found.values()} <= {"5", "7"}
    assert found["x speed a"]["card"] == found["x planning a"]["card"]
    assert all(part["notes"] == [MEANWHILE] for part in found.values())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
    # Nothing is begun once the time is over.
    options.budget_s = 0.0
    assert measure_on_cards(options, measured, tmp_path, found.update) == [] and len(found) == 4
