"""The prefix cache compared with a simple model of it: hits are right, and counts match the entries."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_ids, root_id
from satchel.actors.replica.kv import prefix
from satchel.actors.replica.kv.prefix import PrefixCache, PrefixKV, ReuseRule

ROOT = root_id(b"m" * 32, "t")
NBYTES = 100


def keep(cache: PrefixCache[str], tokens: list[int], window: int = 0) -> None:
    """Store a finished sequence the way the engine does. Of window layers only the last `window` tokens are left by
    then, and of recurrent ones the state at the end."""
    ids = block_ids(ROOT, tokens)

    def kept(start: int, stop: int, value: str) -> PrefixKV[str]:
        window_from = min(stop - start, max(0, len(tokens) - window - start)) if window else 0
        return PrefixKV(value, NBYTES, window_from, snapshot=stop == len(tokens))

    borders = [(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS) for index in range(len(ids))]
    new = [
        (index, tokens[start:stop], kept(start, stop, ids[index].hex()[:8]))
        for index, (start, stop) in enumerate(borders)
    ]
    cache.put_blocks(ids, new)
    end = len(ids) * BLOCK_TOKENS
    cache.put_tail(ROOT, ids, tokens[end:], kept(end, len(tokens), "tail"))


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


def test_a_block_that_the_last_token_ends_is_found_by_its_tail():
    """A sealed block cannot be cut; where the tail that became it is kept too, all but the last token is found."""
    for blocks in (1, 2):
        cache: PrefixCache[str] = PrefixCache(10_000)
        tokens = list(range(blocks * BLOCK_TOKENS))
        ids = block_ids(ROOT, tokens)
        keep(cache, tokens)
        assert cache.peek(ROOT, ids, tokens) == reusable(cache, tokens) == (blocks - 1) * BLOCK_TOKENS
        start = (blocks - 1) * BLOCK_TOKENS
        cache.put_tail(ROOT, ids[:-1], tokens[start:-1], PrefixKV("end", NBYTES))
        assert cache.peek(ROOT, ids, tokens) == reusable(cache, tokens) == len(tokens) - 1
        found = cache.take_tail(ids[-2] if blocks > 1 else ROOT, tokens[start:-1])
        assert found is not None and found.value == "end"
        assert cache.take_tail(ROOT, tokens[:7]) is None
        # A longer prompt takes the block itself.
        assert reusable(cache, [*tokens, 7]) == len(tokens)
        cache.check()


DAMAGE: dict[str, Callable[[PrefixCache[str]], object]] = {
    "bytes": lambda cache: setattr(cache, "nbytes", cache.nbytes - NBYTES),
    "blocks": lambda cache: setattr(cache, "blocks", cache.blocks + 1),
    "lost tail": lambda cache: cache._tails.popitem(),
    "tail too many": lambda cache: next(iter(cache._tails.values())).append((2**31,)),
    "tails of nobody": lambda cache: cache._tails.update({b"x" * 32: [(1,)]}),
    "no tails": lambda cache: cache._tails.update({b"x" * 32: []}),
    "out of order": lambda cache: next(iter(cache._tails.values())).reverse(),
    "lost entry": lambda cache: cache._entries.popitem(),
    "over budget": lambda cache: setattr(cache, "bytes_max", NBYTES),
    "half a block": lambda cache: cache._entries[(cache.block_ids()[0], None)].tokens.pop(),
    "announced": lambda cache: cache._announced.add(b"x" * 32),
    "retracted": lambda cache: cache._retracted.update(cache.block_ids()),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("step", [1, 4096])
def test_every_wrong_count_is_found_and_forgotten(what: str, step: int, monkeypatch: pytest.MonkeyPatch):
    """`reset` works on tables in any state, tells what is gone, and leaves a cache that keeps and finds."""
    monkeypatch.setattr(prefix, "RECOUNT_STEP", step)
    cache: PrefixCache[str] = PrefixCache(10_000)
    for first in (0, 1, 2):
        keep(cache, [*range(600), first, 7])
    ids = cache.block_ids()
    cache.pin("somebody", ROOT, ids, [])
    cache.unpin("somebody")
    cache.check()
    cache.drain_events()
    DAMAGE[what](cache)
    with pytest.raises(AssertionError):
        cache.check()
    cache.reset()
    cache.bytes_max = 10_000
    cache.check()
    _, retracted = cache.drain_events()
    assert set(ids) <= set(retracted) | ({ids[-1]} if what == "lost entry" else set()) and not cache.block_ids()
    keep(cache, list(range(600)))
    assert reusable(cache, [*range(600), 1]) == 600
    cache.check()


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


def test_of_what_was_used_the_end_goes_first():
    """Without what comes before it, it could not be found."""
    cache: PrefixCache[str] = PrefixCache(3 * NBYTES)
    tokens = list(range(BLOCK_TOKENS + 9))
    keep(cache, tokens)
    assert reusable(cache, [*tokens, 1]) == len(tokens)
    for start in (1000, 2000):
        cache.put_tail(ROOT, [], [start], PrefixKV("other", NBYTES))
    assert cache.block_ids() == block_ids(ROOT, tokens) and reusable(cache, [*tokens, 1]) == BLOCK_TOKENS


def test_of_too_many_continuations_of_one_block_the_first_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix, "TAILS_PER_BLOCK", 3)
    cache: PrefixCache[str] = PrefixCache(10_000)
    for first in (50, 10, 40, 20, 30):
        cache.put_tail(ROOT, [], [first], PrefixKV("tail", NBYTES))
        cache.check()
    assert [len(cache.ends(ROOT, [first])) for first in (50, 10, 40, 20, 30)] == [0, 0, 1, 1, 1]


def test_what_somebody_pinned_is_kept_however_large_it_is():
    """A sequence needs it. Without a pin, an entry larger than the cache evicts nothing that fits."""
    tokens = list(range(BLOCK_TOKENS + 5))
    ids = block_ids(ROOT, tokens)
    for pinned in (True, False):
        cache: PrefixCache[str] = PrefixCache(NBYTES)
        cache.put_tail(ROOT, [], [7], PrefixKV("small", NBYTES))
        if pinned:
            cache.pin("one", ROOT, ids, [tokens[BLOCK_TOKENS:]])
        cache.put_blocks(ids, [(0, tokens[:BLOCK_TOKENS], PrefixKV("large", NBYTES + 1))])
        cache.put_tail(ROOT, ids, tokens[BLOCK_TOKENS:], PrefixKV("large tail", NBYTES + 1))
        cache.check()
        assert reusable(cache, [*tokens, 1]) == (len(tokens) if pinned else 0)
        assert reusable(cache, [7, 8]) == 1, "what is pinned takes no room from the others"
        cache.unpin("one")
        cache.check()
        assert cache.nbytes == NBYTES


def test_a_lookup_keeps_what_it_uses_and_nothing_else():
    """The block that a prompt's last token ends is found, and not used."""
    cache: PrefixCache[str] = PrefixCache(3 * NBYTES)
    tokens, other = list(range(2 * BLOCK_TOKENS)), list(range(5000, 5000 + BLOCK_TOKENS))
    keep(cache, tokens)
    keep(cache, other)
    assert reusable(cache, tokens) == BLOCK_TOKENS
    keep(cache, list(range(9000, 9000 + BLOCK_TOKENS)))
    assert reusable(cache, [*other, 1]) == reusable(cache, [*tokens, 1]) == BLOCK_TOKENS


