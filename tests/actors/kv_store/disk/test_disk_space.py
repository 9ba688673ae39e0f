"""Agents' words come before KV: a reserve of the disk is theirs, and on a full one KV goes: it can be computed again.

The disk is one that says what is free; one test fills a small real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import subprocess
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.agents.database import NAME
from satchel.actors.kv_store.disk.io import Space
from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.kv_store.services import disk, ownership, work
from satchel.actors.protocol.entries import Entry
from satchel.actors.protocol.store_messages import Commit, CommitOutcome, Content
from satchel.cluster.errors import DiskError, DiskFull, MemoryFull, SatchelError
from tests.worlds.kv_store.kv_files import MODEL, Bench, NoSync, chain, checked, evict
from tests.worlds.kv_store.kv_node import ALICE, BOB, Node, spoken
from tests.worlds.kv_store.lone_store import LoneStore

TOTAL = 80_000
RESERVE = TOTAL // 8


class Device(NoSync):
    """A device of `TOTAL` bytes under `folder`, of which `others` are somebody else's. Full, it takes nothing more."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.others = 0
        self.full = False

    def space(self, folder: Path) -> Space:
        used = sum(path.stat().st_size for path in (self.root / "segments").rglob("*") if path.is_file())
        return Space(max(0, TOTAL - self.others - used), TOTAL)

    def step(self, what: str, path: Path) -> None:
        if self.full and what == "unlink":
            self.full = False
        if self.full and what in ("create", "write"):
            raise OSError(errno.ENOSPC, "no space left")


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "kv")


@pytest.fixture
def bench(tmp_path: Path, device: Device) -> Iterator[Bench]:
    with checked(tmp_path / "kv") as made:
        made.open(io=device, reserve_bytes=2**30)
        yield made


def put_each(bench: Bench, entries: Sequence[Entry]) -> None:
    for entry in entries:
        bench.put([entry])


def free(bench: Bench, device: Device) -> int:
    return device.space(bench.root).free


def test_kv_grows_until_only_the_reserve_is_left_and_then_the_oldest_goes(bench, device):
    """Of a small device the reserve is an eighth, however much the config asks for."""
    entries = chain(100)
    put_each(bench, entries)
    size = bench.store.stats()["bytes"] // bench.store.stats()["files"]
    assert RESERVE <= free(bench, device) < RESERVE + 2 * size
    kept = bench.store.stats()["files"]
    assert 10 < kept < 100 and bench.has(*entries[-kept:]) and bench.lacks(*entries[:-kept])
    assert bench.store.stats()["bytes_max"] == bench.store.stats()["bytes"] + free(bench, device) - RESERVE


def test_a_budget_that_is_smaller_than_what_is_free_holds(bench, device):
    size = bench.write(chain(1)).nbytes
    bench.open(io=device, bytes_max=3 * size, reserve_bytes=1)
    put_each(bench, chain(9))
    assert bench.store.stats()["files"] == 3 and bench.store.stats()["bytes_max"] == 3 * size


def test_where_others_fill_the_device_kv_gives_the_reserve_back_but_for_what_is_read(bench, device):
    entries = chain(20)
    put_each(bench, entries)
    pin = bench.store.pin(bench.located(entries[:1]), 20.0)
    bench.store.keep_reserve()
    assert bench.has(*entries), "there is room"
    device.others = TOTAL - bench.store.stats()["bytes"] - RESERVE // 2
    bench.store.keep_reserve()
    assert free(bench, device) >= RESERVE
    assert bench.has(entries[0], entries[-1]) and bench.lacks(*entries[1:3])
    come, gone = bench.store.changes(False)
    assert set(gone) >= {entries[1].id, entries[2].id} and entries[0].id in come
    for _ in range(9):
        device.others += free(bench, device)
        bench.store.keep_reserve()
    assert bench.store.stats()["files"] == 1, "what is read is spared to the end"
    bench.store.unpin(pin)
    bench.store.keep_reserve()
    assert bench.files() == []
    with pytest.raises(DiskFull):
        bench.put(entries[:1])
    assert bench.files() == []
    device.others = 0
    bench.put(entries[:1])
    assert bench.has(entries[0]), "what others give back is KV's again"


