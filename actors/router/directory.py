"""The directory: which replicas and disks hold which blocks, and which replica answered an agent last. Pure; built from
reports.

A *holder* is a replica's memory, by the replica's name, or a node's `Disk`. Each holder is a bit, and a block's holders
are one integer: a prefix's holders are found with one look-up and one `and` per block, however many there are. Blocks
with equal holders share the integer. Memory is bounded by what holders report, and `agents_max`.
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
"""Blocks of a report that are processed without a pause: 1 to 2 ms."""

SHARED_MAX = 65_536
"""The most integers that are remembered for sharing."""

FEW_BITS = 24
"""Masks with more bits than this are faster to unpack as a whole than bit by bit."""


class Disk(NamedTuple):
    """A node's disk, as a holder of blocks."""

    node: str


Holder = str | Disk


class Seat(NamedTuple):
    """The replica of an agent's last request to a model, its prompt tokens, and the agent's home epoch then."""

    replica: str
    tokens: int
    epoch: int = 0


class Directory:
    """Blocks by id and agents by key.

    Args:
        agents_max: how many agents are remembered; the oldest entries are dropped first.
    """

    def __init__(self, agents_max: int = 100_000) -> None:
        self._bits: dict[Holder, int] = {}
        self._names: dict[int, Holder] = {}
        self._free: list[int] = []
        """Free bit positions below the highest used one, a heap."""
        self._counts: dict[Holder, int] = {}
        self._holders: dict[bytes, int] = {}
        self._shared: dict[int, int] = {}
        self._expected: dict[Holder, dict[bytes, float]] = {}
        """By holder the blocks that count as held before a report has named them, and until when."""
        self._agents: FIFOCache[tuple[str, str], Seat] = FIFOCache(agents_max)

    @property
    def blocks(self) -> int:
        """Number of blocks that some holder has."""
        return len(self._holders)

    @property
    def agents(self) -> int:
        return len(self._agents)

    @property
    def holders(self) -> set[Holder]:
        """All known holders."""
        return set(self._bits)

    def count(self, holder: Holder) -> int:
        """Returns how many blocks a holder has, or is expected to have."""
        return self._counts.get(holder, 0)

    def index(self, holder: Holder) -> int:
        """Returns the holder's index in `runs`, which stays the same until it is forgotten; -1 if it is unknown."""
        return self._bits.get(holder, 0).bit_length() - 1

    def join(self, holder: Holder) -> int:
        """Adds a holder if it is unknown. Returns its bit."""
        bit = self._bits.get(holder)
        if bit is None:
            # The lowest free one, so that the integers stay short.
            bit = 1 << (heapq.heappop(self._free) if self._free else len(self._bits))
            self._bits[holder], self._names[bit], self._counts[holder], self._expected[holder] = bit, holder, 0, {}
        return bit

    def announce(self, holder: Holder, blocks: Sequence[bytes]) -> None:
        """Adds blocks to a holder."""
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
        """Removes blocks from a holder."""
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
        """Counts blocks as held that a replica will have soon, until it reports them, or `until`."""
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
        """Removes expected blocks that no report has named in time."""
        self.retract(holder, [block for block, until in self._expected.get(holder, {}).items() if until <= now])

    def update(
        self, holder: Holder, announced: Sequence[bytes], retracted: Sequence[bytes], *, whole: bool
    ) -> Iterator[None]:
        """Applies a holder's report, and pauses after every `PART_BLOCKS`; the tables are consistent at every pause.

        Args:
            whole: whether the holder has only the `announced` blocks.
        """
        kept: set[bytes] = set()
        for part in parts(announced):
            self.announce(holder, part)
            if whole:
                kept.update(part)
            yield
        if whole and self._counts.get(holder, 0) > len(kept):
            # Rare: searches the whole directory without a pause.
            kept |= self._expected[holder].keys()
            others = [block for block in self._scan(holder) if block not in kept]
            for part in parts(others):
                yield
                self.retract(holder, part)
        for part in parts(retracted):
            self.retract(holder, part)
            yield

    def forget(self, holder: Holder) -> None:
        """Forgets a holder with its blocks, and the agents that were answered there."""
        bit = self._bits.get(holder)
        if bit is None:
            return
        self.restart(holder)
        self.retract(holder, self._scan(holder))
        del self._bits[holder], self._names[bit], self._counts[holder], self._expected[holder]
        heapq.heappush(self._free, bit.bit_length() - 1)
        self._shared.clear()

    def restart(self, holder: Holder) -> None:
        """Forgets a holder's agents and expected blocks, because it is another process now.

        `update` with the new process's first report removes the old blocks, in parts.
        """
        self.expire(holder, inf)
        for key in [key for key, seat in self._agents.items() if seat.replica == holder]:
            del self._agents[key]

    def held(self, holder: Holder) -> set[bytes]:
        """Returns the ids of all blocks that the holder has reported. Searches the whole directory."""
        return set(self._scan(holder)) - self._expected.get(holder, {}).keys()

    def runs(self, blocks: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Returns how many of the leading `blocks` each holder has, including expected ones.

        Returns:
            `(highest index + 2,) int64` by `index`, with a 0 at its end for index -1.
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
        """Returns the agent's last request to the model; None if it is unknown."""
        return self._agents.get((agent, model))

    def set_seat(self, agent: str, model: str, seat: Seat) -> None:
        """Remembers the agent's last request to the model."""
        self._agents[agent, model] = seat

    def check(self) -> None:
        """Checks all tables.

        Raises:
            AssertionError: they disagree.
        """
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
        """Returns the shared integer of equal value: with many holders an integer is longer than a block id."""
        if len(self._shared) >= SHARED_MAX:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _confirm(self, holder: Holder, blocks: Sequence[bytes]) -> None:
        """Notes that a report named `blocks`, so that they are not only expected."""
        expected = self._expected[holder]
        if expected:
            for block in blocks:
                expected.pop(block, None)

    def _scan(self, holder: Holder) -> list[bytes]:
        bit = self._bits.get(holder, 0)
        return [block for block, mask in self._holders.items() if mask & bit]


def parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yields `items` in pieces of `PART_BLOCKS`; one empty piece if there are none."""
    return (items[start : start + PART_BLOCKS] for start in range(0, len(items) or 1, PART_BLOCKS))


def _note(runs: npt.NDArray[np.int64], mask: int, blocks: int) -> None:
    """Sets `runs` `(holders + 1,) int64` to `blocks` for the holders in `mask`."""
    if mask.bit_count() <= FEW_BITS:
        while mask:
            bit = mask & -mask
            runs[bit.bit_length() - 1] = blocks
            mask ^= bit
    else:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        bits = np.unpackbits(packed, bitorder="little", count=mask.bit_length())
        runs[: len(bits)][bits.view(bool)] = blocks
