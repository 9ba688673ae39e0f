"""Agents' KV between nodes: it follows their words, moves with them, and goes when they are forgotten."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from satchel.actors.kv_store.transfer import node_blocks
from satchel.actors.kv_store.transfer.pull_writer import PullWriter
from satchel.actors.protocol.entries import Entry, owner_tag
from satchel.actors.protocol.media_ids import NAME_TOKENS, embeddings_parent, media_tokens
from satchel.actors.protocol.store_messages import PullKV
from tests.worlds.kv_store.kv_files import MODEL, ROOT, chain, tail
from tests.worlds.kv_store.store_nodes import Cluster, cluster

X, Y = "default/x", "default/y"


async def kept(world: Cluster, node: str, agent: str, first: int = 0, blocks: int = 2) -> list[Any]:
    """An agent that has spoken there, with its KV on the node's disk."""
    entries = [*chain(blocks, first=first, owners=(agent,))]
    entries.append(tail([7, 8, first], 90 + first, entries[-1].id, owners=(agent,)))
    await world.speak(node, agent, f"from {first}", [token for entry in entries for token in entry.tokens])
    await world.put(node, entries)
    return entries


async def used(world: Cluster, node: str, agent: str, entries: list[Any]) -> None:
    """What a replica says when it has written a turn's KV."""
    await world.at(node).disk_touch(MODEL, [entry.id for entry in entries[:-1]], agent)
    await world.stores[node].services.copies.idle()


async def test_kv_follows_the_words_to_the_copy(tmp_path):
    async with cluster(tmp_path) as world:
        entries = await kept(world, "a", X)
        await used(world, "a", X, entries)
        assert world.has("b", *entries)
        calls = world.methods()
        await used(world, "a", X, entries)
        assert world.methods().count("fetch") == 1 and "fetch" in calls


@pytest.mark.parametrize("turns", [1, 2])
async def test_kv_that_is_written_before_its_turn_is_committed_follows_the_turn(tmp_path, turns: int):
    """A replica writes a turn's KV while the endpoint commits the turn."""
    async with cluster(tmp_path) as world:
        blocks = chain(turns, owners=(X,))
        for turn in range(1, turns + 1):
            entries = [*blocks[:turn], tail([7, 8, turn], 90 + turn, blocks[turn - 1].id, owners=(X,))]
            await world.put("a", entries[turn - 1 :])
            await used(world, "a", X, entries)
            assert not world.has("b", entries[-1])
            await world.speak("a", X, f"turn {turn}", [token for entry in entries for token in entry.tokens])
            await world.stores["a"].services.copies.idle()
            assert world.has("b", *entries)


async def test_turns_while_kv_is_copied_are_followed_by_one_more_copying(tmp_path):
    async with cluster(tmp_path) as world:
        entries = await kept(world, "a", X)
        world.delay_s = 0.05
        world.calls.clear()
        world.stores["a"].services.copies.blocks_later(X)
        await asyncio.sleep(0.02)
        for _ in range(50):
            world.stores["a"].services.copies.blocks_later(X)
        await world.stores["a"].services.copies.idle()
        assert world.methods().count("fetch") == 2 and world.has("b", *entries)


async def test_kv_that_is_not_at_home_is_copied_by_nobody(tmp_path):
    async with cluster(tmp_path) as world:
        entries = await kept(world, "a", X)
        await used(world, "a", X, entries)
        world.calls.clear()
        await used(world, "b", X, entries)
        assert "fetch" not in world.methods()


async def test_a_move_brings_the_kv_and_says_how_much(tmp_path, monkeypatch):
    """And what was measured of the link, however little this is."""
    monkeypatch.setattr(node_blocks, "LINK_BYTES_MIN", 1)
    async with cluster(tmp_path, replication=0) as world:
        entries = await kept(world, "a", X)
        moved = await world.at("a").move(X, "b")
        assert world.has("b", *entries)
        assert moved.tokens == 512 and moved.blocks >= 2 and moved.nbytes > 0
        assert (await world.report("b")).links.keys() == {"a"}
        assert (await world.at("b").stats()).disk["blocks"] == 2
        owners = world.disk("b").owners()
        assert owner_tag(world.disk("b").key, X) in owners


async def test_features_of_pictures_go_where_the_words_go_and_are_forgotten_with_them(tmp_path):
    """Those of both pictures, and what another agent's look alike is not touched."""
    name, second = tuple(media_tokens(b"k" * 32, NAME_TOKENS)), tuple(media_tokens(b"s" * 32, 3))
    tokens = [5, *media_tokens(b"k" * 32, 40), 6, *second, 7]
    embeddings = [tail(list(each), 50, embeddings_parent(ROOT, each), owners=(X,)) for each in (name, second)]
    other = tail([*media_tokens(b"o" * 32, NAME_TOKENS)], 51, embeddings_parent(ROOT, name), owners=(Y,))
    async with cluster(tmp_path, replication=0) as world:
        await world.speak("a", X, "look", tokens)
        await world.speak("a", Y, "else", [5, *media_tokens(b"o" * 32, 40)])
        for entry in (*embeddings, other):
            await world.put("a", [entry])
        await world.at("a").move(X, "b")
        assert world.has("b", *embeddings) and not world.on_disk("b", other)
        await world.at("b").forget(X)
        for node in "ab":
            await world.owned(node).idle()
            assert not any(world.on_disk(node, entry) for entry in embeddings), node
        await world.speak("b", X, "look again", tokens[: tokens.index(6)])
        for entry in embeddings:
            await world.put("b", [entry])
        assert world.has("b", embeddings[0]) and not world.has("b", embeddings[1]), (
            "what it sees again is its own again"
        )