def test_room_is_made_at_once_and_also_where_the_device_does_not_say_that_it_is_full(bench, device):
    entries = chain(20)
    put_each(bench, entries)
    used = bench.store.stats()["bytes"]
    device.others = TOTAL - used
    assert bench.store.make_room() and free(bench, device) >= RESERVE
    # A quota, for one.
    device.others = 0
    before = bench.store.stats()["bytes"]
    assert bench.store.make_room()
    assert RESERVE <= before - bench.store.stats()["bytes"] < RESERVE + used // 10
    evict(bench.store, 0)
    assert not bench.store.make_room()


def test_erasing_works_on_a_full_device(bench, device):
    """Of a file that cannot be written anew nothing stays."""
    hers, his = chain(2, owners=(ALICE,)), chain(2, first=40, owners=(BOB,))
    bench.put([hers[0], his[0]])
    bench.put([hers[1], his[1]])
    bench.put(chain(1, first=80))
    device.full = True
    bench.store.forget(ALICE)
    assert bench.lacks(*hers)
    data = bench.bytes_on_disk()
    assert not any(next(iter(entry.parts.values())).tobytes()[:64] in data for entry in hers)


class NoRoomToRewrite(Device):
    """Has room for what the index says, and none for a file."""

    def step(self, what: str, path: Path) -> None:
        if self.full and what == "create" and path.name.startswith("store."):
            raise OSError(errno.ENOSPC, "no space left")


def test_what_must_go_goes_with_its_whole_file_where_the_rest_cannot_be_written_anew(tmp_path):
    with checked(tmp_path / "kv") as bench:
        device = NoRoomToRewrite(tmp_path / "kv")
        bench.open(io=device)
        hers, his = chain(1, owners=(ALICE,)), chain(1, first=40, owners=(BOB,))
        bench.put([*hers, *his])
        device.full = True
        bench.store.forget(ALICE)
        assert bench.lacks(*hers, *his) and bench.files() == []


def test_a_folder_opens_on_a_full_device_and_makes_room(bench, device):
    entries = chain(20)
    put_each(bench, entries)
    device.others = TOTAL - bench.store.stats()["bytes"]
    device.full = True
    bench.open(io=device, reserve_bytes=2**30)
    assert bench.has(*entries)
    bench.store.keep_reserve()
    assert free(bench, device) >= RESERVE and bench.has(entries[-1])


# The store actor: words are what the room is for.


class _Filling(sqlite3.Connection):
    """Of which the next `fails` commits find no room."""

    fails = 0

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.fails:
            self.fails -= 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, *arguments)


def filling(store: LoneStore, folder: Path) -> _Filling:
    database = store.services.memory.database
    store.services.memory.work.thread.submit(database.close).result()
    database._connect = lambda *positional, **named: sqlite3.connect(*positional, factory=_Filling, **named)
    database._db = database._open(folder / NAME)
    assert isinstance(database._db, _Filling)
    return database._db


async def say(store: LoneStore, agent: str, tokens: Sequence[int]) -> CommitOutcome:
    since = (await store.client.recall(agent, MODEL, {})).since
    content = Content(array("I", tokens).tobytes(), "x" * 4 * len(tokens), b"[]")
    return await store.client.commit(agent, Commit(MODEL, content, 1, since))


@pytest.mark.parametrize("fails", [1, work.ROOM_TRIES])
async def test_words_that_find_no_room_get_it_from_kv(tmp_path, fails):
    node = Node(tmp_path / "kv")
    connection = filling(node.actor, node.folder)
    await node.put(*chain(1))
    connection.fails = fails
    assert (await node.speak(ALICE, [1, 2, 3])).kind == "opened"
    assert node.disk.stats()["files"] == 0
    await node.put(*chain(1))
    connection.fails = fails
    assert await node.client.forget(ALICE)
    assert await node.client.agents("default", "default/", 9) == []
    assert node.actor.services.memory.agents.forgotten() == [ALICE] and node.disk.stats()["files"] == 0
    await node.owned.idle()
    node.close()


async def test_a_first_turn_under_way_cannot_commit_where_forgetting_had_to_wait_for_room(tmp_path, monkeypatch):
    """Its tombstone is written at the second try, though the agent is not known any more by then."""
    node = Node(tmp_path / "kv")
    since = (await node.client.recall(ALICE, MODEL, {})).since
    connection = filling(node.actor, node.folder)
    connection.fails = 1
    await node.forget(ALICE)
    assert (await node.speak(ALICE, [1, 2], since)).kind == "forgotten"
    node.close()


