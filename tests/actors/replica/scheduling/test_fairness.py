"""No tenant starves others: places, prefill and the queue are shared among tenants, and a tenant's share among its
flows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest

from satchel.actors.replica.scheduling.fairness import (
    FLOW_TIMES,
    IDLE_MAX,
    TENANT_TIMES,
    FairShares,
    depths,
    queues_too_many,
)
from satchel.actors.replica.scheduling.scheduler import UNEVEN_TOKENS, Limits, Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence, SequenceState

LIMITS = Limits(
    sequences_max=8, queue_requests_max=100, prefill_chunk_tokens=256, kv_tokens_max=2**22, prefill_sequences_max=4
)


class Replica:
    """A scheduler whose model computes nothing: a budget of prefill each step, and a token for all that decode."""

    def __init__(self, limits: Limits = LIMITS, budget: int = 512) -> None:
        self.scheduler = Scheduler(limits)
        self.budget = budget
        self.given: Counter[str] = Counter()
        self.ended: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.steps = 0
        self._names = count()

    def ask(self, tenant: str, flow: str = "", prompt: int = 100, answer: int = 20, priority: int = 0) -> str:
        name = f"{tenant}/{flow}/{next(self._names)}"
        self.scheduler.add(ScheduledSequence(name, prompt, answer, tenant=tenant, flow=flow, priority=priority))
        return name

    def step(self) -> None:
        scheduler = self.scheduler
        scheduler.plan(0.0)
        budget = self.budget
        while budget > 0:
            while (admitted := scheduler.admit()) is not None:
                scheduler.reused(admitted, 0)
            if (chunk := scheduler.next_chunk(budget, self.budget)) is None:
                break
            sequence = self.sequence(chunk.request_id)
            scheduler.prefilled(chunk)
            self.given[sequence.tenant] += chunk.stop - chunk.start
            budget -= chunk.stop - chunk.start
        self.steps += 1
        for name in scheduler.decoding():
            sequence = self.sequence(name)
            self.first.setdefault(name, self.steps)
            scheduler.decoded(name)
            if sequence.generated >= sequence.max_tokens:
                scheduler.finish(name)
                self.ended[name] = self.steps
        scheduler.check()

    def sequence(self, name: str) -> ScheduledSequence:
        sequence = self.scheduler.sequence(name)
        assert sequence is not None
        return sequence

    def until(self, *names: str, steps: int = 100_000) -> int:
        """How many steps pass until all of these have ended."""
        began = self.steps
        while not set(names) <= self.ended.keys():
            self.step()
            assert self.steps - began < steps, f"not within {steps} steps"
        return self.steps - began

    def placed(self) -> Counter[str]:
        sequences = [self.sequence(name) for name in {*self.scheduler.decoding(), *self.scheduler._prefilling}]
        return Counter(sequence.tenant for sequence in sequences)


@pytest.mark.parametrize("victim", [("mine", "agent"), ("other", "agent")])
def test_two_hundred_long_requests_of_one_agent_do_not_hold_up_anothers(victim: tuple[str, str]):
    alone = Replica()
    expected = alone.until(alone.ask(*victim, prompt=600, answer=30))
    replica = Replica(Limits(8, 300, 256, 2**22, 4))
    for _ in range(200):
        replica.ask("mine", "greedy", prompt=8000, answer=500)
    for _ in range(100):
        replica.step()
    assert replica.until(replica.ask(*victim, prompt=600, answer=30)) < 4 * expected


def test_places_are_even_among_tenants_whoever_was_first():
    replica = Replica()
    for _ in range(30):
        replica.ask("first", answer=300)
    for _ in range(20):
        replica.step()
    assert replica.placed() == {"first": 8}
    for tenant in ("second", "third"):
        for _ in range(30):
            replica.ask(tenant, answer=300)
    for _ in range(40):
        replica.step()
    assert sorted(replica.placed().values()) == [2, 3, 3]


def test_places_are_even_among_the_agents_of_a_tenant():
    replica = Replica()
    for _ in range(30):
        replica.ask("me", "choices", answer=300)
    for _ in range(20):
        replica.step()
    agents = [replica.ask("me", f"agent {index}", answer=50) for index in range(4)]
    assert replica.until(*agents) < 100
    assert not replica.ended.keys() - set(agents)


def test_a_tenant_of_many_agents_has_no_more_than_one_of_few():
    replica = Replica()
    for index in range(90):
        replica.ask("many", f"agent {index}", prompt=500, answer=100)
    for _ in range(9):
        replica.ask("few", prompt=500, answer=100)
    for _ in range(60):
        replica.step()
    assert replica.placed() == {"many": 4, "few": 4}


def test_agents_of_one_place_each_send_nobody_back():
    replica = Replica()
    names = [replica.ask("me", f"agent {index}", answer=50 + index) for index in range(24)]
    before = set[str]()
    while replica.scheduler.running or replica.scheduler.waiting:
        replica.step()
        now = {
            name
            for name in names
            if name not in replica.ended and replica.sequence(name).state is not SequenceState.WAITING
        }
        assert before - replica.ended.keys() <= now
        before = now


def test_one_flow_is_served_as_it_came():
    replica = Replica(Limits(1, 100, 256, 2**22, 1))
    names = [replica.ask("me", "a") for _ in range(10)]
    replica.until(*names)
    assert sorted(replica.ended, key=lambda name: replica.ended[name]) == names


def test_urgency_comes_before_fairness():
    replica = Replica(Limits(1, 100, 256, 2**22, 1))
    replica.until(replica.ask("me", "busy", prompt=5000))
    urgent = replica.ask("me", "busy", priority=5)
    other = replica.ask("other", "idle")
    replica.until(urgent, other)
    assert replica.ended[urgent] < replica.ended[other]


def test_who_was_idle_has_no_credit():
    """Otherwise a tenant that comes back after an hour would have the replica for itself."""
    replica = Replica(Limits(1, 400, 256, 2**22, 1))
    for _ in range(200):
        replica.ask("busy", prompt=1000, answer=1)
    replica.ask("idle", prompt=10, answer=1)
    for _ in range(150):
        replica.step()
    assert replica.given["busy"] > 50_000
    for _ in range(100):
        replica.ask("idle", prompt=1000, answer=1)
    before = replica.given.copy()
    for _ in range(100):
        replica.step()
    given = replica.given - before
    assert abs(given["busy"] - given["idle"]) <= 2000


def test_tenants_who_always_want_more_are_given_the_same_however_their_requests_look():
    replica = Replica(Limits(4, 2000, 256, 2**22, 4))
    rng = random.Random(5)
    wanting = {"long": (30_000, 40), "short": (200, 40), "talker": (50, 400)}
    for _ in range(3000):
        for tenant, (prompt, answer) in wanting.items():
            while sum(sequence.tenant == tenant for sequence in replica.scheduler._waiting) < 6:
                replica.ask(tenant, f"agent {rng.randrange(3)}", prompt=prompt, answer=answer)
        replica.step()
    given = {name: taker.given for name, taker in replica.scheduler._shares._tenants.takers.items()}
    # A prompt that has begun is computed to its end, and the first may be so far ahead.
    assert max(given.values()) - min(given.values()) < 30_000 + UNEVEN_TOKENS + 4 * 400 * 4, given


def test_a_long_prompt_of_who_was_given_less_has_every_second_turn():
    replica = Replica(Limits(8, 100, 256, 2**22, 4))
    for _ in range(3):
        replica.ask("first", prompt=100_000)
    for _ in range(100):
        replica.step()
    late = replica.ask("late", prompt=20_000)
    # Of three prompts of 100,000 tokens the first two would take 400 steps.
    assert replica.until(late) < 150


def test_no_sequence_waits_for_ever_where_a_tenant_makes_up_agents():
    replica = Replica(Limits(2, 100, 256, 2**22, 2))
    replica.until(replica.ask("me", "old", prompt=5000))
    for _ in range(5):
        replica.ask("me", "new", prompt=400, answer=5)
    waiting = replica.ask("me", "old", prompt=400, answer=5)
    for index in count():
        if waiting in replica.ended:
            break
        while replica.scheduler.waiting < 10:
            replica.ask("me", f"made up {index} {replica.scheduler.waiting}", prompt=400, answer=5)
        replica.step()
        assert index < 300


def test_a_sequence_that_is_longer_than_all_takes_one_place_only():
    """One of 100,000 tokens beside 31 short ones: a dense batch has no room for both, so it waits for their ends."""
    replica = Replica(Limits(32, 100, 256, 150_000, 4), budget=4096)
    shorts = [replica.ask("many", prompt=500, answer=60) for _ in range(31)]
    while len(replica.scheduler.decoding()) < 31:
        replica.step()
    long = replica.ask("one", prompt=100_000, answer=5)
    replica.step()
    assert len(replica.scheduler.decoding()) == 31
    replica.until(*shorts, long)
    assert replica.ended[long] == max(replica.ended.values())


def test_memory_is_taken_from_those_who_have_most_places():
    replica = Replica(Limits(8, 100, 256, 4000, 8))
    for _ in range(6):
        replica.ask("many", prompt=300, answer=400)
    while len(replica.scheduler.decoding()) < 6:
        replica.step()
    one = replica.ask("one", prompt=300, answer=400)
    replica.until(one, steps=410)


def test_the_queue_keeps_room_for_others():
    scheduler = Scheduler(Limits(2, 98, 256, 2**20))
    taken = 0
    while scheduler.refusal(5, tenant="a", flow="greedy") is None:
        scheduler.add(ScheduledSequence(f"a{taken}", 5, 5, tenant="a", flow="greedy"))
        taken += 1
    assert taken == 80 and scheduler.refusal(5, tenant="a", flow="greedy") == "full_for_it"
    assert scheduler.refusal(5, tenant="a", flow="modest") is None
    while scheduler.refusal(5, tenant="a", flow=f"made up {taken}") is None:
        scheduler.add(ScheduledSequence(f"a{taken}", 5, 5, tenant="a", flow=f"made up {taken}"))
        taken += 1
    assert taken == 95
    for index in range(4):
        assert scheduler.refusal(5, tenant="b", flow="b") is None
        scheduler.add(ScheduledSequence(f"b{index}", 5, 5, tenant="b", flow="b"))
    assert scheduler.refusal(5, tenant="b", flow="b") == "full_for_it"
    assert scheduler.refusal(5, tenant="c", flow="c") is None
    scheduler.add(ScheduledSequence("c", 5, 5, tenant="c", flow="c"))
    assert scheduler.refusal(5, tenant="d", flow="d") == "full"


def test_what_is_left_of_a_queue_bounds_each():
    mine = [ScheduledSequence(str(index), 1, 1, tenant="me", flow="a") for index in range(FLOW_TIMES)]
    assert queues_too_many("me", "a", mine, 1) and not queues_too_many("me", "a", mine, 2)
    assert not queues_too_many("me", "b", mine, 1) and not queues_too_many("you", "a", mine, 1)
    many = [ScheduledSequence(str(index), 1, 1, tenant="me", flow=str(index)) for index in range(TENANT_TIMES)]
    assert queues_too_many("me", "b", many, 1) and not queues_too_many("me", "b", many[1:], 1)


def test_depth_is_how_many_of_ones_own_are_before():
    sequences = [
        ScheduledSequence("", 1, 1, tenant=tenant, flow=flow)
        for tenant, flow in ("ax", "ax", "ay", "b ", "ax", "ay", "b ")
    ]
    assert [(depth.tenant, depth.flow) for depth in depths(sequences)] == [
        (0, 0), (2, 1), (1, 0), (0, 0), (4, 2), (3, 1), (1, 1),
    ]  # fmt: skip


def test_idle_flows_are_forgotten_but_those_that_were_given_most():
    shares = FairShares()
    stays, heavy = (ScheduledSequence("", 1, 1, tenant="me", flow=flow) for flow in ("stays", "heavy"))
    shares.join(stays)
    shares.join(heavy)
    shares.charge(heavy, 1000)
    shares.leave(heavy)
    for index in range(IDLE_MAX + 50):
        sequence = ScheduledSequence("", 1, 1, tenant="me", flow=f"made up {index}")
        shares.join(sequence)
        shares.leave(sequence)
    assert len(shares._flows["me"].takers) <= IDLE_MAX + 2
    assert "heavy" in shares._flows["me"].takers
    shares.leave(stays)
    assert shares.alone
