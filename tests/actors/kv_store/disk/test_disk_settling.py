"""After a start agents' branches tell who owns what KV, and forgetting one costs no other anything."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest

from satchel.actors.kv_store.disk.store import DiskStore
from satchel.actors.kv_store.services import ownership
from satchel.actors.protocol.entries import Entry
from satchel.cluster.errors import DiskError
from tests.worlds.kv_store import kv_node
from tests.worlds.kv_store.kv_files import MODEL, ROOT, chain, tail
from tests.worlds.kv_store.kv_node import ALICE, BOB, CAROL, DAVE, Node, spoken

nodes = kv_node.nodes
"""A fixture."""


async def test_after_a_start_agents_own_what_they_remember_and_forgetting_one_costs_the_others_nothing(node, caplog):
    system = chain(1)
    hers = chain(2, first=10, parent=system[0].id, owners=(ALICE,))
    his = chain(1, first=50, parent=system[0].id, owners=(BOB,))
    her_tail, his_tail = tail([7, 8], 1, parent=hers[1].id, owners=(ALICE,)), tail([5], 2, owners=(BOB,))
    orphan = chain(1, first=90, owners=(CAROL,))
    system = [Entry(system[0].id, ROOT, system[0].tokens, system[0].parts, owners=(CAROL,))]
    await node.speak(ALICE, [*spoken(*system, *hers), 7, 8, 9])
    await node.speak(BOB, spoken(*system, *his))
    await node.speak(BOB, [5, 6])
    await node.put(*system, *hers, *his, *orphan)
    for each in (her_tail, his_tail):
        await node.put(each)
    everything = [*system, *hers, *his, her_tail, his_tail]
    node = await node.restarted()
    assert node.has(*everything, *orphan)
    assert node.owned.settled_total == len(everything)
    assert not [said for said in caplog.records if said.levelno >= logging.WARNING], "every start does this"
    assert [record.id for record in node.disk.uncertain()] == [orphan[0].id]
    await node.forget(DAVE)
    assert node.has(*everything, *orphan)
    await node.forget(CAROL)
    assert node.has(*everything) and not node.on_disk(orphan[0]), "others stand on what she wrote"
    await node.forget(ALICE)
    assert node.has(*system, *his, his_tail) and not any(node.on_disk(entry) for entry in (*hers, her_tail))
    await node.forget(BOB)
    assert node.disk.stats()["files"] == 0
    node.close()


async def test_after_a_start_nothing_of_who_was_forgotten_comes_back(node):
    """The file still names its first owner, and the forgotten one's late, uncommitted file lies beside it."""
    shared, hers = chain(1, owners=(ALICE,)), chain(1, first=40, owners=(ALICE,))
    again, late = chain(1, first=60, owners=(ALICE,)), chain(1, first=80, owners=(ALICE,))
    await node.speak(ALICE, spoken(*shared))
    await node.speak(BOB, spoken(*shared))
    await node.put(*shared)
    await node.client.disk_touch(MODEL, [shared[0].id], BOB)
    await node.forget(ALICE)
    await node.speak(ALICE, spoken(*again))
    await node.put(*again)
    await node.write(hers)
    await node.write(late)
    node = await node.restarted()
    assert node.has(*shared, *again) and not node.on_disk(hers[0]) and not node.on_disk(late[0])
    await node.forget(BOB)
    assert node.has(*again) and not node.on_disk(shared[0])
    node.close()


async def test_who_came_later_and_was_forgotten_leaves_it_to_others_and_what_was_hers_goes_at_a_start(
    node, monkeypatch
):
    """She was forgotten, and the process died before it erased what she had."""
    monkeypatch.setattr(ownership, "ERASE_TRIES", 1)
    monkeypatch.setattr(ownership, "ERASE_RETRY_S", 0.01)
    shared, hers = chain(1, owners=(CAROL,)), chain(1, first=40, owners=(ALICE,))
    await node.speak(ALICE, spoken(*shared))
    await node.speak(ALICE, spoken(*hers))
    await node.put(*shared, *hers)
    await node.client.disk_touch(MODEL, [entry.id for entry in (*shared, *hers)], ALICE)

    def failing(*arguments: Any) -> None:
        raise DiskError("not now")

    monkeypatch.setattr(node.disk, "forget", failing)
    await node.forget(ALICE)
    node = await node.restarted()
    assert node.has(*shared) and not node.on_disk(hers[0])
    await node.forget(CAROL)
    assert not node.on_disk(shared[0])
    node.close()


