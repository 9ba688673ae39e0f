"""The router among replicas, consumers and a network that fail, in seeded time. A failure names its seed."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from satchel.actors.kv_store.blocks import BLOCK_TOKENS
from satchel.actors.messages import Decision, ReplicaReport, RouteRequest
from satchel.actors.router.policy import EVEN_S, NEW_AGENT_EVEN_S, Policy

MODEL = "m"
TIMEOUT_S = 5.0
REPORT_S = 0.5
LEASE_S = 10.0
STEP_S = 0.1
PREFILL_TOKENS_PER_S = 2000.0
DECODE_TOKENS_PER_S = 20.0
ROWS_MAX = 4
QUEUE_MAX = 6
CACHE_BLOCKS = 60


@dataclass
class Ask:
    """A request, as its consumer knows it."""

    request_id: str
    agent: str
    blocks: list[bytes]
    prompt_tokens: int
    answer_tokens: int
    replica: str = ""
    tried: list[str] = field(default_factory=list)


@dataclass
class Row:
    ask: Ask
    consumer: Consumer
    prefill_left: float
    answer_left: float


@dataclass(eq=False)
class Consumer:
    """A process that routes, submits and releases, until it dies and does none of it any more."""

    asks: dict[str, Ask] = field(default_factory=dict)
    waiting: list[Ask] = field(default_factory=list)
    died: float | None = None


class Replica:
    """A crude engine with a block cache. Its reporter is as the real one: what is lost is followed by a full report."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = 0
        self.restart()

    def restart(self) -> None:
        self.process += 1
        self.up = True
        self.sequence, self.full, self.report_at = 0, True, 0.0
        self.rows: dict[str, Row] = {}
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.events: tuple[set[bytes], set[bytes]] = (set(), set())

    def submit(self, row: Row) -> bool:
        if len(self.rows) >= ROWS_MAX + QUEUE_MAX:
            return False
        held = 0
        while held < len(row.ask.blocks) and row.ask.blocks[held] in self.cache:
            held += 1
        row.prefill_left = max(1, row.ask.prompt_tokens - held * BLOCK_TOKENS)
        self.rows[row.ask.request_id] = row
        return True

    def abort(self, row: Row | None) -> None:
        if row is not None and self.rows.get(row.ask.request_id) is row:
            del self.rows[row.ask.request_id]

    def run(self, seconds: float) -> list[Row]:
        """Work for a while; rows that ended."""
        budget, ended = PREFILL_TOKENS_PER_S * seconds, []
        for row in list(self.rows.values())[:ROWS_MAX]:
            if row.prefill_left > 0:
                done = min(budget, row.prefill_left)
                row.prefill_left -= done
                budget -= done
                if row.prefill_left <= 0:
                    self._keep(row.ask.blocks)
            else:
                row.answer_left -= DECODE_TOKENS_PER_S * seconds
                if row.answer_left <= 0:
                    ended.append(self.rows.pop(row.ask.request_id))
        return ended

    def report(self) -> ReplicaReport:
        came, went = self.events
        self.events = (set(), set())
        self.sequence += 1
        return ReplicaReport(
            replica=self.name,
            model=MODEL,
            incarnation=f"{self.name}-{self.process}",
            sequence=self.sequence,
            running=min(len(self.rows), ROWS_MAX),
            waiting=max(0, len(self.rows) - ROWS_MAX),
            pending_tokens=int(sum(row.prefill_left for row in self.rows.values())),
            rows_max=ROWS_MAX,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            active=list(self.rows),
            announced=sorted(self.cache if self.full else came),
            retracted=sorted(went),
            full=self.full,
        )

    def _keep(self, blocks: list[bytes]) -> None:
        came, went = self.events
        for block in reversed(blocks):
            if block not in self.cache:
                came.add(block)
                went.discard(block)
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            block, _ = self.cache.popitem(last=False)
            went.add(block)
            came.discard(block)


