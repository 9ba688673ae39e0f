"""Blocks that several sequences hold count once, whoever is asked about."""

from __future__ import annotations

from satchel.actors.replica.scheduling.shared_blocks import SharedBlocks

KEYS = [bytes([number]) for number in range(9)]


def test_of_some_sequences_only_what_they_share_among_themselves_counts():
    shared = SharedBlocks()
    shared.hold("a", KEYS[:3])
    shared.hold("b", [*KEYS[:2], KEYS[4]])
    shared.hold("c", [KEYS[8]])
    assert shared.common(["a", "b", "c"]) == shared.common(["a", "b"]) == 2
    assert shared.common(["a"]) == shared.common(["a", "c"]) == shared.common(["unknown"]) == 0
    assert shared.common(["c"], KEYS[:3]) == 0 and shared.common(["a"], [*KEYS[:2], KEYS[5]]) == 2
    shared.leave("b")
    shared.leave("b")
    assert shared.common(["a", "c"], KEYS[:5]) == 3
    shared.check(["a", "c"])
