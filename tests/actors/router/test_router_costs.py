"""The best mix of hot, restored, pulled and computed, against every mix there is."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.router.costs import PULL_SETUP_S, RESTORE_SETUP_S, Sources, Ways, best_ways

KV_BYTES = 36_864
"""Of a token of Llama 3.1 8B in 4 bits."""


def ways_of(
    prompt: int,
    hot: int,
    disk: int,
    sources: list[tuple[int, float, float]],
    *,
    token_s: float = 1 / 400,
    restore_bytes_per_s: float = 3e9,
) -> Ways:
    """Of one replica; each source is its tokens, how long it is busy, and the link's bytes a second."""
    found = Sources(
        np.array([tokens for tokens, _, _ in sources], np.int64),
        np.array([wait_s for _, wait_s, _ in sources]),
        np.array([[rate for _, _, rate in sources]]),
    )
    return best_ways(
        prompt,
        np.array([hot]),
        np.array([disk]),
        np.array([token_s]),
        np.array([KV_BYTES / restore_bytes_per_s]),
        np.array([float(KV_BYTES)]),
        found if sources else None,
    )


def every_mix(
    prompt: int, hot: int, disk: int, sources: list[tuple[int, float, float]], token_s: float, restore_s: float
) -> float:
    """The least time, over every number of whole blocks that may be had without computing, and every source."""
    best = (prompt - hot) * token_s
    start = hot // BLOCK_TOKENS * BLOCK_TOKENS
    for held in range(start, prompt, BLOCK_TOKENS):
        rest = (prompt - held) * token_s
        if hot < held <= disk:
            best = min(best, rest + RESTORE_SETUP_S + (held - start) * restore_s)
        near = max(start, disk)
        for tokens, wait_s, rate in sources:
            if max(hot, disk) < held <= tokens and rate > 0.0:
                setup_s = PULL_SETUP_S + wait_s + (RESTORE_SETUP_S if disk > hot else 0.0)
                moved_s = (held - near) * KV_BYTES / rate
                best = min(best, rest + setup_s + moved_s + (held - start) * restore_s)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_no_mix_is_sooner(seed: int):
    """Whatever is where and however fast: the time is that of the best mix, and its parts are what they say."""
    rng = random.Random(seed)
    kinds = set()
    for _ in range(300):
        blocks = rng.randrange(1, 30)
        prompt = blocks * BLOCK_TOKENS + rng.randrange(1, BLOCK_TOKENS)
        hot = rng.choice([0, rng.randrange(prompt), rng.randrange(blocks + 1) * BLOCK_TOKENS])
        disk = rng.choice([0, rng.randrange(blocks + 1) * BLOCK_TOKENS])
        sources = [
            (rng.randrange(blocks + 1) * BLOCK_TOKENS, rng.choice([0.0, rng.random()]), 10 ** rng.uniform(5, 10))
            for _ in range(rng.randrange(4))
        ]
        if sources and rng.random() < 0.2:
            sources[0] = (sources[0][0], 0.0, 0.0)
        token_s, bytes_per_s = 10 ** rng.uniform(-5, -2), 10 ** rng.uniform(6, 10)
        ways = ways_of(prompt, hot, disk, sources, token_s=token_s, restore_bytes_per_s=bytes_per_s)
        held, pulled, source = int(ways.held[0]), int(ways.pulled[0]), int(ways.source[0])
        total = float(ways.restore_s[0] + ways.pull_s[0] + ways.prefill_s[0])
        assert total == pytest.approx(every_mix(prompt, hot, disk, sources, token_s, KV_BYTES / bytes_per_s))
        assert ways.prefill_s[0] == pytest.approx((prompt - held) * token_s)
        assert (source >= 0) == (pulled > 0) == (ways.pull_s[0] > 0.0)
        assert pulled % BLOCK_TOKENS == 0 and hot <= held < prompt
        if pulled:
            assert held == sources[source][0] and sources[source][2] > 0.0
        kinds.add((hot > 0, held > hot, pulled > 0))
    assert len(kinds) >= 6, "the cases differ"


@pytest.mark.parametrize(("bits_per_s", "pulls"), [(10e9, True), (100e6, False)])
def test_an_agent_of_4k_tokens_is_pulled_by_a_fast_link_and_computed_again_beside_a_slow_one(
    bits_per_s: float, pulls: bool
):
    """151 MB take 0.12 s at 10 Gb/s and 12 s at 100 Mb/s, and 4,096 tokens 10.2 s at 400 a second."""
    ways = ways_of(4096 + 50, 0, 0, [(4096, 0.0, bits_per_s / 8)])
    assert int(ways.pulled[0]) == (4096 if pulls else 0)
    assert float(ways.pull_s[0]) == pytest.approx(0.1208 + PULL_SETUP_S if pulls else 0.0, abs=1e-3)
    assert float(ways.prefill_s[0]) == pytest.approx(50 / 400 if pulls else 10.365, abs=1e-3)


def test_a_source_that_others_pull_from_is_passed_over():
    idle, busy = (2048, 0.0, 1e9), (2048, 3.0, 1e9)
    assert int(ways_of(2100, 0, 0, [busy, idle]).source[0]) == 1
    assert float(ways_of(2100, 0, 0, [busy]).pull_s[0]) == pytest.approx(3.0 + 0.0755 + PULL_SETUP_S, abs=1e-3)
    assert int(ways_of(2100, 0, 0, [(2048, inf, 1e9)]).source[0]) == -1
