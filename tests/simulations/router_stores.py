"""Stores of a simulated cluster, and a simple model of what a router has heard about them."""

from __future__ import annotations

from collections import OrderedDict

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.router_messages import StoreReport

DISK_BLOCKS = 150


class Store:
    """A node's disk and its agents, which survive the process. After a lost report comes a full one."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.process = 0
        self.disk: OrderedDict[bytes, None] = OrderedDict()
        self.agents: dict[str, tuple[int, bool]] = {}
        self.tombstones: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        self.process += 1
        self.up = True
        self.sequence, self.full, self.report_at = 0, True, 0.0
        self.came: set[bytes] = set()
        self.went: set[bytes] = set()
        self.changed: set[str] = set()
        self.buried: set[str] = set()
        self.links: dict[str, float] = {}

    def keep(self, blocks: list[bytes]) -> None:
        for block in reversed(blocks):
            if block not in self.disk:
                self.came.add(block)
                self.went.discard(block)
            self.disk[block] = None
            self.disk.move_to_end(block)
        while len(self.disk) > DISK_BLOCKS:
            block, _ = self.disk.popitem(last=False)
            self.went.add(block)
            self.came.discard(block)

    def run(self, blocks: list[bytes]) -> int:
        """How many of `blocks` it has, from the first."""
        return next((index for index, block in enumerate(blocks) if block not in self.disk), len(blocks))

    def claim(self, agent: str, epoch: int, is_primary: bool) -> None:
        self.agents[agent] = (epoch, is_primary)
        self.changed.add(agent)

    def make_room(self) -> None:
        """The copies that it has are evicted."""
        for agent in [agent for agent, (_, is_primary) in self.agents.items() if not is_primary]:
            del self.agents[agent]
            self.changed.add(agent)

    def bury(self, agent: str, epoch: int) -> None:
        self.tombstones[agent] = self.tombstones.get(agent, 0)
        self.tombstones[agent] = max(epoch, self.tombstones[agent])
        self.buried.add(agent)
        if self.agents.get(agent, (epoch + 1, False))[0] <= epoch:
            del self.agents[agent]
            self.changed.add(agent)

    def report(self) -> StoreReport:
        changed, buried = (self.agents, self.tombstones) if self.full else (self.changed, self.buried)
        self.sequence += 1
        report = StoreReport(
            node=self.node,
            incarnation=f"{self.node}-{self.process}",
            sequence=self.sequence,
            announced=sorted(self.disk if self.full else self.came),
            retracted=sorted(self.went),
            full=self.full,
            agents=[(agent, *self.agents[agent]) for agent in sorted(changed) if agent in self.agents],
            agents_retracted=[agent for agent in sorted(self.changed) if agent not in self.agents],
            tombstones=[(agent, self.tombstones[agent]) for agent in sorted(buried)],
            links=self.links,
            used_bytes=len(self.disk) * BLOCK_TOKENS,
        )
        self.came, self.went, self.changed, self.buried, self.links = set(), set(), set(), set(), {}
        return report


class HeardStores:
    """What stores have reported to one router."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.blocks: dict[str, set[bytes]] = {}
        self.claims: dict[str, dict[str, tuple[int, bool]]] = {}
        self.last: dict[str, tuple[str, int]] = {}
        self.replaced: set[str] = set()
        self.at: dict[str, float] = {}
        self.lost: dict[str, float] = {}
        """Nodes that were reported as gone, and until when only new processes count."""
        self.epochs: dict[str, int] = {}
        self.buried: dict[str, int] = {}

    def take(self, report: StoreReport, now: float) -> None:
        node = report.node
        process, sequence = self.last.get(node, ("", -1))
        if report.incarnation == process:
            if report.sequence <= sequence:
                return
        elif report.incarnation in self.replaced and (
            now - self.at[node] <= self.timeout_s or now < self.lost.get(node, now)
        ):
            return
        else:
            self.replaced.add(process)
            self.blocks[node], self.claims[node] = set(), {}
            self.lost.pop(node, None)
        if report.full:
            self.blocks[node], self.claims[node] = set(), {}
        self.blocks[node] |= set(report.announced)
        self.blocks[node] -= set(report.retracted)
        for agent, epoch in report.tombstones:
            self.buried[agent] = max(epoch, self.buried.get(agent, 0))
            if self.epochs.get(agent, epoch + 1) <= epoch:
                del self.epochs[agent]
            for claims in self.claims.values():
                if claims.get(agent, (epoch + 1, False))[0] <= epoch:
                    del claims[agent]
        for agent, epoch, is_primary in report.agents:
            self.claims[node].pop(agent, None)
            if epoch > self.buried.get(agent, 0):
                self.claims[node][agent] = (epoch, is_primary)
                self.epochs[agent] = max(epoch, self.epochs.get(agent, 0))
        for agent in report.agents_retracted:
            self.claims[node].pop(agent, None)
        self.last[node], self.at[node] = (report.incarnation, report.sequence), now
        if now >= self.lost.get(node, now):
            self.lost.pop(node, None)

    def living(self, now: float) -> list[str]:
        return sorted(name for name, at in self.at.items() if now - at <= self.timeout_s and name not in self.lost)

    def home(self, agent: str) -> str | None:
        """None where nobody claims it, "" where nobody who does is its home."""
        claims = {node: claims[agent] for node, claims in self.claims.items() if agent in claims}
        if not claims:
            return None
        return min((node for node, claim in claims.items() if claim == (self.epochs[agent], True)), default="")

    def copies(self, agent: str) -> list[str]:
        """Who else claims it, the newest first."""
        home = self.home(agent)
        claims = [(-claims[agent][0], node) for node, claims in self.claims.items() if agent in claims]
        return [node for _, node in sorted(claims) if node != home]
