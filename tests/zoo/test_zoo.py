"""Four types of models, others every day, are served as `make test-zoo` has found."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from .check import check
from .run import RESULTS

COUNT = 4
SIGNAL = "by signal"


def of_today() -> list[str]:
    types = json.loads((RESULTS / "zoo.json").read_text(encoding="utf-8"))["types"]["text"]
    # One whose code ends the process would end the tests.
    safe = sorted(name for name, found in types.items() if not any(SIGNAL in note for note in found["notes"]))
    return random.Random(datetime.now(UTC).date().toordinal()).sample(safe, COUNT)


@pytest.mark.parametrize("name", of_today())
def test_a_type_is_served_as_it_was_found(name: str, tmp_path: Path):
    found = json.loads((RESULTS / "zoo.json").read_text(encoding="utf-8"))["types"]["text"][name]
    outcome = check("text", name, tmp_path)
    assert outcome.state == found["state"], outcome.notes
