"""A tenant with a limit of its own in a replica's memory: its own oldest KV is evicted, and no other tenant's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.protocol.store_client import StoreClient
from satchel.actors.replica.execution.loaded_model import LoadedModel
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV
from satchel.actors.replica.kv.shares import MemoryShares
from satchel.actors.replica.memory import disk_tier
from satchel.actors.rpc.codec import encode
from tests.worlds.replica.bench import Bench

from .test_disk_tier import Node, process, prompt_of, write_down
from .test_disk_tier import node as _node

node = _node
"""A fixture."""

NBYTES = 100
TENANTS = ("ann", "bob")


def root_of(tenant: str) -> bytes:
    return root_id(b"m" * 32, f"tenant:{tenant}")


def keep(cache: PrefixCache[str], tenant: str, tokens: list[int], nbytes: int = NBYTES) -> None:
    """As the engine keeps a sequence that has ended."""
    ids = block_ids(root_of(tenant), tokens)
    cut = [(index, tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]) for index in range(len(ids))]
    cache.put_blocks(ids, [(index, part, PrefixKV("block", nbytes)) for index, part in cut], tenant)
    cache.put_tail(root_of(tenant), ids, tokens[len(ids) * BLOCK_TOKENS :], PrefixKV("tail", nbytes), tenant)


def found(cache: PrefixCache[str], tenant: str, tokens: list[int]) -> int:
    root, prompt = root_of(tenant), [*tokens, 1]
    return cache.match(root, block_ids(root, prompt), prompt, len(tokens)).tokens


def kept(cache: PrefixCache[str], tenant: str) -> list[Any]:
    """What is the tenant's, the oldest first."""
    return [key for key, entry in cache._entries.items() if entry.tenant == tenant]


def loose(cache: PrefixCache[str], tenant: str) -> int:
    entries = ((key, entry) for key, entry in cache._entries.items() if entry.tenant == tenant)
    return sum(entry.kept.nbytes for key, entry in entries if key not in cache._pinned)


def words(number: int, blocks: int, rest: int) -> list[int]:
    return [number] * (blocks * BLOCK_TOKENS) + list(range(rest))


def test_of_a_tenant_over_its_limit_the_oldest_goes_and_of_a_chain_its_end():
    cache: PrefixCache[str] = PrefixCache(100_000)
    cache.limit("ann", 5 * NBYTES)
    for number in (1, 2):
        keep(cache, "ann", words(number, 2, 0))
        keep(cache, "bob", words(number, 9, 5))
    assert found(cache, "ann", words(1, 2, 0)) == 2 * BLOCK_TOKENS
    keep(cache, "ann", words(3, 2, 9))
    assert [found(cache, "ann", words(*talk)) for talk in ((1, 2, 0), (2, 2, 0), (3, 2, 9))] == [512, 0, 521]
    assert [found(cache, "bob", words(number, 9, 5)) for number in (1, 2)] == [9 * BLOCK_TOKENS + 5] * 2
    keep(cache, "ann", words(4, 8, 9))
    assert found(cache, "ann", words(4, 8, 9)) == 5 * BLOCK_TOKENS, "its end went for its beginning"
    cache.check()


def test_a_limit_counts_what_was_there_before_and_may_change_and_end():
    cache: PrefixCache[str] = PrefixCache(100_000)
    keep(cache, "ann", words(1, 4, 0))
    keep(cache, "bob", words(1, 4, 0))
    for most, left in ((3, 3), (2, 2), (9, 2), (None, 2)):
        cache.limit("ann", None if most is None else most * NBYTES)
        cache.check()
        assert len(kept(cache, "ann")) == left and len(kept(cache, "bob")) == 4
    keep(cache, "ann", words(1, 20, 0))
    assert len(kept(cache, "ann")) == 20 and not cache._shares


def test_what_alone_is_too_large_drives_nothing_out():
    cache: PrefixCache[str] = PrefixCache(100_000)
    cache.limit("ann", NBYTES)
    keep(cache, "ann", [1, 2, 3])
    keep(cache, "ann", words(2, 3, 4), NBYTES + 1)
    assert found(cache, "ann", [1, 2, 3]) == 3 and len(kept(cache, "ann")) == 1
    cache.limit("ann", NBYTES - 1)
    assert not kept(cache, "ann")
    keep(cache, "ann", [1, 2, 3])
    assert not kept(cache, "ann")


