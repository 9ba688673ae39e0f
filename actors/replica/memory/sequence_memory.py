"""Sequences' KV in memory: copies it from the executor into the prefix cache, and finds it again."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import Any

from ...protocol.block_ids import BLOCK_TOKENS, block_ids
from ...protocol.entries import tail_id
from ...protocol.replica_messages import GenerateRequest
from ..execution.batch import Batch
from ..execution.executor import BatchExecutor
from ..execution.media.language_inputs import SequencePictures
from ..execution.sampling.grammar import SequenceGrammar
from ..kv.caches import ModelCacheSpec, PooledBlock, Slab
from ..kv.prefix import Hit, PrefixCache, PrefixKV, covers
from .sequence_span import SequenceSpan

Piece = Slab | PooledBlock

Found = tuple[Tokens[int], PrefixKV[Piece]]
"""Tokens and their KV."""


@dataclass
class Sequence:
    """A request with its tokens so far; pictures' tokens are their media token ids.

    Attributes:
        tokens: the prompt and the generated tokens.
        ids: block ids of its first tokens.
        emitted: how many tokens were generated here.
        kept: how many of `ids` have been offered to the prefix cache.
        cached: how many tokens the first admission reused; None before it.
        tail: the open tail that was cached last.
        prompt_tail: the prompt's open tail, if the answer filled its block.
        prompt_end: the prompt's open tail with a snapshot of recurrent layers, up to where later prompts diverge.
        snapshots: blocks with a snapshot that are not on their way to disk yet; a state cannot be cut out later.
        grammar: what constrains the answer; None for nothing.
        submitted_at, placed_at: when it came and when it got its first place in the batch, by `time.monotonic`.
        span: of its request's trace.
        prepares: whether it is only a prompt that may come.
    """

    request: GenerateRequest
    tokens: list[int]
    ids: list[bytes]
    emitted: int = 0
    kept: int = 0
    cached: int | None = None
    tail: Found | None = None
    prompt_tail: Unsaved | None = None
    prompt_end: Unsaved | None = None
    snapshots: dict[bytes, PrefixKV[Piece]] = field(default_factory=dict)
    pictures: SequencePictures | None = None
    grammar: SequenceGrammar | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    placed_at: float | None = None
    span: SequenceSpan = field(default_factory=SequenceSpan)
    prepares: bool = False

    @property
    def queued_s(self) -> float | None:
        """For how long it waited for its first place; None before it has one."""
        return None if self.placed_at is None else self.placed_at - self.submitted_at

    @property
    def placed_s(self) -> float | None:
        """How long ago it got its first place; None before it has one."""
        return None if self.placed_at is None else time.monotonic() - self.placed_at

    @property
    def id(self) -> str:
        return self.request.request_id

    def given(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Returns tokens [start, stop) as the model gets them: with pictures' own token ids instead of media token
        ids."""
        tokens = self.tokens[start:stop]
        for media in self.request.media:
            first, last = max(media.start - start, 0), min(media.start + len(media.tokens) - start, len(tokens))
            if first < last:
                tokens[first:last] = media.tokens[first + start - media.start : last + start - media.start]
        return tokens

    def forget(self) -> None:
        """Forgets all KV that was cut out of its caches."""
        self.kept = 0
        self.tail = self.prompt_tail = self.prompt_end = None
        self.snapshots.clear()


def is_remembered(request: GenerateRequest) -> bool:
    """Whether a sequence becomes part of its agent's memory; of several choices only the first does."""
    return bool(request.agent) and request.reusable and request.sampling.choice == 0


@dataclass(frozen=True)
class Restored:
    """KV that was read back for a request.

    Attributes:
        first: index in the prompt of the first block.
        blocks: consecutive blocks.
        tails: tails after the last block.
    """

    first: int
    blocks: list[Found]
    tails: list[Found]


@dataclass(frozen=True)
class Unsaved:
    """KV that is to be written: a block, or the open tail after `parent` if `id` is None."""

    id: bytes | None
    parent: bytes
    tokens: Tokens[int]
    kept: PrefixKV[Any]


def copies_of(items: Tokens[Unsaved], batch: Batch) -> list[Unsaved]:
    """Returns the items with copies of their KV for the disk, which are being computed."""
    values = batch.copied([item.kept.value for item in items])
    return [replace(item, kept=replace(item.kept, value=value)) for item, value in zip(items, values, strict=True)]


