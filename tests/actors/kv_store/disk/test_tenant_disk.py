"""What a tenant with a limit has on a node's disk: its KV makes room for its words, its words are refused beyond it,
and nothing of anybody else's ever goes for that."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satchel.actors.kv_store.agents.branches import ROW_BYTES
from satchel.actors.kv_store.agents.database import AgentDatabase
from satchel.actors.kv_store.disk import segment_footer
from satchel.actors.kv_store.disk.quotas import Quotas
from satchel.actors.protocol.block_ids import root_id
from satchel.actors.protocol.entries import NOBODY, crowd_tag, is_crowd, owner_tag, tenant_of_tag, tenant_tag
from satchel.actors.protocol.store_messages import Commit, Content, Head, PullKV
from satchel.cluster.errors import QuotaExceeded
from tests.worlds.kv_store import kv_node
from tests.worlds.kv_store.kv_files import MODEL, ROOT, Bench, chain, nbytes_of, tail
from tests.worlds.kv_store.kv_node import Node, spoken
from tests.worlds.kv_store.store_nodes import Cluster, cluster

nodes = kv_node.nodes
"""A fixture."""

ANN, BOB = "ann/x", "bob/x"
EVERYBODY = ("ann/x", "ann/y", "bob/x")
FIRST = {"ann": 0, "bob": 1000}


# Pure.


def test_the_owner_has_no_limit_and_an_unknown_one_is_none():
    words = {"ann": 10}
    quotas = Quotas(lambda tenant: words.get(tenant, 0), "default")
    quotas.note({"default": 5, "ann": 10})
    quotas.note(None)
    assert [quotas.kv_bytes_max(name) for name in ("default", "ann", "bob")] == [None, 0, None]
    assert quotas.of("ann/x") == {"ann": 10} and quotas.of("bob/x") == {} == quotas.of("default/x")
    quotas.check("ann/x")
    words["ann"] = 11
    with pytest.raises(QuotaExceeded, match=r"11 bytes.*10.*erasing agents") as refused:
        quotas.check("ann/y")
    assert refused.value.status == 429 and refused.value.code == "insufficient_quota"
    assert quotas.kv_bytes_max("ann") == 0
    quotas.note({"ann": None})
    quotas.check("ann/x")
    assert quotas.kv_bytes_max("ann") is None and quotas.of("ann/x") == {"ann": None}


def test_tags_of_one_tenant_begin_alike_and_no_others():
    key = bytes(32)
    tags = {name: owner_tag(key, name) for name in ("ann/x", "ann/x/y", "ann/y", "bob/x", "annx/x", "default/x")}
    assert len(set(tags.values())) == len(tags) and all(len(tag) == 16 for tag in tags.values())
    for name, tag in tags.items():
        assert tenant_of_tag(tag) == tenant_tag(key, name.partition("/")[0])
    assert len({tenant_of_tag(tag) for tag in tags.values()}) == 4
    assert is_crowd(crowd_tag(tags["ann/x"])) and not any(map(is_crowd, tags.values())) and is_crowd(NOBODY)
    assert crowd_tag(tags["ann/x"]) == crowd_tag(tags["ann/y"]) != crowd_tag(tags["bob/x"])
    assert tenant_of_tag(crowd_tag(tags["ann/x"])) == tenant_tag(key, "ann")
    assert tenant_of_tag(owner_tag(key, "")) == tenant_of_tag(NOBODY) == b""


# The disk.


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    made = Bench(tmp_path / "kv")
    made.open()
    yield made
    made.store.check(payload=True)
    made.store.close()


def size(bench: Bench, blocks: int = 1) -> int:
    """Of a segment of so many blocks, in some other folder."""
    probe = Bench(bench.root.parent / f"probe{blocks}")
    with probe.open():
        probe.put(chain(blocks, first=500, owners=(ANN,)))
        return probe.store.stats()["bytes"]


def test_the_oldest_of_a_tenant_goes_and_nothing_of_others(disk: Bench):
    block = size(disk)
    hers = [chain(1, first=number, owners=(ANN,)) for number in range(6)]
    his = [chain(1, first=1000 + number, owners=(BOB,)) for number in range(6)]
    for entries in (*his[:3], *hers[:3]):
        disk.put(entries)
    assert disk.store.limit("ann", 2 * block) == [hers[0][0].id]
    assert nbytes_of(disk.store, "ann") == 2 * block and nbytes_of(disk.store, "bob") == 3 * block
    disk.store.touch([hers[1][0].id])
    assert disk.put(hers[3]).retracted == [hers[2][0].id], "not the one that was used since"
    for entries in his[3:]:
        disk.put(entries)
    assert disk.has(*(entries[0] for entries in his), hers[1][0], hers[3][0])
    disk.store.limit("ann", None)
    for entries in hers[4:]:
        assert disk.put(entries).retracted == []
    assert nbytes_of(disk.store, "ann") == 4 * block


def test_a_file_that_alone_is_too_large_drives_nothing_out_and_is_not_kept(disk: Bench):
    block = size(disk)
    first = chain(1, owners=(ANN,))
    disk.put(first)
    disk.store.limit("ann", size(disk, 3) - 1)
    large = chain(3, first=20, owners=(ANN,))
    placed = disk.put(large)
    assert placed.refused == [entry.id for entry in large] and not placed.kept
    assert disk.has(*first) and disk.lacks(*large) and len(disk.files()) == 1
    disk.store.limit("ann", block - 1)
    assert disk.lacks(*first) and not disk.files() and nbytes_of(disk.store, "ann") == 0
    assert disk.put(first).refused


def test_of_a_turn_that_is_too_long_the_beginning_stays(disk: Bench):
    """Nobody finds the rest without it, and the rest is what came last."""
    disk.store.limit("ann", 3 * size(disk))
    old = chain(1, first=90, owners=(ANN,))
    disk.put(old)
    whole = chain(6, owners=(ANN,))
    for entry in whole[:4]:
        placed = disk.put([entry])
    assert placed.retracted == [whole[3].id], "the writer writes no more"
    assert disk.has(*whole[:3]) and disk.lacks(*whole[3:], *old)
    disk.store.touch([entry.id for entry in whole])
    other = chain(1, first=70, owners=(ANN,))
    disk.put(other)
    assert disk.has(*whole[:2], *other) and disk.lacks(whole[2])


def test_what_agents_of_a_tenant_share_counts_once_and_forgetting_gives_it_back(disk: Bench):
    block = size(disk)
    entries = chain(2, owners=("ann/x",))
    disk.put(entries)
    before = nbytes_of(disk.store, "ann")
    disk.store.touch([entry.id for entry in entries], "ann/y")
    assert disk.put(chain(2, owners=("ann/y",))).dropped and nbytes_of(disk.store, "ann") == before
    disk.store.forget("ann/x")
    assert nbytes_of(disk.store, "ann") == before and disk.has(*entries)
    disk.store.forget("ann/y")
    assert nbytes_of(disk.store, "ann") == 0 and disk.store.limit("ann", block) == []


def test_what_is_being_read_goes_when_nobody_reads_it_any_more(disk: Bench):
    entries = chain(1, owners=(ANN,))
    disk.put(entries)
    for end in ("told", "forgotten"):
        pin = disk.store.pin([where for where in disk.located(entries) if where], 30.0)
        assert disk.store.limit("ann", 0) == [] and disk.has(*entries)
        if end == "told":
            disk.store.unpin(pin)
            assert disk.lacks(*entries) and not disk.files()
            disk.store.limit("ann", None)
            disk.put(entries)
    disk.now += 31.0
    disk.store.keep_reserve()
    assert disk.lacks(*entries)


def test_counts_are_right_after_another_start(disk: Bench):
    disk.put(chain(2, owners=(ANN,)))
    disk.put([tail([1, 2], 5, owners=(ANN,))])
    disk.put(chain(1, first=1000, owners=(BOB,)))
    disk.put(chain(1, first=2000))
    before = [nbytes_of(disk.store, name) for name in ("ann", "bob", "cat")]
    assert before[0] > before[1] > 0 == before[2]
    disk.open(settles=False)
    assert [nbytes_of(disk.store, name) for name in ("ann", "bob", "cat")] == before


def test_what_an_earlier_version_wrote_is_removed_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Nobody could find it to erase it. The log says so once."""
    bench = Bench(tmp_path / "kv")
    entries = chain(2, owners=(ANN,))
    with monkeypatch.context() as before:
        before.setattr(segment_footer, "FORMAT", "satchel.segment.2")
        bench.open()
        for entry in entries:
            path = bench.root / "segments" / MODEL.hex() / bench.write([entry]).name
            path.rename(path.with_suffix(".safetensors"))
        bench.write(entries)
    for name in ("index", "index-wal", "index.damaged-1"):
        (bench.root / name).write_bytes(b"tokens")
    bench.open()
    assert caplog.text.count("3 files of KV, damaged or in an earlier layout, were removed") == 1
    assert bench.lacks(*entries) and not bench.files() and nbytes_of(bench.store, "ann") == 0
    assert not list(bench.root.glob("index*"))
    bench.put(entries)
    bench.store.check(payload=True)
    bench.store.close()


