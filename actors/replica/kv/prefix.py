"""The prefix cache: KV of finished or prefilled sequences, found again by block id. Pure: it never reads the values.

Whole blocks are shared by id. The open tail after a sequence's last whole block is cached under its parent block's id
and matched token by token, so that even a short conversation is not prefilled twice.

Not every cached prefix can be reused by every layer: `ReuseRule` says what sliding-window and recurrent layers need,
and `covers` checks it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import adds_to
from .shares import MemoryShares

TAILS_PER_BLOCK = 256
"""How many tails after one block are cached: the latest ones."""

RECOUNT_STEP = 4096
"""How many entries `recount` checks at a time, which takes milliseconds."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class ReuseRule:
    """What a model's layers need besides the KV of full attention.

    Attributes:
        window: how many of the last tokens sliding-window layers must have; 0 if there are no such layers.
        recurrent: whether recurrent layers need a snapshot exactly at the prefix's end.
    """

    window: int = 0
    recurrent: bool = False


@dataclass(frozen=True)
class PrefixKV(Generic[Value]):
    """The KV of consecutive tokens, of `nbytes` bytes, of which `pool_bytes` are in `slots` slots of the block pool.
    Window layers lack the first `window_from` tokens. `snapshot` says whether it has the recurrent state after the last
    token."""

    value: Value
    nbytes: int
    window_from: int = 0
    snapshot: bool = False
    pool_bytes: int = 0
    slots: int = 0


@dataclass
class _KeptEntry(Generic[Value]):
    tokens: list[int]
    kept: PrefixKV[Value]
    tenant: str = ""
    age: int = 0
    prepared: bool = False


@dataclass(frozen=True)
class Hit(Generic[Value]):
    """The reusable prefix of a prompt: whole `blocks`, then the first `tail_tokens` of `tail`."""

    blocks: list[Value] = field(default_factory=list)
    tail: Value | None = None
    tail_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + self.tail_tokens


def covers(rule: ReuseRule, parts: Sequence[tuple[PrefixKV[Value], int]], count: int, used: int) -> bool:
    """Whether all layers can reuse a prefix. It has the first `count` of `parts` (KV and its number of tokens); the
    last of these is cut to `used` tokens."""
    last, length = parts[count - 1]
    if rule.recurrent and not (last.snapshot and used == length):
        return False
    wanted = rule.window
    for index in range(count - 1, -1, -1):
        if wanted <= 0:
            break
        stop = used if index == count - 1 else parts[index][1]
        if parts[index][0].window_from > max(0, stop - wanted):
            return False
        wanted -= stop
    return True


def _ensure(holds: bool, what: str) -> None:
    # `assert` may be switched off.
    if not holds:
        raise AssertionError(what)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns how many leading tokens are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


