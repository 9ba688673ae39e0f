"""Which prompts run as one padded batch, how far they are padded, and in which pieces they are computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

PADDING_MAX = 2.0
"""A padded batch of prompts may have at most this many times the KV of its sequences."""

SHAPE_TOKENS = 64
"""Prompts are padded to a multiple of this many tokens. Layers that multiply tokens with weights need no plan for a new
number of them, and attention has shapes of its own (`query_pieces.py`)."""

CALL_TOKENS = 512
"""A call costs about as much as so many tokens, on CUDA: 22 ms and 36 us a token with the 8B shape on an H200."""

CALL_TOKENS_ELSEWHERE = 64
"""On a Mac tokens cost more, and a call hardly more than reading the weights. Not measured."""

PIECE_TOKENS, PIECE_TOKENS_ELSEWHERE = 4 * CALL_TOKENS, 8 * CALL_TOKENS_ELSEWHERE
"""The most tokens of a piece, on CUDA and elsewhere. Of smaller ones the calls would cost more than stages gain that
begin earlier: by the clock of `benchmarks/group`, with the 8B shape, 16,000 tokens in chunks of 4,096 take two H200
0.64 times as long as one in pieces of 2,048, and 1.0 times in pieces of 512."""


def pieces_of(
    work: Sequence[tuple[str, Sequence[int]]], tokens_max: int | None
) -> list[list[tuple[str, Sequence[int]]]]:
    """Divides what is to be prefilled into pieces that are computed one after another, so that stages of a model in
    several processes compute at the same time.

    Args:
        work: (sequence id, tokens) each.
        tokens_max: of a piece; None for a single piece.

    Returns:
        The pieces, as `work`, with each sequence at most once. Long prompts are cut into nearly equal parts.
    """
    if tokens_max is None:
        return [list(work)]
    pieces: list[list[tuple[str, Sequence[int]]]] = []
    room = 0
    for sequence_id, tokens in work:
        count = max(1, -(-len(tokens) // tokens_max))
        size = min(tokens_max, SHAPE_TOKENS * -(-len(tokens) // (count * SHAPE_TOKENS)))
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            if len(part) > room:
                pieces.append([])
                room = tokens_max
            pieces[-1].append((sequence_id, part))
            room -= len(part)
    return pieces


def padded_tokens(longest: int) -> int:
    """Returns to how many tokens a batch of prompts is padded."""
    return -(-longest // SHAPE_TOKENS) * SHAPE_TOKENS


def batches_of(sequences: Sequence[tuple[int, int]], call_tokens: int) -> list[list[int]]:
    """Divides sequences into batches, so that calls and padding together cost least.

    Args:
        sequences: of each the tokens that have KV, and those to compute.
        call_tokens: how many tokens cost as much as a call.

    Returns:
        For every batch the numbers of its sequences.
    """
    # A batch also has those whose length is between two of its own.
    order = sorted(range(len(sequences)), key=lambda number: (padded_tokens(sequences[number][1]), sequences[number]))
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for stop in range(1, len(order) + 1):
        ways = []
        for start in range(stop):
            batch = sorted(order[start:stop])
            if len(batch) == 1 or _fit([sequences[number] for number in batch]):
                cost, before = best[start]
                tokens = len(batch) * padded_tokens(sequences[order[stop - 1]][1])
                ways.append((cost + call_tokens + tokens, [*before, batch]))
        best.append(min(ways, key=lambda way: way[0]))
    return sorted(best[-1][1])


def _fit(sequences: Sequence[tuple[int, int]]) -> bool:
    """Whether the histories of these sequences need little padding."""
    most = max(held for held, _ in sequences)
    return len(sequences) * most <= PADDING_MAX * sum(held + length for held, length in sequences)
