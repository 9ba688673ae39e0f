"""The leader's side of calls: each is told to all followers, then done here.

The leader has the last stage, so logits stay where tokens are drawn. A call that only prepares another one waits for it
and goes with it in one message. KV that was cut out gets a number, the same on all processes; if the leader drops it,
the followers are told with the next message.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import msgpack
import numpy as np

from .....cluster.errors import ClusterError
from ...execution.followers import ShownPictures
from ...execution.media.language_inputs import SequencePictures
from ...execution.micro_batches import TWO
from ...kv.caches import PooledBlock, Slab
from ..link.arrays import Launched
from ..link.broken import Wholeness
from ..link.connection import Connection
from ..link.times import Times
from ..pictures.picture_messages import Told, Wanted, pack_pictures, tell

T = TypeVar("T")

TELL, END = "tell", "end"
"""Kinds of messages: calls to do, and the end of the group."""

KEPT, TOKENS, COUNT, PICTURES, SHOWN, SENT, PUT = 1, 2, 3, 4, 5, 6, 7
"""Kinds of msgpack's extension values: KV by its number, an array of tokens as little-endian uint32, and in its place
the number of its tokens, if the followers get them in the model itself; a sequence's pictures, and what its next tokens
need of them; and the number of tokens that the first stage gets on a connection of their own, or, with their number
there, through its ring."""

NUMBERED = frozenset({"cut", "adopt_part", "adopt_slabs"})
"""Calls that return KV, which gets numbers."""

KNOWN_MOST = 2 * TWO
"""So many arrays of tokens are known that calls will tell: each micro-batch has one, and another one once sequences
have joined or left."""

COMPUTING = frozenset({"compute", "compute_ahead"})
"""Calls that return logits, which are not evaluated yet."""

_LATER = frozenset({"open", "line_up", "select", "move", "change", "take_back", "advance"})
"""Calls that are told with the next other one."""

_BETWEEN = frozenset({"select", "change", "seal_filled", "advance"})
"""Calls that may be led while the followers do others that they were told ahead."""


class Leading:
    """Lets followers do the calls of the leader's batch; see `execution.batch.Followers`.

    Args:
        calls: the connection to each follower.
        wanted: what each follower's layers need of pictures.
        overlaps: see `execution.followers.Followers`.
        tokens: a connection to the first stage, on which tokens go that the device still draws; None if calls wait for
            them.
        times: is told how long each kind of call takes here; None for its own.

    Attributes:
        count: how many followers there are.
        times: as given.
    """

    def __init__(
        self,
        calls: Sequence[Connection],
        wholeness: Wholeness,
        wanted: Sequence[Wanted] = (),
        *,
        overlaps: bool = True,
        tokens: Connection | None = None,
        times: Times | None = None,
    ) -> None:
        self._calls, self._wholeness, self.overlaps = calls, wholeness, overlaps
        self._tokens = tokens
        # Arrays of tokens that calls will tell, and what is sent of them, or their numbers in the ring.
        self._known: list[tuple[mx.array, Launched | Callable[[], Sequence[int]] | int]] = []
        # The last that was told of those in the ring.
        self._put = 0
        self._wanted = wanted or [Wanted()] * len(calls)
        self.count = len(calls)
        self.times = times or Times()
        self._untold: list[Any] = []
        # Calls that the followers have been told, and that were not done here yet.
        self._ahead: deque[str] = deque()
        # By the id of what was cut out, as long as it exists.
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._dropped: deque[int] = deque()
        # Guards what waits for the end of a call; only held briefly.
        self._lock = threading.Lock()
        self._calling = False
        self._after: list[Callable[[], object]] = []

    def between_calls(self, do: Callable[[], object]) -> None:
        """Does something as soon as no call is in progress; from any thread. For the watchdog."""
        with self._lock:
            if self._calling:
                self._after.append(do)
                return
        do()

    def lead(self, call: str, given: Sequence[Any], named: Mapping[str, Any], run: Callable[[], T]) -> T:
        """Tells a call and does it.

        Raises:
            GroupBroken: it failed here or on the way, or the group was broken before.
        """
        with self._wholeness.kept(), self._in_call():
            if self._ahead and call == self._ahead[0]:
                self._ahead.popleft()
            elif self._ahead and call not in _BETWEEN:
                raise ClusterError("a step was left that the followers compute")
            else:
                self._untold.append([call, self._packed(given), dict(named)])
                if call not in _LATER:
                    self._tell()
            with self.times.of(call):
                result = run()
            if call in COMPUTING and not self.overlaps:
                # All ranks compute all sums of a call, whatever becomes of its result here: else the next call's sums
                # would meet those that are left.
                mx.async_eval(result)
            if call in NUMBERED:
                assert isinstance(result, list)
                for kept in result:
                    self._number(kept)
            return result

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        with self._lock:
            self._calling = True
        try:
            yield
        finally:
            with self._lock:
                self._calling = False
                after, self._after = self._after, []
            for do in after:
                do()

    def tell_ahead(self, call: str, given: Sequence[Any]) -> None:
        """Tells a call that is done here later; see `execution.batch.Followers`.

        Raises:
            GroupBroken: as `lead`.
        """
        with self._wholeness.kept():
            self._untold.append([call, self._packed(given), {}])
            self._tell()
            self._ahead.append(call)

    def copies_of(self, inputs: mx.array) -> list[mx.array]:
        """See `execution.followers.Followers`."""
        if self._tokens is None:
            return []
        there, what = self._launchable(self._tokens, inputs)
        self._note(inputs, what)
        return [there]

    def _launchable(self, connection: Connection, inputs: mx.array) -> tuple[mx.array, Launched | int]:
        """Returns what must be launched, and what is sent then or the number in the ring."""
        ring = connection.sending
        return connection.launchable(inputs) if ring is None else ring.put(inputs)

    def know(self, inputs: mx.array, tokens: Callable[[], Sequence[int]]) -> None:
        """See `execution.followers.Followers`."""
        if self._tokens is not None:
            self._note(inputs, tokens)

    def _note(self, inputs: mx.array, what: Launched | Callable[[], Sequence[int]] | int) -> None:
        self._known.append((inputs, what))
        for _, never_told in self._known[:-KNOWN_MOST]:
            if isinstance(never_told, int):
                assert self._tokens is not None and self._tokens.sending is not None
                self._tokens.sending.forget(never_told)
        del self._known[:-KNOWN_MOST]

    def _sent(self, connection: Connection, inputs: mx.array) -> msgpack.ExtType:
        """Sends tokens to the first stage. Returns what calls say of them."""
        place = next((place for place, (each, _) in enumerate(self._known) if each is inputs), None)
        what = None if place is None else self._known.pop(place)[1]
        # The first stage has left those out that were put into the ring before what it was told of.
        if what is None or (isinstance(what, int) and what < self._put):
            there, what = self._launchable(connection, inputs)
            mx.async_eval(there)
        count = inputs.size.to_bytes(8, "big")
        if isinstance(what, int):
            self._put = what
            return msgpack.ExtType(PUT, count + what.to_bytes(8, "big"))
        if isinstance(what, Launched):
            connection.put_launched(what)
        else:
            connection.send_numbers(what())
        return msgpack.ExtType(SENT, count)

    def pass_tokens(self) -> None:
        """See `execution.followers.Followers`."""
        if self._tokens is not None:
            with self.times.of("waiting for tokens"):
                self._tokens.wait_sent()

    def end(self) -> None:
        """Tells the followers that the group has ended."""
        for follower in self._calls:
            follower.send(END)

    def _tell(self) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        told, self._untold = self._untold, []
        self.times.log("the leader")
        for number, follower in enumerate(self._calls):
            arrays: list[mx.array] = []
            own = [[call, [_told(each, number, arrays) for each in given], named] for call, given, named in told]
            follower.send(TELL, dropped, own, len(arrays))
            follower.send_behind(arrays)

    def _number(self, kept: Slab | PooledBlock) -> None:
        key, number = id(kept), self._next
        self._numbers[key] = number
        self._next += 1
        weakref.finalize(kept, self._drop, key, number)

    def _drop(self, key: int, number: int) -> None:
        """On any thread."""
        del self._numbers[key]
        self._dropped.append(number)

    def _packed(self, value: Any) -> Any:
        """Returns arguments in the form in which they are told."""
        if isinstance(value, ShownPictures):
            return [tell(value, wanted) for wanted in self._wanted]
        if isinstance(value, SequencePictures):
            return msgpack.ExtType(PICTURES, pack_pictures(value))
        if isinstance(value, Slab | PooledBlock):
            return msgpack.ExtType(KEPT, self._numbers[id(value)].to_bytes(8, "big"))
        if isinstance(value, mx.array) and not self.overlaps:
            # They need not have been drawn yet.
            return msgpack.ExtType(COUNT, value.size.to_bytes(8, "big"))
        if isinstance(value, mx.array) and self._tokens is not None:
            return self._sent(self._tokens, value)
        if isinstance(value, mx.array):
            return msgpack.ExtType(TOKENS, np.array(value).astype("<u4").tobytes())
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            # Prompts are long.
            return list(value) if value and isinstance(value[0], int) else [self._packed(each) for each in value]
        return value


def _told(value: Any, follower: int, arrays: list[mx.array]) -> Any:
    """Returns an argument as it is told to a follower. Adds the arrays that follow the message."""
    if isinstance(value, list) and value and isinstance(value[0], Told):
        told = value[follower]
        arrays += told.arrays
        return msgpack.ExtType(SHOWN, told.packed)
    return value
