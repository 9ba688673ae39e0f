"""Two nodes against one: what they answer together, simulated from rates that were measured.

Where nodes share a machine's cores they share its speed, so this is a calculation: the nodes of the router's benchmark
with one H200's rates for a model of Qwen3-0.6B's shape (`benchmarks/results`), agents that ask again at once, and the
router's own rules.
"""

from __future__ import annotations

from dataclasses import replace

from ..parts import ResultTable
from ..router import engines, replaying, workloads

STEPS_S = {1: 1 / 265, 32: 32 / 3131}
"""Seconds of a decode step by number of sequences, from serve-nvidia-h200 (KV in 4 bits)."""

PREFILL_TOKENS_PER_S = 16_000 / 0.972
"""From memory-nvidia-h200."""

ROWS, TURNS = 32, 6


def together(sizes: tuple[int, ...] = (1, 2, 4)) -> ResultTable:
    """Output tokens a second of clusters of several sizes, each with as many agents as the largest can decode."""
    machine = engines.Machine(
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        step_s=STEPS_S[1],
        step_sequence_s=(STEPS_S[32] - STEPS_S[1]) / 31,
        sequences_max=ROWS,
        disk_blocks_max=20_000,
    )
    sessions = [
        replace(session, starts_s=0.0, turns=[replace(turn, think_s=0.0) for turn in session.turns])
        for session in workloads.synthetic(0, agents=ROWS * max(sizes), turns=TURNS)
    ]
    tokens = sum(turn.output_tokens for session in sessions for turn in session.turns)
    part = ResultTable("Nodes together, simulated from measured rates")
    rates: list[float] = []
    for nodes in sizes:
        outcome = replaying.replay(sessions, replaying.Satchel("satchel"), replicas=nodes, machine=machine)
        rates.append(rate := tokens / outcome.ended_s)
        part.rows.append(
            {
                "nodes": nodes,
                "tokens a second": rate,
                "of one node": rate / rates[0],
                "hit rate": outcome.figures()["hit_rate"],
            }
        )
    part.notes.append(
        f"A simulated clock; each node as one H200 with a 0.6B shape was measured: {PREFILL_TOKENS_PER_S:,.0f} tokens "
        f"of prompt a second, {1000 * STEPS_S[1]:.1f} ms a step of one sequence and {1000 * STEPS_S[32]:.1f} of 32. "
        f"{len(sessions)} agents of {TURNS} turns that ask again at once. No real machine was measured."
    )
    return part