class Heard:
    """What one router was told, kept in the plainest way: the directory and the living must follow from it."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[bytes]] = {}
        self.last: dict[str, tuple[str, int]] = {}
        self.replaced: set[str] = set()
        self.at: dict[str, float] = {}
        self.lost: set[str] = set()

    def take(self, report: ReplicaReport, now: float) -> bool:
        """Whether it is news."""
        name = report.replica
        process, sequence = self.last.get(name, ("", -1))
        if report.incarnation == process:
            if report.sequence <= sequence:
                return False
        elif report.incarnation in self.replaced and now - self.at[name] <= TIMEOUT_S:
            return False
        else:
            self.replaced.add(process)
            self.blocks[name] = set()
        if report.full:
            self.blocks[name] = set()
        self.blocks[name] |= set(report.announced)
        self.blocks[name] -= set(report.retracted)
        self.last[name], self.at[name] = (report.incarnation, report.sequence), now
        self.lost.discard(name)
        return True

    def living(self, now: float) -> list[str]:
        return sorted(name for name, at in self.at.items() if now - at <= TIMEOUT_S and name not in self.lost)


class World:
    """Everything but the router's own state. `faults` scales how often anything fails; 0 is never."""

    def __init__(self, seed: int, *, replicas: int, agents: int, faults: float, think_s: float = 3.0) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.faults = faults
        self.think_s = think_s
        self.replicas = {f"r{index}": Replica(f"r{index}") for index in range(replicas)}
        self.consumers = [Consumer(), Consumer()]
        self.later: list[tuple[float, int, Callable[[], Any]]] = []
        self.talks: dict[str, list[bytes]] = {f"a{index}": [] for index in range(agents)}
        self.quiet = False
        self.count = 0
        self.decisions: list[tuple[Ask, Decision]] = []
        self.new_router()
        for agent in self.talks:
            self.after(self.rng.uniform(0, think_s), lambda agent=agent: self.turn(agent))

    def new_router(self) -> None:
        self.policy = Policy(timeout_s=TIMEOUT_S, sticky_penalty_s_max=2.0, agents_max=1000)
        self.heard = Heard()

    def after(self, seconds: float, what: Callable[[], Any]) -> None:
        self.count += 1
        self.later.append((self.now + seconds, self.count, what))

    def chance(self, a_second: float) -> bool:
        return not self.quiet and self.rng.random() < a_second * self.faults * STEP_S

    def step(self) -> None:
        self.now += STEP_S
        due = sorted(item for item in self.later if item[0] <= self.now)
        self.later = [item for item in self.later if item[0] > self.now]
        for _, _, what in due:
            what()
        for replica in self.replicas.values():
            if not replica.up:
                continue
            for row in replica.run(STEP_S):
                self.end(row.consumer, row.ask)
            self.expire(replica)
            if self.now >= replica.report_at:
                replica.report_at = self.now + REPORT_S
                self.send(replica)
            if self.chance(0.02):
                self.kill(replica)
        self.fail()
        for consumer in self.consumers:
            waiting, consumer.waiting = consumer.waiting, []
            for ask in waiting:
                self.place(consumer, ask)
        self.check()

    # Conversations: a shared system prompt, then turns that make it longer; some begin anew.

    def turn(self, agent: str) -> None:
        if self.quiet:
            return
        self.count += 1
        talk = self.talks[agent]
        if not talk or self.rng.random() < 0.02 or len(talk) > 40:
            talk[:] = [b"system-%d" % index for index in range(8)]
        talk += [f"{agent}-{self.count}-{index}".encode() for index in range(self.rng.randrange(3))]
        tokens = len(talk) * BLOCK_TOKENS + self.rng.randrange(1, BLOCK_TOKENS)
        consumer = self.rng.choice([consumer for consumer in self.consumers if consumer.died is None])
        name = "" if self.rng.random() < 0.1 else agent
        self.place(consumer, Ask(f"q{self.count}", name, list(talk), tokens, self.rng.randrange(2, 60)))
        self.after(self.rng.expovariate(1 / self.think_s), lambda: self.turn(agent))

    def place(self, consumer: Consumer, ask: Ask) -> None:
        if consumer.died is not None:
            return
        request = RouteRequest(ask.request_id, MODEL, ask.agent, ask.blocks, ask.prompt_tokens, list(ask.tried))
        living = self.heard.living(self.now)
        decision = self.policy.route(request, self.now)
        assert (decision is None) == (not living), "somebody is chosen whenever somebody lives"
        if decision is None:
            consumer.waiting.append(ask)
            return
        wanted = [name for name in living if name not in ask.tried] or living
        assert decision.replica in wanted and decision.candidates == wanted
        assert self.policy.requests[ask.request_id] == decision.replica
        check_costs(decision, NEW_AGENT_EVEN_S if ask.agent else EVEN_S)
        self.decisions.append((ask, decision))
        replica = self.replicas[decision.replica]
        ask.replica = replica.name
        if self.chance(0.05):
            # It dies between routing and submitting.
            self.die(consumer)
        elif not replica.up:
            self.lose(consumer, ask)
        elif replica.submit(Row(ask, consumer, 0.0, ask.answer_tokens)):
            consumer.asks[ask.request_id] = ask
        else:
            self.policy.release(replica.name, ask.request_id)
            ask.tried.append(replica.name)
            consumer.waiting.append(ask)
            if len(set(ask.tried)) == len(self.replicas):
                ask.tried.clear()

    def end(self, consumer: Consumer, ask: Ask) -> None:
        """The consumer hears the row's end, and tells the router a little later."""
        if consumer.died is None and consumer.asks.pop(ask.request_id, None):
            name, policy = ask.replica, self.policy
            self.after(self.rng.uniform(0, 0.2), lambda: policy.release(name, ask.request_id))

    def lose(self, consumer: Consumer, ask: Ask) -> None:
        """The consumer sees that its row's replica failed; the row goes on elsewhere."""
        consumer.asks.pop(ask.request_id, None)
        self.policy.lose(ask.replica)
        self.heard.lost.add(ask.replica)
        ask.tried = [ask.replica]
        consumer.waiting.append(ask)

    # What fails.

    def send(self, replica: Replica) -> None:
        report, fate = replica.report(), self.rng.random()
        if self.quiet or fate > 0.15 * self.faults:
            replica.full = not self.deliver(report)
            return
        # To the replica these are one: no answer came.
        replica.full = True
        if fate < 0.1 * self.faults:
            self.after(self.rng.uniform(0, 4.0), lambda: self.deliver(report))

    def deliver(self, report: ReplicaReport) -> bool:
        news = self.heard.take(report, self.now)
        complete = self.policy.observe(report, self.now)
        if news and report.full:
            assert set(report.active) <= self.policy.requests.keys(), "what runs is counted"
        return complete

    def kill(self, replica: Replica) -> None:
        replica.up = False
        for row in list(replica.rows.values()):
            if row.consumer.died is None and row.ask.request_id in row.consumer.asks:
                self.after(self.rng.uniform(0, 0.5), lambda row=row: self.lose(row.consumer, row.ask))
        self.after(self.rng.uniform(0.3, 8.0), replica.restart)

    def fail(self) -> None:
        if self.chance(0.02):
            self.new_router()
        if self.chance(0.03):
            self.die(self.rng.choice(self.consumers))
        if self.chance(0.3):
            # A client hangs up.
            consumer = self.rng.choice(self.consumers)
            for ask in list(consumer.asks.values())[:1]:
                self.replicas[ask.replica].rows.pop(ask.request_id, None)
                self.end(consumer, ask)
        if self.chance(0.1):
            # A link breaks, though the replica lives: its row goes on there until the abort comes.
            consumer = self.rng.choice(self.consumers)
            for ask in list(consumer.asks.values())[:1]:
                replica = self.replicas[ask.replica]
                self.after(1.0, partial(replica.abort, replica.rows.get(ask.request_id)))
                self.lose(consumer, ask)
        if self.chance(0.05):
            # The network between a replica and the router is down for a while.
            self.rng.choice(list(self.replicas.values())).report_at = self.now + 8.0

    def die(self, consumer: Consumer) -> None:
        if consumer.died is None:
            consumer.died = self.now
            self.consumers[self.consumers.index(consumer)] = Consumer()

    def expire(self, replica: Replica) -> None:
        for name, row in list(replica.rows.items()):
            if row.consumer.died is not None and self.now - row.consumer.died > LEASE_S:
                del replica.rows[name]

    # What must hold at every step.

    def check(self) -> None:
        self.policy.check()
        for name, blocks in self.heard.blocks.items():
            assert self.policy.directory.held(name) == blocks
        assert self.policy.alive(MODEL, self.now) == self.heard.living(self.now)

    def settle(self) -> None:
        """No more requests and faults: whatever is under way comes to its end."""
        self.quiet = True
        for _ in range(int(60 / STEP_S)):
            self.step()
        self.now += 200.0
        self.step()


