"""KV that finished or prefilled rows left behind, found again by block id. Pure: values are opaque to it.

Whole blocks are shared by id. The open tail after a row's last whole block is kept too, under its parent block's id:
a conversation that goes on finds it token by token, so even a short one is not prefilled twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..kv_store.blocks import BLOCK_TOKENS

TAILS_PER_BLOCK = 256
"""How many different continuations of one block are kept, the latest first."""

Value = TypeVar("Value")


@dataclass
class _Entry(Generic[Value]):
    tokens: list[int]
    value: Value
    nbytes: int


@dataclass(frozen=True)
class Hit(Generic[Value]):
    """What a prompt can reuse: `blocks` whole ones, then `tail_tokens` of `tail`."""

    blocks: list[Value] = field(default_factory=list)
    tail: Value | None = None
    tail_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.tail_tokens


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


class PrefixCache(Generic[Value]):
    """Least recently used blocks and tails within `bytes_max`.

    `announced` and `retracted` collect block ids that came and went since `drain_events`, for the router's directory.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self.blocks = 0
        # A block is keyed (id, None); a tail (parent id, its tokens). One order for both, oldest first.
        self._entries: OrderedDict[tuple[bytes, tuple[int, ...] | None], _Entry[Value]] = OrderedDict()
        self._tails: dict[bytes, list[tuple[int, ...]]] = {}
        self._announced: set[bytes] = set()
        self._retracted: set[bytes] = set()

    def block_ids(self) -> list[bytes]:
        return [block for block, tail in self._entries if tail is None]

    def __contains__(self, block: bytes) -> bool:
        return (block, None) in self._entries

    def match(self, root: bytes, block_ids: Sequence[bytes], prompt: Sequence[int], tokens_max: int) -> Hit[Value]:
        """The longest reusable prefix of `prompt`, at most `tokens_max` tokens, in O(blocks) look-ups."""
        found: list[Value] = []
        touched: list[bytes] = []
        parent = root
        for index, block in enumerate(block_ids):
            stop = (index + 1) * BLOCK_TOKENS
            entry = self._entries.get((block, None))
            if entry is None or stop > tokens_max or entry.tokens != list(prompt[stop - BLOCK_TOKENS : stop]):
                break
            found.append(entry.value)
            touched.append(block)
            parent = block
        rest = prompt[len(found) * BLOCK_TOKENS : tokens_max]
        tail, length = self._best_tail(parent, rest)
        self._touch(touched)
        return Hit(found, tail, length)

    def put_blocks(self, chain: Sequence[bytes], new: Iterable[tuple[int, Sequence[int], Value, int]]) -> None:
        """Keep whole blocks. The first copy of an id wins.

        Args:
            chain: the ids of a sequence's blocks, from its first.
            new: (index in `chain`, tokens, value, bytes) of those that may not be kept yet.
        """
        for index, tokens, value, nbytes in new:
            block = chain[index]
            if block in self or nbytes > self.bytes_max:
                continue
            self._insert((block, None), _Entry(list(tokens), value, nbytes))
            self.blocks += 1
            self._announced.add(block)
            self._retracted.discard(block)
        self._touch(chain)
        self._evict()

    def put_tail(self, root: bytes, chain: Sequence[bytes], tokens: Sequence[int], value: Value, nbytes: int) -> None:
        """Keep the open tail after `chain`, unless a kept one begins with it; shorter ones that it covers go."""
        key, parent = tuple(tokens), chain[-1] if chain else root
        siblings = list(self._tails.get(parent, ()))
        if not key or nbytes > self.bytes_max or any(other[: len(key)] == key for other in siblings):
            return
        covered = [other for other in siblings if key[: len(other)] == other]
        kept = [other for other in siblings if other not in covered]
        for other in covered + kept[: max(0, len(kept) + 1 - TAILS_PER_BLOCK)]:
            self._remove((parent, other))
        self._tails.setdefault(parent, []).append(key)
        self._insert((parent, key), _Entry(list(key), value, nbytes))
        self._touch(chain)
        self._evict()

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """(announced, retracted) block ids since the last call."""
        events = sorted(self._announced), sorted(self._retracted)
        self._announced.clear()
        self._retracted.clear()
        return events

    def clear(self) -> None:
        for key in list(self._entries):
            self._remove(key)

    def check(self) -> None:
        """Raise AssertionError where the counts and tables disagree."""
        assert self.nbytes == sum(entry.nbytes for entry in self._entries.values()) <= self.bytes_max
        assert self.blocks == len(self.block_ids())
        tails = {(parent, tail) for parent, siblings in self._tails.items() for tail in siblings}
        assert tails == {key for key in self._entries if key[1] is not None}
        assert all(self._tails.values())

    def _best_tail(self, parent: bytes, rest: Sequence[int]) -> tuple[Value | None, int]:
        best: tuple[int, ...] | None = None
        length = 0
        for tail in self._tails.get(parent, ()):
            common = _common(tail, rest)
            if common > length:
                best, length = tail, common
        if best is None:
            return None, 0
        self._entries.move_to_end((parent, best))
        return self._entries[(parent, best)].value, length

    def _touch(self, chain: Sequence[bytes]) -> None:
        """Make a chain the most recently used, its end less than its beginning: without that, the rest is of no use."""
        for block in reversed(chain):
            if block in self:
                self._entries.move_to_end((block, None))

    def _insert(self, key: tuple[bytes, tuple[int, ...] | None], entry: _Entry[Value]) -> None:
        self._entries[key] = entry
        self.nbytes += entry.nbytes

    def _remove(self, key: tuple[bytes, tuple[int, ...] | None]) -> None:
        entry = self._entries.pop(key)
        self.nbytes -= entry.nbytes
        block, tail = key
        if tail is None:
            self.blocks -= 1
            self._retracted.add(block)
            self._announced.discard(block)
            return
        siblings = self._tails[block]
        siblings.remove(tail)
        if not siblings:
            del self._tails[block]

    def _evict(self) -> None:
        while self.nbytes > self.bytes_max:
            self._remove(next(iter(self._entries)))
