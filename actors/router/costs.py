"""How each replica would best come by a prompt's KV, and what that costs it. Pure; arrays run along the replicas.

A prompt's beginning is in a replica's memory up to `hot` tokens, on its node's disk up to `disk`, and on other nodes'
disks up to theirs. Each further way costs more a token than the one before it: a pulled token is also restored. So the
best mix takes each of them wholly or not at all: hot, then restored to the disk's end, then pulled to the end of one
peer's, as far as that is sooner than computing it; the rest is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

import numpy as np
import numpy.typing as npt

from ..protocol.block_ids import BLOCK_TOKENS

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

RESTORE_SETUP_S = 0.005
"""What reading anything back from the disk takes besides the bytes: asking the store, opening files."""

ENCODE_SETUP_S = 0.03
"""What encoding a picture takes besides: its pixels have to be sent and prepared."""

LOST_S = 3600.0
"""For a picture that cannot be encoded, as nobody has its pixels any more: whoever has its features is better."""

PULL_SETUP_S = 0.03
"""What pulling takes besides: asking two stores, connecting, committing."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Disks of other nodes that hold the prompt's beginning.

    Attributes:
        tokens: how much of it, by source; whole blocks.
        wait_s: how long until other pulls have left it, by source.
        bytes_per_s: of the link, by replica and source; 0 where a replica cannot pull.
    """

    tokens: Integers
    wait_s: Floats
    bytes_per_s: Floats


@dataclass(frozen=True, slots=True)
class Ways:
    """The best way for each replica.

    Attributes:
        held: tokens of the prompt that need not be computed.
        pulled: how many of them are pulled, whole blocks.
        source: from which of the `Sources`; -1 for none.
        restore_s: the time to read from the disk what is restored or pulled.
        pull_s: the time until what is pulled is on the disk.
        prefill_s: the time to compute the rest.
    """

    held: Integers
    pulled: Integers
    source: Integers
    restore_s: Floats
    pull_s: Floats
    prefill_s: Floats


def best_ways(
    prompt_tokens: int,
    hot: Integers,
    disk: Integers | None,
    token_s: Floats,
    restore_token_s: Floats,
    kv_bytes: Floats,
    sources: Sources | None,
) -> Ways:
    """The least of hot, restored, pulled and computed, for each replica.

    Args:
        hot: tokens of the prompt's beginning in memory.
        disk: tokens of it on the node's disk, whole blocks; None where no disk has any.
        token_s: seconds to compute a token.
        restore_token_s: seconds to read a token's KV from the disk.
        kv_bytes: what a token's KV takes.
        sources: None where there is nothing to pull.
    """
    nothing = np.zeros(len(hot))
    none = np.full(len(hot), -1)
    if disk is None:
        return Ways(hot, np.zeros_like(hot), none, nothing, nothing, (prompt_tokens - hot) * token_s)
    near = np.maximum(hot, disk)
    # An open tail in memory is of no use to what comes after it in whole blocks.
    whole = hot - hot % BLOCK_TOKENS
    restore_s = np.where(disk > hot, (disk - whole) * restore_token_s + RESTORE_SETUP_S, 0.0)
    # What is gained by restoring, and then by pulling from the best source as well.
    gain_s = (near - hot) * token_s - restore_s
    restores = gain_s > 0.0
    if sources is None:
        held, read_s = np.where(restores, near, hot), np.where(restores, restore_s, 0.0)
        return Ways(held, np.zeros_like(hot), none, read_s, nothing, (prompt_tokens - held) * token_s)
    further = sources.tokens - near[:, None]
    fetched = sources.tokens - np.maximum(whole, disk)[:, None]
    useful = (further > 0) & (sources.bytes_per_s > 0.0)
    rates = np.where(useful, sources.bytes_per_s, 1.0)
    pull_s = fetched * (kv_bytes[:, None] / rates) + sources.wait_s + PULL_SETUP_S
    pull_gain_s = np.where(useful, further * token_s[:, None] - fetched * restore_token_s[:, None] - pull_s, -inf)
    source = pull_gain_s.argmax(axis=1)
    rows = np.arange(len(hot))
    best_s = pull_gain_s[rows, source]
    pulls = (best_s > 0.0) & (gain_s + best_s > 0.0)
    pulled = np.where(pulls, fetched[rows, source], 0)
    held = np.where(pulls, sources.tokens[source], np.where(restores, near, hot))
    read_s = np.where(pulls | restores, restore_s, 0.0) + pulled * restore_token_s
    return Ways(
        held,
        pulled,
        np.where(pulls, source, -1),
        read_s,
        np.where(pulls, pull_s[rows, source], 0.0),
        (prompt_tokens - held) * token_s,
    )


def joined(parts: Sequence[tuple[Integers | slice, Ways]], count: int) -> Ways:
    """The ways of `count` replicas from those of some each, with their positions."""
    if len(parts) == 1:
        return parts[0][1]
    columns = []
    for name in (each.name for each in fields(Ways)):
        whole = np.zeros(count, getattr(parts[0][1], name).dtype)
        for positions, ways in parts:
            whole[positions] = getattr(ways, name)
        columns.append(whole)
    return Ways(*columns)


def encoding_s(
    tokens: int, end: int, pixels: bool, held: Integers, memory: Integers, disk: Integers, encode_token_s: Floats
) -> Floats:
    """What a picture of a prompt costs each replica: nothing where the KV behind it is had, or its features are.

    Args:
        tokens, end: how many tokens it has, and where in the prompt it ends.
        pixels: whether there are any to encode.
        held: tokens of the prompt that need not be computed.
        memory, disk: not 0 where its features are in the replica's memory, or on its node's disk.
        encode_token_s: seconds to encode a picture, for each of its tokens.
    """
    anew_s = tokens * encode_token_s + ENCODE_SETUP_S if pixels else np.full(len(held), LOST_S)
    encoded_s = np.where(disk > 0, RESTORE_SETUP_S, anew_s)
    return np.where((held >= end) | (memory > 0), 0.0, encoded_s)
