"""A pull under thousands of random schedules: links that delay, lose, repeat and damage, sources and targets that die,
disks that are slow or full. Whatever happens, what is installed is a beginning of the chain, and the pull ends."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from satchel.actors.kv_store.disk.leases import Leases
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
    Tick,
    Want,
)

LEASE_S = 4.0


@dataclass
class Source:
    """A node that has blocks, and pins them for each connection."""

    rng: random.Random
    has: dict[bytes, int]
    leases: Leases = field(default_factory=lambda: Leases(1000))
    pins: dict[int, str] = field(default_factory=dict)
    up: bool = True

    def pin(self, connection: int, now: float) -> None:
        self.unpin(connection, now)
        lease = self.leases.take([str(connection)], now, LEASE_S)
        assert lease is not None
        self.pins[connection] = lease

    def unpin(self, connection: int, now: float) -> None:
        lease = self.pins.pop(connection, None)
        if lease is not None:
            self.leases.give_back(lease, now)


class World:
    """One pull with everything around it, in virtual time. `trouble` from 0 to 1 is how much goes wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.trouble = rng.choice([0.0, 0.02, 0.1, 0.4])
        self.chain = [bytes([1]) + number.to_bytes(3, "big") for number in range(rng.randint(0, 60))]
        self.tails = [bytes([2, number]) for number in range(rng.choice([0, 0, 1, 2]))]
        has = {entry: rng.randint(0, 50) for entry in (*self.chain, *self.tails)}
        if self.chain and rng.random() < 0.3:
            has.pop(rng.choice(self.chain))
        self.source = Source(rng, has)
        self.rotten = {entry for entry in has if rng.random() < self.trouble / 10}
        self.here: set[bytes] = {entry for entry in self.chain if rng.random() < rng.choice([0, 0, 0.3])}
        self.limits = PullLimits(
            connects_max=rng.randint(1, 6),
            batch_bytes_min=rng.choice([1, 40, 200]),
            batch_bytes_max=400,
            window_bytes=rng.choice([50, 150, 1000]),
            install_entries_max=rng.randint(1, 16),
            batches_max=rng.randint(1, 3),
            total_bytes_max=rng.choice([10_000, 10_000, 300]),
        )
        self.addresses = rng.randint(1, 3)
        self.dead_addresses = {number for number in range(self.addresses) if rng.random() < self.trouble}
        self.strange_addresses = {number for number in range(self.addresses) if rng.random() < self.trouble / 2}
        self.disk_fails_at = rng.randint(0, 5) if rng.random() < self.trouble / 2 else None
        self.now = 0.0
        self.queue: list[tuple[float, int, Event]] = []
        self.count = itertools.count()
        self.checks = Checks(self)

    def run(self) -> None:
        lives = 1
        while self.rng.random() < self.trouble / 2:
            lives += 1
        for life in range(lives):
            self.live(crash=life < lives - 1)
        for connection in list(self.source.pins):
            # Of those that nobody gave back, the rest run out.
            if self.rng.random() < 0.5:
                self.source.unpin(connection, self.now)
        assert not self.source.leases.held(self.now + LEASE_S), "leases drain"

    def live(self, *, crash: bool) -> None:
        """One life of the target; a crash ends it anywhere, and what was installed is here in the next one."""
        rng = self.rng
        self.queue.clear()
        self.memory: dict[bytes, str] = {}
        self.asked: dict[int, list[bytes]] = {}
        self.free_at = 0.0
        self.connected: int | None = None
        deadline = self.now + rng.choice([0.5, 5.0, 60.0])
        self.machine = Pull(self.limits, self.addresses, deadline)
        self.checks.begin(deadline)
        dies_after = rng.randint(1, 60) if crash else None
        if rng.random() < self.trouble / 4:
            self.later(rng.random() * 5, Cancel())
        self.handle(Want(tuple(self.chain)))
        steps = 0
        while not self.machine.ended:
            steps += 1
            assert steps < 20_000, "it comes to no end"
            if steps == dies_after:
                # Its sockets close with it; the source sees that sooner or later.
                return
            self.step()
        self.checks.end()

    def step(self) -> None:
        wakes_at = self.machine.wakes_at()
        assert wakes_at >= self.now or self.queue, "it wants to be woken in the past"
        if self.queue and self.queue[0][0] <= wakes_at:
            self.now, _, event = heapq.heappop(self.queue)
            if isinstance(event, Chunk) and event.outcome is EntryOutcome.GOOD and event.connection == self.connected:
                self.memory[event.id] = "right"
            if self.rng.random() < self.trouble / 4:
                self.later(self.rng.random(), event)
            self.handle(event)
        else:
            self.now = max(self.now, wakes_at)
            self.handle(Tick())
        if self.connected is not None and self.rng.random() < self.trouble / 20:
            # What it sent before it broke is still on its way.
            self.handle(Lost(self.connected, "broken"))
        if self.rng.random() < self.trouble / 20:
            self.source.up = not self.source.up
            if not self.source.up and self.connected is not None:
                self.later(self.delay(), Lost(self.connected, "the source died"))
                self.source.pins.clear()
                self.source.leases = Leases(1000)

    def handle(self, event: Event) -> None:
        for command in self.machine.handle(event, self.now):
            self.checks.command(command)
            self.obey(command)
        self.checks.state()

    def delay(self) -> float:
        rng = self.rng
        if rng.random() < self.trouble / 10:
            return rng.choice([1.0, 4.0, 40.0])
        return rng.random() * rng.choice([0.001, 0.1])

    def later(self, delay_s: float, event: Event) -> None:
        heapq.heappush(self.queue, (self.now + delay_s, next(self.count), event))

    def obey(self, command) -> None:
        rng = self.rng
        if isinstance(command, Connect):
            self.connected = command.connection
            if command.address in self.strange_addresses:
                self.later(self.delay(), Lost(command.connection, "another key", refused=True))
            elif command.address in self.dead_addresses or not self.source.up:
                if rng.random() < 0.5:
                    self.later(self.delay(), Lost(command.connection, "nobody there"))
            else:
                self.later(self.delay(), Connected(command.connection))
        elif isinstance(command, CloseConnection):
            self.connected = None
            self.source.unpin(command.connection, self.now)
        elif isinstance(command, Install):
            self.install(command)
        elif isinstance(command, Discard):
            for entry in command.ids:
                assert self.memory.pop(entry) == "right"
        elif isinstance(command, Find | Fetch | Renew):
            self.answer(command)

    def answer(self, command: Find | Fetch | Renew) -> None:
        connection = command.connection
        if not self.source.up or self.rng.random() < self.trouble / 10:
            # A silence, or a broken connection.
            if self.rng.random() < 0.5:
                self.later(self.delay(), Lost(connection, "broken"))
            return
        self.source.pin(connection, self.now)
        self.free_at = max(self.free_at, self.now) + self.delay()
        wait_s = self.free_at - self.now
        if isinstance(command, Find):
            blocks = tuple(self.offer(entry) for entry in self.chain)
            offers = [self.offer(entry) for entry in self.tails if entry in self.source.has]
            tails = tuple(offer for offer in offers if offer is not None)
            self.later(wait_s, Found(connection, LEASE_S, blocks, tails))
        elif isinstance(command, Renew):
            self.later(wait_s, Renewed(connection, LEASE_S))
        else:
            for entry in command.ids:
                if self.rng.random() < 0.5:
                    self.later(wait_s, BytesArrived(connection))
                self.later(wait_s, Chunk(connection, entry, self.outcome(entry), "by chance"))

    def offer(self, entry: bytes) -> Offer | None:
        if entry in self.here:
            return Offer(entry, 10, held=True)
        return Offer(entry, self.source.has[entry]) if entry in self.source.has else None

    def outcome(self, entry: bytes) -> EntryOutcome:
        if entry not in self.source.has or (entry in self.rotten and self.rng.random() < 0.3):
            self.source.has.pop(entry, None)
            return EntryOutcome.GONE
        bad = entry in self.rotten or self.rng.random() < self.trouble / 10
        return EntryOutcome.BAD if bad else EntryOutcome.GOOD

    def install(self, command: Install) -> None:
        for entry in command.ids:
            assert self.memory.pop(entry) == "right", "only what was proven is installed"
        if self.disk_fails_at is not None and self.checks.installs > self.disk_fails_at:
            some = self.rng.randrange(len(command.ids))
            if some:
                self.here.update(command.ids[:some])
                self.later(self.delay(), Installed(command.ids[:some]))
            self.later(1.0 + self.delay(), InstallFailed("the disk is full"))
            return
        cut = self.rng.randint(0, len(command.ids))
        wait_s = self.delay()
        for ids in (command.ids[:cut], command.ids[cut:]):
            if ids:
                self.here.update(ids)
                self.later(wait_s, Installed(ids))


