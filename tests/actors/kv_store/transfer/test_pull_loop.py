"""A pull under thousands of random schedules: links that delay, break and damage, sources and targets that die, disks
that are slow or full. Whatever happens, what is installed is a beginning of the chain, and the pull ends."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from satchel.actors.kv_store.transfer.pull_loop import (
    LINES_MAX,
    EntryGone,
    Offer,
    PullEnded,
    PullLimits,
    PullLoop,
    Stop,
)
from satchel.cluster.errors import DiskFull, EntryDamaged, InvalidRecord, LinkError, LinkRefused, LinkVersion

Ended = tuple[Stop, str]


def run(loop: Coroutine[Any, Any, Ended]) -> Ended:
    with pytest.raises(StopIteration) as returned:
        loop.send(None)
    return returned.value.value


class Dies(Exception):
    """The target's process ends."""


class World:
    """One pull with everything around it, in virtual time. `trouble` from 0 to 1 is how much goes wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.trouble = rng.choice([0.0, 0.02, 0.1, 0.4])
        self.chain = [bytes([1]) + number.to_bytes(3, "big") for number in range(rng.randint(0, 60))]
        self.tails = [bytes([2, number]) for number in range(rng.choice([0, 0, 1, 2]))]
        self.order = [*self.chain, *self.tails]
        self.there = {entry: rng.randint(0, 50) for entry in self.order}
        if self.chain and rng.random() < 0.3:
            del self.there[rng.choice(self.chain)]
        self.rotten = {entry for entry in self.there if rng.random() < self.trouble / 10}
        self.here: set[bytes] = {entry for entry in self.chain if rng.random() < rng.choice([0, 0, 0.3])}
        self.limits = PullLimits(
            batch_entries=rng.randint(1, 8),
            total_bytes_max=rng.choice([10_000, 10_000, 300]),
        )
        self.addresses = rng.randint(1, 3)
        self.dead = {number for number in range(self.addresses) if rng.random() < self.trouble}
        self.strange = {number for number in range(self.addresses) if rng.random() < self.trouble / 2}
        self.full_after = rng.randint(0, 20) if rng.random() < self.trouble / 2 else 10**9
        self.all_comes = self.trouble == 0 and self.limits.total_bytes_max > 300
        self.deadlines_s = [0.5, 5.0, 60.0]
        self.now = 0.0
        self.leases = 0
        self.wait_s, self.last = 0.0, b""
        self.made_at: dict[bytes, float] = {}
        if rng.random() < 0.3:
            self.make(rng.choice([0.01, 0.1, 1.0]), rng.choice([0.05, 0.5, 3.0]))

    def make(self, each_s: float, wait_s: float) -> None:
        """The source makes one entry after the other, the last tail at the end, and the pull waits for them."""
        self.wait_s, self.last = wait_s, self.tails[-1] if self.tails else b""
        self.made_at = {entry: number * each_s for number, entry in enumerate(self.order, 1)}
        slower = each_s + 1.0 > wait_s
        self.all_comes &= not slower

    def live(self, *, crash: bool) -> Life:
        """One life of the target; a crash ends it anywhere, and what was installed is here in the next one."""
        life = Life(self, crash)
        loop = PullLoop(self.chain, self.addresses, self.limits, life, life, self.wait_s, self.last)
        life.loop = loop
        try:
            life.ended = run(loop.run())
        except Dies:
            life.crashed = True
        life.check()
        return life


class Life:
    """The source and the disk of one pull, with what must hold."""

    loop: PullLoop
    line: FakeLine

    def __init__(self, world: World, crash: bool) -> None:
        self.world, self.rng = world, world.rng
        self.until = world.now + self.rng.choice(world.deadlines_s)
        self.cancelled_at = world.now + 5 * self.rng.random() if self.rng.random() < world.trouble / 4 else 1e9
        self.dies_after = self.rng.randint(1, 60) if crash else 10**9
        self.before = set(world.here)
        self.writing: list[tuple[float, bytes]] = []
        self.given: list[bytes] = []
        self.asked: dict[bytes, int] = {}
        self.connects: dict[int, int] = {}
        self.lines = self.refused = self.steps = self.written = 0
        self.full = self.crashed = False
        self.flushed = 0
        self.ended: Ended = (Stop.COMPLETE, "")

    async def pause(self, seconds: float) -> None:
        """Time goes on, and what was being written is."""
        world = self.world
        self.steps += 1
        assert self.steps < 5000, "it comes to no end"
        if self.steps >= self.dies_after:
            raise Dies
        ends = min(self.until, self.cancelled_at)
        world.now = min(world.now + seconds, ends)
        while self.writing and self.writing[0][0] <= world.now:
            _, entry = self.writing.pop(0)
            self.full |= self.written >= world.full_after
            if not self.full:
                self.written += 1
                world.here.add(entry)
        if world.now >= ends:
            raise PullEnded(Stop.CANCELLED if ends == self.cancelled_at else Stop.DEADLINE, "over")

    def delay(self) -> float:
        if self.rng.random() < self.world.trouble / 10:
            return self.rng.choice([1.0, 4.0, 40.0])
        return self.rng.random() * self.rng.choice([0.001, 0.1])

    async def connect(self, address: int) -> None:
        self.connects[address] = self.connects.get(address, 0) + 1
        assert self.lines < LINES_MAX, "retries are bounded"
        await self.pause(self.delay())
        if address in self.world.strange:
            assert self.connects[address] == 1, "a stranger is not tried again"
            raise self.rng.choice([LinkRefused, LinkVersion])("another key")
        if address in self.world.dead:
            raise LinkError("nobody there")
        self.line = FakeLine(self)

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        return await self.line.find()

    async def ask(self, ids: Sequence[bytes]) -> None:
        await self.line.ask(ids)

    async def receive(self, offer: Offer) -> bytes:
        return await self.line.receive(offer)

    def close(self) -> None:
        self.line.close()

    async def install(self, entry: bytes) -> None:
        world = self.world
        assert entry not in self.given, "nothing is installed twice"
        self.given.append(entry)
        while len(self.writing) > 4:
            await self.pause(self.writing[0][0] - world.now)
            self.fail()
        free_at = max([world.now, *(at for at, _ in self.writing)])
        self.writing.append((free_at + self.delay(), entry))
        await self.pause(0)
        self.fail()

    async def flush(self) -> None:
        self.flushed = len(self.given)

    async def finish(self) -> None:
        while self.writing:
            await self.pause(self.writing[0][0] - self.world.now)
        self.fail()

    def fail(self) -> None:
        if self.full:
            raise DiskFull("the disk is full")

    def check(self) -> None:
        world, loop = self.world, self.loop
        assert world.now <= self.until, "it ends by its deadline"
        assert world.leases == 0, "it hangs up"
        assert all(count <= 2 for count in self.connects.values()), "retries are bounded"
        assert all(count <= LINES_MAX for count in self.asked.values())
        assert self.before.isdisjoint(self.asked), "what was here is not asked for"
        assert sum(world.there.get(entry, 0) for entry in self.given) <= world.limits.total_bytes_max
        places = [world.order.index(entry) for entry in self.given]
        assert places == sorted(places), "in order"
        upto = max([place + 1 for place in places if place < len(world.chain)], default=0)
        if any(place >= len(world.chain) for place in places):
            upto = len(world.chain)
        known = {*self.given, *self.before}
        assert all(entry in known for entry in world.chain[:upto]), (
            "a beginning of the chain, and tails after all of it"
        )
        if self.crashed:
            return
        here, blocks = loop.here(world.here - self.before, [])
        assert here[:blocks] == world.chain[:blocks] and set(here) <= world.here, "what it says is here, is"
        assert len(here) == blocks or blocks == len(world.chain), "tails count only where all blocks are here"
        stop = self.ended[0]
        assert (stop is Stop.COMPLETE) == (stop is Stop.COMPLETE and set(world.order[: len(world.chain)]) <= world.here)
        if world.all_comes and self.until > world.now + 30:
            assert stop in (Stop.COMPLETE, Stop.MISSING)
            gone = [entry for entry in world.chain if entry not in world.there and entry not in self.before]
            possible = world.chain[: world.chain.index(gone[0])] if gone else world.order
            assert set(possible) <= world.here, "without trouble all there is comes"


@dataclass
class FakeLine:
    life: Life
    asked: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.life.world.leases += 1

    def close(self) -> None:
        self.life.world.leases -= 1

    async def carry(self) -> None:
        life, trouble = self.life, self.life.world.trouble
        await life.pause(life.delay())
        if life.rng.random() < trouble / 20:
            life.lines += 1
            raise life.rng.choice([LinkError, InvalidRecord])("broken")

    async def find(self) -> tuple[list[Offer | None], list[Offer]]:
        await self.carry()
        world = self.life.world
        tails = [offer for entry in world.tails if (offer := self.offer(entry))]
        return [self.offer(entry) for entry in world.chain], tails

    def offer(self, entry: bytes) -> Offer | None:
        world = self.life.world
        if entry in world.here:
            return Offer(entry, 10, held=True)
        made = world.made_at.get(entry, 0.0) <= world.now
        return Offer(entry, world.there[entry]) if made and entry in world.there else None

    async def ask(self, ids: Sequence[bytes]) -> None:
        await self.carry()
        assert 1 <= len(ids) <= self.life.world.limits.batch_entries
        for entry in ids:
            self.life.asked[entry] = self.life.asked.get(entry, 0) + 1
        self.asked += ids
        assert len(self.asked) <= 2 * self.life.world.limits.batch_entries, "two batches are outstanding"

    async def receive(self, offer: Offer) -> bytes:
        await self.carry()
        world, rng = self.life.world, self.life.rng
        assert self.asked.pop(0) == offer.id, "answers come in the order of the questions"
        if offer.id not in world.there or (offer.id in world.rotten and rng.random() < 0.3):
            world.there.pop(offer.id, None)
            raise EntryGone("it is gone")
        if offer.id in world.rotten or rng.random() < world.trouble / 20:
            self.life.lines += 1
            raise EntryDamaged("damaged")
        return offer.id


@pytest.mark.parametrize("part", range(2))
def test_whatever_happens_a_proven_beginning_is_installed_in_order_and_the_pull_ends(part):
    stops = set()
    for seed in range(part * 1500, (part + 1) * 1500):
        world = World(seed)
        try:
            while world.rng.random() < world.trouble / 2:
                world.live(crash=True)
            stops.add(world.live(crash=False).ended[0])
        except BaseException:
            print("seed", seed)
            raise
    assert stops == set(Stop)


def quiet(blocks: int = 6, **limits: Any) -> World:
    """A world in which nothing goes wrong by itself."""
    world = next(world for seed in range(1000) if (world := World(seed)).trouble == 0)
    world.all_comes, world.wait_s, world.last, world.made_at = False, 0.0, b"", {}
    world.chain, world.tails = [bytes([1, number]) for number in range(blocks)], []
    world.order, world.there = list(world.chain), dict.fromkeys(world.chain, 10)
    world.here, world.limits, world.addresses, world.deadlines_s = set(), PullLimits(**limits), 2, [1000.0]
    return world


def test_a_connection_that_breaks_is_replaced_once_and_what_came_is_not_asked_for_again(monkeypatch):
    receive, came = FakeLine.receive, []

    async def breaking(self: FakeLine, offer: Offer) -> bytes:
        if len(came) in (2, 4):
            self.life.lines += 1
            came.append(b"")
            raise LinkError("broken")
        came.append(await receive(self, offer))
        return came[-1]

    monkeypatch.setattr(FakeLine, "receive", breaking)
    world = quiet(batch_entries=1)
    life = world.live(crash=False)
    assert life.ended == (Stop.UNREACHABLE, "broken") and life.connects == {0: 1, 1: 1}
    assert life.given == world.chain[:3] and set(world.chain[:3]) == world.here
    assert [life.asked[entry] for entry in world.chain[:4]] == [1, 1, 2, 2]


def test_where_nobody_is_every_address_is_tried_twice_with_a_pause_and_a_stranger_once():
    world = quiet(backoff_s=0.25)
    world.addresses, world.dead, world.strange = 3, {0, 2}, {1}
    life = world.live(crash=False)
    assert life.ended == (Stop.UNREACHABLE, "nobody there") and life.connects == {0: 2, 1: 1, 2: 2}
    assert life.loop.connections == 5 and world.now >= 0.25
    world = quiet()
    world.strange = {0, 1}
    assert world.live(crash=False).ended == (Stop.REFUSED, "another key")
    world.addresses = 0
    assert world.live(crash=False).ended == (Stop.UNREACHABLE, "the source has no address")


def test_a_damaged_tail_or_one_that_is_gone_costs_only_itself():
    world = quiet(2)
    world.tails = [b"t1", b"t2"]
    world.order += world.tails
    world.there |= {b"t1": 10, b"t2": 10}

    async def receive(self: FakeLine, offer: Offer) -> bytes:
        if offer.id == b"t1":
            self.asked.pop(0)
            raise EntryGone("gone")
        return await plain(self, offer)

    plain, FakeLine.receive = FakeLine.receive, receive
    try:
        life = world.live(crash=False)
    finally:
        FakeLine.receive = plain
    assert life.ended == (Stop.MISSING, "entry 2: gone")
    assert life.loop.here(world.here, []) == ([*world.chain, b"t2"], 2)
    assert life.loop.here([world.chain[0], b"t2"], []) == (world.chain[:1], 1), "a tail stands behind the last block"


def test_more_than_the_store_takes_or_memory_has_is_not_fetched():
    world = quiet(total_bytes_max=35)
    assert world.live(crash=False).ended == (Stop.TOO_LARGE, "entry 3: there is no room for its 10 bytes")
    assert len(world.here) == 3
    world = quiet(total_bytes_max=9)
    assert world.live(crash=False).ended[0] is Stop.TOO_LARGE and not world.here


def test_what_was_evicted_for_later_blocks_is_not_said_to_be_here():
    world = quiet(3)
    loop = world.live(crash=False).loop
    assert loop.here(world.here, []) == (world.chain, 3)
    assert loop.here(world.here, [world.chain[1]]) == (world.chain[:1], 1)


def test_a_pull_that_waits_brings_what_is_made_meanwhile_and_commits_it_at_once():
    world = quiet(20)
    world.tails = [b"t"]
    world.order.append(b"t")
    world.there[b"t"] = 10
    world.make(0.3, wait_s=0.5)
    life = world.live(crash=False)
    assert life.ended == (Stop.COMPLETE, "") and life.given == world.order and life.connects == {0: 1}
    assert 6.3 <= world.now < 7.5, "as soon as the last tail is there"
    assert life.flushed >= 19, "what is here counts before the rest is made"


def test_a_pull_that_waits_ends_once_nothing_comes_any_more():
    world = quiet(20)
    world.make(0.3, wait_s=0.5)
    for entry in world.chain[5:]:
        del world.there[entry]
    life = world.live(crash=False)
    assert life.ended == (Stop.MISSING, "entry 5: the source does not have it") and life.given == world.chain[:5]
    assert 2.0 <= world.now < 3.0
    # A tail that is not the wanted one does not end it.
    world = quiet(2)
    world.wait_s, world.last = 0.5, b"the whole tail"
    life = world.live(crash=False)
    assert life.ended == (Stop.MISSING, "the source does not have the tail") and len(world.here) == 2
    # Without a wait it is not even asked for a second time.
    world = quiet(20)
    world.make(0.3, wait_s=0.0)
    assert world.live(crash=False).ended[0] is Stop.MISSING and world.now < 1.0


def test_a_seed_replays():
    """Else a failing one would be of no use."""

    def told(seed: int) -> list:
        world = World(seed)
        life = world.live(crash=False)
        return [world.now, life.ended, life.given, sorted(world.here)]

    assert [told(seed) for seed in range(30)] == [told(seed) for seed in range(30)]