class SequenceMemory:
    """The KV that sequences reuse and leave in memory. Caches nothing if the model's KV cannot be cut.

    Args:
        bytes_max: bytes for KV that is not pinned; None for as many as there is room for.
        writes: whether cached KV goes to disk.

    Attributes:
        room: returns how many bytes cached KV may have now, not counting pinned KV.
    """

    def __init__(
        self, spec: ModelCacheSpec, executor: BatchExecutor, bytes_max: int | None, *, writes: bool = False
    ) -> None:
        self._bytes_max = sys.maxsize if bytes_max is None else bytes_max
        self.room: Callable[[], int] = lambda: self._bytes_max
        self.prefixes: PrefixCache[Piece] = PrefixCache(self._bytes_max, spec.rule)
        self._spec = spec
        self._executor = executor
        # A placed sequence and the cache hold the same slots, so evicting them would free nothing. With other kinds of
        # layers, cached blocks have more than the sequence: windows that it has left behind, and snapshots.
        self._pins_sequences = spec.policy is not None and self.prefixes.is_plain
        self._block_bytes = spec.bytes_per_token * BLOCK_TOKENS
        self._writes = writes
        # Pin holders of KV that is not on disk yet.
        self._writers: set[str] = set()

    def _keeps(self, sequence: Sequence) -> bool:
        """Whether any KV of the sequence may be cached."""
        return self._spec.reusable and (self._has_room(sequence.request) or self._on_disk(sequence))

    def _has_room(self, request: GenerateRequest) -> bool:
        # With room for less than one block nothing could be reused, and new entries would evict old ones.
        own = request.memory_bytes_max
        return min(self._bytes_max, self._bytes_max if own is None else own) >= self._block_bytes

    def _on_disk(self, sequence: Sequence) -> bool:
        return self._writes and self.is_written(sequence)

    def is_written(self, sequence: Sequence) -> bool:
        """Whether the sequence's KV goes to disk: it is an agent's, and its tenant may have a block there."""
        most = sequence.request.disk_bytes_max
        return not sequence.prepares and is_remembered(sequence.request) and (most is None or most >= self._block_bytes)

    def limit(self, request: GenerateRequest) -> None:
        """Sets the memory limit of the request's tenant."""
        self.prefixes.limit(request.tenant, request.memory_bytes_max)

    def pin(self, sequence: Sequence, tokens: int) -> None:
        """Pins the whole blocks of the sequence's first `tokens` tokens until `find` or `unpin`."""
        self.prefixes.pin(sequence.id, sequence.request.root_id, sequence.ids[: tokens // BLOCK_TOKENS], [])

    def unpin(self, sequence: Sequence) -> None:
        """Unpins what `pin` and `put_back` pinned."""
        self._unpin(sequence.id)

    def spare_tokens(self, request: GenerateRequest) -> int:
        """Returns how many whole blocks' tokens of a request memory can take without evicting anything; 0 if it keeps
        none."""
        if not self._spec.reusable or not self._has_room(request):
            return 0
        spare = self.prefixes.spare_bytes(request.tenant)
        return max(0, spare) // self._block_bytes * BLOCK_TOKENS

    def leave(self, sequence: Sequence) -> None:
        """Unpins the KV of a sequence that was preempted or ended."""
        self._unpin(sequence.id, _as_sequence(sequence))

    def fit(self) -> None:
        """Evicts the least recently used unpinned KV until the rest has room beside the sequences."""
        self.fit_into(self.room())

    def fit_into(self, room_bytes: int) -> bool:
        """As `fit`, if there are so many bytes of room. Returns whether anything was evicted."""
        before = self.prefixes.nbytes
        self.prefixes.resize(max(0, min(self._bytes_max, room_bytes)))
        return self.prefixes.nbytes != before

    def _unpin(self, *holders: str) -> None:
        # KV that was pinned may stay within the usual limit.
        self.prefixes.resize(self._bytes_max)
        for holder in holders:
            self.prefixes.unpin(holder)
        self.fit()

    def _pin_sequence(self, sequence: Sequence, start: int, stop: int) -> None:
        """Pins blocks [start, stop) of a sequence that holds them, until `leave`."""
        if self._pins_sequences and start < stop:
            self.prefixes.pin(_as_sequence(sequence), sequence.request.root_id, sequence.ids[start:stop], [])

    def peek(self, sequence: Sequence) -> int:
        """Returns about how many of the sequence's tokens `find` would find now."""
        root = sequence.request.root_id
        if sequence.emitted:
            # It was preempted: its generated tokens are part of its prompt now.
            sequence.ids = block_ids(root, sequence.tokens)
        return self.prefixes.peek(root, sequence.ids, sequence.tokens)

    def find(self, sequence: Sequence, tokens_max: int) -> Hit[Piece]:
        """Returns the reusable KV of the sequence's first `tokens_max` tokens."""
        if not self._spec.reusable:
            return Hit()
        try:
            root, ids, tokens = sequence.request.root_id, sequence.ids, sequence.tokens
            hit = self.prefixes.match(root, ids, tokens, tokens_max, uses=not sequence.prepares)
            usable = hit.tokens if sequence.pictures is None else sequence.pictures.usable(hit.tokens)
            if usable < hit.tokens:
                hit = self.prefixes.match(root, ids, tokens, usable)
            self._pin_sequence(sequence, 0, len(hit.blocks))
        finally:
            self._unpin(sequence.id)
        sequence.kept = len(hit.blocks)
        return hit

    def put_back(self, sequence: Sequence, restored: Restored) -> None:
        """Caches KV that was read back, whatever its size; it is pinned until `find`."""
        root = sequence.request.root_id
        # The chain of blocks before the tails, even if memory had all of them.
        chain = sequence.ids[: restored.first + len(restored.blocks)]
        self.prefixes.pin(sequence.id, root, chain, [tokens for tokens, _ in restored.tails])
        blocks = [(restored.first + index, *found) for index, found in enumerate(restored.blocks)]
        tenant = sequence.request.tenant
        self.prefixes.put_blocks(chain, blocks, tenant)
        for tokens, kept in restored.tails:
            self.prefixes.put_tail(root, chain, tokens, kept, tenant)

    def recount(self) -> Iterator[None]:
        """Checks all tables while there is no sequence, step by step; nothing may change between the steps.

        Raises:
            AssertionError: they disagree.
        """
        if gone := set(self.prefixes.holders) - self._writers:
            raise AssertionError(f"sequences that ended still pin KV: {sorted(gone)[:3]}")
        yield from self.prefixes.recount()

    def reset(self) -> None:
        """Forgets everything, even if the tables are inconsistent."""
        self._writers.clear()
        self.prefixes.reset()

    def hold(self, writer: str, sequence: Sequence, unsaved: Iterable[Unsaved]) -> None:
        """Pins KV that is about to be written until `release`, so that it is always found in memory or on disk.

        Args:
            writer: a unique name of the write job.
            sequence: the sequence that the KV is of.
        """
        tenant = sequence.request.tenant
        self._writers.add(writer)
        for item in unsaved:
            if item.id is not None:
                self.prefixes.pin(writer, item.parent, [item.id], [])
                self.prefixes.put_blocks([item.id], [(0, item.tokens, item.kept)], tenant)
            else:
                self.prefixes.pin(writer, item.parent, [], [item.tokens])
                self.prefixes.put_tail(item.parent, [], item.tokens, item.kept, tenant)
        # The loop marked the chain's end as the latest, but without the chain's begin nothing is found.
        self.prefixes.touch(sequence.ids)

    def release(self, writer: str) -> None:
        """Unpins what `hold` pinned, once it is on disk or could not be written."""
        self._writers.discard(writer)
        self._unpin(writer)

    def used(self, sequence: Sequence) -> list[bytes]:
        """Returns the ids of the sequence's entries on disk, without the open tail, which later turns replace."""
        tail, ids = sequence.prompt_tail, sequence.ids[: self._whole(sequence)]
        return ids if tail is None else [*ids, tail_id(tail.parent, tail.tokens)]

    def unsaved_bytes(self, sequence: Sequence, saved: Container[bytes]) -> int:
        """Returns about how many bytes `unsaved_blocks` would return."""
        blocks = sum(block not in saved for block in sequence.ids[: self._written(sequence)])
        return blocks * self._block_bytes

    def drop_snapshots(self, sequence: Sequence, saved: Container[bytes]) -> None:
        """Drops snapshots of blocks that are in `saved`, as a sequence has if its KV was not read back in time."""
        for block in [block for block in sequence.snapshots if block in saved]:
            del sequence.snapshots[block]

    def unsaved_blocks(self, sequence: Sequence, saved: Container[bytes]) -> list[Unsaved]:
        """Returns the sequence's whole blocks that are not in `saved`, in order, up to the tenant's disk limit.

        If the prefix cache has evicted a block, it is cut out of the sequence's caches again.
        """
        if not self._keeps(sequence):
            return []
        blocks = sequence.ids[: self._written(sequence)]
        kept = {
            index: sequence.snapshots.pop(block, None) or self.prefixes.take(block)
            for index, block in enumerate(blocks)
            if block not in saved
        }
        gone = [index for index, block_kv in kept.items() if block_kv is None]
        spans = [(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS) for index in gone]
        cut = dict(zip(gone, self._executor.cut(sequence.id, spans), strict=True)) if spans else {}
        return [
            Unsaved(
                sequence.ids[index],
                sequence.ids[index - 1] if index else sequence.request.root_id,
                sequence.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS],
                kept_of(cut[index]) if block_kv is None else block_kv,
            )
            for index, block_kv in kept.items()
        ]

    def unsaved(self, sequence: Sequence, saved: Container[bytes], *, ended: bool = True) -> list[Unsaved]:
        """Returns the sequence's KV that is not in `saved`, in order. Call it after `keep_all`, while the sequence has
        caches.

        Args:
            ended: False for an aborted sequence. Its client has seen less of the answer than was generated, so the next
                turn cannot use the snapshot at the answer's end, only the one at the prompt's end. The latter is
                written for aborted sequences, and if the request asks for it (`lasting_saved`).
        """
        items = self.unsaved_blocks(sequence, saved)
        if self._written(sequence) < self._whole(sequence):
            # A tail is not found without all blocks before it.
            return items
        if sequence.tail is not None:
            whole = self._whole(sequence)
            parent = sequence.ids[whole - 1] if whole else sequence.request.root_id
            items.append(Unsaved(None, parent, *sequence.tail))
        tail = sequence.prompt_tail
        if tail is not None and tail_id(tail.parent, tail.tokens) not in saved:
            items.append(tail)
        end = sequence.prompt_end
        if (
            end is not None
            and (not ended or sequence.request.lasting_saved)
            and all(item.tokens != end.tokens for item in items)
        ):
            items.append(end)
        return items

    def _whole(self, sequence: Sequence) -> int:
        """Returns how many whole blocks the sequence's caches hold."""
        return self._executor.length(sequence.id) // BLOCK_TOKENS

    def _written(self, sequence: Sequence) -> int:
        """Returns how many of these blocks go to disk: at most as many as fit the tenant's limit if it had no
        others."""
        whole, most = self._whole(sequence), sequence.request.disk_bytes_max
        return whole if most is None else min(whole, most // max(1, self._block_bytes))

    def keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Returns the ids of the prompt's whole blocks, by which the scheduler finds common prefixes."""
        return tuple(sequence.ids) if self._spec.reusable else ()

    def twin(self, sequence: Sequence) -> bytes:
        """Returns a key that the choices of one request share; b"" if there is only one, or KV cannot be shared."""
        if not self._spec.reusable or sequence.request.choices == 1:
            return b""
        rest = array("I", sequence.tokens[len(sequence.ids) * BLOCK_TOKENS :]).tobytes()
        return b"".join((*sequence.ids[-1:], rest))

    def known(self, sequence: Sequence) -> int:
        """Returns about how many of the sequence's first tokens have KV in memory, by their whole blocks."""
        return self.prefixes.leading(sequence.ids) * BLOCK_TOKENS if self._spec.reusable else 0

    def keep_blocks(self, sequence: Sequence, computed: int) -> None:
        """Caches the whole blocks of the sequence, whose caches hold `computed` tokens."""
        first, last = sequence.kept, min(computed // BLOCK_TOKENS, len(sequence.ids))
        if not self._keeps(sequence) or last <= first:
            return
        ends = last * BLOCK_TOKENS == computed
        wanted = [
            index
            for index in range(first, last)
            if self.prefixes.lacks(sequence.ids[index], snapshot=ends and index == last - 1)
        ]
        spans = [(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS) for index in wanted]
        slabs = self._executor.cut(sequence.id, spans)
        new = [
            (index, sequence.tokens[start:stop], kept_of(slab))
            for index, (start, stop), slab in zip(wanted, spans, slabs, strict=True)
        ]
        self._pin_sequence(sequence, first, last)
        tenant = sequence.request.tenant
        self.prefixes.put_blocks(sequence.ids[:last], new, tenant, prepared=sequence.prepares)
        sequence.kept = last
        if self._on_disk(sequence):
            sequence.snapshots |= {sequence.ids[index]: kept for index, _, kept in new if kept.snapshot}

    def keep_tail(self, sequence: Sequence, computed: int) -> None:
        """Caches the open tail of the sequence, whose caches hold `computed` tokens."""
        whole = computed // BLOCK_TOKENS
        start = whole * BLOCK_TOKENS
        # The former tail may have another parent.
        sequence.tail = None
        if not self._keeps(sequence) or start == computed:
            return
        (slab,) = self._executor.cut(sequence.id, [(start, computed)])
        chain, tokens = sequence.ids[:whole], sequence.tokens[start:computed]
        sequence.tail = (tokens, kept_of(slab))
        self.prefixes.put_tail(sequence.request.root_id, chain, *sequence.tail, sequence.request.tenant)

    def pause(self, request: GenerateRequest) -> int:
        """Returns the number of prompt tokens after which prefill must stop for `keep_prompt_end`, because later
        prompts do not have the rest; 0 for the prompt's end."""
        if not self._spec.recurrent or not request.agent or not request.reusable:
            return 0
        return request.lasting_tokens if request.lasting_tokens < len(request.prompt) - 1 else 0

    def keep_prompt_end(self, sequence: Sequence, computed: int) -> None:
        """Caches the prompt's tail with a snapshot, for a next turn that does not have the whole answer: the state of
        recurrent layers cannot be cut back. The sequence's caches must hold exactly its first `computed` tokens."""
        if not self._spec.recurrent:
            return
        self.keep_tail(sequence, computed)
        if sequence.tail is not None:
            whole = computed // BLOCK_TOKENS
            parent = sequence.ids[whole - 1] if whole else sequence.request.root_id
            sequence.prompt_end = Unsaved(None, parent, *sequence.tail)

    def fills_prompt(self, sequence: Sequence) -> bool:
        """Whether the sequence's next step fills the block in which its prompt ends. Cheap, as it is asked before every
        step."""
        prompt = len(sequence.request.prompt) - 1
        # A sequence that has just joined has one token without KV; `keep_prompt_tail` checks exactly.
        more = len(sequence.tokens) - (prompt // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        return -1 <= more <= 0 < prompt % BLOCK_TOKENS and self._keeps(sequence) and sequence.request.reusable

    def keep_prompt_tail(self, sequence: Sequence) -> None:
        """Caches the prompt's tail in full precision before its block is sealed; see `fills_prompt`.

        A sealed block cannot be cut, so without this a request with the same prompt would compute up to 255 tokens
        again.
        """
        prompt, computed = len(sequence.request.prompt) - 1, self._executor.length(sequence.id)
        whole, rule = prompt // BLOCK_TOKENS, self._spec.rule
        start = whole * BLOCK_TOKENS
        # A recurrent layer's state has moved on, unless the prompt ends right here.
        if computed + 1 != start + BLOCK_TOKENS or (rule.recurrent and computed != prompt):
            return
        root, chain, tokens = sequence.request.root_id, sequence.ids[:whole], sequence.tokens[start:prompt]
        parent = chain[-1] if chain else root
        kept = self.prefixes.take_tail(parent, tokens)
        if kept is None:
            (slab,) = self._executor.cut(sequence.id, [(start, prompt)])
            kept = kept_of(slab)
            if not covers(rule, [(kept, len(tokens))], 1, len(tokens)):
                # It lacks tokens that a window layer needs.
                return
            self.prefixes.put_tail(root, chain, tokens, kept, sequence.request.tenant)
        sequence.prompt_tail = Unsaved(None, parent, tokens, kept)

    def keep_all(self, sequence: Sequence) -> None:
        """Caches all KV of the sequence: whole blocks and the open tail."""
        if not self._keeps(sequence):
            return
        computed = self._executor.length(sequence.id)
        sequence.ids = block_ids(sequence.request.root_id, sequence.tokens)
        self.keep_blocks(sequence, computed)
        self.keep_tail(sequence, computed)


def kept_of(slab: Piece) -> PrefixKV[Piece]:
    """Returns a slab or block as the prefix cache takes it."""
    snapshot = slab.states is not None
    if isinstance(slab, Slab):
        return PrefixKV(slab, slab.nbytes, slab.window_from, snapshot)
    pool_bytes = slab.nbytes - sum(array.nbytes for array in slab.arrays())
    slots = sum(slot is not None for slot in slab.slots)
    return PrefixKV(slab, slab.nbytes, slab.window_from, snapshot, pool_bytes, slots)


def _as_sequence(sequence: Sequence) -> str:
    """Returns the pin holder of the KV that a placed sequence has. KV for which it waits is pinned under its id."""
    return f"sequence {sequence.id}"
