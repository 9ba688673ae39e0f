"""Who holds what: blocks and agents to replicas. Pure; fed by the replicas' reports, so it can be rebuilt by asking.

A replica is a bit, and a block's holders are one integer: a prefix's holders are found with one look-up and one `and`
a block, however many replicas there are. Its memory is bounded by what the replicas report, and `agents_max`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from math import inf
from typing import NamedTuple

from ..kv_store.blocks import BLOCK_TOKENS

PART_BLOCKS = 4096
"""How many blocks of a report are taken before others get a turn: 1 to 2 ms."""


class Home(NamedTuple):
    """Where an agent's last request to a model went, and how many prompt tokens it had."""

    replica: str
    tokens: int


class Directory:
    """Blocks by id and agents by key.

    Args:
        agents_max: how many agents are remembered; the least recently seen go first.
    """

    def __init__(self, agents_max: int = 100_000) -> None:
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._holders: dict[bytes, int] = {}
        self._expected: dict[str, dict[bytes, float]] = {}
        """Of each replica, the blocks that count as held though no report has named them, and until when."""
        self._agents: OrderedDict[tuple[str, str], Home] = OrderedDict()
        self._agents_max = agents_max

    @property
    def blocks(self) -> int:
        return len(self._holders)

    @property
    def agents(self) -> int:
        return len(self._agents)

    @property
    def replicas(self) -> set[str]:
        """Those that said something since they were last forgotten."""
        return set(self._bits)

    def announce(self, replica: str, blocks: Sequence[bytes]) -> None:
        """The replica has `blocks` as well."""
        bit = self._bits.get(replica) or self._join(replica)
        holders = self._holders
        new = 0
        for block in blocks:
            mask = holders.get(block, 0)
            if not mask:
                # Most blocks have one holder, and share its integer.
                holders[block] = bit
                new += 1
            elif not mask & bit:
                holders[block] = mask | bit
                new += 1
        self._counts[replica] += new
        self._settle(replica, blocks)

    def retract(self, replica: str, blocks: Sequence[bytes]) -> None:
        """The replica has `blocks` no more."""
        bit = self._bits.get(replica, 0)
        holders = self._holders
        gone = 0
        for block in blocks:
            mask = holders.get(block, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del holders[block]
                else:
                    holders[block] = mask ^ bit
        if gone:
            self._counts[replica] -= gone
            self._settle(replica, blocks)

    def expect(self, replica: str, blocks: Sequence[bytes], until: float) -> None:
        """The replica is about to have `blocks`: they count as held until it says so, or till `until`."""
        bit = self._bits.get(replica) or self._join(replica)
        masks = list(map(self._holders.get, blocks, repeat(0)))
        if any(masks):
            holders = {block: mask | bit for block, mask in zip(blocks, masks, strict=True) if not mask & bit}
        else:
            holders = dict.fromkeys(blocks, bit)
        self._holders.update(holders)
        self._counts[replica] += len(holders)
        self._expected[replica].update(dict.fromkeys(holders, until))

    def expire(self, replica: str, now: float) -> None:
        """What was expected of the replica and has not come in time is not held."""
        self.retract(replica, [block for block, until in self._expected.get(replica, {}).items() if until <= now])

    def update(
        self, replica: str, announced: Sequence[bytes], retracted: Sequence[bytes], *, whole: bool
    ) -> Iterator[None]:
        """Take what a replica reports, and pause after every `PART_BLOCKS`; the tables agree at every pause.

        Args:
            whole: the replica has `announced` and no others.
        """
        kept: set[bytes] = set()
        for part in _parts(announced):
            self.announce(replica, part)
            if whole:
                kept.update(part)
            yield
        if whole and self._counts[replica] > len(kept):
            # Only here, and seldom, the whole directory is searched at once.
            kept |= self._expected[replica].keys()
            others = [block for block in self._scan(replica) if block not in kept]
            for part in _parts(others):
                yield
                self.retract(replica, part)
        for part in _parts(retracted):
            self.retract(replica, part)
            yield

    def forget(self, replica: str) -> None:
        """The replica is gone: its blocks, and the agents that lived there."""
        bit = self._bits.get(replica)
        if bit is None:
            return
        self.restart(replica)
        self.retract(replica, self._scan(replica))
        del self._bits[replica], self._names[bit], self._counts[replica], self._expected[replica]

    def restart(self, replica: str) -> None:
        """The replica is another process now: no agent lives there, and nothing is on its way.

        The blocks go with its first report, in parts: `update` with `whole`.
        """
        self.expire(replica, inf)
        for key in [key for key, home in self._agents.items() if home.replica == replica]:
            del self._agents[key]

    def held(self, replica: str) -> set[bytes]:
        """Ids of all blocks that the replica has reported. Searches the whole directory."""
        return set(self._scan(replica)) - self._expected.get(replica, {}).keys()

    def held_tokens(self, blocks: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """For each replica, how many tokens of the prefix `blocks` it holds, counted from the beginning.

        Expected blocks count; a block that is held without one before it counts for nothing.
        """
        held = dict.fromkeys(replicas, 0)
        left = 0
        for replica in held:
            left |= self._bits.get(replica, 0)
        if not left:
            return held
        for index, mask in enumerate(map(self._holders.get, blocks, repeat(0))):
            if mask != left:
                both = left & mask
                if both != left:
                    self._note(held, left ^ both, index)
                    if not both:
                        return held
                    left = both
        self._note(held, left, len(blocks))
        return held

    def home(self, agent: str, model: str) -> Home | None:
        """Where the agent's last request to the model went, if that is known."""
        return self._agents.get((agent, model))

    def set_home(self, agent: str, model: str, home: Home) -> None:
        self._agents[agent, model] = home
        self._agents.move_to_end((agent, model))
        if len(self._agents) > self._agents_max:
            self._agents.popitem(last=False)

    def check(self) -> None:
        """Raise AssertionError where the tables disagree."""
        counts = dict.fromkeys(self._bits, 0)
        for mask in self._holders.values():
            assert mask, "a block without a holder"
            while mask:
                bit = mask & -mask
                counts[self._names[bit]] += 1
                mask ^= bit
        assert counts == self._counts
        assert self._expected.keys() == self._bits.keys()
        for name, blocks in self._expected.items():
            assert all(self._holders[block] & self._bits[name] for block in blocks)
        assert self._names == {bit: name for name, bit in self._bits.items()}
        assert len(self._agents) <= self._agents_max
        assert {home.replica for home in self._agents.values()} <= self._bits.keys()

    def _join(self, replica: str) -> int:
        # The lowest free one, so that the integers stay short.
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._bits[replica], self._names[bit], self._counts[replica], self._expected[replica] = bit, replica, 0, {}
        return bit

    def _settle(self, replica: str, blocks: Sequence[bytes]) -> None:
        """Something is known of `blocks`: they are not only expected."""
        expected = self._expected[replica]
        if expected:
            for block in blocks:
                expected.pop(block, None)

    def _scan(self, replica: str) -> list[bytes]:
        bit = self._bits.get(replica, 0)
        return [block for block, mask in self._holders.items() if mask & bit]

    def _note(self, held: dict[str, int], mask: int, blocks: int) -> None:
        """`blocks` is how many blocks the replicas of `mask` hold."""
        tokens = blocks * BLOCK_TOKENS
        while mask and tokens:
            bit = mask & -mask
            held[self._names[bit]] = tokens
            mask ^= bit


def _parts(blocks: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (blocks[start : start + PART_BLOCKS] for start in range(0, len(blocks) or 1, PART_BLOCKS))
