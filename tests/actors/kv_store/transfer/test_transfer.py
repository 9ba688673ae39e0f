"""The machine of a pull, alone: every event by hand."""

from __future__ import annotations

import pytest

from satchel.actors.kv_store.transfer.machine.pull import Pull
from satchel.actors.kv_store.transfer.machine.pull_terms import (
    BytesArrived,
    Cancel,
    Chunk,
    CloseConnection,
    Connect,
    Connected,
    Discard,
    Done,
    EntryOutcome,
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
    Tick,
    Want,
)
from satchel.actors.kv_store.transfer.machine.rate import TokenBucket

MB = 1 << 20
LIMITS = PullLimits(
    batch_bytes_min=2 * MB, batch_bytes_max=8 * MB, batch_s=1.0, window_bytes=64 * MB, install_entries_max=16
)


def name(number: int) -> bytes:
    return number.to_bytes(2, "big")


def names(*numbers: int) -> tuple[bytes, ...]:
    return tuple(name(number) for number in numbers)


def begun(
    count: int = 6, *, limits: PullLimits = LIMITS, addresses: int = 2, tails: int = 0, lease_s: float = 30.0
) -> tuple[Pull, list]:
    """A machine that has found `count` blocks of a megabyte, and what it wants then."""
    machine = Pull(limits, addresses, 100.0)
    assert machine.handle(Want(names(*range(count))), 0.0) == [Connect(1, 0)]
    assert machine.handle(Connected(1), 0.0) == [Find(1)]
    return machine, machine.handle(found(1, count, tails=tails, lease_s=lease_s), 0.0)


def found(connection: int, count: int, *, tails: int = 0, held: tuple[int, ...] = (), lease_s: float = 30.0) -> Found:
    offers = tuple(Offer(name(number), MB, number in held) for number in range(count))
    return Found(connection, lease_s, offers, tuple(Offer(name(900 + number), MB) for number in range(tails)))


def chunks(machine: Pull, *numbers: int, connection: int = 1, now: float = 0.0) -> list:
    out = []
    for number in numbers:
        out += machine.handle(Chunk(connection, name(number), EntryOutcome.GOOD), now)
    return out


def test_two_batches_are_asked_for_and_what_came_is_installed_in_order():
    machine, out = begun(6)
    assert out == [Fetch(1, names(0, 1)), Fetch(1, names(2, 3))]
    assert chunks(machine, 1) == []
    assert chunks(machine, 0, now=1.0) == [Fetch(1, names(4, 5))]
    assert chunks(machine, 2, 3, 4, now=1.0) == []
    assert chunks(machine, 5, now=1.0) == [CloseConnection(1), Install(names(0, 1, 2, 3, 4, 5))]
    assert machine.handle(Installed(names(0, 1, 2)), 2.0) == []
    assert machine.handle(Installed(names(3, 4, 5)), 2.0) == [Done(Stop.COMPLETE, 6, 6 * MB, "")]


def test_batches_grow_with_the_speed_of_the_link():
    """About a second's worth, between the limits."""
    machine, _ = begun(40)
    assert chunks(machine, 0, 1, now=0.5) == [Fetch(1, names(4, 5, 6, 7))]
    assert chunks(machine, 2, 3, now=0.51) == [Fetch(1, names(*range(8, 16)))]
    assert chunks(machine, 4, 5, 6, 7, now=10.0) == [Fetch(1, names(16, 17))], "and shrink again"


def test_a_damaged_entry_is_asked_for_once_more_and_then_computed():
    machine, _ = begun(3)
    assert machine.handle(Chunk(1, name(0), EntryOutcome.BAD, "damaged"), 0.0) == []
    assert chunks(machine, 1) == [Fetch(1, names(0))]
    assert chunks(machine, 2) == []
    assert machine.handle(Chunk(1, name(0), EntryOutcome.BAD, "damaged"), 0.0) == [
        Discard(names(1, 2)),
        CloseConnection(1),
        Recompute(0, "entry 0: damaged"),
        Done(Stop.DAMAGED, 0, 0, "entry 0: damaged"),
    ]


def test_a_damaged_tail_costs_only_itself():
    machine, out = begun(1, tails=2)
    assert out == [Fetch(1, names(0, 900)), Fetch(1, names(901))]
    chunks(machine, 0, 901)
    machine.handle(Chunk(1, name(900), EntryOutcome.GONE, "gone"), 0.0)
    assert machine.handle(Installed(names(0, 901)), 0.0) == [Done(Stop.MISSING, 2, 2 * MB, "entry 1: gone")]
    assert machine.items.here() == [name(0), name(901)]


def test_after_a_lost_connection_the_next_address_goes_on_where_it_ended():
    machine, _ = begun(6)
    chunks(machine, 0, 1)
    out = machine.handle(Lost(1, "broken"), 1.0)
    assert out == [CloseConnection(1), Connect(2, 1), Install(names(0, 1))]
    assert chunks(machine, 2) == [], "what the old connection still says is not heard"
    machine.handle(Connected(2), 1.0)
    assert machine.handle(found(2, 6, held=(3,)), 1.0) == [Fetch(2, names(2, 4, 5))]
    assert chunks(machine, 2, 4, 5) == [], "nor when it is asked for again"
    assert chunks(machine, 2, 4, 5, connection=2, now=1.0)[0] == CloseConnection(2)


