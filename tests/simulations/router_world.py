"""A cluster that fails, in seeded time, around a router: replicas, stores, nodes, consumers and the network."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import Decision, ReplicaReport, RouteRequest, StoreReport
from satchel.actors.router.directory import Disk
from satchel.actors.router.policy import EVEN_S, Policy

from .router_replicas import LEASE_S, MODEL, REPORT_S, TIMEOUT_S, Ask, Consumer, Heard, Replica, Seq
from .router_stores import HeardStores, Store

STEP_S = 0.1


class World:
    """Everything except the router's own state. `faults` scales how often anything fails; 0 is never."""

    def __init__(
        self,
        seed: int,
        *,
        replicas: int,
        agents: int,
        faults: float,
        think_s: float = 3.0,
        nodes: int = 3,
        checked_every: int = 1,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.faults = faults
        self.think_s = think_s
        self.steps, self.checked_every = 0, checked_every
        self.replicas = {f"r{index}": Replica(f"r{index}", f"n{index % nodes}") for index in range(replicas)}
        self.stores = {f"n{index}": Store(f"n{index}") for index in range(nodes)}
        self.homes: dict[str, tuple[str, int]] = {}
        """The truth: each agent's home and home epoch."""
        self.pulled = self.adopted = 0
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
        self.heard, self.heard_stores = Heard(), HeardStores(TIMEOUT_S)

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
            for sequence in replica.run(STEP_S):
                self.end(sequence.consumer, sequence.ask)
            self.expire(replica)
            if self.now >= replica.report_at:
                replica.report_at = self.now + REPORT_S
                self.send(replica, self.deliver)
            if self.chance(0.02):
                self.kill(replica)
        for store in self.stores.values():
            if store.up and self.now >= store.report_at:
                store.report_at = self.now + REPORT_S
                self.send(store, self.deliver_store)
        self.fail()
        for consumer in self.consumers:
            waiting, consumer.waiting = consumer.waiting, []
            for ask in waiting:
                self.place(consumer, ask)
        self.steps += 1
        if self.steps % self.checked_every == 0:
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
        assert self.policy.members.requests[ask.request_id] == decision.replica
        check_costs(decision)
        self.decisions.append((ask, decision))
        replica = self.replicas[decision.replica]
        ask.replica = replica.name
        self.settle_home(ask, replica)
        self.check_pull(ask, decision)
        if self.chance(0.05):
            # It dies between routing and submitting.
            self.die(consumer)
        elif not replica.up:
            self.lose(consumer, ask)
        elif replica.submit(Seq(ask, consumer, 0.0, ask.answer_tokens), self.stores[replica.node]):
            consumer.asks[ask.request_id] = ask
        else:
            self.policy.members.release(replica.name, ask.request_id)
            ask.tried.append(replica.name)
            consumer.waiting.append(ask)
            if len(set(ask.tried)) == len(self.replicas):
                ask.tried.clear()

    def end(self, consumer: Consumer, ask: Ask) -> None:
        """The consumer gets the sequence's end, and tells the router a little later; the KV is written to disk."""
        if ask.agent and self.stores[self.replicas[ask.replica].node].up:
            self.stores[self.replicas[ask.replica].node].keep(ask.blocks)
        if consumer.died is None and consumer.asks.pop(ask.request_id, None):
            name, policy = ask.replica, self.policy
            self.after(self.rng.uniform(0, 0.2), lambda: policy.members.release(name, ask.request_id))

    def lose(self, consumer: Consumer, ask: Ask) -> None:
        """The consumer sees that its sequence's replica failed; the sequence fails over."""
        consumer.asks.pop(ask.request_id, None)
        self.policy.members.lose(ask.replica)
        self.heard.lost.setdefault(ask.replica, -inf)
        ask.tried = [ask.replica]
        consumer.waiting.append(ask)

    # What fails.

    def send(self, sender: Replica | Store, deliver: Callable[[Any], bool]) -> None:
        report, fate = sender.report(), self.rng.random()
        if self.quiet or fate > 0.2 * self.faults:
            sender.full = not deliver(report)
            return
        if fate > 0.15 * self.faults:
            # It comes, and comes again.
            sender.full = not deliver(report)
        else:
            # To the sender these are one: no answer came.
            sender.full = True
        if fate < 0.1 * self.faults or fate > 0.15 * self.faults:
            self.after(self.rng.uniform(0, 4.0), lambda: deliver(report))

    def deliver(self, report: ReplicaReport) -> bool:
        news = self.heard.take(report, self.now)
        complete = self.policy.members.observe(report, self.now)
        if news and report.full:
            assert set(report.active) <= self.policy.members.requests.keys(), "what runs is counted"
        return complete

    def deliver_store(self, report: StoreReport) -> bool:
        self.heard_stores.take(report, self.now)
        return self.policy.members.observe_store(report, self.now)

    def kill(self, replica: Replica) -> None:
        replica.up = False
        for sequence in list(replica.sequences.values()):
            if sequence.consumer.died is None and sequence.ask.request_id in sequence.consumer.asks:
                self.after(
                    self.rng.uniform(0, 0.5), lambda sequence=sequence: self.lose(sequence.consumer, sequence.ask)
                )
        process = replica.process
        self.after(self.rng.uniform(0.3, 8.0), lambda: replica.process == process and replica.restart())

    def kill_node(self, store: Store) -> None:
        """All its processes die; somebody sees it, and it returns with the disk that it had."""
        if not store.up:
            return
        store.up = False
        node, back_s = store.node, self.rng.uniform(1.0, 20.0)
        for replica in self.replicas.values():
            if replica.node == node and replica.up:
                self.kill(replica)
        self.after(self.rng.uniform(0.0, 3.0), lambda: self.lose_node(store, store.process))
        self.after(back_s, store.restart)

    def lose_node(self, store: Store, process: int) -> None:
        if store.process != process:
            return
        node, until = store.node, self.now + TIMEOUT_S
        self.policy.members.lose_node(node, self.now)
        if node in self.heard_stores.at:
            self.heard_stores.lost[node] = max(until, self.heard_stores.lost.get(node, -inf))
        for replica in self.replicas.values():
            if replica.node == node and replica.name in self.heard.at:
                self.heard.lost[replica.name] = until
        # What lived there is adopted by whoever has a copy.
        for agent, (home, epoch) in list(self.homes.items()):
            copies = [other for other in self.stores.values() if other.up and agent in other.agents]
            if home == node and copies:
                self.move(agent, self.rng.choice(copies), epoch + 1)
                self.adopted += 1

    # Where agents live.

    def settle_home(self, ask: Ask, replica: Replica) -> None:
        """A new agent's home is the node of its first turn; a second one has a copy."""
        store = self.stores[replica.node]
        if ask.agent and ask.agent not in self.homes and store.up:
            others = [other for other in self.stores.values() if other.up and other is not store]
            epoch = 1 + max(other.tombstones.get(ask.agent, 0) for other in self.stores.values())
            self.homes[ask.agent] = (store.node, epoch)
            store.claim(ask.agent, epoch, True)
            for other in others[:1]:
                other.claim(ask.agent, epoch, False)

    def move(self, agent: str, to: Store, epoch: int) -> None:
        old = self.stores[self.homes[agent][0]]
        if old.up and old is not to:
            old.claim(agent, epoch, False)
        to.claim(agent, epoch, True)
        self.homes[agent] = (to.node, epoch)

    def live_elsewhere(self) -> None:
        """Agents move and are forgotten; who is down then returns with what it knew."""
        up = [store for store in self.stores.values() if store.up]
        if not self.homes or not up:
            return
        agent = self.rng.choice(sorted(self.homes))
        home, epoch = self.homes[agent]
        if self.chance(0.1) and self.stores[home].up:
            self.move(agent, self.rng.choice(up), epoch + 1)
        elif self.chance(0.05):
            del self.homes[agent]
            for store in up:
                store.bury(agent, epoch)
        elif self.chance(0.05):
            self.rng.choice(up).make_room()

    def check_pull(self, ask: Ask, decision: Decision) -> None:
        """The source of a pull is alive, is another node, and has the blocks; usually they arrive."""
        living = self.heard_stores.living(self.now)
        assert decision.node == self.replicas[decision.replica].node
        if not decision.pull_from:
            assert decision.pull_tokens == 0
            return
        self.pulled += 1
        assert decision.pull_from in living and decision.pull_from != decision.node
        assert decision.cached_tokens % BLOCK_TOKENS == 0 and decision.pull_tokens % BLOCK_TOKENS == 0
        blocks = ask.blocks[: decision.cached_tokens // BLOCK_TOKENS]
        assert 0 < decision.pull_tokens <= decision.cached_tokens
        assert set(blocks) <= self.heard_stores.blocks[decision.pull_from]
        source, target = self.stores[decision.pull_from], self.stores[decision.node]
        if source.up and target.up and source.run(blocks) == len(blocks) and self.rng.random() < 0.8:
            target.keep(blocks)
            target.links[source.node] = self.rng.uniform(1e7, 2e9)

    def fail(self) -> None:
        self.live_elsewhere()
        if self.chance(0.05):
            self.kill_node(self.rng.choice(list(self.stores.values())))
        if self.chance(0.05):
            # A store alone restarts.
            store = self.rng.choice(list(self.stores.values()))
            if store.up:
                store.restart()
        if self.chance(0.02):
            self.new_router()
        if self.chance(0.03):
            self.die(self.rng.choice(self.consumers))
        if self.chance(0.3):
            # A client hangs up.
            consumer = self.rng.choice(self.consumers)
            for ask in list(consumer.asks.values())[:1]:
                self.replicas[ask.replica].sequences.pop(ask.request_id, None)
                self.end(consumer, ask)
        if self.chance(0.1):
            # A link breaks, but the replica lives: the sequence runs there until the abort arrives.
            consumer = self.rng.choice(self.consumers)
            for ask in list(consumer.asks.values())[:1]:
                replica = self.replicas[ask.replica]
                self.after(1.0, partial(replica.abort, replica.sequences.get(ask.request_id)))
                self.lose(consumer, ask)
        if self.chance(0.05):
            # The network between a replica and the router is down for a while.
            self.rng.choice([*self.replicas.values(), *self.stores.values()]).report_at = self.now + 8.0

    def die(self, consumer: Consumer) -> None:
        if consumer.died is None:
            consumer.died = self.now
            self.consumers[self.consumers.index(consumer)] = Consumer()

    def expire(self, replica: Replica) -> None:
        for name, sequence in list(replica.sequences.items()):
            if sequence.consumer.died is not None and self.now - sequence.consumer.died > LEASE_S:
                del replica.sequences[name]

    # What must hold at every step.

    def check(self) -> None:
        self.policy.members.check()
        for name, blocks in self.heard.blocks.items():
            assert self.policy.members.directory.held(name) == blocks
        assert self.policy.members.alive(MODEL, self.now) == self.heard.living(self.now)
        for node, blocks in self.heard_stores.blocks.items():
            assert self.policy.members.directory.held(Disk(node)) == blocks
        assert self.policy.members.alive_nodes(self.now) == self.heard_stores.living(self.now)
        for agent in self.talks:
            place = self.policy.members.where(agent)
            assert (place and place.node) == self.heard_stores.home(agent)
            assert list(place.copies if place else ()) == self.heard_stores.copies(agent)

    def settle(self) -> None:
        """Ends requests and faults, and lets everything that runs come to its end."""
        self.quiet, self.checked_every = True, 20
        for _ in range(int(60 / STEP_S)):
            self.step()
        self.now += 200.0
        self.step()


def check_costs(decision: Decision) -> None:
    """The terms add up, none is negative, and the cheapest was taken, or an even one."""
    costs, chosen = decision.costs_s, decision.candidates.index(decision.replica)
    total = costs["total"]
    for position in range(len(decision.candidates)):
        terms = [seconds[position] for term, seconds in costs.items() if term != "total"]
        assert min(terms) >= 0.0
        assert total[position] == pytest.approx(sum(terms))
    assert total[chosen] <= min(total) + EVEN_S
