"""How the processes of a group form MLX's own group, once they have agreed on what they compute.

Each follower tells the leader a port of its own; the leader tells all where all ranks may listen; then each calls MLX.
No heartbeats pass meanwhile, because MLX does not let other threads run, so a keeper outside each process has the time
limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .....cluster.config.config import Model
from .....cluster.config.stages import Split
from .....cluster.config.timing import Timing
from .....cluster.errors import ModelLoadError
from ..link.connection import Address, Connection
from .joining import Gather, join, reserved_port
from .kept import Kept
from .ranks import Ranks

_PORT, _ADDRESSES, _PART, _PARTS = "port", "addresses", "part", "parts"
"""Kinds of messages: where a rank may listen, where all may, what one has to say, and what all have."""

_LEAST_S = 0.001


class Joining:
    """One process's way into MLX's group, and its keeper. Used on the thread that computes.

    Args:
        split: says by which backend.
        every_s, silent_s, stalled_s: as for `Kept`.
    """

    def __init__(self, split: Split, every_s: float, silent_s: float, stalled_s: float) -> None:
        self._split = split
        self._kept = Kept(every_s, silent_s, stalled_s)

    @property
    def keeper(self) -> int:
        """The id of the keeper's process."""
        return self._kept.pid

    def lead(self, ranks: Ranks, calls: Sequence[Connection], host: str, until: float) -> None:
        """Forms the group with all followers.

        Args:
            calls: the connection to each follower, in the order of ranks.
            host: where this process may listen.
            until: monotonic seconds, by which it must be formed.

        Raises:
            ModelLoadError: MLX cannot form it.
        """
        with reserved_port(host) as port:
            addresses = [tuple(connection.expect(_PORT, until)) for connection in calls]
            addresses.append((host, port))
        for connection in calls:
            connection.send(_ADDRESSES, addresses)

        def gather(data: bytes) -> bytes:
            parts = [*(connection.expect(_PART, until) for connection in calls), data]
            for connection in calls:
                connection.send(_PARTS, b"".join(parts))
            return b"".join(parts)

        self._join(ranks, addresses, gather, until)

    def follow(self, ranks: Ranks, calls: Connection, host: str, until: float) -> None:
        """As `lead`, for a follower; `calls` is the connection to the leader."""
        with reserved_port(host) as port:
            calls.send(_PORT, [host, port])
            addresses = [(host, port) for host, port in calls.expect(_ADDRESSES, until)]

        def gather(data: bytes) -> bytes:
            calls.send(_PART, data)
            return calls.expect(_PARTS, until)

        self._join(ranks, addresses, gather, until)

    def end(self) -> None:
        """Ends the keeper."""
        self._kept.end()

    def _join(self, ranks: Ranks, addresses: Sequence[Address], gather: Gather, until: float) -> None:
        with self._patient(until):
            try:
                join(ranks, self._split, addresses, gather)
            except (RuntimeError, ValueError) as error:
                raise ModelLoadError(f"the ranks cannot join by {self._split.backend}: {error}") from error

    @contextmanager
    def _patient(self, until: float) -> Iterator[None]:
        """While this is open, this process may be silent until then."""
        self._kept.allow(max(_LEAST_S, until - time.monotonic()))
        try:
            yield
        finally:
            self._kept.resume()


def joining_of(model: Model, timing: Timing) -> Joining | None:
    """Returns how a process of a divided model joins the others; None if they pass hidden states instead."""
    if model.split is None or model.split.tensor is None:
        return None
    return Joining(model.split, timing.group_beat_s, timing.group_silent_s, timing.group_stalled_s)
