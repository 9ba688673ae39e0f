"""The ranks of a model of which each process has a share, and their sums.

What a share of a layer computes is added over all ranks, in the order of ranks. So a token's result does not depend on
its place in the batch: MLX's own sum over three ranks or more adds pieces of an array in different orders. With two
ranks the order does not matter, and MLX's own sum is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ....patches import collectives_by

Collective = Callable[..., mx.array]


class Ranks:
    """A group as models' code sees it: MLX's functions for sums and gathers of processes take it as their group.

    Until it is connected, a rank is alone: sums are its own part. So a model can be loaded before its group is formed;
    what it computes then has the right shapes, but other values. Used on one thread and its default stream: sums of two
    streams at once are wrong with some backends.

    Args:
        rank: this process's.
        size: how many there are; at least one.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} of {size}")
        self._rank, self._size = rank, size
        self._group: mx.distributed.Group | None = None
        collectives_by(mx.distributed, Ranks)

    def rank(self) -> int:
        """Returns this process's rank."""
        return self._rank

    def size(self) -> int:
        """Returns how many ranks there are."""
        return self._size

    def connect(self, group: mx.distributed.Group) -> None:
        """Has sums be those of all ranks from now on.

        Raises:
            ValueError: it is another group.
        """
        if (group.rank(), group.size()) != (self._rank, self._size):
            raise ValueError(f"rank {self._rank} of {self._size} became rank {group.rank()} of {group.size()}")
        self._group = group

    def all_sum(self, x: mx.array, plain: Collective) -> mx.array:
        """Returns the sum of all ranks' `x`, of its shape and dtype; the same bits on every rank.

        Args:
            plain: MLX's own function.
        """
        if self._group is None:
            return x
        if self._size == 2:
            return plain(x, group=self._group)
        return in_order(plain_gather(self._group, x))

    def from_last(self, x: mx.array) -> mx.array:
        """Returns the last rank's `x`, of integers; those of the others only have its shape and dtype."""
        if self._group is None:
            return x
        own = x if self._rank == self._size - 1 else mx.zeros_like(x)
        return mx.distributed.all_sum(own, group=self._group)

    def all_gather(self, x: mx.array, plain: Collective) -> mx.array:
        """Returns all ranks' `x`, one after the other along the first axis. Arguments as for `all_sum`."""
        if self._group is None:
            return mx.concatenate([x] * self._size, axis=0)
        return plain(x, group=self._group)


def plain_gather(group: mx.distributed.Group, x: mx.array) -> mx.array:
    """Returns all ranks' `x`, `(ranks, *x.shape)`."""
    return mx.distributed.all_gather(x[None], group=group)


def in_order(parts: mx.array) -> mx.array:
    """Returns the sum of `parts`, `(ranks, ...)`, added from the first to the last; each sum is rounded."""
    total: Any = parts[0]
    for number in range(1, parts.shape[0]):
        total = total + parts[number]
    return total