async def test_words_that_find_no_room_at_all_are_refused_with_the_reason(tmp_path):
    node = Node(tmp_path / "kv")
    connection = filling(node.actor, node.folder)
    connection.fails = work.ROOM_TRIES + 1
    with pytest.raises(MemoryFull):
        await say(node.actor, ALICE, [1, 2, 3])
    assert connection.fails == 0
    assert (await node.speak(ALICE, [1, 2, 3])).kind == "opened"
    await node.owned.idle()
    node.close()


async def test_a_small_disk_that_is_filled_by_kv_and_then_by_others_keeps_every_word(tmp_path, soon, monkeypatch):
    """On a real device of 8 MiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small device")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mounted], capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    monkeypatch.setattr(disk, "SPACE_S", 0.05)
    try:
        node = Node(mounted / "kv")
        filler = mounted / "filler"
        said: list[str] = []
        for index in range(60):
            agent = f"default/a{index}"
            with_kv = chain(2, first=10 * index, owners=(agent,), layers=40)
            # What finds no room is computed again.
            with contextlib.suppress(AssertionError, SatchelError):
                await node.put(*with_kv)
            assert (await node.speak(agent, spoken(*with_kv) * 8)).kind == "opened", index
            said.append(agent)
            if index == 40:
                fill(filler)
        assert node.disk.stats()["evicted_total"] > 0
        filler.unlink()
        await node.put(*chain(16, first=990, layers=600))
        fill(filler)
        assert await node.client.forget("default/a3")
        await node.owned.idle()
        found = await node.client.agents("default", "default/", 99)
        assert {each.agent for each in found} == {*said} - {"default/a3"}
        fill(filler)
        node.close()
        fill(filler)
        # A store that starts on a full disk, and without a disk tier, knows all words.
        node = Node(mounted / "kv")
        assert await node.client.agents("default", "default/", 99) == found
        filler.unlink()
        assert (await node.speak("default/new", [1, 2, 3])).kind == "opened"
        await opened(node)
        node.close()
    finally:
        subprocess.run(["umount", "-l", mounted], check=False)


def fill(path: Path) -> None:
    """Take all that is free."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65_536))
        except OSError:
            pass


# A disk tier that could not be opened.


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(disk, "OPEN_RETRY_S", 0.05)


async def opened(node: Node) -> None:
    async with asyncio.timeout(10):
        while node.actor.services.memory.disk.store is None:
            await asyncio.sleep(0.01)
    await node.client.stats()
    await node.owned.idle()


async def test_a_disk_tier_that_could_not_be_opened_is_opened_later_and_what_was_forgotten_meanwhile_goes(
    tmp_path, soon
):
    """A predecessor still holds the lock: words go on, status says why there is no disk, and erasing is a debt."""
    hers, his = chain(3, owners=(ALICE,)), chain(2, first=40, owners=(BOB,))
    before = Node(tmp_path / "kv")
    await before.speak(ALICE, spoken(*hers))
    await before.speak(BOB, spoken(*his))
    await before.put(*hers)
    await before.put(*his)
    before.actor.services.memory.database.close()
    node = Node(tmp_path / "kv")
    assert "another process" in (await node.client.stats()).disk_error
    assert await node.client.disk_session() is None
    assert await node.client.forget(ALICE)
    await node.client.fork(BOB, "default/copy")
    await node.client.forget(BOB)
    await node.speak("default/new", [1, 2, 3])
    before.disk.close()
    await opened(node)
    assert (await node.client.stats()).disk_error == ""
    assert not any(node.on_disk(entry) for entry in hers)
    assert node.has(*his), "its copy stands on it"
    late = chain(1, first=80, owners=("default/new",))
    assert await node.put(*late) == [late[0].id]
    node.disk.check(payload=True)
    node.close()


async def test_what_cannot_be_erased_for_long_is_erased_when_the_disk_is_tidied_up(tmp_path, soon, monkeypatch):
    monkeypatch.setattr(ownership, "ERASE_RETRY_S", 0.001)
    monkeypatch.setattr(disk, "SPACE_S", 0.02)
    monkeypatch.setattr(disk, "COMPACT_S", 0.05)
    node = Node(tmp_path / "kv")
    entries = chain(1, owners=(ALICE,))
    await node.speak(ALICE, spoken(*entries))
    await node.put(*entries)
    forget, failures = DiskStore.forget, [DiskError("not now")] * (2 * ownership.ERASE_TRIES)

    def at_last(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return forget(*arguments)

    monkeypatch.setattr(DiskStore, "forget", at_last)
    await node.client.forget(ALICE)
    async with asyncio.timeout(10):
        while node.on_disk(entries[0]):
            await asyncio.sleep(0.02)
    node.close()