def test_a_limit_that_cannot_be_kept_now_is_kept_later(disk: Bench, monkeypatch: pytest.MonkeyPatch):
    """Whoever reads or asks meanwhile hears no error."""
    entries = chain(1, owners=(ANN,))
    disk.put(entries)
    with monkeypatch.context() as full:
        full.setattr(disk.store._shelf.io, "unlink", Mock(side_effect=OSError(errno.EIO, "not now")))
        assert disk.store.limit("ann", 0) == [entries[0].id]
        assert disk.store.stats()["failed_removals_total"] == 1 == len(disk.files())
        disk.store.unpin(disk.store.pin([], 1.0))
    disk.store.keep_reserve()
    assert disk.lacks(*entries) and not disk.files()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(EVERYBODY), st.integers(0, 4), st.integers(1, 3)),
        st.tuples(st.just("touch"), st.sampled_from(EVERYBODY), st.integers(0, 4)),
        st.tuples(st.just("forget"), st.sampled_from(EVERYBODY)),
        st.tuples(st.just("limit"), st.one_of(st.none(), st.integers(0, 12_000))),
        st.tuples(st.just("compact")),
        st.tuples(st.just("start")),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(taken=STEPS)
def test_whatever_happens_the_counts_are_right_and_others_keep_theirs(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[Any, ...]]
):
    bench = Bench(tmp_path_factory.mktemp("kv") / "kv")
    bench.open()
    most: int | None = None
    his: dict[bytes, Any] = {}
    for step in taken:
        match step:
            case "put", agent, first, count:
                entries = chain(count, first=FIRST[agent[:3]] + 10 * first, owners=(agent,))
                bench.put(entries)
                if agent == "bob/x":
                    his |= {entry.id: entry for entry in entries}
            case "touch", agent, first:
                ids = [entry.id for entry in chain(3, first=FIRST[agent[:3]] + 10 * first)]
                bench.store.touch(ids, agent)
            case "forget", agent:
                bench.store.forget(agent)
                his = {} if agent == "bob/x" else his
            case "limit", most:
                bench.store.limit("ann", most)
            case ("compact",):
                bench.store.compact()
            case ("start",):
                bench.open()
                bench.store.limit("ann", most)
        assert most is None or nbytes_of(bench.store, "ann") <= most
        assert bench.has(*his.values())
        bench.store.check()
    bench.store.close()


