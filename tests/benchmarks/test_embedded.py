"""The embedded models recall and see what they are sold for."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.programs import ROOT, program


@pytest.mark.parametrize(
    ("row", "questions", "least"),
    [
        pytest.param("8 codes in 1,000 tokens", 3, 1.0, marks=pytest.mark.slow),
        pytest.param("16 codes in 3,500 tokens", 60, 0.97, marks=pytest.mark.slow),
        pytest.param("16 codes in 7,900 tokens", 16, 0.97, marks=pytest.mark.slow),
    ],
)
def test_recall(row: str, questions: int, least: float):
    run = subprocess.run(
        program("embedded.recall", "--json", "--cpu", "--rows", row, "--questions", questions),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    right = json.loads(run.stdout)["right"]
    assert set(right) == {row, f"{row}, never told"}
    assert min(right.values()) >= least, right


@pytest.mark.parametrize(
    ("count", "every", "least"),
    [
        pytest.param(4, 18, {"pure colours on white": 1.0, "what is in it": 0.9}, marks=pytest.mark.slow),
        pytest.param(
            20,
            1,
            {"pure colours on white": 1.0, "what is in it": 0.97, "video": 0.92},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sight(count: int, every: int, least: dict[str, float]):
    found: dict[str, list[int]] = {}
    for row in least:
        options = ["--json", "--cpu", "--rows", row, "--count", str(count), "--every", str(every)]
        run = subprocess.run(
            program("embedded.shapes", *options), cwd=ROOT, capture_output=True, text=True, timeout=5400, check=True
        )
        found |= json.loads(run.stdout)
    shares = {row: found[row][0] / found[row][1] for row in least}
    assert all(shares[row] >= share for row, share in least.items()), shares