def test_what_is_held_neither_counts_nor_goes_until_it_is_let_go():
    cache: PrefixCache[str] = PrefixCache(100_000)
    cache.limit("ann", NBYTES)
    tokens = words(1, 3, 5)
    ids = block_ids(root_of("ann"), tokens)
    cache.pin("one", root_of("ann"), ids, [tokens[3 * BLOCK_TOKENS :]])
    keep(cache, "ann", tokens)
    keep(cache, "ann", words(2, 1, 0))
    cache.check()
    assert found(cache, "ann", tokens) == len(tokens) and found(cache, "ann", words(2, 1, 0)) == BLOCK_TOKENS
    cache.limit("ann", 0)
    assert found(cache, "ann", tokens) == len(tokens) and found(cache, "ann", words(2, 1, 0)) == 0
    cache.limit("ann", NBYTES)
    cache.unpin("one")
    cache.check()
    assert found(cache, "ann", tokens) == BLOCK_TOKENS


def test_wrong_counts_of_a_tenant_are_found():
    for damage in (
        lambda shares: shares.count("ann", 1),
        lambda shares: shares.add("ann", (b"x" * 32, None), 0),
        lambda shares: shares.use("ann", next(iter(shares.oldest("ann")))),
    ):
        cache: PrefixCache[str] = PrefixCache(100_000)
        cache.limit("ann", 10 * NBYTES)
        keep(cache, "ann", words(1, 3, 0))
        cache.check()
        damage(cache._shares)
        with pytest.raises(AssertionError):
            cache.check()
        cache.reset()
        cache.check()
        keep(cache, "ann", words(1, 30, 0))
        assert len(kept(cache, "ann")) == 10


talks = st.builds(words, st.integers(1, 4), st.integers(0, 4), st.integers(0, 3))
tenants = st.sampled_from(TENANTS)
steps = st.one_of(
    st.tuples(st.just("keep"), tenants, talks, st.sampled_from([NBYTES, 3 * NBYTES])),
    st.tuples(st.just("match"), tenants, talks),
    st.tuples(st.just("pin"), tenants, talks, st.sampled_from(["sequence 1", "sequence 2"])),
    st.tuples(st.just("unpin"), st.sampled_from(["sequence 1", "sequence 2"])),
    st.tuples(st.just("drop"), tenants, talks),
    st.tuples(st.just("limit"), st.sampled_from([None, 0, NBYTES - 1, 2 * NBYTES, 5 * NBYTES])),
    st.tuples(st.just("clear")),
    st.tuples(st.just("reset")),
)


def play(cache: PrefixCache[str], step: tuple[Any, ...]) -> None:
    match step:
        case "keep", tenant, tokens, nbytes:
            keep(cache, tenant, tokens, nbytes)
        case "match", tenant, tokens:
            found(cache, tenant, tokens)
        case "pin", tenant, tokens, holder:
            ids = block_ids(root_of(tenant), tokens)
            cache.pin(holder, root_of(tenant), ids, [tokens[len(ids) * BLOCK_TOKENS :]])
        case "unpin", holder:
            cache.unpin(holder)
        case "drop", tenant, tokens:
            cache.drop(root_of(tenant), block_ids(root_of(tenant), tokens), tokens)
        case ("clear",):
            cache.clear()
        case ("reset",):
            cache.reset()


@settings(max_examples=400, deadline=None)
@given(st.lists(steps, max_size=30))
def test_a_tenant_is_never_above_its_limit_and_nobody_else_notices(taken: list[tuple[Any, ...]]):
    """Beside a cache without the limit: of others everything is there, in the same order; of the tenant nothing is that
    would not be there without it, and it has the latest. The counts are those of what is kept."""
    limited: PrefixCache[str] = PrefixCache(10**9)
    free: PrefixCache[str] = PrefixCache(10**9)
    most: int | None = None
    for step in taken:
        before = [key for key in kept(limited, "ann") if key not in limited._pinned]
        if step[0] == "limit":
            most = step[1]
            limited.limit("ann", most)
        else:
            play(limited, step)
            play(free, step)
        limited.check()
        assert most is None or loose(limited, "ann") <= most
        assert kept(limited, "bob") == kept(free, "bob")
        if step[0] in ("limit", "unpin"):
            now = set(kept(limited, "ann"))
            left = [key in now for key in before]
            assert left == sorted(left), "the oldest went first"
    assert set(kept(limited, "ann")) <= set(limited._entries)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=30))
def test_a_limit_beside_a_small_cache_never_breaks_the_counts(taken: list[tuple[Any, ...]]):
    cache: PrefixCache[str] = PrefixCache(7 * NBYTES)
    for step in taken:
        if step[0] == "limit":
            cache.limit("ann", step[1])
        else:
            play(cache, step)
        cache.check()