async def test_settling_that_was_cut_off_goes_on_at_the_next_start(node, monkeypatch):
    monkeypatch.setattr(ownership, "_SETTLED_TOGETHER", 1)
    entries = chain(4, owners=(CAROL,))
    await node.speak(ALICE, spoken(*entries))
    await node.put(*entries)
    settle, calls = DiskStore.settle, 0

    def dying(self: DiskStore, owners: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise DiskError("cut off")
        return settle(self, owners)

    with monkeypatch.context() as cut:
        cut.setattr(DiskStore, "settle", dying)
        node = await node.restarted()
    assert len(list(node.disk.uncertain())) == 2
    node = await node.restarted()
    assert list(node.disk.uncertain()) == [] and node.has(*entries)
    await node.forget(CAROL)
    assert node.has(*entries)
    await node.forget(ALICE)
    assert node.disk.stats()["files"] == 0
    node.close()


async def test_what_is_forgotten_while_owners_are_settled_goes_all_the_same(node, monkeypatch):
    hers, his = chain(2, owners=(ALICE,)), chain(2, first=40, owners=(BOB,))
    await node.speak(ALICE, spoken(*hers))
    await node.speak(BOB, spoken(*his))
    await node.put(*hers, *his)
    node.close()
    settle, forgetting = DiskStore.settle, threading.Event()

    def slow(self: DiskStore, owners: Any) -> int:
        assert forgetting.wait(10)
        return settle(self, owners)

    monkeypatch.setattr(DiskStore, "settle", slow)
    node = Node(node.folder)
    await node.client.forget(ALICE)
    forgetting.set()
    await node.owned.idle()
    assert node.has(*his) and not any(node.on_disk(entry) for entry in hers)
    node.close()


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_comes_together_only_what_some_agent_remembers_is_left(node, monkeypatch, seed):
    """Turns, late writes, deletions, restarts and lost indexes in any order: of a forgotten life nothing stays, and
    nobody's deletion takes what another agent, or the same one since, remembers and has committed."""
    monkeypatch.setattr(node, "claim_wait_s", 0.01)
    monkeypatch.setattr(node.owned, "_claim_wait_s", 0.01)
    rng = random.Random(seed)
    agents = [ALICE, BOB, CAROL]
    known: dict[str, list[Entry]] = {}
    late: list[dict[str, Any]] = []
    everything: dict[bytes, Entry] = {}
    committed: set[tuple[str, bytes]] = set()
    for step in range(40):
        agent = rng.choice(agents)
        act = rng.choice(("turn", "turn", "turn", "late turn", "commit late", "forget", "restart"))
        if act in ("turn", "late turn"):
            entries = chain(rng.randint(1, 3), first=rng.choice((0, 10 * step)), owners=(agent,))
            everything.update({entry.id: entry for entry in entries})
            await node.speak(agent, spoken(*entries))
            known.setdefault(agent, []).extend(entries)
            record = await node.write(entries)
            if act == "late turn":
                late.append(record)
            else:
                await node.client.disk_commit(record)
                await node.client.disk_touch(MODEL, [entry.id for entry in entries], agent)
                committed.update((agent, entry.id) for entry in entries)
        elif act == "commit late" and late:
            await node.client.disk_commit(late.pop(rng.randrange(len(late))))
        elif act == "forget":
            await node.forget(agent)
            known.pop(agent, None)
            committed = {(who, entry) for who, entry in committed if who != agent}
        elif act == "restart":
            # What was written for the last process does not count any more.
            late.clear()
            node = await node.restarted()
            # A file names who wrote it, and branches who stands on it: of one that no branch needs any more nobody
            # knows who else had it.
            claims = {agent: (await node.owned.claims(agent)).blocks for agent in agents}
            first = {entry.id: entry.owners[0] for entry in everything.values()}
            committed = {(who, entry) for who, entry in committed if entry in claims[who] or first[entry] == who}
        remembered = {entry.id for entries in known.values() for entry in entries}
        live = {block for block in everything if node.disk.locate(MODEL, [block]) != [None]}
        assert live <= remembered, f"seed {seed}, step {step}: {act}"
        assert {entry for _, entry in committed} <= live, f"seed {seed}, step {step}: {act}"
    for record in late:
        await node.client.disk_commit(record)
    await node.owned.idle()
    node.disk.compact()
    remembered = {entry.id for entries in known.values() for entry in entries}
    left = [entry for entry in everything.values() if entry.id not in remembered and node.on_disk(entry)]
    assert not left, f"seed {seed}"
    node.disk.check(payload=True)
    node.close()
