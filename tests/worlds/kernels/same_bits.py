"""Checks that a token attends to the same bits whatever else a step computes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from satchel.actors.replica.kernels import decode_kernel
from satchel.actors.replica.kernels.decode_views import KernelStep, KernelView, NewTokens
from satchel.actors.replica.kernels.sealing import SealPolicy
from satchel.actors.replica.selftest.kernel_check import World


def check(made: World, policy: SealPolicy, sinks: mx.array | None = None) -> None:
    """Every token of a step has the same output if it is computed alone, after the ones before it."""
    step, queries = made.view.step, made.queries
    tails = [mx.contiguous(tail + 0) for tail in step.tails]
    mx.eval(tails)
    together = decode_kernel.attend(queries, made.view, policy, 0.1, sinks)
    mx.eval(together)
    numbers, count = np.array(step.read.numbers)[1:].tolist(), step.read.tokens
    columns = [numbers[at * count : at * count + len(made.positions)] for at in (2, 3, 5, 6)]
    for token, (place, owner, begin, end) in enumerate(zip(*columns, strict=True)):
        keys, values = (mx.contiguous(tail[owner : owner + 1]) for tail in tails)
        mx.eval(keys, values)
        read = NewTokens.of(step.read.slots, [begin, end], [place], [0], 0, keys.shape[1])
        new = [each[token : token + 1] for each in (made.view.keys, made.view.values)]
        view = KernelView(
            new[0], new[1], KernelStep((keys, values), step.pool, read, step.written), made.view.transform
        )
        alone = decode_kernel.attend(queries[token : token + 1], view, policy, 0.1, sinks)
        mx.eval(alone)
        assert mx.array_equal(alone, together[token : token + 1]), token
        # The next token finds it in the open block.
        for tail, mine in zip(tails, (keys, values), strict=True):
            tail[owner] = mine[0]
