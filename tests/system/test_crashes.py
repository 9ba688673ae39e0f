"""A process that keeps agents' memory is killed without warning, again and again: what it said is kept is there.

Run as a script, this file is that process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.agents import database as agent_db
from satchel.actors.kv_store.disk.segment_reader import StoredEntry, read_entries
from satchel.actors.kv_store.disk.segments import write_segment
from satchel.actors.kv_store.services import disk as disk_tier
from satchel.actors.protocol.entries import Entry
from satchel.actors.protocol.store_messages import Commit, Content
from satchel.cluster.config.config import parse_config
from satchel.cluster.errors import HomeInUse
from tests.worlds.kv_store.kv_files import MODEL, ROOT, chain, payload, same, tail
from tests.worlds.kv_store.lone_store import LoneStore

ROUNDS = 4
AGENTS = 3
TURNS_MAX = 5
"""Of an agent's life; then it is forgotten and begins anew."""

LIVES_MAX = 1000


@dataclass(frozen=True)
class Line:
    """What an agent remembers at the end of a turn; everything in it follows from these numbers."""

    agent: int
    life: int
    turn: int

    @property
    def owner(self) -> str:
        return f"default/{self.agent}"

    @property
    def text(self) -> str:
        return f"{self.agent} {self.life} {self.turn} " * 100

    @property
    def entries(self) -> list[Entry]:
        """Its blocks, one for each turn, and an open tail."""
        first = ((self.agent * LIVES_MAX) + self.life) * TURNS_MAX
        blocks = chain(self.turn, first=first, owners=(self.owner,))
        return [*blocks, tail([first + self.turn] * 9, first, parent=blocks[-1].id, owners=(self.owner,))]

    @property
    def tokens(self) -> list[int]:
        return [token for entry in self.entries for token in entry.tokens]

    @property
    def next(self) -> Line:
        return Line(self.agent, self.life, self.turn + 1)

    @property
    def reborn(self) -> Line:
        return Line(self.agent, self.life + 1, 0)


async def opened(folder: Path) -> LoneStore:
    return LoneStore(parse_config({"models": [{"name": "x", "source": "x"}]}), folder)


async def write_for_ever(folder: Path, lines: list[Line]) -> None:
    """Take turns and say of each step that it begins and that it is done."""
    store = await opened(folder)
    told = await store.client.disk_session()
    disk = store.services.memory.disk.store
    assert disk is not None and told is not None
    await store.client.stats()
    while True:
        for index, line in enumerate(lines):
            if line.turn == TURNS_MAX:
                say("forgetting", line)
                await store.client.forget(line.owner)
                say("forgotten", line)
                line = line.reborn
            line = lines[index] = line.next
            say("beginning", line)
            recalled = await store.client.recall(line.owner, MODEL, {})
            (branch,) = [(each.head.branch, each.head.epoch) for each in recalled.branches] or [(None, 0)]
            content = Content(array("I", line.tokens).tobytes(), line.text, json.dumps([line.text]).encode())
            await store.client.commit(line.owner, Commit(MODEL, content, 1, recalled.since, *branch, turns=line.turn))
            say("kept", line)
            ids = [entry.id for entry in line.entries]
            # Also what the process before this one did not come to write.
            missing = await store.client.disk_touch(MODEL, ids, line.owner) or []
            for entry in [entry for entry in line.entries if entry.id in missing]:
                values: dict[str, Any] = {"session": told.session, "epoch": told.epoch, "now_s": time.time()}
                record = write_segment(folder, disk.key, MODEL, [entry], **values)
                assert await store.client.disk_commit(record) == [entry.id]
            assert await store.client.disk_touch(MODEL, ids, line.owner) == []
            say("written", line)


def say(what: str, line: Line) -> None:
    print(what, line.agent, line.life, line.turn, flush=True)


@dataclass
class Told:
    """What was heard of the process, and what therefore must be there."""

    kept: dict[int, Line]
    begun: dict[int, Line] = field(default_factory=dict)
    written: dict[int, Line] = field(default_factory=dict)
    forgetting: dict[int, Line] = field(default_factory=dict)
    gone: list[Line] = field(default_factory=list)

    def hear(self, said: str) -> None:
        what, *numbers = said.split()
        line = Line(*map(int, numbers))
        if what == "beginning":
            self.begun[line.agent] = line
        elif what == "kept":
            self.kept[line.agent] = line
        elif what == "written":
            self.written[line.agent] = line
        elif what == "forgetting":
            self.forgetting[line.agent] = line
        else:
            assert what == "forgotten"
            self.gone.append(line)
            self.written.pop(line.agent, None)
            self.kept[line.agent] = line.reborn
            self.forgetting.pop(line.agent)


