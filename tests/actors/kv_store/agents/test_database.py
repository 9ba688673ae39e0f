"""What was committed survives the process's death at any instant; damage costs memory and never makes a wrong one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.kv_store.agents.branches import AgentLimits
from satchel.actors.kv_store.agents.database import NAME, AgentDatabase
from satchel.actors.protocol.store_messages import Commit, Content, Head
from satchel.cluster.errors import ClusterError, HomeInUse, SatchelError, Unavailable

MODEL = b"m" * 32


def content(text: str) -> Content:
    return Content(
        b"".join(ord(c).to_bytes(4, sys.byteorder) for c in text), text, f'[{{"content": "{text}"}}]'.encode()
    )


def opened(database: AgentDatabase, **limits: Any) -> Agents:
    return Agents(database, AgentLimits(**limits), lambda agent, model: b"r" * 32)


def commit(agents: Agents, agent: str, text: str, old: Head | None = None) -> Any:
    since = agents.sequence
    made = Commit(MODEL, content(text), 1, since, old.branch if old else None, old.epoch if old else 0)
    return agents.commit(agent, made, 0.0, 1e9)


def texts(folder: Path, agent: str) -> list[str]:
    """What a new process finds."""
    database = AgentDatabase(folder)
    try:
        return said(database, agent)
    finally:
        database.close()


def said(database: AgentDatabase, agent: str) -> list[str]:
    found = [database.content(head) for head in database.heads(agent)]
    for each in found:
        assert each is None or each == content(each.text)
    return sorted(each.text for each in found if each is not None)


def test_what_was_committed_is_there_again(tmp_path):
    database = AgentDatabase(tmp_path / "kv")
    agents = opened(database)
    first = commit(agents, "t/x", "a")
    (head,) = database.heads("t/x")
    commit(agents, "t/x", "ab", head)
    commit(agents, "t/y", "ä😀")
    agents.forget("t/y", 1e9)
    with database.transaction():
        database.let_go("t/z", 7, 9)
    sequence, nbytes = agents.sequence, agents.nbytes
    database.close()
    database = AgentDatabase(tmp_path / "kv")
    agents = opened(database)
    assert said(database, "t/x") == ["ab"] and said(database, "t/y") == []
    assert (agents.sequence, agents.nbytes) == (sequence, nbytes)
    (head,) = database.heads("t/x")
    assert (head.branch, head.model, head.root, head.turns) == (first.branch, MODEL, b"r" * 32, 1)
    assert agents.forgotten() == ["t/y"], "tombstones last"
    assert agents.let_go("t/z") and not agents.let_go("t/y")
    database.close()


def test_files_are_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        database = AgentDatabase(tmp_path / "kv")
        commit(opened(database), "t/x", "a")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "kv").iterdir()}
    assert set(modes.values()) == {0o600} and {NAME, "key"} <= modes.keys()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert len((tmp_path / "kv" / "key").read_bytes()) == 32
    database.close()


class _Crash(BaseException):
    """The process is dead from here on."""


class _Fragile:
    """A connection that dies at its `step`th statement."""

    def __init__(self, connection: sqlite3.Connection, step: int, error: BaseException) -> None:
        self._connection = connection
        self.left = step
        self._error = error

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.left -= 1
        if self.left <= 0 and not (isinstance(self._error, sqlite3.Error) and arguments[0] == "ROLLBACK"):
            raise self._error
        return self._connection.execute(*arguments)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def close(self) -> None:
        self._connection.close()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "text_factory":
            self._connection.text_factory = value
        else:
            object.__setattr__(self, name, value)


def test_dying_at_any_step_keeps_what_was_committed_and_nothing_else(tmp_path):
    step, finished = 0, False
    while not finished:
        step += 1
        folder = tmp_path / str(step)
        fragile: list[_Fragile] = []

        def connect(*arguments: Any, step: int = step, fragile: list[_Fragile] = fragile, **named: Any) -> Any:
            fragile.append(_Fragile(sqlite3.connect(*arguments, **named), step, _Crash()))
            return fragile[-1]

        done = 0
        try:
            database = AgentDatabase(folder, connect=connect)
            agents = opened(database, branches_max=2)
            for text in ("a", "b", "c"):
                commit(agents, "t/x", text)
                done += 1
            agents.forget("t/x", 1e9)
            done += 1
            database.scrub()
            finished = True
        except _Crash:
            pass
        # What a dead process leaves behind is the files as they are: closing would tidy them up.
        left = tmp_path / f"{step} left"
        shutil.copytree(folder, left)
        fragile[-1].close()
        assert texts(left, "t/x") == [[], ["a"], ["a", "b"], ["a", "c"], []][done], step
    assert step > 40


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY])
def test_a_disk_that_fails_is_an_error_of_that_call_and_changes_nothing(tmp_path, code):
    error = sqlite3.OperationalError("the disk is not well")
    error.sqlite_errorcode = code
    fragile: list[_Fragile] = []

    def connect(*arguments: Any, **named: Any) -> Any:
        fragile.append(_Fragile(sqlite3.connect(*arguments, **named), 10**9, error))
        return fragile[-1]

    database = AgentDatabase(tmp_path, connect=connect)
    agents = opened(database)
    commit(agents, "t/x", "a")
    for step in range(1, 9):
        fragile[0].left = step
        with pytest.raises(Unavailable):
            commit(agents, "t/x", "b" * step)
        fragile[0].left = 10**9
        assert said(database, "t/x") == ["a"]
        agents.check(["t/x"])
        assert database.nbytes == sum(head.nbytes for head in database.heads("t/x"))
    commit(agents, "t/x", "b")
    assert said(database, "t/x") == ["a", "b"]
    database.close()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from satchel.actors.kv_store.agents.database import AgentDatabase
from satchel.actors.kv_store.agents.agents import Agents
from satchel.actors.protocol.store_messages import Commit, Content
from satchel.actors.kv_store.agents.branches import AgentLimits

agents = Agents(AgentDatabase(Path(sys.argv[1])), AgentLimits(), lambda agent, model: b"r" * 32)
branch, epoch, number = None, 0, 0
while True:
    number += 1
    text = f"{{number}} " * 2000
    tokens = b"".join(ord(c).to_bytes(4, sys.byteorder) for c in text)
    made = Commit(b"m" * 32, Content(tokens, text, b'[{{"content": "' + text.encode() + b'"}}]'), 1, agents.sequence,
                  branch, epoch)
    outcome = agents.commit("t/x", made, 0.0, 1e9)
    branch, epoch = outcome.branch, outcome.epoch
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_process_has_lost_nothing_that_it_said_was_kept(tmp_path, seed):
    command = [sys.executable, "-c", WRITER.format(tests=str(Path(__file__).parent)), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    kept = 0
    try:
        for _ in range(random.Random(seed).randrange(1, 40)):
            kept = int(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
    kept = int(rest.split()[-1]) if rest.split() else kept
    (text,) = texts(tmp_path, "t/x")
    assert text in (f"{kept} " * 2000, f"{kept + 1} " * 2000)


def test_a_second_process_is_told_that_the_home_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("satchel.actors.kv_store.agents.database.LOCK_WAIT_S", 0.1)
    database = AgentDatabase(tmp_path)
    commit(opened(database), "t/x", "a")
    code = (
        "import sys; from pathlib import Path; from satchel.actors.kv_store.agents import database\n"
        "from satchel.cluster.errors import HomeInUse; database.LOCK_WAIT_S = 0.1\n"
        "try: database.AgentDatabase(Path(sys.argv[1]))\nexcept HomeInUse: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 7
    with pytest.raises(HomeInUse):
        AgentDatabase(tmp_path)
    assert said(database, "t/x") == ["a"], "and the first one works on"
    database.close()


def filled(folder: Path) -> None:
    database = AgentDatabase(folder)
    agents = opened(database)
    for agent in ("t/0", "t/1", "t/2", "t/3"):
        for text in ("a", "b"):
            commit(agents, agent, f"{agent} {text}")
    database.close()


def test_rows_are_bound_to_their_agent_and_to_the_homes_key(tmp_path):
    """Whoever can write the file and has no key cannot give one agent another one's memory."""
    filled(tmp_path / "kv")
    with contextlib.closing(sqlite3.connect(tmp_path / "kv" / NAME)) as plain:
        for table in ("branches", "contents"):
            plain.execute(f"UPDATE {table} SET agent = 't/x' WHERE agent = 't/0'")
        plain.execute("UPDATE branches SET epoch = epoch + 100 WHERE agent = 't/1'")
        (mine, yours) = [
            plain.execute("SELECT branch FROM branches WHERE agent = ?", (agent,)).fetchone()[0]
            for agent in ("t/2", "t/3")
        ]
        text = plain.execute("SELECT text FROM contents WHERE branch = ?", (yours,)).fetchone()[0]
        plain.execute("UPDATE contents SET text = ? WHERE branch = ?", (text, mine))
        plain.commit()
    database = AgentDatabase(tmp_path / "kv")
    assert database.heads("t/x") == [] and database.heads("t/1") == []
    assert len(said(database, "t/2")) == 1 and len(said(database, "t/3")) == 2
    assert database.damaged_total == 5, "four heads and one content"
    database.close()
    (tmp_path / "kv" / "key").write_bytes(b"k" * 32)
    assert texts(tmp_path / "kv", "t/3") == []
    (tmp_path / "kv" / "key").write_bytes(b"short")
    with pytest.raises(ClusterError, match="32"):
        AgentDatabase(tmp_path / "kv")


