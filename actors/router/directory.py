"""Who holds what: blocks to replicas and disks, agents to replicas. Pure; rebuilt by asking, for it is fed by reports.

A *holder* is a replica's memory, by the replica's name, or a node's `Disk`. It is a bit, and a block's holders are one
integer: a prefix's holders are found with one look-up and one `and` a block, however many there are. Blocks with the
same holders share the integer. The memory of it all is bounded by what holders report, and `agents_max`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cachetools import FIFOCache

PART_BLOCKS = 4096
"""How many blocks of a report are taken before others get a turn: 1 to 2 ms."""

SHARED_MAX = 65_536
"""How many integers are remembered to be shared, at most."""

FEW_BITS = 24
"""More holders than this, which hold equally much, are found faster by unpacking all bits than one by one."""


class Disk(NamedTuple):
    """What is on a node's disk, as a holder of blocks."""

    node: str


Holder = str | Disk


class Seat(NamedTuple):
    """Where an agent's last request to a model went, how many prompt tokens it had, and the agent's home epoch then."""

    replica: str
    tokens: int
    epoch: int = 0


class Directory:
    """Blocks by id and agents by key.

    Args:
        agents_max: how many agents are remembered; the least recently seen go first.
    """

    def __init__(self, agents_max: int = 100_000) -> None:
        self._bits: dict[Holder, int] = {}
        self._names: dict[int, Holder] = {}
        self._free: list[int] = []
        """Places below the highest one that are not taken, a heap."""
        self._counts: dict[Holder, int] = {}
        self._holders: dict[bytes, int] = {}
        self._shared: dict[int, int] = {}
        self._expected: dict[Holder, dict[bytes, float]] = {}
        """Of each replica, the blocks that count as held though no report has named them, and until when."""
        self._agents: FIFOCache[tuple[str, str], Seat] = FIFOCache(agents_max)

    @property
    def blocks(self) -> int:
        return len(self._holders)

    @property
    def agents(self) -> int:
        return len(self._agents)

    @property
    def holders(self) -> set[Holder]:
        """Those that said something since they were last forgotten."""
        return set(self._bits)

    def count(self, holder: Holder) -> int:
        """How many blocks it has, or is expected to have."""
        return self._counts.get(holder, 0)

    def index(self, holder: Holder) -> int:
        """The holder's index in `runs`; -1 where it is not known. It stays the same until the holder is forgotten."""
        return self._bits.get(holder, 0).bit_length() - 1

    def join(self, holder: Holder) -> int:
        """Give the holder a place if it has none. Returns its bit."""
        bit = self._bits.get(holder)
        if bit is None:
            # The lowest free one, so that the integers stay short.
            bit = 1 << (heapq.heappop(self._free) if self._free else len(self._bits))
            self._bits[holder], self._names[bit], self._counts[holder], self._expected[holder] = bit, holder, 0, {}
        return bit

    def announce(self, holder: Holder, blocks: Sequence[bytes]) -> None:
        """The holder has `blocks` as well."""
        bit = self.join(holder)
        holders = self._holders
        new = 0
        for block in blocks:
            mask = holders.get(block, 0)
            if not mask:
                holders[block] = bit
                new += 1
            elif not mask & bit:
                holders[block] = self._share(mask | bit)
                new += 1
        self._counts[holder] += new
        self._confirm(holder, blocks)

    def retract(self, holder: Holder, blocks: Sequence[bytes]) -> None:
        """The holder has `blocks` no more."""
        bit = self._bits.get(holder, 0)
        holders = self._holders
        gone = 0
        for block in blocks:
            mask = holders.get(block, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del holders[block]
                else:
                    holders[block] = self._share(mask ^ bit)
        if gone:
            self._counts[holder] -= gone
            self._confirm(holder, blocks)

    def expect(self, replica: str, blocks: Sequence[bytes], until: float) -> None:
        """The replica is about to have `blocks`: they count as held until it says so, or till `until`."""
        bit = self.join(replica)
        masks = list(map(self._holders.get, blocks, repeat(0)))
        if any(masks):
            holders = {
                block: self._share(mask | bit) for block, mask in zip(blocks, masks, strict=True) if not mask & bit
            }
        else:
            holders = dict.fromkeys(blocks, bit)
        self._holders.update(holders)
        self._counts[replica] += len(holders)
        self._expected[replica].update(dict.fromkeys(holders, until))

    def expire(self, holder: Holder, now: float) -> None:
        """What was expected of the holder and has not come in time is not held."""
        self.retract(holder, [block for block, until in self._expected.get(holder, {}).items() if until <= now])

    def update(
        self, holder: Holder, announced: Sequence[bytes], retracted: Sequence[bytes], *, whole: bool
    ) -> Iterator[None]:
        """Take what a holder reports, and pause after every `PART_BLOCKS`; the tables agree at every pause.

        Args:
            whole: the holder has `announced` and no others.
        """
        kept: set[bytes] = set()
        for part in parts(announced):
            self.announce(holder, part)
            if whole:
                kept.update(part)
            yield
        if whole and self._counts.get(holder, 0) > len(kept):
            # Only here, and seldom, the whole directory is searched at once.
            kept |= self._expected[holder].keys()
            others = [block for block in self._scan(holder) if block not in kept]
            for part in parts(others):
                yield
                self.retract(holder, part)
        for part in parts(retracted):
            self.retract(holder, part)
            yield

    def forget(self, holder: Holder) -> None:
        """The holder is gone: its blocks, and the agents that lived there."""
        bit = self._bits.get(holder)
        if bit is None:
            return
        self.restart(holder)
        self.retract(holder, self._scan(holder))
        del self._bits[holder], self._names[bit], self._counts[holder], self._expected[holder]
        heapq.heappush(self._free, bit.bit_length() - 1)
        self._shared.clear()

    def restart(self, holder: Holder) -> None:
        """The holder is another process now: no agent lives there, and nothing is on its way.

        The blocks go with its first report, in parts: `update` with `whole`.
        """
        self.expire(holder, inf)
        for key in [key for key, seat in self._agents.items() if seat.replica == holder]:
            del self._agents[key]

    def held(self, holder: Holder) -> set[bytes]:
        """Ids of all blocks that the holder has reported. Searches the whole directory."""
        return set(self._scan(holder)) - self._expected.get(holder, {}).keys()

    def runs(self, blocks: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """How many of `blocks` each holder has, counted from the first up to one that it has not.

        Expected blocks count. The array goes by `index`, and has a zero at its end, where -1 points.
        """
        top = len(self._bits) + len(self._free)
        runs = np.zeros(top + 1, np.int64)
        left = self._holders.get(blocks[0], 0) if blocks else 0
        if left:
            for index, mask in enumerate(map(self._holders.get, blocks, repeat(0))):
                if mask != left:
                    both = left & mask
                    if both != left:
                        _note(runs, left ^ both, index)
                        if not both:
                            return runs
                        left = both
            _note(runs, left, len(blocks))
        return runs

    def seat(self, agent: str, model: str) -> Seat | None:
        """Where the agent's last request to the model went, if that is known."""
        return self._agents.get((agent, model))

    def set_seat(self, agent: str, model: str, seat: Seat) -> None:
        self._agents[agent, model] = seat

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
        places = [bit.bit_length() - 1 for bit in self._names]
        assert sorted(places + self._free) == list(range(len(places) + len(self._free))), "each place is somebody's"
        assert {seat.replica for seat in self._agents.values()} <= set(self._bits)

    def _share(self, mask: int) -> int:
        """The integer that other blocks with the same holders have: with many holders it is longer than an id."""
        if len(self._shared) >= SHARED_MAX:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _confirm(self, holder: Holder, blocks: Sequence[bytes]) -> None:
        """Something is known of `blocks`: they are not only expected."""
        expected = self._expected[holder]
        if expected:
            for block in blocks:
                expected.pop(block, None)

    def _scan(self, holder: Holder) -> list[bytes]:
        bit = self._bits.get(holder, 0)
        return [block for block, mask in self._holders.items() if mask & bit]


def parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`items` in pieces of `PART_BLOCKS`; one empty piece of none."""
    return (items[start : start + PART_BLOCKS] for start in range(0, len(items) or 1, PART_BLOCKS))


def _note(runs: npt.NDArray[np.int64], mask: int, blocks: int) -> None:
    """The holders of `mask` have `blocks` blocks."""
    if mask.bit_count() <= FEW_BITS:
        while mask:
            bit = mask & -mask
            runs[bit.bit_length() - 1] = blocks
            mask ^= bit
    else:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        bits = np.unpackbits(packed, bitorder="little", count=mask.bit_length())
        runs[: len(bits)][bits.view(bool)] = blocks
