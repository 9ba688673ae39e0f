"""KV that a copied agent stands on is the copy's too: forgetting one leaves it to the other, and both, to nobody."""

from __future__ import annotations

from satchel.actors.kv_store.services import ownership
from satchel.cluster.errors import DiskError
from tests.worlds.kv_store import kv_node
from tests.worlds.kv_store.kv_files import MODEL, chain, tail
from tests.worlds.kv_store.kv_node import ALICE, BOB, CAROL, spoken
from tests.worlds.kv_store.store_nodes import cluster

nodes = kv_node.nodes
"""A fixture."""

NOW = [1, 2]


def history() -> tuple[list, list[int]]:
    """Three blocks and a tail of Alice's, and her branch."""
    blocks = chain(3, owners=(ALICE,))
    end = tail(NOW, 9, parent=blocks[-1].id, owners=(ALICE,))
    return [*blocks, end], [*spoken(*blocks), *NOW, 3]


async def put(node, entries) -> None:
    await node.put(*(entry for entry in entries if not entry.tail))
    await node.put(*(entry for entry in entries if entry.tail))


async def test_a_copy_keeps_what_it_stands_on_when_its_original_is_forgotten_and_nothing_else(node):
    entries, branch = history()
    before = chain(1, first=70, owners=(ALICE,))
    # Of a branch that she has no more.
    elsewhere = tail([7, 7], 5, parent=entries[2].id, owners=(ALICE,))
    await node.speak(ALICE, branch)
    await put(node, [*entries, elsewhere])
    assert await node.client.fork(ALICE, BOB) == 1
    await node.speak(ALICE, spoken(*before))
    await node.put(*before)
    await node.forget(ALICE)
    assert node.has(*entries) and await node.client.disk_kept(BOB) == 4
    assert not node.on_disk(before[0]), "what the original said since is its own"
    assert not node.on_disk(elsewhere)
    await node.forget(BOB)
    assert not any(node.on_disk(entry) for entry in entries)
    assert node.disk.stats()["files"] == 0


async def test_an_original_keeps_what_it_stands_on_when_its_copy_is_forgotten(node):
    entries, branch = history()
    theirs = chain(1, first=70, parent=entries[2].id, owners=(BOB,))
    await node.speak(ALICE, branch)
    await put(node, entries)
    await node.client.fork(ALICE, BOB)
    await node.speak(BOB, spoken(*entries[:3], *theirs))
    await node.put(*theirs)
    await node.forget(BOB)
    assert node.has(*entries) and not node.on_disk(theirs[0])
    await node.forget(ALICE)
    assert node.disk.stats()["files"] == 0


async def test_kv_that_is_written_down_after_the_copy_was_made_is_the_copys_too(node):
    """Also where the original was forgotten before: nobody but the copy has it then. And for a copy of the copy."""
    entries, branch = history()
    await node.speak(ALICE, branch)
    late = [await node.write(entries[:3]), await node.write(entries[3:])]
    await node.client.fork(ALICE, BOB)
    await node.client.fork(BOB, CAROL)
    assert len(await node.client.disk_commit(late[0])) == 3
    await node.forget(ALICE)
    assert await node.client.disk_commit(late[1]) == [entries[3].id]
    assert node.has(*entries)
    await node.forget(BOB)
    assert node.has(*entries) and await node.client.disk_kept(CAROL) == 4
    await node.forget(CAROL)
    assert not any(node.on_disk(entry) for entry in entries)


async def test_what_the_copy_has_not_said_is_not_its_own_however_soon_it_comes(node):
    entries, branch = history()
    await node.speak(ALICE, branch)
    await node.client.fork(ALICE, BOB)
    since = chain(1, first=70, parent=entries[2].id, owners=(ALICE,))
    await node.speak(ALICE, spoken(*entries[:3], *since))
    await node.put(*since)
    await node.forget(ALICE)
    assert not node.on_disk(since[0])
    await node.forget(BOB)


async def test_an_original_is_taken_for_one_for_a_while_only(node, monkeypatch):
    monkeypatch.setattr(ownership, "HEIRS_MAX", 3)
    _, branch = history()
    await node.speak(ALICE, branch)
    for number in range(9):
        await node.client.fork(ALICE, f"default/copy{number}")
    assert len(node.owned.heirs_of(ALICE)) <= 3
    monkeypatch.setattr(ownership, "HEIRS_S", -1.0)
    await node.client.fork(ALICE, "default/last")
    assert "default/last" not in node.owned.heirs_of(ALICE)


async def test_a_copy_whose_id_was_forgotten_before_has_what_it_stands_on_while_its_former_life_is_erased(
    node, monkeypatch
):
    entries, branch = history()
    former = chain(1, first=70, owners=(BOB,))
    await node.speak(BOB, spoken(*former))
    await node.put(*former)
    await node.speak(ALICE, branch)
    await put(node, entries)
    await node.client.forget(BOB)
    await node.client.fork(ALICE, BOB)
    await node.owned.idle()
    await node.forget(ALICE)
    assert node.has(*entries) and not node.on_disk(former[0])
    await node.forget(BOB)
    assert node.disk.stats()["files"] == 0


async def test_a_copy_is_made_also_where_the_disk_fails(node, monkeypatch):
    """What it stands on is computed anew then."""
    entries, branch = history()
    await node.speak(ALICE, branch)
    await put(node, entries)

    def failing(*arguments: object) -> None:
        raise DiskError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(node.disk, "give", failing)
        assert await node.client.fork(ALICE, BOB) == 1
    assert (await node.client.recall(BOB, MODEL, {})).branches


async def test_the_copies_of_both_on_another_node_outlive_each_other_too(tmp_path):
    """What is written down at home after the copy was made follows for the copy as well."""
    entries, branch = history()
    async with cluster(tmp_path) as world:
        home = world.stores["a"]
        await world.speak("a", ALICE, "hello", branch)
        await world.at("a").fork(ALICE, BOB)
        await home.services.copies.idle()
        await world.put("a", entries)
        await world.at("a").disk_touch(MODEL, [entry.id for entry in entries], ALICE)
        await home.services.copies.idle()
        assert world.has("b", *entries)
        await world.at("a").forget(ALICE)
        for store in world.stores.values():
            assert store.services.memory.disk.owned is not None
            await store.services.memory.disk.owned.idle()
        assert world.has("a", *entries) and world.has("b", *entries)
        moved = await world.at("a").move(BOB, "b")
        assert moved.node == "b" and await world.at("b").disk_kept(BOB) == 4
        await world.at("b").forget(BOB)
        for store in world.stores.values():
            assert store.services.memory.disk.owned is not None
            await store.services.memory.disk.owned.idle()
        assert not any(world.on_disk(name, entry) for name in "ab" for entry in entries)
