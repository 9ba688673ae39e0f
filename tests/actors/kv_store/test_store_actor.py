"""The store actor's own part: who waits for a turn, what is on disk when it answers, KV that goes with its agent."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from satchel.actors.kv_store.agents.database import NAME
from satchel.actors.kv_store.services import turns
from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.entries import unpack_tokens
from satchel.actors.protocol.store_messages import Commit, CommitOutcome, Content
from satchel.cluster.config.config import Config, parse_config
from satchel.cluster.config.timing import Timing
from satchel.cluster.errors import AgentBusy, AgentExists, AgentNotFound, Unavailable
from tests.worlds.kv_store.kv_files import chain, checked
from tests.worlds.kv_store.lone_store import LoneStore

MODEL, OTHER = b"m" * 32, b"o" * 32


def config(**fields: Any) -> Config:
    return parse_config({"models": [{"name": "x", "source": "x"}], **fields})


def turn_of(text: str, since: int, turn: str = "", tokens: int = 10) -> Commit:
    content = Content(array("I", range(tokens)).tobytes(), text, json.dumps([{"content": text}]).encode())
    return Commit(MODEL, content, 1, since, turn=turn)


async def keep(store: LoneStore, agent: str, text: str, turn: str = "", tokens: int = 10) -> CommitOutcome:
    since = (await store.client.recall(agent, MODEL, {})).since
    return await store.client.commit(agent, turn_of(text, since, turn, tokens))


async def test_what_was_answered_is_on_the_disk(tmp_path):
    store = LoneStore(config(), tmp_path)
    await keep(store, "t/x", "a")
    store.close()
    again = LoneStore(config(), str(tmp_path))
    assert json.loads(await again.client.transcript("t/x")) == [{"content": "a"}]
    (branch,) = (await again.client.recall("t/x", MODEL, {})).branches
    assert branch.content is not None
    assert branch.content.text == "a" and branch.content.tokens == array("I", range(10)).tobytes()
    since = (await again.client.recall("t/y", MODEL, {})).since
    assert since >= branch.head.epoch and since > time.time() * 2**19, "numbers grow with the clock"


async def test_a_continuing_turn_gets_tokens_of_its_model_only_and_always_the_transcript():
    store = LoneStore(config())
    assert (await store.client.begin("t/x", "t1", MODEL, {})).branch is None
    kept = await keep(store, "t/x", "a", "t1")
    for model, known, tokens in (
        (MODEL, {}, True),
        (MODEL, {kept.branch: kept.epoch}, False),
        (OTHER, {}, False),
    ):
        begun = await store.client.begin("t/x", "t2", model, known)
        assert begun.branch is not None and (begun.branch.content is not None) == tokens
        assert json.loads(begun.transcript) == [{"content": "a"}]
        await store.client.abandon("t/x", "t2")


async def test_turns_are_given_in_the_order_of_asking_and_at_once():
    store = LoneStore(config())
    await store.client.begin("t/x", "t0", MODEL, {})
    order: list[int] = []

    async def turn(index: int) -> None:
        await store.client.begin("t/x", f"t{index}", MODEL, {})
        order.append(index)
        await keep(store, "t/x", str(index), f"t{index}")

    waiting = []
    for index in range(1, 9):
        waiting.append(asyncio.create_task(turn(index)))
        await asyncio.sleep(0.01)
    await keep(store, "t/x", "0", "t0")
    # A turn that ends wakes the next one: nobody waits until a limit or a lease has run out.
    async with asyncio.timeout(20):
        await asyncio.gather(*waiting)
    assert order == list(range(1, 9))
    assert store.services.turns._lines == {}, "nothing is left of the line"


async def test_nobody_overtakes_those_who_wait():
    store = LoneStore(config())
    order: list[str] = []

    async def take(turn: str) -> None:
        await store.client.begin("t/x", turn, MODEL, {})
        order.append(turn)
        await store.client.abandon("t/x", turn)

    for index in range(20):
        await store.client.begin("t/x", "first", MODEL, {})
        waiting = asyncio.create_task(take(f"waited {index}"))
        await asyncio.sleep(0.005)
        await asyncio.gather(store.client.abandon("t/x", "first"), take(f"came late {index}"), waiting)
    assert order == [f"{who} {index}" for index in range(20) for who in ("waited", "came late")]


async def test_waiting_ends_with_the_limit():
    store = LoneStore(config(timeouts={"turn_wait_s": 0.2}))
    await store.client.begin("t/x", "t0", MODEL, {})
    async with asyncio.timeout(20):
        with pytest.raises(AgentBusy):
            await store.client.begin("t/x", "t1", MODEL, {})


async def test_waiting_ends_with_giving_up():
    store = LoneStore(config())
    await store.client.begin("t/x", "t0", MODEL, {})
    gone = asyncio.ensure_future(store.client.begin("t/x", "t1", MODEL, {}))
    await asyncio.sleep(0.05)
    await store.client.abandon("t/x", "t1")
    async with asyncio.timeout(20):
        with pytest.raises(AgentBusy):
            await gone


async def test_waiting_ends_with_the_lease_of_a_turn_that_gives_no_sign_of_life():
    store = LoneStore(replace(config(), timing=Timing(turn_lease_s=0.3)))
    await store.client.begin("t/x", "t0", MODEL, {})
    assert not await store.client.renew("t/x", "of nobody")
    async with asyncio.timeout(20):
        await store.client.begin("t/x", "t1", MODEL, {})
    assert (await keep(store, "t/x", "late", "t0")).kind == "lost"


async def test_the_line_for_a_turn_has_a_limit(monkeypatch):
    monkeypatch.setattr(turns, "WAITING_MAX", 3)
    store = LoneStore(config())
    await store.client.begin("t/x", "t0", MODEL, {})
    waiting = [asyncio.ensure_future(store.client.begin("t/x", f"t{index}", MODEL, {})) for index in range(1, 4)]
    await asyncio.sleep(0.02)
    async with asyncio.timeout(20):
        with pytest.raises(AgentBusy):
            await store.client.begin("t/x", "t4", MODEL, {})
    assert not any(each.done() for each in waiting)
    for index, each in enumerate(waiting, 1):
        await store.client.abandon("t/x", f"t{index}")
        with pytest.raises(AgentBusy):
            await each


async def test_blocks_are_those_that_replicas_know_the_agents_tokens_by():
    store = LoneStore(config())
    await keep(store, "t/x", "a", tokens=600)
    (branch,) = await store.client.blocks("t/x")
    model, root, ids, first = branch.model, branch.kept.root, branch.kept.block_ids, branch.kept.first
    assert (model, root, ids) == (MODEL, root_id(MODEL, "tenant:t"), block_ids(root, range(600)))
    assert list(unpack_tokens(first)) == list(range(256)) and branch.kept.embeddings == []
    assert (await store.client.blocks("t/nobody")) == []


class _Counting(sqlite3.Connection):
    commits = 0
    error: sqlite3.Error | None = None

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            if self.error is not None:
                raise self.error
            self.commits += 1
        return super().execute(sql, *arguments)


def counting(store: LoneStore, folder: Path) -> _Counting:
    database = store.services.memory.database
    store.services.memory.work.thread.submit(database.close).result()
    database._connect = lambda *positional, **named: sqlite3.connect(*positional, factory=_Counting, **named)
    database._db = database._open(folder / NAME)
    assert isinstance(database._db, _Counting)
    database._db.commits = 0
    return database._db


async def test_turns_that_end_together_share_one_sync_of_the_disk(tmp_path):
    store = LoneStore(config(), tmp_path)
    connection = counting(store, tmp_path)
    kept = await asyncio.gather(*(keep(store, f"t/{index}", str(index)) for index in range(200)))
    assert len({outcome.branch for outcome in kept}) == 200
    assert connection.commits <= 20
    assert len(await store.client.agents("t", "t/", 500)) == 200


async def test_one_that_cannot_be_written_does_not_take_the_others_with_it(tmp_path):
    store = LoneStore(config(transcripts_bytes_max=200_000), tmp_path)

    def end(agent: str, text: str) -> Any:
        # Not by its client, which cannot send such a text.
        return store.services.turns.commit(agent, turn_of(text, 0))

    kept = [end(f"t/{index}", str(index)) for index in range(10)]
    spoilt = [end("t/x", "\ud800"), end("t/y", "y" * 300_000)]
    answers = await asyncio.gather(*kept[:5], *spoilt, *kept[5:], return_exceptions=True)
    assert isinstance(answers[5], UnicodeEncodeError)
    assert isinstance(answers[6], CommitOutcome) and answers[6].kind == "no room"
    assert len(await store.client.agents("t", "t/", 500)) == 10
    assert store.services.memory.agents.nbytes == sum(
        head.nbytes for each in (await store.client.agents("t", "t/", 500)) for head in each.branches
    )


async def test_a_disk_that_fails_at_the_end_keeps_none_and_leaves_the_turn_its_owners(tmp_path):
    store = LoneStore(config(timeouts={"turn_wait_s": 0.1}), tmp_path)
    connection = counting(store, tmp_path)
    await store.client.begin("t/x", "t1", MODEL, {})
    connection.error = sqlite3.OperationalError("database or disk is full")
    with pytest.raises(Unavailable, match="disk is full"):
        await keep(store, "t/x", "a", "t1")
    with pytest.raises(AgentBusy):
        await store.client.begin("t/x", "t2", MODEL, {})
    assert (await store.client.transcript("t/x")) == b"[]"
    connection.error = None
    assert (await keep(store, "t/x", "a", "t1")).kind == "opened"
    assert (await store.client.begin("t/x", "t2", MODEL, {})).branch is not None


async def test_a_clock_that_was_set_back_changes_no_order_and_frees_no_turn_from_its_tombstone(tmp_path, monkeypatch):
    """Numbers begin with the clock, so that they are new where the file was lost; where it is there, it counts."""
    store = LoneStore(config(), tmp_path)
    before = (await store.client.recall("t/y", MODEL, {})).since
    kept = await keep(store, "t/x", "a")
    await keep(store, "t/y", "b")
    await store.client.forget("t/y")
    store.close()
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    again = LoneStore(config(), tmp_path)
    late = Commit(MODEL, Content(bytes(4), "x", b"[]"), 1, before)
    assert (await again.client.commit("t/y", late)).kind == "forgotten"
    newer = await keep(again, "t/x", "c")
    assert newer.epoch > kept.epoch and newer.branch > kept.branch
    assert (await again.client.info("t/x")).main == kept.branch, "the oldest is still the oldest"
    assert (await keep(again, "t/y", "d")).kind == "opened", "it may come back all the same"


async def test_the_disk_is_a_part_of_what_is_counted(tmp_path):
    store = LoneStore(config(), tmp_path)
    assert (await store.client.stats()).disk["blocks"] == 0
    assert (await LoneStore(config()).client.stats()).disk == {}


async def test_errors_come_as_answers():
    store = LoneStore(config())
    with pytest.raises(AgentNotFound):
        await store.client.info("t/x")
    with pytest.raises(AgentNotFound):
        await store.client.fork("t/x", "t/y")
    assert (await store.client.forget("t/x")) is False
    await keep(store, "t/x", "a")
    described = await store.client.info("t/x")
    assert described.main == described.branches[0].branch
    assert (await store.client.agents("t", "t/", 10)) == [described]
    assert (await store.client.agents("u", "u/", 10)) == []
    with pytest.raises(AgentExists):
        await store.client.fork("t/x", "t/x")


@pytest.mark.parametrize("share", ["none", "agent"])
async def test_who_shares_with_nobody_has_no_blocks_to_be_found_by(share):
    store = LoneStore(config(share=share))
    await keep(store, "t/x", "a", tokens=600)
    blocks = await store.client.blocks("t/x")
    assert bool(blocks) == (share == "agent")


async def test_agents_whose_names_a_mac_would_not_tell_apart_share_no_file(tmp_path: Path):
    """A Mac's disk takes `Ann` and `ann` for one file, and an accent before or after composition. Names on disk are not
    made of what callers write."""
    names = ["Ann", "ann", "ANN", "Zo\u00eb", "Zoe\u0308", "ZOE\u0308", "\u212bngstr\u00f6m", "stra\u00dfe", "STRASSE"]
    store = LoneStore(config(), tmp_path)
    for tenant in ("t", "T"):
        for name in names:
            await keep(store, f"{tenant}/{name}", f"{tenant} is {name}")
    store.close()
    again = LoneStore(config(), tmp_path)
    for tenant in ("t", "T"):
        for name in names:
            assert json.loads(await again.client.transcript(f"{tenant}/{name}")) == [{"content": f"{tenant} is {name}"}]
    again.close()
    check_names(tmp_path)


def test_files_of_kv_of_such_agents_have_names_of_lower_case(tmp_path: Path):
    with checked(tmp_path / "kv") as made:
        for name in ("Ann", "ann", "Zo\u00eb", "Zoe\u0308"):
            made.put(chain(2, parent=root_id(MODEL, name), owners=(name,)))
    assert check_names(tmp_path / "kv") > 4


def check_names(folder: Path) -> int:
    """Checks that every file is the same on any file system. Returns how many there are."""
    paths = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    assert all(path.isascii() and path == path.lower() for path in paths), paths
    return len(paths)
