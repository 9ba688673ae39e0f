"""Six types of models, others every day, are served as well as `make test-zoo` has found."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from .check import RIGHT, check
from .run import RESULTS
from .vision_types import IN_CODE

COUNTS = {"text": 3, "vision": 1}
SIGNAL = "by signal"
LONG_S = 15.0
"""Types that take longer are checked by `make test-zoo` alone."""


def found() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads((RESULTS / "zoo.json").read_text(encoding="utf-8"))["types"]


def of_today() -> list[tuple[str, str]]:
    draw, types = random.Random(datetime.now(UTC).date().toordinal()), found()
    return [(kind, name) for kind, count in COUNTS.items() for name in draw.sample(fit(types[kind]), count)]


def fit(types: dict[str, dict[str, Any]]) -> list[str]:
    """The types that leave the tests as they are: one whose code ends the process would end them."""
    quick = {name: one["notes"] for name, one in types.items() if one["seconds"] < LONG_S and name not in IN_CODE}
    return sorted(name for name, notes in quick.items() if not any(SIGNAL in note for note in notes))


@pytest.mark.variants(2)
@pytest.mark.parametrize(("kind", "name"), of_today())
def test_a_type_is_served_as_well_as_it_was_found(kind: str, name: str, tmp_path: Path):
    outcome = check(kind, name, tmp_path, brief=True)
    # What is noted of long sequences may not show in short ones.
    assert outcome.state in (found()[kind][name]["state"], RIGHT), outcome.notes