async def test_features_that_are_there_already_belong_to_the_agent_that_comes_too(tmp_path):
    """Else they would be erased with the one who was there first."""
    name = tuple(media_tokens(b"k" * 32, NAME_TOKENS))
    tokens = [5, *media_tokens(b"k" * 32, 40), 6]

    def embeddings(owner: str) -> Entry:
        return tail(list(name), 50, embeddings_parent(ROOT, name), owners=(owner,))

    async with cluster(tmp_path, replication=0) as world:
        for node, agent in (("a", X), ("b", Y)):
            await world.speak(node, agent, "look", tokens)
            await world.put(node, [embeddings(agent)])
        await world.at("a").move(X, "b")
        await world.at("b").forget(Y)
        await world.owned("b").idle()
        assert world.has("b", embeddings(X))


async def test_a_node_whose_disk_takes_nothing_gets_the_words_all_the_same(tmp_path):
    """KV that cannot come is computed again; an agent that cannot move is stuck."""
    async with cluster(tmp_path, replication=0, disk_bytes_max=1 << 20) as world:
        await kept(world, "a", X)
        store = world.stores["b"]
        assert store.services.fetching.blocks is not None
        await asyncio.to_thread(store.services.fetching.blocks.close)
        moved = await world.at("a").move(X, "b")
        assert moved.blocks == 0 and world.homes(X) == ["b"]


async def test_a_node_that_keeps_no_kv_can_be_a_home(tmp_path):
    async with cluster(tmp_path, replication=0) as world:
        await kept(world, "a", X)
        world.stores["b"].services.fetching.blocks, blocks = None, world.stores["b"].services.fetching.blocks
        moved = await world.at("a").move(X, "b")
        assert moved.nbytes == 0 and world.homes(X) == ["b"]
        world.stores["b"].services.fetching.blocks = blocks


async def test_forgetting_erases_the_kv_on_all_nodes(tmp_path):
    """Also on one that has nothing but KV of the agent, because a replica there computed a turn; others' stays."""
    async with cluster(tmp_path, "abc") as world:
        entries = await kept(world, "a", X)
        others = await kept(world, "a", Y, first=20)
        await used(world, "a", X, entries)
        for name in "bc":
            await world.put(name, [*entries, *others])
        await world.at("a").forget(X)
        for name in "abc":
            await world.owned(name).idle()
            assert not any(world.on_disk(name, entry) for entry in entries), name
            assert world.has(name, *others), name


async def test_a_node_that_was_away_erases_the_kv_when_it_is_back(tmp_path):
    async with cluster(tmp_path) as world:
        entries = await kept(world, "a", X)
        await used(world, "a", X, entries)
        await world.stop("b")
        await world.at("a").forget(X)
        back = world.start("b")
        assert world.on_disk("b", entries[0])
        await back.services.tending.learn()
        assert back.services.memory.disk.owned is not None
        await back.services.memory.disk.owned.idle()
        assert not any(world.on_disk("b", entry) for entry in entries)


async def test_what_is_still_coming_for_an_agent_that_is_forgotten_is_not_kept(tmp_path, monkeypatch):
    """Neither a file that is written at that moment, nor a pull that begins afterwards."""
    async with cluster(tmp_path, replication=0) as world:
        entries = await kept(world, "a", X)
        written, go_on = threading.Event(), threading.Event()
        commit = PullWriter._commit

        def slowly(self: PullWriter, record: Any) -> None:
            written.set()
            assert go_on.wait(10.0)
            commit(self, record)

        monkeypatch.setattr(PullWriter, "_commit", slowly)
        ids, rest = [entry.id for entry in entries[:-1]], list(entries[-1].tokens)
        wanted = PullKV("a", MODEL, ROOT, ids, rest, X, 20.0)
        pulling = asyncio.ensure_future(world.at("b").pull(wanted))
        await asyncio.to_thread(written.wait, 10.0)
        await world.at("b").bury(X, 5, 0)
        await world.owned("b").idle()
        go_on.set()
        await pulling
        assert not world.has("b", entries[0])
        again = await world.at("b").pull(replace(wanted, deadline_s=5.0))
        assert again.tokens == 0 and not world.has("b", entries[0])
        tag = owner_tag(world.disk("b").key, X)
        assert tag not in world.disk("b").owners()
        mine = await world.at("b").pull(replace(wanted, owner=Y, deadline_s=5.0))
        assert mine.tokens == 512, "others may have it"


async def test_pulls_of_a_forgotten_agent_end_at_once(tmp_path, monkeypatch):
    async with cluster(tmp_path, replication=0) as world:
        entries = await kept(world, "a", X)
        store = world.stores["b"]
        assert store.services.fetching.blocks is not None and store.services.memory.disk.owned is not None
        cancelled: list[str] = []
        end = store.services.fetching.blocks._puller.cancel_owner

        def noted(owner: str, wait_s: float) -> bool:
            cancelled.append(owner)
            return end(owner, wait_s)

        monkeypatch.setattr(store.services.fetching.blocks._puller, "cancel_owner", noted)
        await world.at("b").bury(X, 5, 0)
        await store.services.memory.disk.owned.idle()
        assert cancelled == [X] and entries


async def test_an_agent_that_lives_again_gets_what_it_says_now(tmp_path):
    """Its tombstone bars what it had, and not what it has."""
    async with cluster(tmp_path) as world:
        old = await kept(world, "a", X)
        await world.at("a").forget(X)
        for name in "ab":
            await world.owned(name).idle()
        new = await kept(world, "a", X, first=40)
        await used(world, "a", X, new)
        assert world.has("a", *new) and world.has("b", *new)
        assert not world.has("b", old[0])
