"""The embedded model recalls what it is sold for, in full precision and with KV in 4 bits."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.programs import ROOT, program


@pytest.mark.parametrize(
    ("row", "questions", "least"),
    [
        ("8 codes in 1,000 tokens", 3, 1.0),
        pytest.param("16 codes in 3,500 tokens", 60, 0.97, marks=pytest.mark.slow),
        pytest.param("16 codes in 7,900 tokens", 16, 0.97, marks=pytest.mark.slow),
    ],
)
def test_recall(row: str, questions: int, least: float):
    run = subprocess.run(
        program("embedded.evaluate", "--json", "--cpu", "--rows", row, "--questions", questions),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    right = json.loads(run.stdout)["right"]
    assert set(right) == {row, f"{row}, never told"}
    assert min(right.values()) >= least, right
