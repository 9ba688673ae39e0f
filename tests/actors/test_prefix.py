"""The prefix cache against a plain model of it: what is found is right, what is counted is there."""

from __future__ import annotations

import random

import pytest

from satchel.actors.kv_store.blocks import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.replica.prefix import PrefixCache

ROOT = root_id(b"m" * 32, "t")
NBYTES = 100


def keep(cache: PrefixCache[str], tokens: list[int]) -> None:
    """Store a finished row the way the engine does."""
    ids = block_ids(ROOT, tokens)
    parts = [tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS] for index in range(len(ids))]
    cache.put_blocks(ids, [(index, part, ids[index].hex()[:8], NBYTES) for index, part in enumerate(parts)])
    cache.put_tail(ROOT, ids, tokens[len(ids) * BLOCK_TOKENS :], "tail", NBYTES)


def reusable(cache: PrefixCache[str], prompt: list[int]) -> int:
    return cache.match(ROOT, block_ids(ROOT, prompt), prompt, len(prompt) - 1).tokens


def test_a_conversation_that_goes_on_finds_all_of_itself():
    cache: PrefixCache[str] = PrefixCache(10_000)
    for length in (1, 100, 255, 256, 257, 511, 512, 600):
        tokens = [length * 1000 + index for index in range(length)]
        keep(cache, tokens)
        assert reusable(cache, [*tokens, 7, 8, 9]) == length


def test_at_most_all_but_the_last_token_is_reused():
    """The last token of a prompt is the first decode step's input, so its logits are always computed."""
    cache: PrefixCache[str] = PrefixCache(10_000)
    for length in (2, 256, 300, 512):
        tokens = [length * 1000 + index for index in range(length)]
        keep(cache, tokens)
        expected = length - 1 if length % BLOCK_TOKENS else length - BLOCK_TOKENS
        assert reusable(cache, tokens) == expected


def test_a_diverging_prompt_reuses_the_common_part_only():
    cache: PrefixCache[str] = PrefixCache(10_000)
    tokens = list(range(700))
    keep(cache, tokens)
    assert reusable(cache, [*tokens[:600], 9999, 9998]) == 600
    assert reusable(cache, [*tokens[:100], 9999, 9998]) == 0, "a whole block is not cut"
    assert reusable(cache, [9999, *tokens]) == 0


def test_a_longer_tail_replaces_what_it_covers_and_a_covered_one_is_not_kept():
    cache: PrefixCache[str] = PrefixCache(10_000)
    keep(cache, [1, 2, 3])
    keep(cache, [1, 2, 3, 4, 5])
    keep(cache, [1, 2])
    assert cache.nbytes == NBYTES
    cache.check()


@pytest.mark.parametrize("room", [19, 18, 10, 1])
def test_a_conversation_larger_than_the_cache_keeps_its_beginning(room: int):
    cache: PrefixCache[str] = PrefixCache(room * NBYTES)
    tokens = list(range(20 * BLOCK_TOKENS + 5))
    for turn in range(3):
        keep(cache, tokens)
        assert reusable(cache, [*tokens, turn]) == room * BLOCK_TOKENS
        cache.check()


def test_many_short_conversations_are_kept_side_by_side():
    cache: PrefixCache[str] = PrefixCache(100 * NBYTES)
    talks = [[1, 2, agent + 10, *range(1000 * agent, 1000 * agent + 80)] for agent in range(60)]
    for talk in talks:
        keep(cache, talk)
    assert [reusable(cache, [*talk, 7]) for talk in talks] == [83] * 60


def test_events_tell_what_came_and_went():
    cache: PrefixCache[str] = PrefixCache(2 * NBYTES)
    first, second = list(range(256)), list(range(1000, 1256))
    keep(cache, first)
    assert cache.drain_events() == (block_ids(ROOT, first), [])
    keep(cache, second)
    keep(cache, list(range(2000, 2256)))
    announced, retracted = cache.drain_events()
    assert retracted == block_ids(ROOT, first)
    assert block_ids(ROOT, second)[0] in announced


@pytest.mark.parametrize("seed", range(20))
def test_random_use_never_breaks_the_counts_or_finds_what_was_not_kept(seed: int):
    rng = random.Random(seed)
    cache: PrefixCache[str] = PrefixCache(rng.choice([500, 2000, 100_000]))
    kept: list[list[int]] = []
    for _ in range(60):
        base = rng.choice([*kept, []])[: rng.randrange(900)]
        tokens = base + [rng.randrange(50_000) for _ in range(rng.randrange(1, 600))]
        found = reusable(cache, tokens)
        best = max((len(common(tokens, other)) for other in kept), default=0)
        assert found <= min(best, len(tokens) - 1)
        if cache.bytes_max == 100_000 and best:
            assert found >= min(best, len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        keep(cache, tokens)
        kept.append(tokens)
        cache.check()


def common(left: list[int], right: list[int]) -> list[int]:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]