def test_a_tail_that_was_used_outlives_one_that_was_not():
    cache: PrefixCache[str] = PrefixCache(2 * NBYTES)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        keep(cache, tokens)
    assert reusable(cache, [1, 2, 3, 9]) == 3
    keep(cache, [7, 8, 9])
    assert [reusable(cache, [*tokens, 9]) for tokens in ([1, 2, 3], [4, 5, 6])] == [3, 0]


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


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "rule", [ReuseRule(100), ReuseRule(256), ReuseRule(700), ReuseRule(0, True), ReuseRule(300, True)]
)
def test_windows_and_states_are_there_wherever_a_prefix_is_found(rule: ReuseRule, seed: int):
    """What is found ends where some kept sequence had all that window and recurrent layers need; a sequence that goes
    on where it ended finds all of itself. A state is found even where the blocks of another sequence go further."""
    rng = random.Random(seed)
    cache: PrefixCache[str] = PrefixCache(1_000_000, rule)
    kept: list[list[int]] = []
    for _ in range(40):
        base = rng.choice([*kept, []])[: rng.choice([100, 256, 300, 512, 2000])]
        tokens = base + [rng.randrange(50_000) for _ in range(rng.randrange(1, 900))]
        estimated = cache.reusable_tokens(ROOT, block_ids(ROOT, tokens), tokens)
        found = reusable(cache, tokens)
        assert estimated == found
        if found:
            assert served(rule, kept, tokens, found), (
                f"seed {seed}: {found} tokens found that no kept sequences can give"
            )
        if rule == ReuseRule(0, True):
            assert found == max(
                (len(sequence) for sequence in kept if tokens[: len(sequence)] == sequence), default=0
            ), "the longest sequence"
        keep(cache, tokens, rule.window)
        kept.append(tokens)
        cache.check()
        assert reusable(cache, [*tokens, 1, 2]) == len(tokens)


def served(rule: ReuseRule, sequences: list[list[int]], tokens: list[int], cut: int) -> bool:
    """Whether what finished sequences left is enough to go on after the first `cut` tokens."""
    shared = [(len(common(sequence, tokens)), len(sequence)) for sequence in sequences]
    if rule.recurrent and not any(same >= cut == length for same, length in shared):
        return False
    needed = range(max(0, cut - rule.window), cut) if rule.window else range(cut)
    return all(any(same > at >= length - (rule.window or length) for same, length in shared) for at in needed)


