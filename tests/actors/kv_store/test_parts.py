"""KV of a divided model: the agent's words are under the leader's model id, each process's KV under its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from satchel.actors.protocol.block_ids import root_id, scope_of
from satchel.actors.protocol.entries import Entry
from satchel.actors.protocol.store_messages import AskUnpack
from tests.worlds.kv_store import kv_node
from tests.worlds.kv_store.kv_files import MODEL, OTHER_MODEL, chain, tail
from tests.worlds.kv_store.kv_node import ALICE, BOB, Node, spoken
from tests.worlds.kv_store.store_nodes import cluster

nodes = kv_node.nodes
"""A fixture."""

FOLLOWER = OTHER_MODEL
DIVIDED = {"name": "x", "source": "x", "split": {"pipeline": "auto"}}


def part(model: bytes, agent: str = ALICE, first: int = 0) -> list[Entry]:
    """Two blocks and a tail, as a process of the group has them."""
    tenant, _, name = agent.partition("/")
    root = root_id(model, scope_of("tenant", tenant, name, ""))
    blocks = chain(2, parent=root, first=first, owners=(agent,), layers=1 if model == FOLLOWER else 2)
    return [*blocks, tail([7, 8, 9], 5, blocks[-1].id, owners=(agent,))]


async def put(node: Node, entries: list[Entry], model: bytes) -> None:
    for each in entries:
        await node.put(each, model=model)


async def test_a_forgotten_agent_that_comes_back_gets_a_followers_kv_too(node):
    """And nothing from before it was forgotten, not even late."""
    old, new = part(FOLLOWER), part(FOLLOWER, first=50)
    await node.speak(ALICE, spoken(*old))
    await put(node, old[1:], FOLLOWER)
    await node.forget(ALICE)
    assert not node.has(*old[1:], model=FOLLOWER) and not any(map(node.on_disk, old))
    await node.speak(ALICE, spoken(*new))
    await put(node, new, FOLLOWER)
    await put(node, old[:1], FOLLOWER)
    assert node.has(*new, model=FOLLOWER) and node.disk.locate(FOLLOWER, [old[0].id]) == [None]
    node = await node.restarted()
    assert node.has(*new, model=FOLLOWER)
    await node.forget(BOB)
    assert node.has(*new, model=FOLLOWER)
    await node.forget(ALICE)
    assert node.disk.stats()["files"] == 0
    node.close()


async def test_a_fork_has_its_originals_parts(node):
    entries = part(FOLLOWER)
    await node.speak(ALICE, spoken(*entries))
    await put(node, entries, FOLLOWER)
    await node.client.fork(ALICE, BOB)
    await node.forget(ALICE)
    assert node.has(*entries, model=FOLLOWER)
    await node.forget(BOB)
    assert node.disk.stats()["files"] == 0
    node.close()


async def test_a_satchel_has_all_parts_and_a_cluster_takes_those_that_it_can_use(tmp_path: Path):
    """The follower's part is on another node than the agent."""
    leaders, followers = part(MODEL), part(FOLLOWER)
    async with cluster(tmp_path / "home", ["a", "b"], models=[DIVIDED]) as home:
        await home.speak("a", ALICE, "hello", spoken(*leaders))
        await home.put("a", leaders)
        await home.put("b", followers, FOLLOWER)
        await home.at("a").fetch(ALICE, "b", 10.0)
        assert home.has("a", *followers, model=FOLLOWER)
        files = home.agents("a").heads(ALICE)[0].files
        packed = await home.at("a").pack(ALICE, [(files, MODEL), (files, FOLLOWER)])
        data = Path(packed.path).read_bytes()
    assert packed.entries == 6
    for models, entries in (([MODEL, FOLLOWER], 6), ([FOLLOWER], 3), ([], 0)):
        async with cluster(tmp_path / f"other {entries}", ["a"]) as other:
            path = Path(await other.at("a").room(BOB, len(data)))
            path.write_bytes(data)
            came = await other.at("a").unpack(AskUnpack(BOB, str(path), models, trusted=True))
            assert (came.entries, came.entries_of) == (entries, 6)
            assert other.has("a", *part(FOLLOWER, BOB), model=FOLLOWER) is (FOLLOWER in models)
            assert other.has("a", *part(MODEL, BOB)) is (MODEL in models)
            assert other.said("a", BOB) == {"hello"}


@pytest.mark.parametrize("divided", [True, False])
async def test_a_followers_part_is_copied_to_the_agents_node_and_from_there_to_its_secondaries(
    tmp_path: Path, divided: bool
):
    """Only if the config divides a model: else nodes would ask each other for nothing after every turn."""
    leaders, followers = part(MODEL), part(FOLLOWER)
    model = DIVIDED if divided else {"name": "x", "source": "x"}
    async with cluster(tmp_path / "home", ["a", "b", "c"], models=[model], replication=2) as home:
        await home.speak("a", ALICE, "hello", spoken(*leaders))
        await home.put("b", followers, FOLLOWER)
        await home.put("a", leaders)
        copies = home.stores["a"].services.copies
        copies.kv_written(ALICE)
        await copies.idle()
        assert all(home.has(node, *leaders) for node in ("b", "c"))
        assert [home.has(node, *followers, model=FOLLOWER) for node in ("a", "c")] == [divided, divided]


async def test_a_follower_of_an_agent_that_lives_again_elsewhere_keeps_its_part(tmp_path: Path):
    """Its node has a tombstone of the agent, and no branch."""
    old, new = part(FOLLOWER), part(FOLLOWER, first=50)
    async with cluster(tmp_path / "home", ["a", "b"], models=[DIVIDED], replication=0) as home:
        await home.speak("a", ALICE, "hello", spoken(*old))
        await home.put("b", old[1:], FOLLOWER)
        await home.at("a").forget(ALICE)
        for node in ("a", "b"):
            await home.owned(node).idle()
        assert home.agents("b").forgotten() == [ALICE] and not home.has("b", *old[1:], model=FOLLOWER)
        await home.put("b", new, FOLLOWER)
        assert not home.has("b", *new, model=FOLLOWER), "it does not live yet"
        await home.speak("a", ALICE, "again", spoken(*new))
        await home.put("b", new, FOLLOWER)
        await home.put("b", old[:1], FOLLOWER)
        assert home.has("b", *new, model=FOLLOWER) and not home.has("b", *old[:1], model=FOLLOWER)
        home.owned("b")._to_erase[ALICE] = None
        await home.owned("b")._erase_all()
        assert home.has("b", *new, model=FOLLOWER), "as after a start"
        await home.at("a").forget(ALICE)
        await home.owned("b").idle()
        assert home.disk("b").stats()["files"] == 0