class PrefixCache(Generic[Value]):
    """An LRU cache of blocks and tails with at most `bytes_max` bytes, not counting pinned entries.

    If a tenant has a limit of its own, its unpinned entries take at most that: its own oldest entries are evicted
    first. `drain_events` returns added and removed block ids for the router's directory.

    KV may be *prepared*: computed before any sequence needs it. Until one does, it is evicted before all other KV.

    Attributes:
        nbytes, pool_bytes: as in `PrefixKV`, of all entries.
        loose_bytes, loose_slots: the same of entries that are not pinned.
        prepared_tokens: tokens of all blocks that were prepared; `used_tokens` of them were used by a sequence, and
            `wasted_tokens` were evicted before that.
    """

    def __init__(self, bytes_max: int, rule: ReuseRule = ReuseRule()) -> None:
        self.bytes_max = bytes_max
        self._rule = rule
        self.nbytes = self.pool_bytes = 0
        self.loose_bytes = self.loose_slots = 0
        self.blocks = 0
        self.prepared_tokens = self.used_tokens = self.wasted_tokens = 0
        self._inserted = 0
        # A block's key is (id, None), a tail's (parent id, its tokens). One order for both, the oldest first.
        self._entries: OrderedDict[tuple[bytes, tuple[int, ...] | None], _KeptEntry[Value]] = OrderedDict()
        # Sorted, so that bisection ends next to the tail with the longest common prefix.
        self._tails: dict[bytes, list[tuple[int, ...]]] = {}
        # Keys that must not be evicted, by holder, and the number of holders of each.
        self._pins: dict[str, set[tuple[bytes, tuple[int, ...] | None]]] = {}
        self._pinned: Counter[tuple[bytes, tuple[int, ...] | None]] = Counter()
        self._shares: MemoryShares[tuple[bytes, tuple[int, ...] | None]] = MemoryShares()
        self._announced: set[bytes] = set()
        self._retracted: set[bytes] = set()

    def limit(self, tenant: str, bytes_max: int | None) -> None:
        """Sets a tenant's limit in bytes; None removes it. Only the first limit of a tenant reads all entries."""
        known = self._shares.bytes_max(tenant)
        if bytes_max == known:
            return
        if bytes_max is None:
            self._shares.end(tenant)
            return
        if known is None:
            entries = ((key, entry) for key, entry in self._entries.items() if entry.tenant == tenant)
            self._shares.begin(tenant, bytes_max, ((key, self._loose(key, entry)) for key, entry in entries))
        else:
            self._shares.change(tenant, bytes_max)
        self._fit(tenant)

    def resize(self, bytes_max: int) -> None:
        """Changes how many unpinned bytes the cache may have."""
        self.bytes_max = bytes_max
        self._evict()

    def most(self, tenant: str) -> int:
        """Returns how many unpinned bytes a tenant may have."""
        own = self._shares.bytes_max(tenant)
        return self.bytes_max if own is None else min(own, self.bytes_max)

    def spare_bytes(self, tenant: str) -> int:
        """Returns how many bytes of a tenant's KV may be added before anything is evicted."""
        spare, own = self.bytes_max - self.loose_bytes, self._shares.bytes_max(tenant)
        return spare if own is None else min(spare, -self._shares.excess(tenant))

    @property
    def is_plain(self) -> bool:
        """Whether every prefix of a cached entry can be reused: all layers are of full attention."""
        return self._rule == ReuseRule()

    def block_ids(self) -> list[bytes]:
        return [block for block, tail in self._entries if tail is None]

    def __contains__(self, block: bytes) -> bool:
        return (block, None) in self._entries

    def lacks(self, block: bytes, *, snapshot: bool) -> bool:
        """Whether `put_blocks` would add KV of this block, with or without a snapshot."""
        entry = self._entries.get((block, None))
        if entry is None:
            return True
        return (snapshot and self._rule.recurrent and not entry.kept.snapshot) or entry.kept.window_from > 0

    def leading(self, block_ids: Sequence[bytes]) -> int:
        """Returns how many leading blocks are cached: an estimate of `match` that does not compare tokens."""
        return next((index for index, block in enumerate(block_ids) if block not in self), len(block_ids))

    def peek(self, root: bytes, block_ids: Sequence[bytes], prompt: Sequence[int]) -> int:
        """Returns about how many leading tokens of the prompt `match` would find if all layers were of full attention.
        May be called from any thread."""
        # The last token is always computed, so a block that ends with it is not matched.
        most = len(prompt) - 1
        whole = self.leading(block_ids[: most // BLOCK_TOKENS])
        rest = prompt[whole * BLOCK_TOKENS : min(most, (whole + 1) * BLOCK_TOKENS)]
        tails = self._candidates(block_ids[whole - 1] if whole else root, rest)
        return whole * BLOCK_TOKENS + max((used for _, used in tails), default=0)

    def take(self, block: bytes) -> PrefixKV[Value] | None:
        """Returns a cached block without marking it as used; None if it is not cached."""
        entry = self._entries.get((block, None))
        return None if entry is None else entry.kept

    def take_tail(self, parent: bytes, tokens: Sequence[int]) -> PrefixKV[Value] | None:
        """Returns the cached tail of exactly these tokens without marking it as used; None if it is not cached."""
        entry = self._entries.get((parent, tuple(tokens)))
        return None if entry is None else entry.kept

    @property
    def holders(self) -> list[str]:
        """Names of the holders that have pinned something."""
        return list(self._pins)

    def pin(self, holder: str, root: bytes, block_ids: Sequence[bytes], tails: Iterable[Sequence[int]]) -> None:
        """Protects these blocks and the tails after the last one from eviction until `unpin`. They need not be cached
        yet."""
        parent = block_ids[-1] if block_ids else root
        held = self._pins.setdefault(holder, set())
        new = ({(block, None) for block in block_ids} | {(parent, tuple(tail)) for tail in tails}) - held
        held |= new
        self._count(new - self._pinned.keys(), -1)
        self._pinned.update(new)

    def unpin(self, holder: str) -> None:
        """Releases all pins of a holder, if it has any."""
        held = self._pins.pop(holder, None)
        if held is None:
            return
        for key in held:
            self._pinned[key] -= 1
            if not self._pinned[key]:
                del self._pinned[key]
        for tenant in self._count(held - self._pinned.keys(), 1):
            self._fit(tenant)
        self._evict()

    def drop(self, root: bytes, block_ids: Iterable[bytes], first: Sequence[int]) -> int:
        """Drops these blocks and the tails after them, and also the tails after `root` with which `first` begins.

        Returns:
            The freed bytes.
        """
        before = self.nbytes
        for tail in self.ends(root, first):
            self._remove((root, tail))
        for block in block_ids:
            for tail in list(self._tails.get(block, ())):
                self._remove((block, tail))
            if block in self:
                self._remove((block, None))
        return before - self.nbytes

    def drop_prepared(self, block_ids: Iterable[bytes]) -> int:
        """Drops those of the blocks that were prepared and not used. Returns the freed bytes."""
        before = self.nbytes
        for block in block_ids:
            entry = self._entries.get((block, None))
            if entry is not None and entry.prepared:
                self._remove((block, None))
        return before - self.nbytes

    def ends(self, root: bytes, first: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the tails after `root` with which `first` begins."""
        return [tail for tail in self._tails.get(root, ()) if tail == tuple(first[: len(tail)])]

    def match(
        self, root: bytes, block_ids: Sequence[bytes], prompt: list[int], tokens_max: int, *, uses: bool = True
    ) -> Hit[Value]:
        """Finds the longest reusable prefix of `prompt`, of at most `tokens_max` tokens, in O(blocks) look-ups.

        Args:
            uses: whether it counts as used.
        """
        blocks, parent, tail, used = self._search(root, block_ids, prompt, tokens_max)
        if uses:
            if tail:
                self._use((parent, tail))
            self.touch(block_ids[: len(blocks)])
        return Hit(blocks, self._entries[(parent, tail)].kept.value if tail else None, used)

    def reusable_tokens(self, root: bytes, block_ids: Sequence[bytes], prompt: list[int]) -> int:
        """Returns how many leading tokens of the prompt `match` would find, without marking them as used."""
        blocks, _, _, used = self._search(root, block_ids, prompt, len(prompt) - 1)
        return len(blocks) * BLOCK_TOKENS + used

    def _search(
        self, root: bytes, block_ids: Sequence[bytes], prompt: list[int], tokens_max: int
    ) -> tuple[list[Value], bytes, tuple[int, ...], int]:
        """Returns the blocks to reuse, the id of the last one (or the root), the tail after it, and how many of the
        tail's tokens to reuse; () and 0 without a tail."""
        parts: list[tuple[PrefixKV[Value], int]] = []
        for index, block in enumerate(block_ids):
            stop = (index + 1) * BLOCK_TOKENS
            entry = self._entries.get((block, None))
            if entry is None or stop > tokens_max or entry.tokens != prompt[stop - BLOCK_TOKENS : stop]:
                break
            parts.append((entry.kept, BLOCK_TOKENS))
        # If window or recurrent layers lack something at the end of the last block, they may have it before.
        for whole in range(len(parts), -1, -1):
            parent, start = block_ids[whole - 1] if whole else root, whole * BLOCK_TOKENS
            for key, used in self._candidates(parent, prompt[start : min(tokens_max, start + BLOCK_TOKENS)]):
                entry = self._entries[(parent, key)]
                if covers(self._rule, [*parts[:whole], (entry.kept, len(key))], whole + 1, used):
                    return [kept.value for kept, _ in parts[:whole]], parent, key, used
            if whole and covers(self._rule, parts, whole, BLOCK_TOKENS):
                return [kept.value for kept, _ in parts[:whole]], parent, (), 0
        return [], root, (), 0

    def put_blocks(
        self,
        chain: Sequence[bytes],
        new: Iterable[tuple[int, Sequence[int], PrefixKV[Value]]],
        tenant: str = "",
        *,
        prepared: bool = False,
    ) -> None:
        """Caches whole blocks. The first copy of an id stays, unless a later one adds to it.

        Args:
            chain: the ids of a sequence's blocks, from its first.
            new: (index in `chain`, tokens, KV) of blocks that may not be cached yet.
            tenant: their owner.
            prepared: whether no sequence needs them yet.
        """
        most = self.most(tenant)
        for index, tokens, kept in new:
            block = chain[index]
            entry = self._entries.get((block, None))
            large = kept.nbytes > most and not self._is_pinned((block, None))
            if large or (entry is not None and not adds_to(kept, entry.kept)):
                continue
            # What a sequence uses stays its own if more is prepared of it.
            ahead = prepared and (entry is None or entry.prepared)
            if entry is not None:
                self._remove((block, None))
            self._insert((block, None), _KeptEntry(list(tokens), kept, tenant, prepared=ahead))
            self.blocks += 1
            self._announced.add(block)
            self._retracted.discard(block)
            if ahead:
                self.prepared_tokens += BLOCK_TOKENS
                self._entries.move_to_end((block, None), last=False)
                self._shares.age(tenant, (block, None))
        if not prepared:
            self.touch(chain)
        self._fit(tenant)
        self._evict()

    def put_tail(
        self, root: bytes, chain: Sequence[bytes], tokens: Sequence[int], kept: PrefixKV[Value], tenant: str = ""
    ) -> None:
        """Caches the open tail after `chain`, unless a cached tail replaces it. Drops shorter tails that it
        replaces."""
        key, parent = tuple(tokens), chain[-1] if chain else root
        siblings = self._tails.get(parent, [])
        large = kept.nbytes > self.most(tenant) and not self._is_pinned((parent, key))
        if not key or large or key in siblings:
            return
        # With window or recurrent layers a longer tail may not be reusable up to a shorter one's end.
        if self.is_plain:
            if any(other[: len(key)] == key for other in siblings):
                return
            for other in [other for other in siblings if key[: len(other)] == other]:
                self._remove((parent, other))
        while len(siblings := self._tails.get(parent, [])) >= TAILS_PER_BLOCK:
            self._remove((parent, min(siblings, key=lambda other: self._entries[(parent, other)].age)))
        insort(self._tails.setdefault(parent, []), key)
        self._insert((parent, key), _KeptEntry(list(key), kept, tenant))
        self.touch(chain)
        self._fit(tenant)
        self._evict()

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the block ids (added, removed) since the last call."""
        events = sorted(self._announced), sorted(self._retracted)
        self._announced.clear()
        self._retracted.clear()
        return events

    def clear(self) -> None:
        """Drops all entries, also pinned ones."""
        for key in list(self._entries):
            self._remove(key)

    def reset(self) -> None:
        """Forgets everything, pins too, even if the tables are inconsistent. Earlier events are lost."""
        self._retracted.update(self.block_ids(), self._announced)
        for table in (self._entries, self._tails, self._pins, self._pinned, self._announced):
            table.clear()
        self._shares.clear()
        self.nbytes = self.pool_bytes = self.loose_bytes = self.loose_slots = self.blocks = 0

    def check(self) -> None:
        """Checks all counts and tables.

        Raises:
            AssertionError: they disagree.
        """
        for _ in self.recount():
            pass

    def recount(self) -> Iterator[None]:
        """Does `check` in steps of `RECOUNT_STEP` entries; the cache must not change between them."""
        nbytes = pooled = blocks = loose = slots = 0
        tails: dict[bytes, int] = {}
        shares: dict[str, tuple[int, list[tuple[bytes, tuple[int, ...] | None]]]] = {}
        for number, ((parent, tail), entry) in enumerate(self._entries.items(), 1):
            nbytes, pooled = nbytes + entry.kept.nbytes, pooled + entry.kept.pool_bytes
            if not self._is_pinned((parent, tail)):
                loose, slots = loose + entry.kept.nbytes, slots + entry.kept.slots
            if self._shares.bytes_max(entry.tenant) is not None:
                counted, keys = shares.get(entry.tenant, (0, []))
                keys.append((parent, tail))
                shares[entry.tenant] = counted + self._loose((parent, tail), entry), keys
            if tail is None:
                blocks += 1
                _ensure(len(entry.tokens) == BLOCK_TOKENS, "a block has another length")
            else:
                tails[parent] = tails.get(parent, 0) + 1
                siblings = self._tails.get(parent, [])
                at = bisect_left(siblings, tail)
                _ensure(siblings[at : at + 1] == [tail], "a tail cannot be found")
            if number % RECOUNT_STEP == 0:
                yield
        _ensure(nbytes == self.nbytes, f"{nbytes} bytes are kept, not {self.nbytes}")
        _ensure(pooled == self.pool_bytes, f"{pooled} bytes are in the pool, not {self.pool_bytes}")
        _ensure((loose, slots) == (self.loose_bytes, self.loose_slots), "what is not pinned is counted wrong")
        _ensure(blocks == self.blocks, f"{blocks} blocks are kept, not {self.blocks}")
        _ensure(loose <= self.bytes_max, f"{loose} bytes are kept, of {self.bytes_max}")
        for tenant, counted in self._shares.counted().items():
            _ensure(counted == shares.get(tenant, (0, [])), f"what {tenant} has is counted wrong")
            _ensure(counted[0] <= (self._shares.bytes_max(tenant) or 0), f"{counted[0]} bytes of {tenant} are kept")
        for number, (parent, siblings) in enumerate(self._tails.items(), 1):
            _ensure(tails.get(parent) == len(siblings), "a tail is counted that is not there")
            _ensure(all(one < two for one, two in pairwise(siblings)), "tails are out of order")
            if number % RECOUNT_STEP == 0:
                yield
        _ensure(len(tails) == len(self._tails), "a tail is counted that is not there")
        pinned = Counter(key for held in self._pins.values() for key in held)
        _ensure(pinned == self._pinned, "pins are counted wrong")
        _ensure(all(block in self for block in self._announced), "a block is announced that is not there")
        _ensure(not any(block in self for block in self._retracted), "a block is retracted that is there")

    def _candidates(self, parent: bytes, rest: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yields tails after `parent` and how many of their tokens `rest` begins with, the most first."""
        siblings = self._tails.get(parent, [])
        if not self._rule.recurrent:
            at = bisect_left(siblings, tuple(rest))
            near = [(common_length(tail, rest), tail) for tail in siblings[max(0, at - 1) : at + 1]]
            common, tail = max(near, default=(0, ()))
            if common:
                yield tail, common
        if not self.is_plain:
            whole = [tail for tail in siblings if len(tail) <= len(rest) and tail == tuple(rest[: len(tail)])]
            for tail in reversed(whole):
                yield tail, len(tail)

    def touch(self, chain: Sequence[bytes]) -> None:
        """Marks a chain as most recently used, its begin last: without the begin the rest cannot be reused. What was
        prepared of it no longer counts as that."""
        for block in reversed(chain):
            entry = self._entries.get((block, None))
            if entry is not None:
                self.used_tokens += BLOCK_TOKENS * entry.prepared
                entry.prepared = False
                self._use((block, None))

    def _use(self, key: tuple[bytes, tuple[int, ...] | None]) -> None:
        self._entries.move_to_end(key)
        if self._shares:
            self._shares.use(self._entries[key].tenant, key)

    def _insert(self, key: tuple[bytes, tuple[int, ...] | None], entry: _KeptEntry[Value]) -> None:
        self._inserted += 1
        entry.age = self._inserted
        self._entries[key] = entry
        self._tally(entry, 1, loose=not self._is_pinned(key))
        self._shares.add(entry.tenant, key, self._loose(key, entry))

    def _remove(self, key: tuple[bytes, tuple[int, ...] | None]) -> None:
        entry = self._entries.pop(key)
        self._tally(entry, -1, loose=not self._is_pinned(key))
        self._shares.remove(entry.tenant, key, self._loose(key, entry))
        block, tail = key
        self.wasted_tokens += BLOCK_TOKENS * entry.prepared
        if tail is None:
            self.blocks -= 1
            self._retracted.add(block)
            self._announced.discard(block)
            return
        siblings = self._tails[block]
        siblings.remove(tail)
        if not siblings:
            del self._tails[block]

    def _tally(self, entry: _KeptEntry[Value], sign: int, *, loose: bool) -> None:
        """Counts an entry that comes (`sign` 1) or goes (-1)."""
        self.nbytes += sign * entry.kept.nbytes
        self.pool_bytes += sign * entry.kept.pool_bytes
        if loose:
            self._tally_loose(entry, sign)

    def _tally_loose(self, entry: _KeptEntry[Value], sign: int) -> None:
        self.loose_bytes += sign * entry.kept.nbytes
        self.loose_slots += sign * entry.kept.slots

    def _is_pinned(self, key: tuple[bytes, tuple[int, ...] | None]) -> bool:
        return key in self._pinned

    def _loose(self, key: tuple[bytes, tuple[int, ...] | None], entry: _KeptEntry[Value]) -> int:
        """Returns the bytes of the entry that count for its tenant."""
        return 0 if self._is_pinned(key) else entry.kept.nbytes

    def _count(self, keys: Iterable[tuple[bytes, tuple[int, ...] | None]], sign: int) -> list[str]:
        """Counts entries that were unpinned (`sign` 1), or uncounts ones that were pinned (-1). Returns their
        tenants."""
        entries = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        for entry in entries:
            self._tally_loose(entry, sign)
            self._shares.count(entry.tenant, sign * entry.kept.nbytes)
        return list(dict.fromkeys(entry.tenant for entry in entries))

    def _fit(self, tenant: str) -> None:
        """Evicts the tenant's own oldest entries until the rest is within its limit."""
        excess, victims = self._shares.excess(tenant), []
        if excess <= 0:
            return
        for key in self._shares.oldest(tenant):
            if excess <= 0:
                break
            if not self._is_pinned(key):
                victims.append(key)
                excess -= self._entries[key].kept.nbytes
        for key in victims:
            self._remove(key)

    def _evict(self) -> None:
        while self.loose_bytes > self.bytes_max:
            key = next(iter(self._entries))
            if self._is_pinned(key):
                # It is pinned: it becomes the latest, so that the next search does not meet it again.
                self._use(key)
            else:
                self._remove(key)