class Checks:
    """What must hold whatever happens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.installs = 0

    def begin(self, deadline: float) -> None:
        self.deadline = deadline
        self.connects = 0
        self.asked: dict[bytes, int] = {}
        self.given: list[bytes] = []
        self.before = set(self.world.here)
        self.last: list = []

    def command(self, command) -> None:
        world = self.world
        assert not any(isinstance(one, Done) for one in self.last), "nothing comes after the end"
        self.last.append(command)
        if isinstance(command, Connect):
            self.connects += 1
            assert command.connection == self.connects <= world.limits.connects_max, "retries are bounded"
            assert command.address < world.addresses
        elif isinstance(command, Fetch):
            assert 1 <= len(command.ids) <= world.limits.batch_entries_max
            for entry in command.ids:
                assert entry not in self.before, "what was here is not asked for"
                self.asked[entry] = self.asked.get(entry, 0) + 1
                assert self.asked[entry] <= world.limits.connects_max + world.limits.again_max
        elif isinstance(command, Install):
            self.install(command)

    def install(self, command: Install) -> None:
        world = self.world
        self.installs += 1
        assert 1 <= len(command.ids) <= world.limits.install_entries_max
        assert set(command.ids).isdisjoint(self.given), "nothing is installed twice"
        self.given += command.ids
        order = [*world.chain, *world.tails]
        places = [order.index(entry) for entry in self.given]
        assert places == sorted(places), "in order"
        blocks = [entry for entry in self.given if entry in world.chain]
        if blocks:
            upto = world.chain[: world.chain.index(blocks[-1]) + 1]
            assert all(entry in self.given or entry in world.here for entry in upto), "a beginning of the chain"
        if any(entry in world.tails for entry in self.given):
            assert all(entry in self.given or entry in world.here for entry in world.chain), (
                "tails after the whole chain"
            )

    def state(self) -> None:
        world = self.world
        largest = max(world.source.has.values(), default=0)
        assert 0 <= world.machine.items.in_hand_bytes <= world.limits.window_bytes + largest, "memory is bounded"
        assert world.machine.items.first_bytes <= world.limits.total_bytes_max

    def end(self) -> None:
        world = self.world
        assert world.now <= self.deadline, "it ends by its deadline"
        done = self.last[-1]
        assert isinstance(done, Done)
        missing = [one for one in self.last if isinstance(one, Recompute)]
        assert len(missing) == (world.machine.items.blocks_here() < len(world.chain))
        for one in missing:
            assert one.block == world.machine.items.blocks_here()
            assert all(entry in world.here for entry in world.chain[: one.block]), "what it says is here, is"
        assert world.connected is None, "it hangs up"
        if world.trouble == 0 and world.limits.total_bytes_max > 300 and self.deadline > world.now + 30:
            here = [entry in world.here for entry in world.chain]
            there = [entry in world.source.has for entry in world.chain]
            held = [entry in self.before for entry in world.chain]
            fits = [world.source.has.get(entry, 0) <= world.limits.window_bytes for entry in world.chain]
            possible = next((n for n in range(len(here)) if not held[n] and not (there[n] and fits[n])), len(here))
            assert all(here[:possible]), "without trouble all there is comes"


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_a_proven_beginning_is_installed_in_order_and_the_pull_ends(part):
    for seed in range(part * 500, (part + 1) * 500):
        try:
            World(seed).run()
        except BaseException:
            print("seed", seed)
            raise


def test_a_seed_replays():
    """Else a failing one would be of no use."""

    def told(seed: int) -> list:
        world = World(seed)
        world.run()
        return [world.now, world.checks.last, sorted(world.here)]

    assert [told(seed) for seed in range(30)] == [told(seed) for seed in range(30)]