def test_an_address_without_a_peer_of_ours_is_not_tried_again():
    machine = Pull(LIMITS, 2, 100.0)
    machine.handle(Want(names(0)), 0.0)
    assert machine.handle(Lost(1, "another key", refused=True), 0.0) == [CloseConnection(1), Connect(2, 1)]
    out = machine.handle(Lost(2, "another key", refused=True), 0.0)
    assert out == [CloseConnection(2), Recompute(0, "another key"), Done(Stop.REFUSED, 0, 0, "another key")]


def test_retries_are_counted_and_wait_longer_each_time():
    machine = Pull(PullLimits(connects_max=5, backoff_s=1.0, backoff_s_max=3.0), 1, 100.0)
    now, waited = 0.0, []
    machine.handle(Want(names(0)), now)
    for number in range(1, 5):
        assert machine.handle(Lost(number, "broken"), now) == [CloseConnection(number)]
        waited.append(machine.wakes_at() - now)
        now = machine.wakes_at()
        assert machine.handle(Tick(), now) == [Connect(number + 1, 0)]
    assert waited == [1.0, 2.0, 3.0, 3.0]
    assert machine.handle(Lost(5, "broken"), now)[-1] == Done(Stop.UNREACHABLE, 0, 0, "broken")


@pytest.mark.parametrize(("event", "at"), [(None, 3.0), (Connected(1), 5.0)])
def test_a_source_that_does_not_answer_is_left(event, at):
    machine = Pull(PullLimits(connects_max=1), 1, 100.0)
    machine.handle(Want(names(0)), 0.0)
    if event:
        machine.handle(event, 0.0)
    assert machine.wakes_at() == at
    assert machine.handle(Tick(), at - 0.01) == []
    assert machine.handle(Tick(), at)[-1] == Done(Stop.UNREACHABLE, 0, 0, "it does not answer")


def test_a_source_that_stops_sending_is_left_though_bytes_came_before():
    machine, _ = begun(6)
    assert machine.wakes_at() == 3.0
    machine.handle(BytesArrived(1), 2.0)
    assert machine.handle(Tick(), 4.9) == []
    assert CloseConnection(1) in machine.handle(Tick(), 5.0)


def test_the_lease_is_renewed_at_its_half_and_a_lost_one_ends_the_connection():
    """While the window is full nothing is asked for, so nothing else renews it."""
    limits = PullLimits(window_bytes=2 * MB, batch_bytes_min=MB, batch_bytes_max=MB, install_entries_max=1)
    machine, _ = begun(6, limits=limits, lease_s=10.0)
    assert chunks(machine, 0, 1) == [Install(names(0))]
    assert machine.wakes_at() == 5.0
    assert machine.handle(Tick(), 5.0) == [Renew(1)]
    assert machine.handle(Tick(), 6.0) == [], "once"
    machine.handle(Renewed(1, 10.0), 6.0)
    assert machine.wakes_at() == 10.0, "counted from the asking"
    assert machine.handle(Tick(), 10.0) == [Renew(1)]
    assert machine.handle(Tick(), 15.0)[0] == CloseConnection(1)


def test_what_comes_keeps_the_lease_though_a_renewal_is_not_answered():
    """A source that sends has not let go; its answer stands behind what it sends."""
    machine, _ = begun(6, lease_s=10.0)
    for now in (2.0, 4.0):
        machine.handle(BytesArrived(1), now)
    assert machine.handle(Tick(), 5.0) == [Renew(1)]
    for now in (7.0, 9.5, 12.0):
        assert machine.handle(BytesArrived(1), now) == []
    assert machine.handle(Tick(), 14.9) == [], "half a lease from what came last"
    assert machine.handle(BytesArrived(1), 14.9) == []
    assert machine.handle(Tick(), 17.85) == []


def test_a_connection_that_brought_something_begins_the_waiting_anew():
    limits = PullLimits(connects_max=9, backoff_s=1.0, backoff_s_max=60.0, batch_bytes_min=MB, batch_bytes_max=MB)
    machine, _ = begun(6, limits=limits, addresses=1)
    now, waited = 0.0, []
    for connection, brings in ((1, False), (2, False), (3, True), (4, False)):
        if brings:
            chunks(machine, 0, connection=connection, now=now)
        machine.handle(Lost(connection, "broken"), now)
        waited.append(machine.wakes_at() - now)
        now = machine.wakes_at()
        assert machine.handle(Tick(), now) == [Connect(connection + 1, 0)]
        machine.handle(Connected(connection + 1), now)
        machine.handle(found(connection + 1, 6, held=(0,) if connection > 2 else ()), now)
    assert waited == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize("event", [Cancel(), Tick()])