def test_a_newer_versions_file_is_left_alone(tmp_path):
    filled(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / NAME)) as plain:
        plain.execute("PRAGMA user_version = 9")
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ClusterError, match="newer version"):
        AgentDatabase(tmp_path)
    assert (tmp_path / NAME).read_bytes() == before
    assert not list(tmp_path.glob("agents.damaged-*"))


def test_what_was_erased_is_in_no_file_any_more(tmp_path):
    database = AgentDatabase(tmp_path)
    agents = opened(database)
    secret = "the secret of ann "
    (tmp_path / "agents.damaged-1").write_text(secret)
    commit(agents, "t/ann", secret)
    for times in range(2, 300, 50):
        (head,) = database.heads("t/ann")
        commit(agents, "t/ann", secret * times, head)
        commit(agents, "t/bob", f"bob {times}")
    assert any(secret.encode() in path.read_bytes() for path in tmp_path.iterdir())
    agents.forget("t/ann", 1e9)
    database.scrub()
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        assert secret.encode() not in data, path
        assert content(secret).tokens[:32] not in data, path
    assert len(said(database, "t/bob")) == 6
    database.close()


def test_what_was_erased_by_a_process_that_died_at_once_is_in_no_file_of_the_next_one(tmp_path):
    """It had no time to empty its log."""
    database = AgentDatabase(tmp_path / "kv")
    agents = opened(database)
    secret = "the secret of ann " * 50
    commit(agents, "t/ann", secret)
    agents.forget("t/ann", 1e9)
    shutil.copytree(tmp_path / "kv", tmp_path / "left")
    database.close()
    assert any(secret.encode() in path.read_bytes() for path in (tmp_path / "left").iterdir())
    database = AgentDatabase(tmp_path / "left")
    assert not any(secret.encode() in path.read_bytes() for path in (tmp_path / "left").iterdir())
    assert database.tombstones() == ["t/ann"]
    database.close()


def test_contents_are_cached_within_a_limit(tmp_path):
    database = AgentDatabase(tmp_path, cache_bytes_max=20_000)
    agents = opened(database)
    for index in range(30):
        commit(agents, f"t/{index}", "x" * 300)
        assert database._cache.currsize <= 20_000
    assert 0 < len(database._cache) < 30
    for index in range(30):
        assert said(database, f"t/{index}") == ["x" * 300]
    kept = list(database._cache)
    commit(agents, "t/big", "x" * 10_000)
    assert database._cache.currsize <= 20_000
    assert list(database._cache) == kept, "what is larger than all of it drives nothing out"
    assert said(database, "t/big") == ["x" * 10_000]
    database.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SatchelError, match="file"):
        AgentDatabase(tmp_path / "file")
