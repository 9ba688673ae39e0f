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

from satchel.actors.kv_store import actor
from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.kv_store.agents.database import NAME
from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.entries import unpack_tokens
from satchel.cluster.config import Config, parse_config
from satchel.cluster.timing import Timing

MODEL, OTHER = b"m" * 32, b"o" * 32


def config(**fields: Any) -> Config:
    return parse_config({"models": [{"name": "x", "source": "x"}], **fields})


def result(answer: dict[str, Any]) -> Any:
    assert "error" not in answer, answer
    return answer["result"]


async def keep(store: KVStoreActor, agent: str, text: str, turn: str = "", tokens: int = 10) -> Any:
    since = result(await store.recall(agent, MODEL, {}))["since"]
    answer = await store.commit(
        agent,
        token_ids=array("I", range(tokens)).tobytes(),
        text=text,
        transcript=json.dumps([{"content": text}]).encode(),
        messages=1,
        model=MODEL,
        since=since,
        turn=turn,
    )
    return result(answer)


async def test_what_was_answered_is_on_the_disk(tmp_path):
    store = KVStoreActor(config(), tmp_path)
    await keep(store, "t/x", "a")
    store._database.close()
    assert store._disk is not None
    store._disk.close()
    again = KVStoreActor(config(), str(tmp_path))
    assert json.loads(result(await again.transcript("t/x"))) == [{"content": "a"}]
    (branch,) = result(await again.recall("t/x", MODEL, {}))["branches"]
    assert branch["text"] == "a" and branch["token_ids"] == array("I", range(10)).tobytes()
    since = result(await again.recall("t/y", MODEL, {}))["since"]
    assert since >= branch["epoch"] and since > time.time() * 2**19, "numbers grow with the clock"


async def test_a_continuing_turn_gets_tokens_of_its_model_only_and_always_the_transcript():
    store = KVStoreActor(config())
    assert result(await store.begin("t/x", "t1", MODEL, {}))["branch"] is None
    kept = await keep(store, "t/x", "a", "t1")
    for model, known, tokens in (
        (MODEL, {}, True),
        (MODEL, {kept["branch"]: kept["epoch"]}, False),
        (OTHER, {}, False),
    ):
        branch = result(await store.begin("t/x", "t2", model, known))["branch"]
        assert ("token_ids" in branch) == tokens and json.loads(branch["transcript"]) == [{"content": "a"}]
        await store.abandon("t/x", "t2")


async def test_turns_are_given_in_the_order_of_asking_and_at_once():
    store = KVStoreActor(config())
    result(await store.begin("t/x", "t0", MODEL, {}))
    order: list[int] = []

    async def turn(index: int) -> None:
        result(await store.begin("t/x", f"t{index}", MODEL, {}))
        order.append(index)
        await keep(store, "t/x", str(index), f"t{index}")

    waiting = []
    for index in range(1, 9):
        waiting.append(asyncio.create_task(turn(index)))
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await keep(store, "t/x", "0", "t0")
    await asyncio.gather(*waiting)
    assert order == list(range(1, 9))
    assert time.monotonic() - began < 0.5, "a turn that ends wakes the next one"
    assert store._lines == {}, "nothing is left of the line"


async def test_nobody_overtakes_those_who_wait():
    store = KVStoreActor(config())
    order: list[str] = []

    async def take(turn: str) -> None:
        result(await store.begin("t/x", turn, MODEL, {}))
        order.append(turn)
        await store.abandon("t/x", turn)

    for index in range(20):
        result(await store.begin("t/x", "first", MODEL, {}))
        waiting = asyncio.create_task(take(f"waited {index}"))
        await asyncio.sleep(0.005)
        await asyncio.gather(store.abandon("t/x", "first"), take(f"came late {index}"), waiting)
    assert order == [f"{who} {index}" for index in range(20) for who in ("waited", "came late")]


async def test_waiting_ends_with_the_limit_with_giving_up_and_with_the_lease():
    store = KVStoreActor(replace(config(timeouts={"turn_wait_s": 0.2}), timing=Timing(turn_lease_s=0.6)))
    result(await store.begin("t/x", "t0", MODEL, {}))
    assert (await store.begin("t/x", "t1", MODEL, {}))["error"]["kind"] == "AgentBusy"
    gone = asyncio.create_task(store.begin("t/x", "t2", MODEL, {}))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await store.abandon("t/x", "t2")
    assert (await gone)["error"]["kind"] == "AgentBusy" and time.monotonic() - began < 0.1
    await asyncio.sleep(0.2)
    assert not result(await store.renew("t/x", "of nobody"))
    await asyncio.sleep(0.3)
    assert result(await store.begin("t/x", "t3", MODEL, {})) is not None, "the first turn gave no sign of life"
    assert (await keep(store, "t/x", "late", "t0"))["kind"] == "lost"


async def test_the_line_for_a_turn_has_a_limit(monkeypatch):
    monkeypatch.setattr(actor, "WAITING_MAX", 3)
    store = KVStoreActor(config(timeouts={"turn_wait_s": 0.3}))
    result(await store.begin("t/x", "t0", MODEL, {}))
    waiting = [asyncio.create_task(store.begin("t/x", f"t{index}", MODEL, {})) for index in range(1, 4)]
    await asyncio.sleep(0.02)
    began = time.monotonic()
    assert (await store.begin("t/x", "t4", MODEL, {}))["error"]["kind"] == "AgentBusy"
    assert time.monotonic() - began < 0.2
    assert {(await each)["error"]["kind"] for each in waiting} == {"AgentBusy"}


