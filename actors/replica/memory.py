"""What a replica remembers of its rows: the executor has their KV, and the prefix cache keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Container
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from ..kv_store.blocks import BLOCK_TOKENS, block_ids
from ..messages import GenerateRequest
from .executor import BatchExecutor
from .kv_cache import ModelCacheSpec, Slab
from .prefix import Hit, Kept, PrefixCache


@dataclass
class Sequence:
    """A request with its tokens so far, `emitted` of which were drawn here.

    `ids` are the block ids of its first tokens; `kept` counts those whose KV has been offered to the prefix cache.
    `cached` is how many tokens its first admission reused.
    `tail` is the open end that was kept last.
    """

    request: GenerateRequest
    tokens: list[int]
    ids: list[bytes]
    emitted: int = 0
    kept: int = 0
    cached: int | None = None
    tail: tuple[list[int], Kept[Slab]] | None = None

    @property
    def id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True)
class Restored:
    """What was read back for a request: KV of consecutive blocks of its prompt, and of tails after the last of them.

    `blocks` are (index in the prompt, tokens, KV); `tails` are (tokens, KV).
    """

    blocks: list[tuple[int, Tokens[int], Kept[Slab]]]
    tails: list[tuple[Tokens[int], Kept[Slab]]]


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

    def put_back(self, sequence: Sequence, restored: Restored) -> None:
        """Take what was read back, and keep it until the row is opened or leaves."""
        root = sequence.request.root_id
        last = restored.blocks[-1][0] + 1 if restored.blocks else 0
        chain = sequence.ids[:last]
        self.prefixes.pin(sequence.id, root, chain, [tokens for tokens, _ in restored.tails])
        self.prefixes.put_blocks(chain, restored.blocks)
        for tokens, kept in restored.tails:
            self.prefixes.put_tail(root, chain, tokens, kept)

    def leave(self, sequence: Sequence) -> None:
        """The row is over."""
        self.prefixes.unpin(sequence.id)

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
            (index, sequence.tokens[start:stop], _kept(slab))
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
        sequence.tail = (tokens, _kept(slab))
        self.prefixes.put_tail(sequence.request.root_id, chain, *sequence.tail)

    def keep_all(self, sequence: Sequence) -> None:
        """Keep all that the row's caches hold: its answer's whole blocks and the open tail."""
        if not self._keeps:
            return
        computed = self._executor.length(sequence.id)
        sequence.tail = None
        sequence.ids = block_ids(sequence.request.root_id, sequence.tokens)
        self.keep_blocks(sequence, computed)
        self.keep_tail(sequence, computed)


def _kept(slab: Slab) -> Kept[Slab]:
    return Kept(slab, slab.nbytes, slab.window_from, slab.states is not None)
