"""The benchmark of divided models counts rightly, and its clock has the schedule that stages have."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.group.clock import Link, PrefillCost, prefill_s, step_s, whole_prefill_s
from benchmarks.group.ring import CARDS, TCP, TOGETHER_BYTES, Side
from benchmarks.group.run import fitted
from benchmarks.programs import ROOT
from tests.worlds.replica import fake_rings
from tests.worlds.replica.group import on_a_thread

HALF = PrefillCost(0.018, 1.07e-3, 8.9e-7)
"""A stage of four layers of the 30M shape on one core of an AMD EPYC, as `make bench-group` measured it."""


@pytest.mark.parametrize("chunk_tokens", [64, 128, 256])
@pytest.mark.parametrize("tokens", [4000, 16000])
def test_two_stages_prefill_at_least_1_6_times_as_fast_as_one_process(tokens: int, chunk_tokens: int):
    """On a clock with measured parts; over a link of 1 Gb/s too."""
    for link in (Link(), Link(0.0005, 125e6)):
        two_s = prefill_s([HALF, HALF], tokens, chunk_tokens, 512, link, 2048, engine_s=0.002)
        assert whole_prefill_s([HALF, HALF], tokens, chunk_tokens, engine_s=0.002) / two_s >= 1.6


def test_a_chunk_of_many_tokens_is_overlapped_only_in_pieces():
    costs = [PrefillCost(0.0, 0.001)] * 2
    one_s = whole_prefill_s(costs, 4096, 4096)
    assert prefill_s(costs, 4096, 4096, None) == pytest.approx(one_s)
    # The first piece of the first stage and the last one of the second overlap with nothing.
    assert prefill_s(costs, 4096, 4096, 512) == pytest.approx(one_s * 9 / 16)
    # Chunks overlap with the next ones, as pieces do.
    assert prefill_s(costs, 4096, 512, None) == pytest.approx(one_s * 9 / 16)


def test_a_slow_link_sets_the_pace_and_what_waits_for_it_is_bounded():
    costs = [PrefillCost(0.0, 1e-6)] * 2
    slow = Link(bytes_per_s=1e6)
    assert prefill_s(costs, 100_000, 100_000, 500, slow, 10_000) == pytest.approx(1000.0, rel=0.01)
    waits = [prefill_s(costs, 100_000, 100_000, 500, Link(bytes_per_s=rate), 10_000) for rate in (1e6, 1e7, 1e9)]
    assert all(before > after for before, after in pairwise(waits))


def test_decode_steps_overlap_as_far_as_a_step_of_half_the_sequences_is_shorter():
    """Two stages take half the time if a step's time is that of its sequences, and the same if it is constant."""
    linear, constant = (lambda rows: 0.01 * rows), (lambda rows: 0.01)
    for cost, two in ((linear, 0.5), (constant, 1.0)):
        for stages in (2, 3, 4):
            costs = [cost] * stages
            assert step_s(costs, 8, 2) / step_s(costs, 8, 1) == pytest.approx(two)
    # With as many as stages, these stand still at the ends of steps.
    assert step_s([constant] * 3, 6, 3) / step_s([constant] * 3, 6, 1) == pytest.approx(4 / 3, rel=0.02)
    # A longer stage sets the pace of both.
    uneven = [lambda rows: 0.008, lambda rows: 0.012]
    assert step_s(uneven, 8, 2) / step_s(uneven, 8, 1) == pytest.approx(1.2)


def test_costs_are_found_again_from_calls():
    cost, before, calls = PrefillCost(0.01, 2e-3, 3e-7), 0, []
    for tokens in (256, 64, 64, 128, 256, 13, 1):
        calls.append((tokens, 0.0, cost(before, tokens)))
        before += tokens
    found = fitted(calls)
    assert (found.fixed_s, found.token_s) == pytest.approx((0.01, 2e-3))
    assert found.pair_s == pytest.approx(3e-7, rel=1e-3)
    # What would be negative is nothing.
    assert fitted([(100, 0.0, 0.1), (200, 0.0, 0.199), (100, 0.0, 0.09)]).pair_s == 0.0


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path):
    """Over loopback and over links, where these are possible."""
    options = ["--rows", "2", "--steps", "4", "--prompts", "300", "--rounds", "1", "--out", tmp_path, "--machine", "x"]
    command = [sys.executable, "-m", "benchmarks.group.run", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "group-x.json").read_text())["parts"]
    assert found.keys() == {"decoding", "steps", "prefill", "clock"}
    for row in found["decoding"]["rows"]:
        assert row["two / one"] > 0 and row["CPU, ms a token: one"] > 0
        if row["link"] != "loopback":
            # A hidden state has 512 numbers of 4 bytes.
            assert row["wire, bytes a token"] > 2048


def test_arrays_pass_between_two_processes_by_their_cards_and_over_tcp():
    """Through rings and without; each array comes back as it went."""
    for through_rings in (True, False):
        with fake_rings.rings() if through_rings else nullcontext([]) as passed:
            one, other = Side(), Side()
            with on_a_thread(other.answer):
                assert one.lead(other.address()) is through_rings
                for way in [CARDS, TCP] if through_rings else [TCP]:
                    for nbytes in (16384, 2 * TOGETHER_BYTES):
                        assert one.one_way_s(way, nbytes, 3) > 0
                one.close()
        # Each way, and one more before it is timed.
        assert passed.count(("received", 16384)) == (2 * (1 + 3) if through_rings else 0)
