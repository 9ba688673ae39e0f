"""What went wrong is written down, bounded, private, and never at anybody's cost."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from satchel.api.serve import FLOOD_MIN, Refusals
from satchel.cluster import incidents as module
from satchel.cluster.bring_up.doctor import check_lately
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.incidents import former, incidents, note_incident, note_incident_aside


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    prepare_home(home)
    return home


def test_what_was_noted_is_found_in_order(home: Home):
    note_incident(home, "stuck", "one")
    note_incident_aside(home, "died", "two\nlines").join(10)
    found = incidents(home, time.time() - 60)
    assert [(one.kind, one.text) for one in found] == [("stuck", "one"), ("died", "two\nlines")]
    assert incidents(home, time.time() + 60) == []
    assert home.incidents_file.stat().st_mode & 0o777 == 0o600


def test_the_file_is_bounded_and_the_latest_are_kept(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FILE_BYTES_MAX", 2000)
    for number in range(200):
        note_incident(home, "refused", f"number {number} " + "x" * 2000)
    files = [home.incidents_file, former(home.incidents_file)]
    assert all(path.stat().st_size <= 2000 for path in files) and len(list(home.run.iterdir())) == 2
    assert incidents(home, 0.0)[-1].text.startswith("number 199 ") and len(incidents(home, 0.0)) >= 3


def test_many_writers_lose_nothing(home: Home, monkeypatch: pytest.MonkeyPatch):
    """Nor do two that find the file full at the same time set aside what neither has read."""
    monkeypatch.setattr(module, "FILE_BYTES_MAX", 20_000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: note_incident(home, "node", str(number)), range(300)))
    assert sorted(int(one.text) for one in incidents(home, 0.0)) == list(range(300))


def test_a_line_that_was_cut_short_costs_no_other(home: Home):
    note_incident(home, "disk", "one")
    with home.incidents_file.open("ab") as file:
        file.write(b'{"at_s": 1, "ki')
    note_incident(home, "disk", "two")
    with home.incidents_file.open("ab") as file:
        file.write(b'\n[]\n{"at_s": "x", "kind": 1, "text": ""}\n\xff\n')
    assert [one.text for one in incidents(home, 2.0)] == ["one", "two"]


def test_nothing_fails_where_it_cannot_be_written(home: Home, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    note_incident(home, "disk", "one")
    monkeypatch.undo()
    note_incident(Home(home.root / "nowhere"), "disk", "one")
    assert incidents(home, 0.0) == []


def test_the_doctor_says_what_happened_lately_and_how_often(home: Home):
    (fine,) = check_lately(home, time.time())
    assert fine.result == "ok"
    old = {"at_s": time.time() - 2 * 24 * 3600, "kind": "stuck", "text": "long ago"}
    home.incidents_file.write_text(json.dumps(old) + "\n")
    for number in range(3):
        note_incident(home, "died", f"number {number}")
    note_incident(home, "disk", "full")
    died, disk = check_lately(home, time.time())
    assert (died.name, died.result) == ("last 24 h: died", "warn")
    assert died.found.startswith("3 times, last at ") and died.found.endswith(": number 2") and died.mend
    assert disk.found.startswith("once at ")


async def test_a_flood_of_refusals_is_one_line_a_minute():
    told: list[str] = []
    refusals = Refusals(told.append)
    for _ in range(1000):
        refusals.count("all connections are in use")
    for _ in range(FLOOD_MIN - 1):
        refusals.count("too large")
    refusals.end_minute()
    refusals.end_minute()
    assert told == ["1000 requests were refused within a minute: all connections are in use"]
