"""Whether one replica should prefill a prompt and another, on another node, decode the answer. Pure.

The estimate for a pair, in seconds:

    prefill   until the first one has computed the prompt, with its queue, and what it restores before that
    travel    until the KV is on the other node's disk. Blocks travel while later ones are computed; at the end the last
              chunk and the open tail are left, or what a link slower than the prefill has not carried
    queue     how much longer the other one's own queue takes than all that
    restore   until it has read the KV from its disk
    decode    as for every request; and `away`, if it is not the agent's home
    pace      `ANSWER_TOKENS` of its decode steps

A replica alone costs what `policy.py` says, and its own pace. A fast machine that decodes slowly, or for many, and one
that decodes fast and prefills slowly are better together than each alone. Equal ones never are: travelling takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..protocol.block_ids import BLOCK_TOKENS
from .costs import RESTORE_SETUP_S, Floats, Integers

ANSWER_TOKENS = 128
"""The length of an answer for which decode steps are compared."""

LAST_TOKENS = 1024
"""Tokens whose KV travels after the prefill: those of its last chunk, and an open tail in full precision."""

HAND_ON_S = 0.1
"""Fixed time of handing on: writing, syncing and committing the last blocks on both nodes."""

GAIN_S_MIN = 0.5
"""A smaller gain is within the errors of the estimate."""

COMPARED = 16
"""How many replicas are considered for either part."""

WAIT_FACTOR, WAIT_S_MIN = 2.0, 5.0
"""The decoding replica waits for this multiple of the estimate plus this many seconds, then computes what is
missing."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When requests are split.

    Attributes:
        tokens_min: the fewest tokens to be computed.
        gain_min: how much less the two together must cost than the best one alone, as a share of that.
    """

    tokens_min: int
    gain_min: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """The replicas that may answer a request; arrays are `(candidates,)`.

    Attributes:
        node, model: indices; a node of -1 is unknown.
        stores: whether its KV can go by disks, and the node's store answers and can write.
        held: tokens of the prompt that need not be computed there.
        near: those of them that are on the replica's node already.
        hot: those of them that are in the replica's memory.
        queue_s, prefill_s: until its turn comes, and from then until the prompt is computed.
        own_s: the latter without KV of a third node.
        other_s: everything else that its answering alone costs.
        decode_s, step_s: what its sequences lose by one more, and the time of a decode step.
        away_s: for not being the agent's home.
        restore_token_s, kv_bytes: of a token's KV.
    """

    node: Integers
    model: Integers
    stores: np.ndarray
    held: Integers
    near: Integers
    hot: Integers
    queue_s: Floats
    prefill_s: Floats
    own_s: Floats
    other_s: Floats
    decode_s: Floats
    step_s: Floats
    away_s: Floats
    restore_token_s: Floats
    kv_bytes: Floats


@dataclass(frozen=True, slots=True)
class Split:
    """The chosen pair, by their positions.

    Attributes:
        costs_s: the estimate by term, with `total` and `alone`, what the best replica alone would cost.
        wire_s: seconds that the link is busy.
        wait_s: how long the decoding replica waits for the KV.
    """

    prefill: int
    decode: int
    costs_s: dict[str, float]
    wire_s: float
    wait_s: float


def best_split(prompt_tokens: int, candidates: Candidates, rates: Floats, busy_s: Floats, rules: Rules) -> Split | None:
    """Returns the best pair if it is clearly better than every replica alone, else None.

    Args:
        rates: bytes per second to the first node from the second, `(nodes, nodes)`.
        busy_s: seconds until earlier pulls from each node are done, `(nodes,)`.
    """
    one, usable = candidates, prompt_tokens - 1
    pace_s = ANSWER_TOKENS * one.step_s
    alone_s = one.queue_s + one.prefill_s + one.other_s + pace_s
    best = int(alone_s.argmin())
    able = np.flatnonzero(one.stores & (one.node >= 0))
    if prompt_tokens - int(one.held[best]) < rules.tokens_min or len(able) < 2:
        return None
    at_s, answer_s = one.queue_s + one.own_s, one.decode_s + one.away_s + pace_s
    # Rows prefill, columns decode.
    first, second = _least(able, at_s)[:, None], _least(able, answer_s)[None, :]
    moved = np.maximum(0, usable - one.near[second])
    byte_s = one.kv_bytes[first] / rates[one.node[second], one.node[first]]
    late_s = np.maximum(moved * byte_s - one.own_s[first], np.minimum(moved, LAST_TOKENS) * byte_s)
    travel_s = busy_s[one.node[first]] + late_s + HAND_ON_S
    there_s = at_s[first] + travel_s
    whole = one.hot[second] - one.hot[second] % BLOCK_TOKENS
    restore_s = (usable - whole) * one.restore_token_s[second] + RESTORE_SETUP_S
    queue_s = np.maximum(0.0, one.queue_s[second] - there_s)
    total = there_s + queue_s + restore_s + answer_s[second]
    on_two_nodes = (one.node[first] != one.node[second]) & (one.model[first] == one.model[second])
    total = np.where(on_two_nodes, total, np.inf)
    row, column = np.unravel_index(int(total.argmin()), total.shape)
    gain_s = float(alone_s[best] - total[row, column])
    if not gain_s >= max(GAIN_S_MIN, rules.gain_min * float(alone_s[best])):
        return None
    prefill, decode = int(first[row, 0]), int(second[0, column])
    costs_s = {
        "prefill": at_s[prefill],
        "travel": travel_s[row, column],
        "queue": queue_s[row, column],
        "restore": restore_s[0, column],
        "decode": one.decode_s[decode],
        "away": one.away_s[decode],
        "pace": pace_s[decode],
        "total": total[row, column],
        "alone": alone_s[best],
    }
    return Split(
        prefill,
        decode,
        {term: float(seconds) for term, seconds in costs_s.items()},
        float(moved[0, column] * byte_s[row, column]),
        WAIT_FACTOR * float(there_s[row, column]) + WAIT_S_MIN,
    )


def _least(positions: Integers, seconds: Floats) -> Integers:
    """Returns up to `COMPARED` of `positions`, those of the least `seconds`, ascending."""
    if len(positions) <= COMPARED:
        return positions
    return np.sort(positions[np.argpartition(seconds[positions], COMPARED)[:COMPARED]])