async def test_blocks_are_those_that_replicas_know_the_agents_tokens_by():
    store = KVStoreActor(config())
    await keep(store, "t/x", "a", tokens=600)
    ((model, root, ids, first, features),) = result(await store.blocks("t/x"))
    assert (model, root, ids) == (MODEL, root_id(MODEL, "tenant:t"), block_ids(root, range(600)))
    assert list(unpack_tokens(first)) == list(range(256)) and features == []
    assert result(await store.blocks("t/nobody")) == []


class _Counting(sqlite3.Connection):
    commits = 0
    error: sqlite3.Error | None = None

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            if self.error is not None:
                raise self.error
            self.commits += 1
        return super().execute(sql, *arguments)


def counting(store: KVStoreActor, folder: Path) -> _Counting:
    store._database.close()
    store._database._connect = lambda *positional, **named: sqlite3.connect(*positional, factory=_Counting, **named)
    store._database._db = store._database._open(folder / NAME)
    assert isinstance(store._database._db, _Counting)
    store._database._db.commits = 0
    return store._database._db


async def test_turns_that_end_together_share_one_sync_of_the_disk(tmp_path):
    store = KVStoreActor(config(), tmp_path)
    connection = counting(store, tmp_path)
    kept = await asyncio.gather(*(keep(store, f"t/{index}", str(index)) for index in range(200)))
    assert len({outcome["branch"] for outcome in kept}) == 200
    assert connection.commits <= 20
    assert len(result(await store.agents("t", "t/", 500))) == 200


async def test_one_that_cannot_be_written_does_not_take_the_others_with_it(tmp_path):
    store = KVStoreActor(config(transcripts_bytes_max=200_000), tmp_path)
    turns = [keep(store, f"t/{index}", str(index)) for index in range(10)]
    spoilt = [keep(store, "t/x", "\ud800"), keep(store, "t/y", "y" * 300_000)]
    answers = await asyncio.gather(*turns[:5], *spoilt, *turns[5:], return_exceptions=True)
    assert isinstance(answers[5], UnicodeEncodeError)
    assert answers[6]["kind"] == "no room"  # pyright: ignore[reportIndexIssue]
    assert len(result(await store.agents("t", "t/", 500))) == 10
    assert store._agents.nbytes == sum(
        branch["nbytes"] for each in result(await store.agents("t", "t/", 500)) for branch in each["branches"]
    )


async def test_a_disk_that_fails_at_the_end_keeps_none_and_leaves_the_turn_its_owners(tmp_path):
    store = KVStoreActor(config(timeouts={"turn_wait_s": 0.1}), tmp_path)
    connection = counting(store, tmp_path)
    result(await store.begin("t/x", "t1", MODEL, {}))
    connection.error = sqlite3.OperationalError("database or disk is full")
    with pytest.raises(AssertionError, match="disk is full"):
        await keep(store, "t/x", "a", "t1")
    assert (await store.begin("t/x", "t2", MODEL, {}))["error"]["kind"] == "AgentBusy"
    assert result(await store.transcript("t/x")) == b"[]"
    connection.error = None
    assert (await keep(store, "t/x", "a", "t1"))["kind"] == "opened"
    assert result(await store.begin("t/x", "t2", MODEL, {}))["branch"] is not None


async def test_a_clock_that_was_set_back_changes_no_order_and_frees_no_turn_from_its_tombstone(tmp_path, monkeypatch):
    """Numbers begin with the clock, so that they are new where the file was lost; where it is there, it counts."""
    store = KVStoreActor(config(), tmp_path)
    before = result(await store.recall("t/y", MODEL, {}))["since"]
    kept = await keep(store, "t/x", "a")
    await keep(store, "t/y", "b")
    result(await store.forget("t/y"))
    store._database.close()
    assert store._disk is not None
    store._disk.close()
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    again = KVStoreActor(config(), tmp_path)
    late = {"token_ids": bytes(4), "text": "x", "transcript": b"[]", "messages": 1, "model": MODEL, "since": before}
    assert result(await again.commit("t/y", **late))["kind"] == "forgotten"
    newer = await keep(again, "t/x", "c")
    assert newer["epoch"] > kept["epoch"] and newer["branch"] > kept["branch"]
    assert result(await again.info("t/x"))["main"] == kept["branch"], "the oldest is still the oldest"
    assert (await keep(again, "t/y", "d"))["kind"] == "opened", "it may come back all the same"


async def test_the_disk_is_a_part_of_what_is_counted(tmp_path):
    store = KVStoreActor(config(), tmp_path)
    assert result(await store.stats())["disk"]["blocks"] == 0
    assert result(await KVStoreActor(config()).stats())["disk"] == {}


async def test_errors_come_as_answers():
    store = KVStoreActor(config())
    assert (await store.info("t/x"))["error"]["kind"] == "AgentNotFound"
    assert (await store.fork("t/x", "t/y"))["error"]["kind"] == "AgentNotFound"
    assert result(await store.forget("t/x")) is False
    await keep(store, "t/x", "a")
    described = result(await store.info("t/x"))
    assert described["main"] == described["branches"][0]["branch"]
    assert result(await store.agents("t", "t/", 10)) == [described]
    assert result(await store.agents("u", "u/", 10)) == []
    assert (await store.fork("t/x", "t/x"))["error"]["kind"] == "AgentExists"


@pytest.mark.parametrize("share", ["none", "agent"])
async def test_who_shares_with_nobody_has_no_blocks_to_be_found_by(share):
    store = KVStoreActor(config(share=share))
    await keep(store, "t/x", "a", tokens=600)
    blocks = result(await store.blocks("t/x"))
    assert bool(blocks) == (share == "agent")