def test_a_tenant_without_a_limit_is_not_looked_at():
    """However many blocks there are, and a limited one's are looked through once."""
    cache: PrefixCache[str] = PrefixCache(10**9)
    keep(cache, "bob", words(1, 50, 0))
    assert not cache._shares and cache._shares.counted() == {}
    cache.limit("ann", 10 * NBYTES)
    keep(cache, "bob", words(2, 50, 0))
    assert list(cache._shares.counted()) == ["ann"]
    assert MemoryShares[int]().excess("nobody") == 0 and list(MemoryShares[int]().oldest("nobody")) == []


# In the engine.


def tokens_kept(bench: Bench, tenant: str) -> int:
    prefixes = bench.engine.prefixes
    return sum(len(entry.tokens) for entry in prefixes._entries.values() if entry.tenant == tenant)


def test_sequences_of_a_limited_tenant_run_and_what_others_left_is_found(loaded: LoadedModel):
    """From its first request on, and the next one's limit counts."""
    bench = Bench(loaded)
    block = loaded.spec.bytes_per_token * BLOCK_TOKENS
    prompt = prompt_of(800)
    other = bench.run("bob", prompt, tenant="bob")
    for number, (most, cached) in enumerate([(2 * block, 0), (2 * block, 512), (block - 1, 0), (0, 0), (None, 0)]):
        sequence = bench.run(f"ann {number}", prompt, tenant="ann", memory=most)
        assert sequence.finish == "length" and sequence.tokens == other.tokens and sequence.cached == cached, number
        if most is not None:
            assert loose(bench.engine.prefixes, "ann") <= most  # pyright: ignore[reportArgumentType]
    assert bench.run("ann again", prompt, tenant="ann").cached == 799
    assert bench.run("bob again", prompt, tenant="bob").cached == 799


def test_what_is_read_back_and_written_counts_when_the_sequence_has_ended(loaded: LoadedModel, node: Node):
    bench, disk = process(loaded, node)
    block = loaded.spec.bytes_per_token * BLOCK_TOKENS
    most = 2 * block
    prompt = prompt_of(900)
    first = bench.run("first", prompt, agent="ann/x", tenant="ann", memory=most)
    write_down(bench, disk)
    assert 0 < loose(bench.engine.prefixes, "ann") <= most  # pyright: ignore[reportArgumentType]
    second = [*prompt, *first.tokens]
    sequence = bench.run("second", [*second, 1, 2], agent="ann/x", tenant="ann", memory=most)
    assert sequence.cached == len(second), "the disk has the rest"
    write_down(bench, disk)
    assert 0 < loose(bench.engine.prefixes, "ann") <= most  # pyright: ignore[reportArgumentType]


def test_no_more_is_written_than_the_tenant_may_have_on_the_disk(loaded: LoadedModel, node: Node):
    """The beginning is written, because the rest cannot be found without it; the answer is the same anyway."""
    block = loaded.spec.bytes_per_token * BLOCK_TOKENS
    prompt = prompt_of(900)
    for tenant, most, cached in (("ann", 2 * block, 512), ("cat", block - 1, 0), ("bob", None, 899)):
        bench, disk = process(loaded, node)
        said = bench.run("first", prompt, agent=f"{tenant}/x", tenant=tenant, on_disk=most).tokens
        write_down(bench, disk)
        bench, disk = process(loaded, node)
        sequence = bench.run("second", prompt, agent=f"{tenant}/x", tenant=tenant, on_disk=most)
        assert sequence.tokens == said and sequence.cached == cached, tenant
        write_down(bench, disk)


@pytest.mark.parametrize(("most", "commits"), [(10**9, 2), (None, 4)])
def test_what_follows_a_block_that_the_tenant_may_not_have_is_not_written(
    loaded: LoadedModel, node: Node, monkeypatch: pytest.MonkeyPatch, most: int | None, commits: int
):
    monkeypatch.setattr(disk_tier, "grouped", lambda entries: ([entry] for entry in entries))
    asked: list[Any] = []
    call = node.call

    def refusing(method: str, data: bytes) -> bytes:
        if method != "disk_commit":
            return call(method, data)
        asked.append(StoreClient.disk_commit.asked(data)[-1])
        return call(method, data) if len(asked) == 1 else encode([])

    monkeypatch.setattr(node, "call", refusing)
    bench, disk = process(loaded, node)
    assert bench.run("one", prompt_of(800), agent="ann/x", tenant="ann", on_disk=most).finish == "length"
    write_down(bench, disk)
    assert asked == [{"ann": most}] * commits
