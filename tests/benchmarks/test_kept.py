"""What is kept of a run: valid JSON, whatever was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import kept


def test_numbers_that_json_lacks_are_kept_as_none(tmp_path: Path):
    rows = [{"widest": float("inf"), "least": float("-inf"), "mean": float("nan"), "ms": 12.3456789}]
    kept.save(tmp_path / "r", {"rows": rows}, lambda result: "told")
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row == {"widest": None, "least": None, "mean": None, "ms": 12.3457}