def check_costs(decision: Decision, even_s: float) -> None:
    """The terms add up, none is negative, and the cheapest was taken, or an even one."""
    costs, chosen = decision.costs_s, decision.candidates.index(decision.replica)
    total = costs["total"]
    for position in range(len(decision.candidates)):
        terms = [seconds[position] for term, seconds in costs.items() if term != "total"]
        assert min(terms) >= 0.0
        assert total[position] == pytest.approx(sum(terms))
    assert total[chosen] <= min(total) + even_s


@pytest.mark.parametrize("seed", range(10))
def test_whatever_fails_the_router_counts_right_and_forgets(seed: int):
    """Replicas, consumers, links and the router itself fail, reports are lost, late and out of order.

    At every step the tables agree, the directory is what was reported and the dead and excluded are avoided; in the
    end nothing is left of requests that nobody has, and the directory is what the replicas hold.
    """
    world = World(seed, replicas=5, agents=14, faults=1.0)
    for _ in range(int(60 / STEP_S)):
        world.step()
    world.settle()
    assert len(world.decisions) > 100
    assert not any(consumer.asks or consumer.waiting for consumer in world.consumers), "every request ended"
    assert not any(replica.rows for replica in world.replicas.values())
    assert world.policy.requests == {}
    for replica in world.replicas.values():
        assert replica.up
        assert world.policy.directory.held(replica.name) == set(replica.cache)
    held = {block for replica in world.replicas.values() for block in replica.cache}
    assert world.policy.directory.blocks == len(held), "nothing is expected any more"
    assert world.policy.directory.agents <= len(world.talks)


@pytest.mark.parametrize("seed", range(3))
def test_an_unloaded_cluster_brings_agents_home_and_spreads_them(seed: int):
    """Nothing fails and there is room: over 95% of an agent's turns after its first come home, and no replica has more
    than twice its share of the requests, though all agents share one system prompt."""
    world = World(seed, replicas=4, agents=16, faults=0.0, think_s=12.0)
    for _ in range(int(200 / STEP_S)):
        world.step()
    homes: dict[str, str] = {}
    turns = returns = 0
    for ask, decision in world.decisions:
        if ask.agent:
            turns += ask.agent in homes
            returns += homes.get(ask.agent) == decision.replica
            homes[ask.agent] = decision.replica
    spread = Counter(decision.replica for _, decision in world.decisions)
    assert turns > 150
    assert returns / turns > 0.95
    assert max(spread.values()) <= 2 * len(world.decisions) / len(world.replicas)
