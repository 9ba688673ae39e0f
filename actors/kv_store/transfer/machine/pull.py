"""One pull of a chain of blocks and its tails from another node, as a state machine: events in, commands out. Pure.

Theory of operation. The wanted entries are a sequence of *items*: the blocks of the chain, then the tails. Each has a
state:

::

    WAITING ──fetch──► ASKED ──good──► HELD ──install──► INSTALLING ──► INSTALLED
       ▲                 │ bad, or the connection broke
       └─────────────────┘                        SKIPPED  was here before
                                                  DROPPED  unavailable, or follows an unavailable block

Items are installed in order, one group at a time. So the blocks here are always a prefix of the chain, however the pull
ends: at its deadline, cancelled, with a full disk or without a connection. The missing blocks are recomputed.
Events only change states (`_take`). What follows from the states and the clock is decided in one place (`_advance`).
Events of earlier connections are ignored, so late or duplicate ones do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from .pull_items import Items, ItemState
from .pull_terms import (
    BytesArrived,
    Cancel,
    Chunk,
    CloseConnection,
    Command,
    Connect,
    Connected,
    Discard,
    Done,
    EntryOutcome,
    Event,
    Fetch,
    Find,
    Found,
    Install,
    Installed,
    InstallFailed,
    Lost,
    Offer,
    PullLimits,
    Recompute,
    Renew,
    Renewed,
    Stop,
    Want,
)


class _Phase(Enum):
    IDLE = "idle"  # without a connection, until `_retry_at` or for ever
    CONNECTING = "connecting"
    FINDING = "finding"
    FETCHING = "fetching"
    ENDED = "ended"


@dataclass
class _Batch:
    """One fetch request: its bytes, the items without an answer, and since when the source works on it."""

    nbytes: int
    left: set[int]
    since: float


class Pull:
    """The state machine of one pull. Call `handle` with each event, and with a `Tick` at `wakes_at` at the latest.

    Args:
        limits: of the pull.
        addresses: how many addresses the source has, the best first.
        deadline: when the pull ends at the latest, by the clock of `now`.

    Attributes:
        items: the wanted entries and their states, read-only for others.
    """

    def __init__(self, limits: PullLimits, addresses: int, deadline: float) -> None:
        self.items = Items()
        self._limits = limits
        self._deadline = deadline
        self._addresses = list(range(addresses))
        self._phase = _Phase.IDLE
        self._out: list[Command] = []
        self._begun = False
        self._known = False
        self._batches: list[_Batch] = []
        self._batch_bytes = limits.batch_bytes_min
        self._connection = 0
        self._address = 0
        self._failures = 0  # in a row
        self._retry_at: float | None = None
        self._until = 0.0  # of the phase
        self._heard = 0.0
        self._asked_at = 0.0
        self._lease_s = 0.0
        self._lease_until = 0.0
        self._renew_at: float | None = None
        self._cancelled = False
        self._why: tuple[Stop, str] | None = None
        self._take: dict[type, Callable[..., None]] = {
            Want: self._want,
            Connected: self._connected,
            Found: self._found,
            BytesArrived: self._progress,
            Chunk: self._chunk,
            Renewed: self._renewed,
            Lost: self._lost,
            Installed: self._installed,
            InstallFailed: self._install_failed,
        }

    @property
    def ended(self) -> bool:
        return self._phase is _Phase.ENDED

    def wakes_at(self) -> float:
        """Returns when a `Tick` is due at the latest."""
        times = [self._deadline]
        if self._phase is _Phase.IDLE and self._retry_at is not None:
            times.append(self._retry_at)
        if self._phase in (_Phase.CONNECTING, _Phase.FINDING):
            times.append(self._until)
        if self._phase is _Phase.FETCHING:
            times.append(self._lease_until)
            if self._batches:
                times.append(self._heard + self._limits.stall_s)
            if self._renew_at is None:
                times.append(self._lease_until - self._lease_s / 2)
        return min(times)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handles an event at the monotonic time `now`, and returns the commands to carry out."""
        if self.ended:
            return []
        self._out = []
        if isinstance(event, Cancel):
            self._cancelled = True
        elif type(event) in self._take:
            self._take[type(event)](event, now)
        self._advance(now)
        return self._out

    # Events: they change states.

    def _want(self, event: Want, now: float) -> None:
        if self._begun:
            return
        self._begun = True
        for block in event.blocks:
            self.items.append(block, block=True)
        self._retry_at = now
        if not self._addresses:
            self._give_up(Stop.UNREACHABLE, "the source has no address")

    def _connected(self, event: Connected, now: float) -> None:
        if event.connection == self._connection and self._phase is _Phase.CONNECTING:
            self._phase = _Phase.FINDING
            self._asked_at, self._until = now, now + self._limits.answer_s
            self._out.append(Find(self._connection))

    def _found(self, event: Found, now: float) -> None:
        if event.connection != self._connection or self._phase is not _Phase.FINDING:
            return
        self._phase = _Phase.FETCHING
        self._heard = now
        self._lease_s, self._lease_until, self._renew_at = event.lease_s, self._asked_at + event.lease_s, None
        if not self._known:
            self._known = True
            for tail in event.tails:
                self.items.append(tail.id, block=False)
        offered = {offer.id: offer for offer in (*event.blocks, *event.tails) if offer is not None}
        for number in range(len(self.items)):
            if self.items[number].state is ItemState.WAITING:
                self._consider(number, offered.get(self.items[number].id))

    def _consider(self, number: int, offer: Offer | None) -> None:
        if offer is None:
            self._fail(number, Stop.MISSING, "the source does not have it")
        elif offer.held:
            self.items.move(number, ItemState.SKIPPED)
        elif offer.nbytes > self._limits.window_bytes:
            self._fail(number, Stop.TOO_LARGE, f"it has {offer.nbytes} bytes")
        else:
            self.items[number].nbytes = offer.nbytes

    def _progress(self, event: BytesArrived | Chunk, now: float) -> None:
        if event.connection == self._connection and self._phase is _Phase.FETCHING:
            self._heard = now
            self._lease_until = max(self._lease_until, now + self._lease_s / 2)

    def _chunk(self, event: Chunk, now: float) -> None:
        number = self.items.number_of(event.id)
        if event.connection != self._connection or self._phase is not _Phase.FETCHING or number is None:
            return
        item = self.items[number]
        if item.state is not ItemState.ASKED:
            return
        self._progress(event, now)
        self._answered(number, now)
        if event.outcome is EntryOutcome.GOOD:
            self.items.move(number, ItemState.HELD)
            # The connection works.
            self._failures = 0
        elif event.outcome is EntryOutcome.GONE:
            self._fail(number, Stop.MISSING, event.reason)
        elif item.again >= self._limits.again_max:
            self._fail(number, Stop.DAMAGED, event.reason)
        else:
            item.again += 1
            self.items.move(number, ItemState.WAITING)

    def _answered(self, number: int, now: float) -> None:
        batch = next((batch for batch in self._batches if number in batch.left), None)
        if batch is None:
            return
        batch.left.discard(number)
        if batch.left:
            return
        self._batches.remove(batch)
        limits = self._limits
        fitting = int(batch.nbytes / max(now - batch.since, 1e-6) * limits.batch_s)
        self._batch_bytes = min(max(fitting, limits.batch_bytes_min), limits.batch_bytes_max)
        for other in self._batches:
            # The source answers one request after the other.
            other.since = now

    def _renewed(self, event: Renewed, now: float) -> None:
        if event.connection == self._connection and self._phase is _Phase.FETCHING and self._renew_at is not None:
            self._heard = now
            self._lease_s = event.lease_s
            self._lease_until = max(self._lease_until, self._renew_at + event.lease_s)
            self._renew_at = None

    def _lost(self, event: Lost, now: float) -> None:
        if event.connection == self._connection and self._phase is not _Phase.IDLE:
            self._leave(event.reason, now, refused=event.refused)

    def _installed(self, event: Installed, now: float) -> None:
        self.items.installed_now(event.ids)

    def _install_failed(self, event: InstallFailed, now: float) -> None:
        # Later items may not be installed without these, and a retry would fail too.
        self._why = (Stop.DISK, event.reason)
        self.items.install_failed()
        self._drop(range(len(self.items)))

    # What follows from the states and the clock.

    def _advance(self, now: float) -> None:
        if self._cancelled:
            self._end(Stop.CANCELLED, "cancelled")
        elif now >= self._deadline:
            self._end(Stop.DEADLINE, "the deadline is over")
        else:
            self._mind_the_clock(now)
            if self._phase is _Phase.FETCHING:
                self._fetch(now)
            self._connect_renew_or_close(now)
            self._install()
            idle = self._phase is _Phase.IDLE and self._retry_at is None
            if idle and self._known_or_given_up() and not self.items.installing:
                self._end(*(self._why or (Stop.COMPLETE, "")))

    def _mind_the_clock(self, now: float) -> None:
        if self._phase in (_Phase.CONNECTING, _Phase.FINDING) and now >= self._until:
            self._leave("it does not answer", now)
        elif self._phase is _Phase.FETCHING:
            if self._batches and now >= self._heard + self._limits.stall_s:
                self._leave("the source stopped sending", now)
            elif now >= self._lease_until:
                self._leave("the lease was not renewed", now)

    def _fetch(self, now: float) -> None:
        while len(self._batches) < self._limits.batches_max:
            taken = self._next_batch()
            if not taken:
                return
            if not self._batches:
                self._heard = now
            self._batches.append(_Batch(sum(self.items[number].nbytes for number in taken), set(taken), now))
            self._out.append(Fetch(self._connection, tuple(self.items[number].id for number in taken)))

    def _next_batch(self) -> list[int]:
        limits, items = self._limits, self.items
        taken: list[int] = []
        nbytes = 0
        while len(taken) < limits.batch_entries_max:
            number = items.waiting()
            if number is None:
                break
            size = items[number].nbytes
            if taken and nbytes + size > self._batch_bytes:
                break
            # The first missing item is fetched even if the window is full: all others wait for it.
            if items.in_hand_bytes + size > limits.window_bytes and number != items.next():
                break
            if items.first_bytes + size > limits.total_bytes_max:
                self._fail(number, Stop.TOO_LARGE, "there is no room for more")
                continue
            items.move(number, ItemState.ASKED)
            nbytes += size
            taken.append(number)
        return taken

    def _connect_renew_or_close(self, now: float) -> None:
        wanted = self._batches or self.items.waiting() is not None
        if not wanted and self._known_or_given_up():
            # The source need not keep its lease while the last entries are written here.
            self._close()
            self._retry_at = None
        elif self._phase is _Phase.IDLE and self._retry_at is not None and now >= self._retry_at:
            self._connection += 1
            self._phase = _Phase.CONNECTING
            self._retry_at = None
            self._until = now + self._limits.connect_s
            self._out.append(Connect(self._connection, self._addresses[self._address % len(self._addresses)]))
        elif self._phase is _Phase.FETCHING and self._renew_at is None and now >= self._lease_until - self._lease_s / 2:
            self._renew_at = now
            self._out.append(Renew(self._connection))

    def _install(self) -> None:
        if self.items.installing:
            return
        count_max = self._limits.install_entries_max
        ready, nbytes = self.items.ready(count_max)
        # Small groups make many small files. But if no fetch is running, there is nothing to wait for.
        full = len(ready) == count_max or 2 * nbytes >= self._limits.window_bytes
        if ready and (full or not self._batches):
            self._out.append(Install(self.items.install(ready)))

    def _known_or_given_up(self) -> bool:
        return self._known or self._why is not None

    # Ends, of items, of connections and of the pull.

    def _fail(self, number: int, stop: Stop, reason: str) -> None:
        """Drops an unavailable item. A block takes all items after it with it; a tail does not."""
        self._why = self._why or (stop, f"entry {number}: {reason}")
        self._drop([number] if number >= self.items.blocks else range(number, len(self.items)))

    def _drop(self, numbers: Iterable[int]) -> None:
        dropped, held = self.items.drop(numbers)
        for batch in self._batches:
            batch.left.difference_update(dropped)
        self._batches = [batch for batch in self._batches if batch.left]
        if held:
            self._out.append(Discard(tuple(held)))

    def _close(self) -> None:
        if self._phase not in (_Phase.IDLE, _Phase.ENDED):
            self._out.append(CloseConnection(self._connection))
            self._phase = _Phase.IDLE
            self._batches = []

    def _leave(self, reason: str, now: float, *, refused: bool = False) -> None:
        """Closes this connection and schedules the next address; received items stay."""
        self._close()
        for number in self.items.in_state(ItemState.ASKED):
            self.items.move(number, ItemState.WAITING)
        if refused:
            del self._addresses[self._address % len(self._addresses)]
        else:
            self._address += 1
            self._failures += 1
        if not self._addresses:
            self._give_up(Stop.REFUSED, reason)
        elif self._connection >= self._limits.connects_max:
            self._give_up(Stop.UNREACHABLE, reason)
        else:
            # Every address is tried once before any backoff.
            rounds = self._failures // len(self._addresses)
            wait_s = self._limits.backoff_s * 2.0 ** min(rounds - 1, 32) if rounds else 0.0
            self._retry_at = now + min(wait_s, self._limits.backoff_s_max)

    def _give_up(self, stop: Stop, reason: str) -> None:
        """Ends fetching. Received items are still installed if the items before them are here."""
        self._why = self._why or (stop, reason)
        self._retry_at = None
        missing = self.items.waiting()
        if missing is not None and missing < self.items.blocks:
            self._drop(range(missing, len(self.items)))
        else:
            self._drop(self.items.in_state(ItemState.WAITING))

    def _end(self, stop: Stop, reason: str) -> None:
        self._close()
        self._phase = _Phase.ENDED
        here = self.items.blocks_here()
        if here < self.items.blocks:
            self._out.append(Recompute(here, reason))
        self._out.append(Done(stop, self.items.installed, self.items.installed_bytes, reason))
