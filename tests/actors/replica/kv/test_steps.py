"""Masks of bidirectional image attention, however a prompt is cut into chunks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.kv.steps import mask_of, seen_of, step_of

RUN = (230, 300)
TOKENS = 600


def seen(start: int, stop: int, window: int, exact: bool, padding: int = 0) -> dict[int, set[tuple[int, bool]]]:
    """By query of a chunk the positions that it sees, each with whether it is seen as sealed."""
    step = step_of([start], window, [stop - start], padded=padding > 0, exact=exact)
    count = stop - start + padding
    mask = np.array(mask_of(step, [start], step.first, count, window, [[RUN]]))[0, 0]
    sealed = step.first[0] * BLOCK_TOKENS + np.arange(step.used * BLOCK_TOKENS)
    opened = start // BLOCK_TOKENS * BLOCK_TOKENS + np.arange(step.columns)
    columns = [(int(at), True) for at in sealed] + [(int(at), False) for at in opened]
    return {start + query: {columns[at] for at in np.flatnonzero(mask[query])} for query in range(stop - start)}


@pytest.mark.parametrize("window", [0, 50, 300])
@pytest.mark.parametrize("exact", [False, True])
def test_a_run_is_seen_whole_by_its_tokens_and_by_no_others_early(window: int, exact: bool) -> None:
    for query, found in seen(0, TOKENS, window, exact).items():
        first = max(0, query - window + 1) if window else 0
        wanted = set(range(first, query + 1)) | (set(range(*RUN)) if RUN[0] <= query < RUN[1] else set())
        assert len(found) == len(wanted) and {at for at, _ in found} == wanted
        own = query // BLOCK_TOKENS * BLOCK_TOKENS
        assert exact or all(sealed == (at < own) for at, sealed in found)


@pytest.mark.skipif(on_gpu(), reason="a GPU multiplies an odd number of columns as others")
@pytest.mark.parametrize("opened", [0, 1, 2, 254, 255])
def test_a_step_on_a_cpu_has_an_even_number_of_columns_and_sees_its_tokens(opened: int) -> None:
    lengths = [512 + opened]
    step = step_of(lengths, 0, [1])
    wanted = [True] * (opened + 1) + [False] * (step.columns - opened - 1)
    mask, tail = mask_of(step, lengths, step.first, 1, 0), seen_of(step, 0)
    assert step.columns % 2 == 0 and len(wanted) == step.columns
    if all(wanted):
        assert mask is None and tail is None
    else:
        assert mask is not None and tail is not None
        assert np.array(mask).flatten().tolist() == [True] * 512 + wanted
        assert np.array(tail).flatten().tolist() == wanted


@pytest.mark.parametrize("cuts", [(0, 230, TOKENS), (0, 300, 310, TOKENS), (0, 100, 350, TOKENS)])
def test_chunks_see_what_the_whole_prompt_does(cuts: tuple[int, ...]) -> None:
    for window in (0, 100):
        whole = seen(0, TOKENS, window, False)
        for start, stop in pairwise(cuts):
            for padding in (0, 30):
                found = seen(start, stop, window, False, padding)
                assert all(found[query] == whole[query] for query in range(start, stop))


def test_the_rest_of_a_run_sees_its_begin_that_is_known_already() -> None:
    """Blocks may end in it."""
    for window in (0, 100):
        whole, rest = seen(0, TOKENS, window, False), seen(BLOCK_TOKENS, TOKENS, window, False)
        assert all(rest[query] == whole[query] for query in range(BLOCK_TOKENS, TOKENS))
