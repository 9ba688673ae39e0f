"""KV that outlives its agent's memory has no owner: what comes late is refused, what is rightly an agent's stays."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from satchel.actors.kv_store.services import ownership
from satchel.actors.protocol.store_messages import BranchKV
from satchel.api.views.agents import agent_info
from satchel.cluster.errors import DiskError
from tests.worlds.kv_store import kv_node
from tests.worlds.kv_store.kv_files import MODEL, ROOT, chain, tail
from tests.worlds.kv_store.kv_node import ALICE, BOB, CAROL, DAVE, spoken

nodes = kv_node.nodes
"""A fixture."""


async def test_kv_of_a_deleted_agent_that_comes_late_is_refused_at_once_and_off_the_disk(node, monkeypatch):
    monkeypatch.setattr(node.owned, "_claim_wait_s", 30.0)
    entries = [*chain(2, owners=(ALICE,)), tail([1, 2], 5, owners=(ALICE,))]
    await node.speak(ALICE, spoken(*entries[:2]))
    late = [await node.write(entries[:2]), await node.write(entries[2:])]
    await node.forget(ALICE)
    began = time.monotonic()
    assert [await node.client.disk_commit(record) for record in late] == [[], []]
    assert time.monotonic() - began < 10.0, "nobody is waited for"
    assert not node.has(entries[0]) and not any(node.on_disk(entry) for entry in entries)
    assert node.disk.stats()["refused_total"] == 3 and node.disk.stats()["files"] == 0


async def test_who_comes_back_has_what_was_said_since_and_nothing_from_before(node):
    before, since = chain(3, owners=(ALICE,)), chain(3, first=40, owners=(ALICE,))
    await node.speak(ALICE, spoken(*before))
    late = await node.write(before)
    await node.forget(ALICE)
    await node.speak(ALICE, spoken(*since))
    assert await node.client.disk_commit(late) == []
    assert await node.put(*since) == [entry.id for entry in since]
    assert node.has(*since) and not any(node.on_disk(entry) for entry in before)
    await node.forget(ALICE)
    assert not any(node.on_disk(entry) for entry in since)


async def test_of_the_same_words_said_again_the_kv_is_welcome_up_to_where_they_differ(node):
    before = chain(3, owners=(ALICE,))
    other = chain(1, first=70, parent=before[1].id, owners=(ALICE,))
    await node.speak(ALICE, spoken(*before))
    late = await node.write(before)
    await node.forget(ALICE)
    await node.speak(ALICE, spoken(*before[:2], *other))
    assert await node.client.disk_commit(late) == [entry.id for entry in before[:2]]
    node.disk.compact()
    assert node.has(*before[:2]) and not node.on_disk(before[2])


async def test_of_a_tail_that_goes_on_behind_the_new_branch_nothing_is_kept(node):
    secret, known = tail([1, 2, 3, 4], 1, owners=(ALICE,)), tail([1, 2], 2, owners=(ALICE,))
    elsewhere = tail([1, 2], 3, parent=MODEL, owners=(ALICE,))
    await node.forget(ALICE)
    await node.speak(ALICE, [1, 2, 3])
    assert await node.put(secret) == [] == await node.put(elsewhere)
    assert await node.put(known) == [known.id]
    assert not node.on_disk(secret) and not node.on_disk(elsewhere)


async def test_kv_that_comes_just_before_its_branch_waits_for_it(node, monkeypatch):
    monkeypatch.setattr(node.owned, "_claim_wait_s", 30.0)
    shared = chain(1, owners=(BOB,))
    entries = chain(2, first=10, parent=shared[0].id, owners=(ALICE,))
    await node.speak(ALICE, [1])
    await node.forget(ALICE)
    await node.put(*shared)
    since = (await node.client.recall(ALICE, MODEL, {})).since
    early = asyncio.create_task(node.put(*entries))
    touch = asyncio.ensure_future(node.client.disk_touch(MODEL, [shared[0].id], ALICE))
    await asyncio.sleep(0.2)
    assert not early.done() and not touch.done() and not node.has(*entries)
    began = time.monotonic()
    await node.speak(ALICE, spoken(*shared, *entries), since)
    assert await early == [entry.id for entry in entries]
    await touch
    assert time.monotonic() - began < 10.0
    await node.forget(BOB)
    assert node.has(*shared, *entries)


async def test_an_agent_that_was_never_forgotten_waits_for_nothing(node, monkeypatch):
    monkeypatch.setattr(node.owned, "_claim_wait_s", 30.0)
    await node.forget(BOB)
    entries = chain(2, owners=(ALICE,))
    began = time.monotonic()
    assert len(await node.put(*entries)) == 2
    assert await node.client.disk_touch(MODEL, [entry.id for entry in entries], ALICE) == []
    assert time.monotonic() - began < 10.0


async def test_of_a_segment_with_several_owners_only_what_is_nobodys_is_refused(node):
    hers, his = chain(1, owners=(ALICE,)), chain(1, first=40, owners=(BOB,))
    both = chain(1, first=80, owners=(ALICE, BOB))
    await node.speak(ALICE, spoken(*hers))
    await node.speak(BOB, spoken(*his))
    late = await node.write([*hers, *his, *both])
    await node.forget(ALICE)
    assert await node.client.disk_commit(late) == [his[0].id, both[0].id]
    assert await node.client.disk_commit(late) == [his[0].id, both[0].id], "also when it is told again"
    node.disk.compact()
    assert node.has(*his, *both) and not node.on_disk(hers[0])
    await node.forget(BOB)
    assert not node.on_disk(both[0]), "the other one has it no more"


async def test_a_late_sign_of_use_makes_nobody_an_owner_again(node):
    entries = chain(2, owners=(BOB,))
    ids = [entry.id for entry in entries]
    await node.speak(ALICE, spoken(*entries))
    await node.speak(BOB, spoken(*entries))
    await node.put(*entries)
    await node.forget(ALICE)
    assert await node.client.disk_touch(MODEL, ids, ALICE) == []
    found = await node.client.disk_find(MODEL, ids, ROOT, b"", 2)
    await node.client.disk_read(found.lease, ids, ALICE, [])
    await node.forget(BOB)
    assert not any(node.on_disk(entry) for entry in entries)


async def test_who_comes_back_owns_what_it_uses(node):
    shared, old = chain(2, owners=(BOB,)), chain(2, first=30, owners=(BOB,))
    await node.put(*shared)
    await node.put(*old)
    await node.forget(ALICE)
    await node.speak(ALICE, spoken(*shared))
    await node.client.disk_touch(MODEL, [entry.id for entry in (*shared, *old)], ALICE)
    await node.forget(BOB)
    assert node.has(*shared) and not any(node.on_disk(entry) for entry in old)


async def test_nothing_is_committed_behind_the_erasing_that_it_met(node, monkeypatch):
    """The commit has been let in, and is still on its way to the disk when its agent is forgotten."""
    entries = chain(2, owners=(ALICE,))
    await node.speak(ALICE, spoken(*entries))
    go_on, entered, commit = threading.Event(), threading.Event(), node.disk.commit

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return commit(*arguments)

    monkeypatch.setattr(node.disk, "commit", slow)
    late = asyncio.create_task(node.put(*entries))
    await asyncio.to_thread(entered.wait, 10)
    # Its caller giving up changes nothing.
    late.cancel()
    await node.client.forget(ALICE)
    await asyncio.sleep(0.05)
    go_on.set()
    await node.owned.idle()
    assert not any(node.on_disk(entry) for entry in entries)


async def test_who_comes_back_while_its_old_kv_is_being_erased_keeps_the_new_and_loses_it_when_forgotten_again(
    node, monkeypatch
):
    before, since = chain(2, owners=(ALICE,)), chain(2, first=40, owners=(ALICE,))
    shared = chain(1, first=80, owners=(BOB,))
    await node.speak(ALICE, spoken(*before))
    await node.put(*before)
    await node.put(*shared)
    go_on, entered, forget = threading.Event(), threading.Event(), node.disk.forget

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return forget(*arguments)

    monkeypatch.setattr(node.disk, "forget", slow)
    await node.client.forget(ALICE)
    await asyncio.to_thread(entered.wait, 10)
    await node.speak(ALICE, spoken(*since))
    await node.speak(ALICE, spoken(*shared))
    await node.put(*since)
    await node.client.disk_touch(MODEL, [shared[0].id], ALICE)
    go_on.set()
    await node.owned.idle()
    assert node.has(*since) and not any(node.on_disk(entry) for entry in before)
    await node.forget(BOB)
    assert node.has(*shared)
    await node.forget(ALICE)
    assert node.disk.stats()["files"] == 0 and node.owned._since == {}


async def test_who_is_forgotten_twice_while_its_first_kv_is_being_erased_keeps_its_third_lifes(node, monkeypatch):
    lives = [chain(2, first=40 * life, owners=(ALICE,)) for life in range(3)]
    await node.speak(ALICE, spoken(*lives[0]))
    await node.put(*lives[0])
    go_on, entered, forget = threading.Event(), threading.Event(), node.disk.forget

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return forget(*arguments)

    monkeypatch.setattr(node.disk, "forget", slow)
    await node.client.forget(ALICE)
    await asyncio.to_thread(entered.wait, 10)
    await node.speak(ALICE, spoken(*lives[1]))
    await node.put(*lives[1])
    await node.client.forget(ALICE)
    await node.speak(ALICE, spoken(*lives[2]))
    await node.put(*lives[2])
    go_on.set()
    await node.owned.idle()
    assert node.has(*lives[2]) and not any(node.on_disk(entry) for life in lives[:2] for entry in life)


async def test_a_first_turn_under_way_when_its_agent_is_forgotten_leaves_no_kv(node):
    entries = chain(1, owners=(ALICE,))
    since = (await node.client.recall(ALICE, MODEL, {})).since
    await node.forget(ALICE)
    assert (await node.speak(ALICE, spoken(*entries), since)).kind == "forgotten"
    assert await node.put(*entries) == [] and not node.on_disk(entries[0])


async def test_the_next_process_knows_who_was_forgotten(node):
    entries = chain(1, owners=(ALICE,))
    await node.speak(ALICE, spoken(*entries))
    await node.forget(ALICE)
    node = await node.restarted()
    assert await node.put(*entries) == []
    node.close()


async def test_what_an_erasing_has_left_undone_the_next_process_does_and_keeps_what_came_since(node, monkeypatch):
    monkeypatch.setattr(ownership, "ERASE_TRIES", 1)
    monkeypatch.setattr(ownership, "ERASE_RETRY_S", 0.01)
    before, since = chain(2, owners=(ALICE,)), chain(2, first=40, owners=(ALICE,))
    shared = chain(1, first=80, owners=(ALICE, BOB))
    await node.speak(ALICE, spoken(*before))
    await node.speak(BOB, spoken(*shared))
    await node.put(*before, *shared)

    def failing(*arguments: Any) -> None:
        raise DiskError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(node.disk, "forget", failing)
        await node.forget(ALICE)
    await node.speak(ALICE, spoken(*since))
    await node.put(*since)
    assert node.has(*before, *since)
    node = await node.restarted()
    assert node.has(*since, *shared) and not any(node.on_disk(entry) for entry in before)
    node.close()


async def test_an_erasing_that_fails_is_tried_again(node, monkeypatch):
    monkeypatch.setattr(ownership, "ERASE_RETRY_S", 0.01)
    entries = chain(1, owners=(ALICE,))
    await node.speak(ALICE, spoken(*entries))
    await node.put(*entries)
    forget, failures = node.disk.forget, [DiskError("not now"), OSError("nor now")]

    def at_last(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return forget(*arguments)

    monkeypatch.setattr(node.disk, "forget", at_last)
    await node.forget(ALICE)
    assert not failures and not node.on_disk(entries[0])


async def test_what_is_kept_of_an_agent_on_disk_counts_blocks_and_tails(node):
    blocks = chain(2, owners=(ALICE,))
    own, others = tail([7, 8], 1, parent=blocks[1].id, owners=(ALICE,)), tail([1, 2, 3], 2, owners=(BOB,))
    await node.speak(ALICE, [*spoken(*blocks), 7, 8, 9])
    await node.speak(CAROL, [1, 2, 9])
    await node.speak(DAVE, [1, 2, 3, 4])
    assert await node.client.disk_kept(ALICE) == 0
    await node.put(*blocks)
    assert await node.client.disk_kept(ALICE) == 2
    await node.put(own)
    await node.put(others)
    assert await node.client.disk_kept(ALICE) == 3
    assert await node.client.disk_kept(CAROL) == 0, "another's tail that only begins alike"
    assert await node.client.disk_kept(DAVE) == 1, "another's tail of the same beginning"
    assert await node.client.disk_kept("default/nobody") == 0


class _Nothing:
    """An endpoint without replicas, over a node's store."""

    def __init__(self, node: kv_node.Node) -> None:
        client = node.client
        self.info, self.transcript, self.blocks, self.disk_kept = (
            client.info,
            client.transcript,
            client.blocks,
            client.disk_kept,
        )

    async def models(self) -> list[Any]:
        return []

    async def held(self, branch: BranchKV) -> int:
        return 0


async def test_an_agent_shorter_than_a_block_is_warm_as_soon_as_its_tail_is_on_the_disk(node):
    nothing: Any = _Nothing(node)
    await node.speak(ALICE, [7, 8, 9])
    assert (await agent_info(nothing, nothing, ALICE))["tier"] == "cold"
    await node.put(tail([7, 8], 1, owners=(ALICE,)))
    shown = await agent_info(nothing, nothing, ALICE)
    assert (shown["tier"], shown["blocks"], shown["tokens"]) == ("warm", 0, 3)


async def test_a_home_whose_kv_had_a_key_of_its_own_opens_and_only_that_kv_is_gone(node):
    await node.speak(ALICE, [1, 2, 3])
    old = node.folder / "blocks"
    (old / "segments").mkdir(parents=True)
    (old / "key").write_bytes(b"k" * 32)
    node = await node.restarted()
    assert not old.exists()
    assert json.loads(await node.client.transcript(ALICE)) == [] and await node.client.info(ALICE)
    assert [path.name for path in node.folder.rglob("key")] == ["key"]
    node.close()
