"""Who holds what: blocks and agents to replicas. Pure; fed by the replicas' reports, so it can be rebuilt by asking."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..kv_store.blocks import BLOCK_TOKENS


@dataclass(frozen=True)
class Home:
    """Where an agent's last request to a model went, and how many prompt tokens it had."""

    replica: str
    tokens: int


class Directory:
    """Blocks by id and agents by key.

    Args:
        agents_max: how many agents are remembered; the least recently seen go first.
    """

    def __init__(self, agents_max: int = 100_000) -> None:
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}
        self._agents: OrderedDict[tuple[str, str], Home] = OrderedDict()
        self._agents_max = agents_max

    @property
    def blocks(self) -> int:
        return len(self._holders)

    def announce(self, replica: str, blocks: Iterable[bytes]) -> None:
        held = self._held.setdefault(replica, set())
        for block in blocks:
            held.add(block)
            self._holders.setdefault(block, set()).add(replica)

    def retract(self, replica: str, blocks: Iterable[bytes]) -> None:
        held = self._held.get(replica, set())
        for block in blocks:
            if block not in held:
                continue
            held.discard(block)
            holders = self._holders[block]
            holders.discard(replica)
            if not holders:
                del self._holders[block]

    def forget(self, replica: str) -> None:
        """The replica's memory is gone: its blocks, and the agents that lived there."""
        self.retract(replica, list(self._held.get(replica, ())))
        self._held.pop(replica, None)
        for key in [key for key, home in self._agents.items() if home.replica == replica]:
            del self._agents[key]

    def held(self, replica: str) -> set[bytes]:
        """Ids of all blocks the replica holds."""
        return set(self._held.get(replica, ()))

    def held_tokens(self, blocks: Sequence[bytes], replicas: Sequence[str]) -> dict[str, int]:
        """For each replica, how many tokens of the prefix `blocks` it holds, counted from the beginning."""
        held = dict.fromkeys(replicas, 0)
        alive = set(replicas)
        for index, block in enumerate(blocks):
            alive &= self._holders.get(block, set())
            if not alive:
                break
            for replica in alive:
                held[replica] = (index + 1) * BLOCK_TOKENS
        return held

    def home(self, agent: str, model: str) -> Home | None:
        return self._agents.get((agent, model))

    def set_home(self, agent: str, model: str, home: Home) -> None:
        self._agents[agent, model] = home
        self._agents.move_to_end((agent, model))
        if len(self._agents) > self._agents_max:
            self._agents.popitem(last=False)

    def check(self) -> None:
        """Raise AssertionError where the two tables disagree."""
        pairs = {(block, replica) for block, holders in self._holders.items() for replica in holders}
        assert pairs == {(block, replica) for replica, held in self._held.items() for block in held}
        assert all(self._holders.values())
