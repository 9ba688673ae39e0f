"""What a replica remembers of its rows: the executor has their KV, and the prefix cache keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from ..kv_store.blocks import BLOCK_TOKENS, block_ids
from ..kv_store.codec import tail_id
from ..messages import GenerateRequest
from .executor import BatchExecutor
from .kv_cache import ModelCacheSpec, Run, Slab
from .prefix import Hit, Kept, PrefixCache, common_length, covers
from .vision import RowPictures

RUNS_BYTES_MAX = 512 * 2**20
"""What joined blocks of rows that have not begun may take; a row without joins its blocks when it begins."""

Found = tuple[Tokens[int], Kept[Slab]]
"""Tokens and their KV."""


@dataclass
class Sequence:
    """A request with its tokens so far, `emitted` of which were drawn here; those of pictures as words.

    `ids` are the block ids of its first tokens; `kept` counts those whose KV has been offered to the prefix cache.
    `cached` is how many tokens its first admission reused.
    `tail` is the open end that was kept last; `prompt_tail` the end of the prompt, of a block that the answer filled.
    """

    request: GenerateRequest
    tokens: list[int]
    ids: list[bytes]
    emitted: int = 0
    kept: int = 0
    cached: int | None = None
    tail: Found | None = None
    prompt_tail: Unsaved | None = None
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
    run: Run | None = None

    def known(self, prompt: Tokens[int]) -> int:
        """How many of the prompt's first tokens it reaches."""
        whole = (self.first + len(self.blocks)) * BLOCK_TOKENS
        ends = (common_length(tail, prompt[whole:]) for tail, _ in self.tails)
        return whole + max(ends, default=0)


@dataclass(frozen=True)
class Unsaved:
    """KV that is worth writing down: a block, or the open tail after `parent`."""

    id: bytes | None
    parent: bytes
    tokens: Tokens[int]
    kept: Kept[Slab]