# Words.

WRITES = st.lists(
    st.tuples(
        st.sampled_from(["put", "drop", "erase", "let go", "begin", "end", "fail"]),
        st.sampled_from(["ann/x", "ann/y", "bob/x"]),
        st.integers(1, 3),
        st.integers(0, 50),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(WRITES)
def test_words_of_a_tenant_are_counted_as_they_are_also_where_writing_fails(taken: list[tuple[str, str, int, int]]):
    database = AgentDatabase()
    kept: dict[tuple[str, int], int] = {}
    inside: list[tuple[Any, dict[tuple[str, int], int]]] = []
    for what, agent, branch, size in taken:
        head = Head(agent, branch, branch, b"m" * 32, b"", 1, False, 1, size, 0, 0.0, 0.0)
        if what == "put":
            database.put(head, Content(bytes(4 * size), "x" * size, b"[]"))
            kept[agent, branch] = 5 * size + 2 + ROW_BYTES
        elif what == "drop":
            database.drop(head)
            kept.pop((agent, branch), None)
        elif what in ("erase", "let go"):
            database.erase(agent) if what == "erase" else database.let_go(agent, 1, 10)
            kept = {key: nbytes for key, nbytes in kept.items() if key[0] != agent}
        elif what == "begin" and len(inside) < 3:
            transaction = database.transaction()
            transaction.__enter__()
            inside.append((transaction, dict(kept)))
        elif what == "end" and inside:
            inside.pop()[0].__exit__(None, None, None)
        elif what == "fail" and inside:
            transaction, kept = inside.pop()
            assert not transaction.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        for tenant in ("ann", "bob"):
            held = sum(nbytes for (agent, _), nbytes in kept.items() if agent.startswith(tenant))
            assert database.nbytes_of(tenant) == held
        assert database.nbytes == sum(kept.values())
    while inside:
        inside.pop()[0].__exit__(None, None, None)
    assert not database._counted
    database.close()


# The store's actor.


async def refused(node: Node, method: str, *arguments: Any) -> None:
    with pytest.raises(QuotaExceeded):
        await getattr(node.client, method)(*arguments)


async def say(node: Node, agent: str, tokens: list[int], limits: dict[str, int | None] | None = None) -> Any:
    since = (await node.client.recall(agent, MODEL, {}, limits)).since
    content = Content(b"\0\0\0\1" * len(tokens), "x", b"[1]")
    return await node.client.commit(agent, Commit(MODEL, content, 1, since), limits)


async def test_words_over_the_limit_are_refused_until_some_are_erased(node: Node):
    limits: dict[str, int | None] = {"ann": 3000}
    await say(node, "ann/a", [1] * 100, limits)
    await say(node, "bob/a", [1] * 100)
    kept = await say(node, "ann/b", [1] * 900, limits)
    assert kept.kind == "opened", "one turn may end above it"
    held = node.actor.services.memory.agents.nbytes_of("ann")
    for restarted in (False, True):
        if restarted:
            node.close()
            node.__init__(node.folder)
            assert node.actor.services.memory.agents.nbytes_of("ann") == held
        for method, arguments in (
            ("recall", ("ann/a", MODEL, {}, limits)),
            ("recall", ("ann/new", MODEL, {}, limits)),
            ("begin", ("ann/a", "turn", MODEL, {}, limits)),
            ("fork", ("ann/a", "ann/c", limits)),
        ):
            await refused(node, method, *arguments)
    assert len(await node.client.agents("ann", "", 10)) == 2 and await node.client.info("ann/a")
    assert await node.client.transcript("ann/b") == b"[1]"
    assert (await node.client.recall("ann/a", MODEL, {})).branches, "who adds no words is not refused"
    assert (await node.client.begin("ann/a", "move", b"", {})).branch
    await node.client.abandon("ann/a", "move")
    await say(node, "bob/b", [1] * 2000, {"bob": None})
    await say(node, "default/b", [1] * 2000, {"default": None})
    await node.forget("ann/b")
    await say(node, "ann/a", [1] * 10, limits)
    await refused(node, "fork", "ann/a", "ann/c", {"ann": 1500})
    assert [each.agent for each in await node.client.agents("ann", "", 10)] == ["ann/a"]
    assert await node.client.fork("ann/a", "ann/c", {"ann": 3000})
    await say(node, "ann/b", [1] * 900, {"ann": None})


async def test_of_turns_that_end_together_one_takes_the_words_over_the_limit(node: Node):
    limits: dict[str, int | None] = {"ann": 2000}
    sinces = [(await node.client.recall(f"ann/{name}", MODEL, {}, limits)).since for name in "abcd"]
    await node.client.begin("ann/d", "turn", MODEL, {}, limits)
    commit = Commit(MODEL, Content(bytes(4000), "x", b"[1]"), 1, 0)
    ends = [replace(commit, since=since) for since in sinces]
    ends[-1] = replace(ends[-1], turn="turn")
    kinds = [
        (await node.client.commit(f"ann/{name}", end, limits)).kind for name, end in zip("abcd", ends, strict=True)
    ]
    assert kinds == ["opened", "over quota", "over quota", "over quota"]
    assert await node.client.begin("ann/d", "next", MODEL, {}), "its turn is over"
    assert not await node.client.agents("ann", "ann/a", 10)


async def test_kv_makes_room_for_words_and_words_never_for_kv(node: Node, tmp_path: Path):
    entries = chain(3, owners=(ANN,))
    his = chain(3, first=1000, owners=(BOB,))
    await node.speak(BOB, spoken(*his))
    await node.put(*his)
    record = await node.write(entries)
    words = 40_000
    block = size(Bench(tmp_path / "kv"), 3)
    limits: dict[str, int | None] = {"ann": words + 2 * block}
    await say(node, ANN, [1] * 768, limits)
    assert await node.client.disk_commit(record, limits) == [entry.id for entry in entries]
    await node.client.disk_touch(MODEL, [entry.id for entry in entries], ANN)
    assert node.has(*entries, *his)
    await say(node, "ann/y", [1] * (words // 4 + 1500), limits)
    assert not node.has(*entries) and node.has(*his) and await node.client.info(ANN)
    assert nbytes_of(node.disk, "ann") + node.actor.services.memory.agents.nbytes_of("ann") <= limits["ann"]  # pyright: ignore
    late = await node.write(chain(3, first=50, owners=(ANN,)))
    assert await node.client.disk_commit(late, {"ann": 1}) == [], "a limit below one turn keeps no KV"
    assert (await node.client.info(ANN)).branches and (await node.client.info("ann/y")).branches
    assert await node.client.disk_commit(await node.write(entries), {"ann": None}) == [entry.id for entry in entries]


async def test_a_limit_comes_with_the_first_request_after_a_start(node: Node, tmp_path: Path):
    entries = chain(2, owners=(ANN,))
    await node.speak(ANN, spoken(*entries))
    assert await node.client.disk_commit(await node.write(entries), {"ann": 10**6})
    node = await node.restarted()
    try:
        more = chain(1, first=50, owners=(ANN,))
        held = nbytes_of(node.disk, "ann") + node.actor.services.memory.agents.nbytes_of("ann")
        await node.client.disk_commit(await node.write(more), {"ann": held})
        assert not node.has(*entries) and node.has(*more)
    finally:
        await node.owned.idle()
        node.disk.check(payload=True)
        node.close()


# Several nodes.


async def kv(world: Cluster, node: str, agent: str, first: int, limits: dict[str, int | None]) -> list[Any]:
    entries = chain(3, first=first, parent=root_id(MODEL, f"tenant:{agent[:3]}"), owners=(agent,))
    tokens = [token for entry in entries for token in entry.tokens]
    await world.speak(node, agent, f"from {first}", tokens, limits=limits)
    await world.put(node, entries)
    await world.at(node).disk_touch(MODEL, [entry.id for entry in entries], agent)
    await world.stores[node].services.copies.idle()
    return entries


async def test_copies_count_where_they_are_and_are_never_refused(tmp_path: Path):
    """The node of the copies hears of the limit with them."""
    async with cluster(tmp_path) as world:
        both = await kv(world, "a", BOB, 1000, {"bob": None})
        many: dict[str, int | None] = {"ann": 10**6}
        entries = await kv(world, "a", ANN, 0, many)
        agents, disk, quotas = world.agents("b"), world.disk("b"), world.stores["b"].services.memory.quotas
        assert nbytes_of(disk, "ann") > 0 and quotas.of(ANN) == many
        words, held = agents.nbytes_of("ann"), nbytes_of(disk, "ann")
        assert words == world.agents("a").nbytes_of("ann") and world.has("b", *entries)
        few: dict[str, int | None] = {"ann": 2 * words + held - 100}
        await world.speak("a", "ann/y", "more", [1] * 768, limits=few)
        assert nbytes_of(disk, "ann") == 0 and world.has("b", *both), "its KV made room for the copy of its words"
        await world.speak("a", "ann/y", "even more", [2] * 768, limits=few)
        await world.speak("a", "ann/y", "much more", [3] * 1500, limits={"ann": None})
        assert world.said("b", "ann/y") == {"more", "even more", "much more"}
        assert quotas.of(ANN) == {"ann": None}
        assert agents.nbytes_of("ann") == world.agents("a").nbytes_of("ann")


async def test_what_a_move_brings_counts_at_the_new_home(tmp_path: Path):
    async with cluster(tmp_path, replication=0) as world:
        limits: dict[str, int | None] = {"ann": 10**6}
        entries = await kv(world, "a", ANN, 0, limits)
        held = [world.agents("a").nbytes_of("ann"), nbytes_of(world.disk("a"), "ann")]
        await world.at("a").move(ANN, "b")
        agents, disk = world.agents("b"), world.disk("b")
        assert world.has("b", *entries)
        assert [agents.nbytes_of("ann"), nbytes_of(disk, "ann")] == [
            held[0],
            pytest.approx(held[1], rel=0.2),
        ]
        await world.speak("b", ANN, "and now", [7] * 100, limits={"ann": held[0] + 2000})
        assert nbytes_of(disk, "ann") == 0 and len(world.said("b", ANN)) == 2


async def test_what_is_pulled_fits_the_limit_and_is_the_beginning(tmp_path: Path):
    async with cluster(tmp_path, replication=0) as world:
        entries = chain(40, owners=(ANN,))
        await world.speak("a", ANN, "long", [token for entry in entries for token in entry.tokens])
        for start in range(0, 40, 16):
            await world.put("a", entries[start : start + 16])
        held = nbytes_of(world.disk("a"), "ann")
        chain_ids = [entry.id for entry in entries]
        most = held * 3 // 4
        await world.at("b").pull(PullKV("a", MODEL, ROOT, chain_ids, [], ANN, 20.0, {"ann": most}))
        disk = world.disk("b")
        assert 0 < nbytes_of(disk, "ann") <= most
        there = [where is not None for where in disk.locate(MODEL, [entry.id for entry in entries])]
        assert there == sorted(there, reverse=True) and there[0]