def test_what_is_installed_stays_when_it_ends_early(event):
    machine, _ = begun(6, limits=PullLimits(install_entries_max=2, batch_bytes_min=MB, batch_bytes_max=MB))
    chunks(machine, 0, 1)
    machine.handle(Installed(names(0)), 1.0)
    out = machine.handle(event, 100.0)
    stop = Stop.CANCELLED if isinstance(event, Cancel) else Stop.DEADLINE
    assert out[0] == CloseConnection(1) and isinstance(out[1], Recompute) and out[1].block == 1
    assert isinstance(out[2], Done) and (out[2].stop, out[2].installed) == (stop, 1)
    assert machine.ended and machine.handle(Installed(names(1)), 101.0) == []


def test_a_full_disk_ends_it_at_once():
    machine, _ = begun(6, limits=PullLimits(install_entries_max=2, batch_bytes_min=MB, batch_bytes_max=MB))
    chunks(machine, 0, 1, 2)
    out = machine.handle(InstallFailed("full"), 1.0)
    assert out == [Discard(names(2)), CloseConnection(1), Recompute(0, "full"), Done(Stop.DISK, 0, 0, "full")]


def test_more_than_the_store_takes_is_not_fetched():
    machine, out = begun(6, limits=PullLimits(batch_bytes_max=8 * MB, total_bytes_max=3 * MB))
    assert out == [Fetch(1, names(0, 1, 2))]
    assert chunks(machine, 0, 1, 2) == [CloseConnection(1), Install(names(0, 1, 2))]
    assert machine.handle(Installed(names(0, 1, 2)), 0.0)[-1] == Done(
        Stop.TOO_LARGE, 3, 3 * MB, "entry 3: there is no room for more"
    )


def test_the_front_is_let_in_where_later_entries_fill_the_window():
    """Else an entry that the source has in a larger form by now would wait for ever for those that wait for it."""
    limits = PullLimits(window_bytes=2 * MB, batch_bytes_min=MB, batch_bytes_max=MB, batches_max=3)
    machine, out = begun(6, limits=limits)
    assert out == [Fetch(1, names(0)), Fetch(1, names(1))]
    assert chunks(machine, 1) == []
    machine.handle(Lost(1, "broken"), 0.0)
    machine.handle(Connected(2), 0.0)
    larger = Found(2, 30.0, (Offer(name(0), 2 * MB), *found(2, 6).blocks[1:]))
    assert machine.handle(larger, 0.0) == [Fetch(2, names(0))]


def test_a_source_without_addresses_is_unreachable():
    assert Pull(LIMITS, 0, 9.0).handle(Want(names(0)), 0.0)[-1] == Done(
        Stop.UNREACHABLE, 0, 0, "the source has no address"
    )


def test_a_bucket_keeps_its_rate_and_grants_pieces():
    """Over ten seconds at most the rate and one burst, however it is asked."""
    bucket = TokenBucket(1000.0, 0.0, burst_s=0.1, piece=10)
    now, taken = 0.0, 0
    while now < 10.0:
        grant = bucket.take(10_000, now)
        assert grant.count == 0 or grant.count >= 10
        taken += grant.count
        now += grant.wait_s or 0.0001
    assert 9_900 <= taken <= 10_100
    while bucket.take(50, now).count:
        pass
    assert bucket.take(3, now + 0.005).count == 3, "less than a piece, where no more is wanted"
    with pytest.raises(ValueError):
        TokenBucket(0.0, now)


def test_a_bucket_says_how_long_to_wait_and_keeps_no_more_than_a_burst():
    bucket = TokenBucket(1000.0, 0.0, burst_s=0.1, piece=10)
    assert bucket.take(50, 0.0).wait_s == pytest.approx(0.01)
    assert bucket.take(50, 0.004).wait_s == pytest.approx(0.006)
    assert bucket.take(50, 0.03) == (30, 0.0) and bucket.take(3, 0.03).wait_s == pytest.approx(0.003)
    assert bucket.take(10_000, 50.0).count == 100
    assert bucket.take(1, 49.0).count == 0, "a clock that went back gives nothing"
    assert TokenBucket(1000.0, 0.0, burst_s=0.001, piece=10).take(10_000, 9.0).count == 10, "a piece at least"


def test_tails_count_only_where_all_blocks_are_here():
    """They stand behind the last block; one that was here before is of no use where a block is missing."""
    machine = Pull(LIMITS, 2, 100.0)
    machine.handle(Want(names(0, 1)), 0.0)
    machine.handle(Connected(1), 0.0)
    offers = tuple(Offer(name(number), MB) for number in range(2))
    machine.handle(Found(1, 30.0, offers, (Offer(name(900), MB, True),)), 0.0)
    chunks(machine, 0)
    machine.handle(Chunk(1, name(1), EntryOutcome.GONE, "gone"), 0.0)
    machine.handle(Installed(names(0)), 0.0)
    assert machine.ended and machine.items.here() == [name(0)]