class RowMemory:
    """Finds what of a row is known, and keeps what it leaves. Does nothing for a model whose KV cannot be cut."""

    def __init__(self, spec: ModelCacheSpec, executor: BatchExecutor, bytes_max: int) -> None:
        self.prefixes: PrefixCache[Slab] = PrefixCache(bytes_max, spec.rule)
        self._spec = spec
        self._executor = executor
        # With less than a block there is nothing to find, and what is kept would push out what was kept before.
        self._keeps = spec.reusable and bytes_max >= spec.bytes_per_token * BLOCK_TOKENS
        # By the row that waits for it: the index of its first block, and the run.
        self._runs: dict[str, tuple[int, Run]] = {}

    def find(self, sequence: Sequence, tokens_max: int) -> Hit[Slab]:
        """What is known of the first `tokens_max` tokens."""
        if not self._spec.reusable:
            return Hit()
        root = sequence.request.root_id
        if sequence.emitted:
            # It was sent back: its answer is a part of its prompt now.
            sequence.ids = block_ids(root, sequence.tokens)
        hit = self.prefixes.match(root, sequence.ids, sequence.tokens, tokens_max)
        self.prefixes.unpin(sequence.id)
        sequence.kept = len(hit.blocks)
        return hit

    def slabs(self, sequence: Sequence, hit: Hit[Slab]) -> list[Slab]:
        """What to open the row with: the hit's blocks, joined as far as they have been read back so; once only."""
        first, run = self._runs.pop(sequence.id, (0, None))
        if run is None:
            return list(hit.blocks)
        last = first + len(run.blocks)
        # Where memory had a copy of its own, that one counts.
        same = [id(slab) for slab in hit.blocks[first:last]] == [id(slab) for slab in run.blocks]
        return [*hit.blocks[:first], run, *hit.blocks[last:]] if same else list(hit.blocks)

    def put_back(self, sequence: Sequence, restored: Restored) -> None:
        """Take what was read back, and keep it until the row is opened or leaves."""
        root = sequence.request.root_id
        # Where there are tails, this is all that comes before them, also where memory had every block.
        chain = sequence.ids[: restored.first + len(restored.blocks)]
        self.prefixes.pin(sequence.id, root, chain, [tokens for tokens, _ in restored.tails])
        blocks = [(restored.first + index, *found) for index, found in enumerate(restored.blocks)]
        self.prefixes.put_blocks(chain, blocks)
        for tokens, kept in restored.tails:
            self.prefixes.put_tail(root, chain, tokens, kept)
        if restored.run is not None:
            waiting = sum(run.joined_nbytes for _, run in self._runs.values())
            if waiting + restored.run.joined_nbytes <= RUNS_BYTES_MAX:
                self._runs[sequence.id] = (restored.first, restored.run)

    def recount(self) -> Iterator[None]:
        """Count everything again, while there is no row; a step at a time, between which nothing may change.

        Raises:
            AssertionError: something does not add up.
        """
        if self._runs or self.prefixes.holders:
            raise AssertionError(f"rows that are gone hold KV: {[*self._runs, *self.prefixes.holders][:3]}")
        yield from self.prefixes.recount()

    def reset(self) -> None:
        """Forget everything, whatever state it is in."""
        self._runs.clear()
        self.prefixes.reset()

    def leave(self, sequence: Sequence) -> None:
        """The row is over."""
        self._runs.pop(sequence.id, None)
        self.prefixes.unpin(sequence.id)

    def used(self, sequence: Sequence) -> list[bytes]:
        """The ids under which the disk has what the row leaves, but for the open tail, which others will replace."""
        tail = sequence.prompt_tail
        return sequence.ids if tail is None else [*sequence.ids, tail_id(tail.parent, tail.tokens)]

    def unsaved(self, sequence: Sequence, saved: Container[bytes]) -> list[Unsaved]:
        """What `keep_all` has kept of the row and is not in `saved`, in order."""
        found: list[Unsaved] = []
        parent = sequence.request.root_id
        for index, block in enumerate(sequence.ids):
            kept = self.prefixes.take(block) if block not in saved else None
            if kept is not None:
                start = index * BLOCK_TOKENS
                found.append(Unsaved(block, parent, sequence.tokens[start : start + BLOCK_TOKENS], kept))
            parent = block
        if sequence.tail is not None:
            found.append(Unsaved(None, parent, *sequence.tail))
        tail = sequence.prompt_tail
        if tail is not None and tail_id(tail.parent, tail.tokens) not in saved:
            found.append(tail)
        return found

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
        if not self._keeps or last <= first:
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
        self.prefixes.put_blocks(sequence.ids[:last], new)
        sequence.kept = last

    def keep_tail(self, sequence: Sequence, computed: int) -> None:
        """Keep the open tail of the first `computed` tokens, which are all that the row's caches hold."""
        whole = computed // BLOCK_TOKENS
        start = whole * BLOCK_TOKENS
        if not self._keeps or start == computed:
            return
        (slab,) = self._executor.cut(sequence.id, [(start, computed)])
        chain, tokens = sequence.ids[:whole], sequence.tokens[start:computed]
        sequence.tail = (tokens, kept_of(slab))
        self.prefixes.put_tail(sequence.request.root_id, chain, *sequence.tail)

    def fills_prompt(self, sequence: Sequence) -> bool:
        """Whether the row's next step fills the block that its prompt ends in. Asked before every step, so cheap."""
        prompt = len(sequence.request.prompt) - 1
        # A row that has just joined has one token more than it has KV; `keep_prompt_tail` counts again.
        more = len(sequence.tokens) - (prompt // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        return -1 <= more <= 0 < prompt % BLOCK_TOKENS and self._keeps

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
            self.prefixes.put_tail(root, chain, tokens, kept)
        sequence.prompt_tail = Unsaved(None, parent, tokens, kept)

    def keep_all(self, sequence: Sequence) -> None:
        """Keep all that the row's caches hold: its answer's whole blocks and the open tail."""
        if not self._keeps:
            return
        computed = self._executor.length(sequence.id)
        sequence.tail = None
        sequence.ids = block_ids(sequence.request.root_id, sequence.tokens)
        self.keep_blocks(sequence, computed)
        self.keep_tail(sequence, computed)


def kept_of(slab: Slab) -> Kept[Slab]:
    """A slab as the prefix cache takes it."""
    return Kept(slab, slab.nbytes, slab.window_from, slab.states is not None)
