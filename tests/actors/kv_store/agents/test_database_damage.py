"""Damage to the file costs memory and never makes a wrong one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.agents.database import NAME, AgentDatabase
from satchel.cluster.errors import ClusterError, Unavailable

from .test_database import commit, opened, said


class _Hasty(sqlite3.Connection):
    """Does not wait for the disk: a thousand databases are opened and nobody dies."""

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("synchronous = FULL", "synchronous = OFF"), *arguments)


def hasty(*arguments: Any, **named: Any) -> sqlite3.Connection:
    return sqlite3.connect(*arguments, factory=_Hasty, **named)


def filled(folder: Path) -> dict[str, list[str]]:
    """A closed database of some pages, and what is in it."""
    database = AgentDatabase(folder)
    agents = opened(database)
    expected: dict[str, list[str]] = {}
    for index in range(6):
        expected[f"t/{index}"] = [f"{index}{side}" * (50 + 200 * (index % 2)) for side in "ab"]
        for text in expected[f"t/{index}"]:
            commit(agents, f"t/{index}", text)
    agents.forget("t/5", 1e9)
    expected["t/5"] = []
    database.scrub()
    database.close()
    return expected


def check_damaged(folder: Path, expected: dict[str, list[str]]) -> int:
    """Open it, see that all it has is right, and that it can be written. Returns how many texts are left."""
    try:
        database = AgentDatabase(folder, connect=hasty)
    except ClusterError as error:
        assert "newer version" in error.message
        return 0
    try:
        left = 0
        agents = opened(database)
        for agent, right in expected.items():
            with contextlib.suppress(Unavailable):
                found = said(database, agent)
                assert set(found) <= set(right), "never a wrong one"
                left += len(found)
        agents.check(expected)
        assert commit(agents, "t/new", "new").kept
        assert said(database, "t/new") == ["new"]
        return left
    finally:
        database.close()


def test_any_flipped_byte_costs_rows_and_never_makes_wrong_ones(tmp_path):
    expected = filled(tmp_path / "whole")
    data = (tmp_path / "whole" / NAME).read_bytes()
    total = sum(map(len, expected.values()))
    lost = trials = 0
    seen: list[int] = []
    # A prime, so that all kinds of pages and places are met.
    for place in range(0, len(data), 191):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        (folder / NAME).write_bytes(flipped)
        left = check_damaged(folder, expected)
        lost, trials = lost + total - left, trials + 1
        seen.append(left)
        shutil.rmtree(folder)
    assert trials > 100
    assert lost / trials < total / 4, "one byte costs little of what is there"
    assert any(left < total for left in seen), "else nothing was damaged"


@pytest.mark.parametrize("seed", range(3))
def test_a_file_that_is_cut_off_or_garbage_is_set_aside(tmp_path, seed):
    rng = random.Random(seed)
    expected = filled(tmp_path / "whole")
    size = (tmp_path / "whole" / NAME).stat().st_size
    for length in [0, 1, 15, 16, 100, 512, 4095, 4096, *(rng.randrange(size) for _ in range(6))]:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        os.truncate(folder / NAME, length)
        check_damaged(folder, expected)
        shutil.rmtree(folder)
    (tmp_path / "whole" / NAME).write_bytes(rng.randbytes(size))
    assert check_damaged(tmp_path / "whole", expected) == 0
    (aside,) = (tmp_path / "whole").glob("agents.damaged-*")
    assert aside.stat().st_size == size, "for whoever wants to look at it"


def test_what_verifies_in_a_damaged_file_is_taken_over(tmp_path):
    expected = filled(tmp_path)
    data = bytearray((tmp_path / NAME).read_bytes())
    page = data.index(b"1a1a1a1a1a1a1a1a") // 4096 * 4096
    data[page : page + 4096] = b"\xff" * 4096
    (tmp_path / NAME).write_bytes(data)
    left = check_damaged(tmp_path, expected)
    assert 0 < left < sum(map(len, expected.values()))


def test_damage_found_while_it_runs_costs_one_call(tmp_path):
    expected = filled(tmp_path)
    database = AgentDatabase(tmp_path)
    size = (tmp_path / NAME).stat().st_size
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    database._db.execute("PRAGMA shrink_memory")
    with pytest.raises(Unavailable):
        for agent in expected:
            said(database, agent)
    assert database.set_aside_total == 1
    agents = opened(database)
    assert commit(agents, "t/0", "again").kept
    assert said(database, "t/0") == ["again"]
    database.close()
