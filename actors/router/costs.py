"""Computes how each replica would best get a prompt's KV, and what that costs. Pure; arrays are `(replicas,)`.

A prompt's first tokens are in a replica's memory up to `hot`, on its node's disk up to `disk`, and on other nodes'
disks up to some token. Each further way costs more per token than the one before it: a pulled token is also restored.
So the best mix takes each way wholly or not at all: hot, then restored to the disk's end, then pulled to the end of one
peer's, if that is faster than computing; the rest is computed.
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
"""Fixed time of reading from disk: asking the store, opening files."""

ENCODE_SETUP_S = 0.03
"""Fixed time of encoding a picture: sending and preparing its pixels."""

LOST_S = 3600.0
"""Cost of a picture whose pixels are gone, so that only replicas with its image embeddings can answer."""

PULL_SETUP_S = 0.03
"""Fixed time of a pull: asking two stores, connecting, committing."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Disks of other nodes that hold the prompt's first tokens.

    Attributes:
        tokens: how many of them, whole blocks, `(sources,) int64`.
        wait_s: seconds until earlier pulls from the source are done, `(sources,) float64`.
        bytes_per_s: of the link, `(replicas, sources) float64`; 0 if the replica cannot pull.
    """

    tokens: Integers
    wait_s: Floats
    bytes_per_s: Floats


@dataclass(frozen=True, slots=True)
class Ways:
    """The best mix for each replica; arrays are `(replicas,)`.

    Attributes:
        held: tokens of the prompt that need not be computed.
        pulled: how many of them are pulled, whole blocks.
        source: index of the source in `Sources`; -1 for none.
        restore_s: seconds to read restored and pulled KV from disk.
        pull_s: seconds until pulled KV is on disk.
        prefill_s: seconds to compute the rest.
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
    """Returns the fastest mix of hot, restored, pulled and computed tokens for each replica.

    Args:
        hot: leading tokens of the prompt in memory.
        disk: leading tokens on the node's disk, whole blocks; None if no disk has any.
        token_s: seconds to compute a token.
        restore_token_s: seconds to read a token's KV from disk.
        kv_bytes: bytes of a token's KV.
        sources: None if there is nothing to pull.
    """
    nothing = np.zeros(len(hot))
    none = np.full(len(hot), -1)
    if disk is None:
        return Ways(hot, np.zeros_like(hot), none, nothing, nothing, (prompt_tokens - hot) * token_s)
    near = np.maximum(hot, disk)
    # Whole blocks from disk cannot follow an open tail in memory.
    whole = hot - hot % BLOCK_TOKENS
    restore_s = np.where(disk > hot, (disk - whole) * restore_token_s + RESTORE_SETUP_S, 0.0)
    # The gain from restoring, and below the additional gain from pulling from the best source.
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
    """Joins the ways of groups of replicas, each with its positions, into those of all `count` replicas."""
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
    """Returns the seconds that a picture of a prompt costs each replica: 0 if its KV need not be computed, or its image
    embeddings are in memory.

    Args:
        tokens, end: number of its tokens, and where in the prompt it ends.
        pixels: whether the request has its pixels.
        held: tokens of the prompt that need not be computed.
        memory, disk: not 0 if its image embeddings are in the replica's memory, or on its node's disk.
        encode_token_s: seconds to encode a picture, per token.
    """
    anew_s = tokens * encode_token_s + ENCODE_SETUP_S if pixels else np.full(len(held), LOST_S)
    encoded_s = np.where(disk > 0, RESTORE_SETUP_S, anew_s)
    return np.where((held >= end) | (memory > 0), 0.0, encoded_s)