def test_a_copy_that_serves_where_the_first_does_not_takes_its_place():
    """A block computed while decoding lacks its state and part of its window; prefilled again, it has them."""
    rule = ReuseRule(300, True)
    cache: PrefixCache[str] = PrefixCache(10_000, rule)
    tokens = list(range(600))
    keep(cache, tokens, rule.window)
    ids = block_ids(ROOT, tokens)
    assert reusable(cache, [*tokens[:512], 7, 8]) == 0
    assert cache.lacks(ids[1], snapshot=True) and cache.lacks(ids[0], snapshot=False)
    full = [
        (index, tokens[index * 256 : index * 256 + 256], PrefixKV(f"new{index}", NBYTES, 0, True)) for index in (0, 1)
    ]
    cache.put_blocks(ids, full)
    cache.put_blocks(ids, [(0, tokens[:256], PrefixKV("late", NBYTES, 0, True))])
    hit = cache.match(ROOT, ids, [*tokens[:512], 7, 8], 513)
    assert hit.blocks == ["new0", "new1"]
    assert not cache.lacks(ids[1], snapshot=True)
    cache.check()


def test_a_hundred_thousand_blocks_cost_no_more_than_ten():
    """A look-up touches the prompt's own blocks only, however many there are; so does the search among tails."""

    class Counting(dict):
        reads = 0

        def get(self, *arguments):
            Counting.reads += 1
            return super().get(*arguments)

    def reads(blocks: int) -> int:
        cache: PrefixCache[str] = PrefixCache(10**9)
        for first in range(0, blocks, 100):
            keep(cache, [first * 1000 + index for index in range(min(blocks, 100) * BLOCK_TOKENS)])
        tokens = list(range(10 * BLOCK_TOKENS))
        entries = cache._entries
        cache._entries = Counting(entries)  # type: ignore[assignment]
        cache.touch = lambda chain: None  # type: ignore[method-assign]
        Counting.reads = 0
        assert reusable(cache, tokens) == 9 * BLOCK_TOKENS
        return Counting.reads

    assert reads(10_000) == reads(10)


def test_a_short_conversation_is_dropped_without_what_others_said_after_the_same_root() -> None:
    """All conversations shorter than a block have their tails under the same root."""
    cache: PrefixCache[str] = PrefixCache(1000, ReuseRule())
    root = b"r" * 32
    for tokens in ([1, 2, 3], [1, 2, 9], [7]):
        cache.put_tail(root, [], tokens, PrefixKV("kv", 10))
    assert cache.ends(root, [1, 2, 3, 4]) == [(1, 2, 3)]
    assert cache.drop(root, [], [1, 2, 3, 4]) == 10
    assert cache.ends(root, [1, 2, 9]) == [(1, 2, 9)] and cache.ends(root, [7]) == [(7,)]
    cache.check()


def test_prepared_blocks_are_counted_and_go_first():
    """They do not count as used by a look-up that only prepares more."""
    cache: PrefixCache[str] = PrefixCache(6 * 10)
    old, ahead = [1] * (2 * BLOCK_TOKENS), [2] * (4 * BLOCK_TOKENS)

    def put(tokens: list[int], *, prepared: bool) -> list[bytes]:
        ids = block_ids(ROOT, tokens)
        new = [(at, tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS], PrefixKV("", 10)) for at in range(len(ids))]
        cache.put_blocks(ids, new, prepared=prepared)
        return ids

    assert cache.spare_bytes("") == 60
    first, later = put(old, prepared=False), put(ahead, prepared=True)
    assert cache.spare_bytes("") == 0
    assert cache.match(ROOT, later, [*ahead, 0], 2000, uses=False).tokens == 4 * BLOCK_TOKENS
    assert (cache.prepared_tokens, cache.used_tokens, cache.wasted_tokens) == (4 * BLOCK_TOKENS, 0, 0)
    assert cache.match(ROOT, later[:1], [*ahead, 0], 2000).tokens == BLOCK_TOKENS
    put([3] * BLOCK_TOKENS * 2, prepared=False)
    assert (cache.leading(first), cache.leading(later)) == (2, 2), "the end of what was prepared went"
    assert (cache.used_tokens, cache.wasted_tokens) == (BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert cache.drop_prepared(later) == 10 and cache.leading(later) == 1, "what was used stays"
    cache.check()


@pytest.mark.parametrize("first", ["a sequence", "prepared"])
def test_what_a_sequence_has_computed_is_not_prepared(first: str):
    """Whichever comes first. With recurrent layers both may compute the same blocks."""
    cache: PrefixCache[str] = PrefixCache(100, ReuseRule(recurrent=True))
    tokens = [1] * (2 * BLOCK_TOKENS)
    ids = block_ids(ROOT, tokens)

    def put(*, prepared: bool, snapshot: bool) -> None:
        new = [(at, tokens[:BLOCK_TOKENS], PrefixKV("", 10, snapshot=snapshot and at == 1)) for at in range(2)]
        cache.put_blocks(ids, [each for each in new if cache.lacks(ids[each[0]], snapshot=snapshot)], prepared=prepared)

    put(prepared=first == "prepared", snapshot=False)
    put(prepared=first != "prepared", snapshot=first != "prepared")
    assert cache.drop_prepared(ids) == 0 and cache.leading(ids) == 2
    cache.check()
