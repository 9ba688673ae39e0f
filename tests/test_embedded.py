"""The embedded model recalls what it is sold for: the evaluation command, with 60 questions where time allows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EVALUATE = Path(__file__).parents[1] / "benchmarks" / "embedded" / "evaluate.py"


@pytest.mark.parametrize(
    ("row", "questions", "least"), [("8 codes in 1,000 tokens", 60, 0.99), ("16 codes in 3,500 tokens", 16, 0.97)]
)
def test_recall(row: str, questions: int, least: float):
    run = subprocess.run(
        [sys.executable, str(EVALUATE), "--json", "--cpu", "--rows", row, "--questions", str(questions)],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    right = json.loads(run.stdout)["right"]
    assert set(right) == {row, f"{row}, never told"}
    assert min(right.values()) >= least, right