@contextmanager
def writing(folder: Path, lines: list[Line]) -> Iterator[subprocess.Popen[str]]:
    state = json.dumps([[line.agent, line.life, line.turn] for line in lines])
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), state],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(root)])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        assert process.stdout is not None
        process.stdout.close()


def killed_after(process: subprocess.Popen[str], told: Told, seconds: float) -> None:
    """Listen from its first word on, for so long; kill it, and hear what it still said."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 30)[0], "it does not begin"
    time.sleep(seconds)
    assert process.poll() is None, "it ended by itself"
    process.send_signal(signal.SIGKILL)
    for said in process.stdout.read().splitlines(keepends=True):
        if said.endswith("\n"):
            told.hear(said)


async def look_after(store: LoneStore, folder: Path, told: Told, where: str) -> list[Line]:
    """Compare what the next process finds with what was told. Returns how far the agents have come."""
    await store.client.stats()
    disk, owned = store.services.memory.disk.store, store.services.memory.disk.owned
    assert disk is not None and owned is not None
    await owned.idle()
    found = []
    for agent, kept in told.kept.items():
        # The answer to the last step may have been lost with the process, and nothing else.
        possible = [kept]
        if agent in told.begun and told.begun[agent] == kept.next:
            possible.append(kept.next)
        if agent in told.forgetting:
            possible.append(kept.reborn)
        found.append(line := await line_of(store, agent, possible, where))
        if line.life > kept.life:
            told.gone.append(kept)
        if agent in told.written and line.life == told.written[agent].life:
            entries = told.written[agent].entries
            places = disk.locate(MODEL, [entry.id for entry in entries])
            assert all(places), f"{where}: KV of {told.written[agent]} is lost"
            stored = read_entries(folder, disk.key, [place for place in places if place])
            for entry, read in zip(entries, stored, strict=True):
                assert isinstance(read, StoredEntry) and same(read.parts, entry.parts), where
    on_disk = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for line in told.gone:
        assert not any(payload(entry) in on_disk for entry in line.entries), f"{where}: {line} is still there"
        assert line.text.encode() not in on_disk, f"{where}: the words of {line} are still there"
    disk.check(payload=True)
    return found


async def line_of(store: LoneStore, agent: int, possible: list[Line], where: str) -> Line:
    branches = (await store.client.recall(f"default/{agent}", MODEL, {})).branches
    lines = {line.text: line for line in possible if line.turn}
    if not branches:
        # A life that has only begun, or been ended, has none.
        (line,) = [line for line in possible if not line.turn]
        return line
    (branch,) = branches
    head, content = branch.head, branch.content
    assert content is not None and content.text in lines, f"{where}: {content!r:.60} is none of {possible}"
    line = lines[content.text]
    assert content.tokens == array("I", line.tokens).tobytes() and head.root == ROOT
    assert json.loads(content.messages) == [line.text] and head.turns == line.turn
    return line


async def test_a_process_killed_at_any_instant_has_lost_at_most_the_turn_it_had_not_answered(tmp_path: Path):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    folder = tmp_path / "kv"
    lines = [Line(agent, 0, 0) for agent in range(AGENTS)]
    told, turns = Told({}), 0
    for number in range(ROUNDS):
        told = Told({line.agent: line for line in lines}, written=told.written, gone=told.gone)
        with writing(folder, lines) as process:
            killed_after(process, told, rng.uniform(0.0, 0.8))
        store = await opened(folder)
        try:
            before, lines = lines, await look_after(store, folder, told, f"seed {seed}, round {number}")
        finally:
            store.close()
        for old, new in zip(before, lines, strict=True):
            turns += (new.life - old.life) * TURNS_MAX + new.turn - old.turn
    assert turns > ROUNDS, "too little happened between the kills to say anything"


def test_a_second_process_on_the_same_memory_is_refused_and_the_first_goes_on(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disk_tier, "LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(agent_db, "LOCK_WAIT_S", 0.1)
    told = Told({agent: Line(agent, 0, 0) for agent in range(AGENTS)})
    with writing(tmp_path / "kv", list(told.kept.values())) as process:
        assert process.stdout is not None
        for _ in range(3):
            told.hear(process.stdout.readline())
        before = dict(told.kept)
        with pytest.raises(HomeInUse, match=r"agents\.sqlite"):
            asyncio.run(opened(tmp_path / "kv"))
        for _ in range(12):
            told.hear(process.stdout.readline())
        assert told.kept != before
    store = asyncio.run(opened(tmp_path / "kv"))
    assert store.services.memory.disk.store is not None, "a killed process holds nothing"
    store.close()


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1]), [Line(*numbers) for numbers in json.loads(sys.argv[2])]))
