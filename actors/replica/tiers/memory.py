"""What a replica remembers of its rows: the executor has their KV, and the prefix cache keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from ...protocol.block_ids import BLOCK_TOKENS, block_ids
from ...protocol.entries import tail_id
from ...protocol.messages import GenerateRequest
from ..execution.executor import BatchExecutor
from ..execution.vision import RowPictures
from ..kv.caches import BlockRun, ModelCacheSpec, Slab
from ..kv.prefix import Hit, KeptKV, PrefixCache, covers

Found = tuple[Tokens[int], KeptKV[Slab]]
"""Tokens and their KV."""


@dataclass
class Sequence:
    """A request with its tokens so far, `emitted` of which were drawn here; those of pictures as words.

    `ids` are the block ids of its first tokens; `kept` counts those whose KV has been offered to the prefix cache.
    `cached` is how many tokens its first admission reused.
    `tail` is the open end that was kept last; `prompt_tail` the end of the prompt, of a block that the answer filled;
    `prompt_end` the end of the prompt with a snapshot of recurrent layers, and `snapshots` blocks that have one and are
    not on their way to the disk yet: a state cannot be cut again.
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
    snapshots: dict[bytes, KeptKV[Slab]] = field(default_factory=dict)
    pictures: RowPictures | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    def given(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Tokens [start, stop) as the model is given them."""
        tokens = self.tokens[start:stop]
        for media in self.request.media:
            first, last = max(media.start - start, 0), min(media.start + len(media.tokens) - start, len(tokens))
            if first < last:
                tokens[first:last] = media.tokens[first + start - media.start : last + start - media.start]
        return tokens


def is_remembered(request: GenerateRequest) -> bool:
    """Whether a row becomes its agent's memory; of several choices only the first does."""
    return bool(request.agent) and request.reusable and request.sampling.choice == 0


@dataclass(frozen=True)
class Restored:
    """What was read back for a request.

    Attributes:
        first: the index in the prompt of the first block.
        blocks: consecutive ones.
        tails: those after the last block.
        run: the blocks as one, or None.
    """

    first: int
    blocks: list[Found]
    tails: list[Found]
    run: BlockRun | None = None


@dataclass(frozen=True)
class Unsaved:
    """KV that is worth writing down: a block, or the open tail after `parent`."""

    id: bytes | None
    parent: bytes
    tokens: Tokens[int]
    kept: KeptKV[Slab]


class RowMemory:
    """Finds what of a row is known, and keeps what it leaves. Does nothing for a model whose KV cannot be cut.

    Args:
        bytes_max: for what nobody holds.
        writes: whether what is kept goes to the disk.
    """

    def __init__(self, spec: ModelCacheSpec, executor: BatchExecutor, bytes_max: int, *, writes: bool = False) -> None:
        self.prefixes: PrefixCache[Slab] = PrefixCache(bytes_max, spec.rule)
        self._spec = spec
        self._executor = executor
        self._bytes_max = bytes_max
        self._block_bytes = spec.bytes_per_token * BLOCK_TOKENS
        self._writes = writes
        # Those who hold what is not on the disk yet.
        self._writers: set[str] = set()

    def _keeps(self, sequence: Sequence) -> bool:
        """Whether anything of the row is kept."""
        return self._spec.reusable and (self._has_room(sequence) or self._on_disk(sequence))

    def _has_room(self, sequence: Sequence) -> bool:
        # With less than a block there is nothing to find, and what is kept would push out what was kept before.
        own = sequence.request.memory_bytes_max
        return min(self._bytes_max, self._bytes_max if own is None else own) >= self._block_bytes

    def _on_disk(self, sequence: Sequence) -> bool:
        return self._writes and self.is_written(sequence)

    def is_written(self, sequence: Sequence) -> bool:
        """Whether what the row leaves belongs on the disk: it is an agent's, and its tenant may have a block there."""
        most = sequence.request.disk_bytes_max
        return is_remembered(sequence.request) and (most is None or most >= self._block_bytes)

    def limit(self, request: GenerateRequest) -> None:
        """Keep of the request's tenant what it may have in memory from now on."""
        self.prefixes.limit(request.tenant, request.memory_bytes_max)

    def pin(self, sequence: Sequence, tokens: int) -> None:
        """Keep the whole blocks that memory has of the row's first `tokens` tokens until `find` or `leave`."""
        self.prefixes.pin(sequence.id, sequence.request.root_id, sequence.ids[: tokens // BLOCK_TOKENS], [])

    def leave(self, sequence: Sequence) -> None:
        """The row has lost its place, or is over."""
        self.prefixes.unpin(sequence.id)

    def peek(self, sequence: Sequence) -> int:
        """About how many of the row's tokens `find` would find now."""
        root = sequence.request.root_id
        if sequence.emitted:
            # It was sent back: its answer is a part of its prompt now.
            sequence.ids = block_ids(root, sequence.tokens)
        return self.prefixes.peek(root, sequence.ids, sequence.tokens)

    def find(self, sequence: Sequence, tokens_max: int) -> Hit[Slab]:
        """What is known of the first `tokens_max` tokens."""
        if not self._spec.reusable:
            return Hit()
        try:
            hit = self.prefixes.match(sequence.request.root_id, sequence.ids, sequence.tokens, tokens_max)
        finally:
            self.prefixes.unpin(sequence.id)
        sequence.kept = len(hit.blocks)
        return hit

    @staticmethod
    def slabs(hit: Hit[Slab], restored: Restored | None) -> list[Slab]:
        """What to open a row with: the hit's blocks, joined as far as they have been read back so."""
        if restored is None or restored.run is None:
            return list(hit.blocks)
        first, run = restored.first, restored.run
        last = first + len(run.blocks)
        # Where memory had a copy of its own, that one counts.
        same = [id(slab) for slab in hit.blocks[first:last]] == [id(slab) for slab in run.blocks]
        return [*hit.blocks[:first], run, *hit.blocks[last:]] if same else list(hit.blocks)

    def put_back(self, sequence: Sequence, restored: Restored) -> None:
        """Take what was read back, and keep it until `find`, however much it is."""
        root = sequence.request.root_id
        # Where there are tails, this is all that comes before them, also where memory had every block.
        chain = sequence.ids[: restored.first + len(restored.blocks)]
        self.prefixes.pin(sequence.id, root, chain, [tokens for tokens, _ in restored.tails])
        blocks = [(restored.first + index, *found) for index, found in enumerate(restored.blocks)]
        tenant = sequence.request.tenant
        self.prefixes.put_blocks(chain, blocks, tenant)
        for tokens, kept in restored.tails:
            self.prefixes.put_tail(root, chain, tokens, kept, tenant)

    def recount(self) -> Iterator[None]:
        """Count everything again, while there is no row; a step at a time, between which nothing may change.

        Raises:
            AssertionError: something does not add up.
        """
        if gone := set(self.prefixes.holders) - self._writers:
            raise AssertionError(f"rows that are gone hold KV: {sorted(gone)[:3]}")
        yield from self.prefixes.recount()

    def reset(self) -> None:
        """Forget everything, whatever state it is in."""
        self._writers.clear()
        self.prefixes.reset()

    def hold(self, writer: str, sequence: Sequence, unsaved: Iterable[Unsaved]) -> None:
        """Keep what is about to be written until `release`, so that it is found in memory or on the disk all the time.

        Args:
            writer: who writes it, a name of its own.
            sequence: the row that left it.
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
        # Its end was used last by this; without its beginning nobody finds that.
        self.prefixes.touch(sequence.ids)

    def release(self, writer: str) -> None:
        """What the writer had is on the disk, or could not be written."""
        self._writers.discard(writer)
        self.prefixes.unpin(writer)

    def used(self, sequence: Sequence) -> list[bytes]:
        """The ids under which the disk has what the row leaves, but for the open tail, which others will replace."""
        tail, ids = sequence.prompt_tail, sequence.ids[: self._whole(sequence)]
        return ids if tail is None else [*ids, tail_id(tail.parent, tail.tokens)]

    def unsaved_bytes(self, sequence: Sequence, saved: Container[bytes]) -> int:
        """About how much `unsaved_blocks` would give."""
        blocks = sum(block not in saved for block in sequence.ids[: self._written(sequence)])
        return blocks * self._block_bytes

    def drop_snapshots(self, sequence: Sequence, saved: Container[bytes]) -> None:
        """Hold no snapshots of blocks that are in `saved`: those of a row that was not read back in time."""
        for block in [block for block in sequence.snapshots if block in saved]:
            del sequence.snapshots[block]

    def unsaved_blocks(self, sequence: Sequence, saved: Container[bytes]) -> list[Unsaved]:
        """The whole blocks in the row's caches that are not in `saved`, in order, and no more from the first on than
        the tenant may have on the disk.

        What the prefix cache has let go is cut out of the row again.
        """
        if not self._keeps(sequence):
            return []
        blocks = sequence.ids[: self._written(sequence)]
        kept = {
            index: sequence.snapshots.pop(block, None) or self.prefixes.take(block)
            for index, block in enumerate(blocks)
            if block not in saved
        }
        gone = [index for index, found in kept.items() if found is None]
        spans = [(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS) for index in gone]
        cut = dict(zip(gone, self._executor.cut(sequence.id, spans), strict=True)) if spans else {}
        return [
            Unsaved(
                sequence.ids[index],
                sequence.ids[index - 1] if index else sequence.request.root_id,
                sequence.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS],
                kept_of(cut[index]) if found is None else found,
            )
            for index, found in kept.items()
        ]

    def unsaved(self, sequence: Sequence, saved: Container[bytes], *, ended: bool = True) -> list[Unsaved]:
        """What of the row, whose caches are still there after `keep_all`, is not in `saved`, in order.

        Args:
            ended: False for a row that somebody took out. The caller has seen less of the answer than the row has
                drawn, so the snapshot at its end is of no use to the next turn, but that at the prompt's end is.
        """
        found = self.unsaved_blocks(sequence, saved)
        if self._written(sequence) < self._whole(sequence):
            # Without the blocks before it nobody finds an end.
            return found
        if sequence.tail is not None:
            whole = self._whole(sequence)
            parent = sequence.ids[whole - 1] if whole else sequence.request.root_id
            found.append(Unsaved(None, parent, *sequence.tail))
        tail = sequence.prompt_tail
        if tail is not None and tail_id(tail.parent, tail.tokens) not in saved:
            found.append(tail)
        end = sequence.prompt_end
        if end is not None and not ended and all(item.tokens != end.tokens for item in found):
            found.append(end)
        return found

    def _whole(self, sequence: Sequence) -> int:
        """How many whole blocks the row's caches hold."""
        return self._executor.length(sequence.id) // BLOCK_TOKENS

    def _written(self, sequence: Sequence) -> int:
        """How many of them go to the disk: as many as its tenant may have there if it has nothing else."""
        whole, most = self._whole(sequence), sequence.request.disk_bytes_max
        return whole if most is None else min(whole, most // max(1, self._block_bytes))

    def keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        """What the scheduler knows equal beginnings by: the ids of the prompt's whole blocks."""
        return tuple(sequence.ids) if self._spec.reusable else ()

    def twin(self, sequence: Sequence) -> bytes:
        """A key that the choices of one request have in common; b"" where there is one, or nothing can be shared."""
        if not self._spec.reusable or sequence.request.choices == 1:
            return b""
        rest = array("I", sequence.tokens[len(sequence.ids) * BLOCK_TOKENS :]).tobytes()
        return b"".join((*sequence.ids[-1:], rest))

    def known(self, sequence: Sequence) -> int:
        """About how many of its first tokens `find` would find now."""
        return self.prefixes.leading(sequence.ids) * BLOCK_TOKENS if self._spec.reusable else 0

    def keep_blocks(self, sequence: Sequence, computed: int) -> None:
        """Keep the whole blocks among the first `computed` tokens, which are all that the row's caches hold."""
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
        self.prefixes.put_blocks(sequence.ids[:last], new, sequence.request.tenant)
        sequence.kept = last
        if self._on_disk(sequence):
            sequence.snapshots |= {sequence.ids[index]: kept for index, _, kept in new if kept.snapshot}

    def keep_tail(self, sequence: Sequence, computed: int) -> None:
        """Keep the open tail of the first `computed` tokens, which are all that the row's caches hold."""
        whole = computed // BLOCK_TOKENS
        start = whole * BLOCK_TOKENS
        if not self._keeps(sequence) or start == computed:
            return
        (slab,) = self._executor.cut(sequence.id, [(start, computed)])
        chain, tokens = sequence.ids[:whole], sequence.tokens[start:computed]
        sequence.tail = (tokens, kept_of(slab))
        self.prefixes.put_tail(sequence.request.root_id, chain, *sequence.tail, sequence.request.tenant)

    def keep_prompt_end(self, sequence: Sequence, computed: int) -> None:
        """Keep the prompt's end, where the row is now, for a next turn that does not have all of the answer: a state of
        recurrent layers cannot be cut."""
        if not self._spec.recurrent:
            return
        self.keep_tail(sequence, computed)
        if sequence.tail is not None:
            whole = computed // BLOCK_TOKENS
            parent = sequence.ids[whole - 1] if whole else sequence.request.root_id
            sequence.prompt_end = Unsaved(None, parent, *sequence.tail)

    def fills_prompt(self, sequence: Sequence) -> bool:
        """Whether the row's next step fills the block that its prompt ends in. Asked before every step, so cheap."""
        prompt = len(sequence.request.prompt) - 1
        # A row that has just joined has one token more than it has KV; `keep_prompt_tail` counts again.
        more = len(sequence.tokens) - (prompt // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        return -1 <= more <= 0 < prompt % BLOCK_TOKENS and self._keeps(sequence) and sequence.request.reusable

    def keep_prompt_tail(self, sequence: Sequence) -> None:
        """Keep the end of the prompt in full precision, for `fills_prompt`.

        A block that is sealed cannot be cut, so without this the same prompt would find nothing of its last block: up
        to 255 tokens would be computed again.
        """
        prompt, computed = len(sequence.request.prompt) - 1, self._executor.length(sequence.id)
        whole, rule = prompt // BLOCK_TOKENS, self._spec.rule
        start = whole * BLOCK_TOKENS
        # A recurrent layer's state has gone on unless the prompt ends right here.
        if computed + 1 != start + BLOCK_TOKENS or (rule.recurrent and computed != prompt):
            return
        root, chain, tokens = sequence.request.root_id, sequence.ids[:whole], sequence.tokens[start:prompt]
        parent = chain[-1] if chain else root
        kept = self.prefixes.take_tail(parent, tokens)
        if kept is None:
            (slab,) = self._executor.cut(sequence.id, [(start, prompt)])
            kept = kept_of(slab)
            if not covers(rule, [(kept, len(tokens))], 1, len(tokens)):
                # A window has left it behind.
                return
            self.prefixes.put_tail(root, chain, tokens, kept, sequence.request.tenant)
        sequence.prompt_tail = Unsaved(None, parent, tokens, kept)

    def keep_all(self, sequence: Sequence) -> None:
        """Keep all that the row's caches hold: its answer's whole blocks and the open tail."""
        if not self._keeps(sequence):
            return
        computed = self._executor.length(sequence.id)
        sequence.tail = None
        sequence.ids = block_ids(sequence.request.root_id, sequence.tokens)
        self.keep_blocks(sequence, computed)
        self.keep_tail(sequence, computed)


def kept_of(slab: Slab) -> KeptKV[Slab]:
    """A slab as the prefix cache takes it."""
    return KeptKV(slab, slab.nbytes, slab.window_from, slab.states is not None)
