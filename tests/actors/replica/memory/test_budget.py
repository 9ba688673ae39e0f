"""The rules by which memory is divided."""

from __future__ import annotations

import pytest

from satchel.actors.replica.memory.budget import (
    Held,
    MemoryBudget,
    MemoryClaim,
    Sequences,
    bearable_bytes,
    claimable_bytes,
    has_room,
    share_bytes,
    workspace_bytes,
)

BUDGET = MemoryBudget(bytes_max=32_000, token_bytes=2, sequence_bytes=100, sequences_max=4, paged=True)
USABLE = 31_000


def test_replicas_get_equal_parts_of_what_models_and_workspaces_leave():
    assert share_bytes(1000, [MemoryClaim(100, 50), MemoryClaim(300, 50)]) == 250
    assert share_bytes(1000, [MemoryClaim(2000, 0)]) == 0
    without = MemoryClaim(300, 50, kv=False)
    assert share_bytes(1000, [MemoryClaim(100, 50), without]) == 500, "one without KV takes no part of the rest"
    assert share_bytes(1000, [without]) == 650


def test_what_a_replica_without_kv_may_claim_leaves_the_others_some() -> None:
    claims = [MemoryClaim(500, 100), MemoryClaim(300, 100, kv=False)]
    assert claimable_bytes(1600, claims) == 500, "100 for KV"
    assert claimable_bytes(1600, claims[1:]) == 1200
    assert claimable_bytes(1000, claims) == 0


def test_a_model_comes_beside_others_only_if_each_keeps_a_sixteenth():
    there = [MemoryClaim(500, 100)]
    assert has_room(1600, there, MemoryClaim(700, 100)), "100 for each"
    assert not has_room(1600, there, MemoryClaim(700, 102))
    assert has_room(1600, [], MemoryClaim(1599, 0)) and not has_room(1600, [], MemoryClaim(1600, 0))
    assert not has_room(8, there, MemoryClaim(1, 0))


@pytest.mark.parametrize(
    ("used", "free", "expected"), [(0, 1000, 500), (400, 64, 432), (400, 32, 400), (400, 10, 378), (0, 0, 0)]
)
def test_other_programs_take_what_they_need(used: int, free: int, expected: int):
    """A thirty-second of the device stays free; what is missing is given back."""
    assert bearable_bytes(500, used, free, 1024) == expected


def test_a_workspace_grows_with_the_chunk_and_with_the_history():
    small = workspace_bytes(tokens=256, context=1000, hidden=64, intermediate=128, itemsize=2, layer=100)
    assert small == 256 * (12 * 64 + 4 * 128) * 2 + 256 * 1000 + 2 * 1000 * 100


def test_kept_prefixes_have_what_sequences_do_not_need():
    assert BUDGET.usable == USABLE
    assert BUDGET.kept_bytes(Sequences(), Held()) == USABLE - 400, "open blocks of sequences that may come are reserved"
    sequences = Sequences(count=2, cost=5000, held=1000)
    held = Held(pool=4000, slots=3800, kept=50, loose=2050)
    # Of the slots and what lies beside them 2,050 bytes can go, and sequences account for the rest.
    assert BUDGET.others(sequences, held) == 0
    assert BUDGET.kept_bytes(sequences, held) == USABLE - 10_000 - 200
    assert BUDGET.sequences_tokens(sequences, held) == USABLE // 2


def test_all_that_is_not_in_the_pool_is_outside():
    assert Held(pool=10_000, slots=9000, loose=800, kept=1, pictures=20, seen=300, unwritten=4000).outside == 4321


def test_what_nobody_expected_of_the_slots_is_not_given_to_sequences():
    sequences, held = Sequences(count=1, cost=1000, held=1000), Held(pool=9000, slots=9000, loose=2000)
    assert BUDGET.others(sequences, held) == 9000 - 2000 + 100 - 2000
    assert BUDGET.sequences_tokens(sequences, held) == (USABLE - 5100) // 2


def test_pictures_of_sequences_and_unwritten_kv_go_before_what_is_kept():
    held = Held(pictures=5000, unwritten=1000, seen=3000)
    assert BUDGET.kept_bytes(Sequences(), held) == USABLE - 6000 - 3000 - 400
    assert BUDGET.pictures_bytes(Sequences(), held) == 4000
    assert BUDGET.pictures_bytes(Sequences(count=4, cost=12_000, held=12_000), held) == USABLE - 6000 - 24_000


def test_a_pool_grows_by_much_or_not_at_all_and_gives_back_with_slack():
    held = Held(pool=30_000, slots=30_000, loose=30_000)
    assert BUDGET.pool_bytes(Sequences(), held) == USABLE - 400
    assert BUDGET.kept_bytes(Sequences(), held) == 30_000, "600 bytes more are not worth a copy"
    assert not BUDGET.pool_is_too_large(Sequences(), held)
    assert BUDGET.pool_is_too_large(Sequences(), Held(pool=30_000, kept=2001))


def test_a_dense_batch_has_no_pool():
    dense = MemoryBudget(bytes_max=32_000, token_bytes=2, sequence_bytes=0, sequences_max=4, paged=False)
    sequences, held = Sequences(count=2, cost=1000, held=900), Held(kept=3000, loose=1000)
    assert dense.others(sequences, held) == 2000 and dense.used(sequences, held) == 1800 + 3000
    assert dense.kept_bytes(sequences, held) == USABLE - 2000 - 2000
