"""A follower's side of calls: does what the leader tells, in order, with its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import mlx.core as mx
import msgpack
import numpy as np

from .....cluster.errors import LinkGarbage, SatchelError
from ...execution.batch import Batch
from ...kv.caches import PooledBlock, Slab
from ..link.broken import Wholeness, in_words
from ..link.connection import Connection
from ..link.times import Times
from ..pictures.picture_messages import read_pictures, read_shown
from .leading import COMPUTING, COUNT, END, KEPT, NUMBERED, PICTURES, PUT, SENT, SHOWN, TELL, TOKENS


class Following:
    """One follower.

    Args:
        calls: the connection to the leader.
        after: the connection to the next stage, which is told if something fails here; None if there is none.
        relative_bytes: the bytes of a token's KV here, relative to the leader's.
        tokens: as for `Leading`; None if this is not the first stage.
        times: is told how long it waits for calls, and how long each kind of call takes; None for its own.

    Attributes:
        times: as given.
    """

    def __init__(
        self,
        batch: Batch,
        calls: Connection,
        after: Connection | None,
        wholeness: Wholeness,
        relative_bytes: float = 1.0,
        tokens: Connection | None = None,
        times: Times | None = None,
    ) -> None:
        self._batch, self._calls, self._after, self._wholeness = batch, calls, after, wholeness
        self._relative_bytes, self._tokens = relative_bytes, tokens
        self.times = times or Times()
        self._kept: dict[int, Slab | PooledBlock] = {}
        self._next = 0
        # Those that followed the last message.
        self._arrays: Iterator[mx.array] = iter(())

    @property
    def batch(self) -> Batch:
        return self._batch

    @property
    def kept(self) -> int:
        """How many pieces of KV it keeps for the leader."""
        return len(self._kept)

    def run(self) -> None:
        """Does what it is told until the leader ends the group.

        Raises:
            GroupBroken: something failed.
        """
        with self._wholeness.kept():
            try:
                while self._heard():
                    self.times.log("a follower")
            except BaseException as error:
                if not self._wholeness.why and self._after is not None:
                    with suppress(SatchelError):
                        self._after.fail(in_words(error))
                raise

    def _heard(self) -> bool:
        """Does what the next message says. Returns False if it is the last."""
        with self.times.of("waiting for calls"):
            kind, fields = self._calls.receive() or ("", [])
        if kind == TELL:
            dropped, told, arrays = fields
            self._arrays = iter(self._calls.receive_behind(arrays))
            for call, given, named in told:
                self._do(call, given, named)
            # Only now: a call may have been told later than its KV was dropped.
            for number in dropped:
                del self._kept[number]
        elif kind != END:
            raise LinkGarbage(f"the leader sends {kind!r:.40}")
        return kind == TELL

    def _do(self, call: str, given: list[Any], named: dict[str, Any]) -> None:
        method = getattr(Batch, call, None)
        if not hasattr(method, "replayed"):
            raise LinkGarbage(f"{call!r:.40} is no call of a batch")
        if call == "give_back":
            given = [int(nbytes * self._relative_bytes) for nbytes in given]
        with self.times.of(call):
            result: Any = getattr(self._batch, call)(*map(self._unpacked, given), **named)
        if call in COMPUTING and self._after is None:
            # No stage waits for the logits, but the other ranks need the sums that are in them.
            mx.async_eval(result)
        if call in NUMBERED:
            for kept in result:
                self._kept[self._next] = kept
                self._next += 1

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, msgpack.ExtType):
            if value.code == KEPT:
                return self._kept[int.from_bytes(value.data, "big")]
            if value.code == PICTURES:
                return read_pictures(value.data)
            if value.code == SHOWN:
                return read_shown(value.data, self._arrays)
            if value.code == TOKENS:
                return mx.array(np.frombuffer(value.data, "<u4"))
            if value.code == SENT and self._tokens is not None:
                return self._tokens.await_numbers(int.from_bytes(value.data, "big"))
            if value.code == PUT and self._tokens is not None and self._tokens.receiving is not None:
                count, number = (int.from_bytes(each, "big") for each in (value.data[:8], value.data[8:]))
                return self._tokens.receiving.take((count,), mx.uint32, number)
            if value.code in (COUNT, SENT, PUT):
                return mx.zeros(int.from_bytes(value.data[:8], "big"), mx.uint32)
        return [self._unpacked(each) for each in value] if isinstance(value, list) else value
