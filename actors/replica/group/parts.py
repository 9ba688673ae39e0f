"""KV of a divided model on disk: each process keeps its own layers' part of every block on its own node.

A stage is a model of its own on disk: its model id names its layers, and the ids of its blocks are made of that one and
of the tokens, as any block's. So a store claims, moves and packs parts as other KV. The leader names blocks by its own
ids; a follower knows which of its ids these are (`StageIds`). What the leader writes, the followers write too
(`Batch.save`). When the leader reads a prompt's KV back, the followers are asked first how much of it they have; what
not all have is computed.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....cluster.errors import SatchelError
from ...protocol.block_ids import BLOCK_TOKENS, block_id, block_ids, root_id
from ...protocol.entries import pack_tokens, unpack_tokens
from ...protocol.group_clients import StageClient
from ...protocol.group_messages import FoundPart, ReadPart
from ...protocol.store_messages import FoundKV
from ..execution.batch import Batch
from ..kv.caches import PooledBlock, Records, Slab
from ..loop.engine import Engine
from ..memory.disk_reading import Adopt
from ..memory.disk_tier import SAVED_MAX, DiskTier, Prompt, WriteJob
from ..memory.sequence_memory import Restored, Unsaved, copies_of, kept_of

logger = logging.getLogger(__name__)

ADOPT_S = 10.0
"""How long a reader waits for the engine, as for blocks."""

IDS_MAX = 2 * SAVED_MAX
"""How many blocks of the leader a follower knows: more than the leader takes for written."""

READINGS_MAX = 8
"""How many readings a follower keeps whose end it was not told."""

FORGOTTEN_MAX = 64
"""How many readings a follower remembers whose end it was told before they were there."""


@dataclass(frozen=True)
class _WholePrompt(Prompt):
    """A prompt as far as all followers have read it: `ids` ends there, with these tails."""

    tails: frozenset[bytes] = frozenset()


class GroupDisk(DiskTier):
    """The leader's disk tier. As `DiskTier`, but reads only what all followers have read too."""

    clients: Sequence[StageClient] = ()
    engine: Engine | None = None

    def serve(self, engine: Engine, clients: Sequence[StageClient]) -> None:
        """Begins to read for an engine, with these followers."""
        self.engine, self.clients = engine, clients

    def read_found(self, prompt: Prompt, hot_tokens: int, adopt: Adopt) -> Restored | None:
        engine = self.engine
        if engine is None:
            return None
        reading = f"{prompt.request_id}/{uuid.uuid4().hex}"
        try:
            whole = self._whole(reading, prompt, hot_tokens)
            if whole is None:
                return None
            restored = super().read_found(whole, hot_tokens, lambda records: adopt(replace(records, reading=reading)))
            if restored is not None:
                self._adopt_slabs(engine, reading, restored)
            return restored
        finally:
            engine.call(lambda: engine.executor.forget_read(reading))

    def _whole(self, reading: str, prompt: Prompt, hot_tokens: int) -> _WholePrompt | None:
        """Has the followers read their parts. Returns the prompt as far as all of them have it; None for nothing."""
        ids, tokens = list(prompt.ids), pack_tokens(prompt.tokens)
        limits = dict(prompt.limits)
        part = ReadPart(reading, prompt.owner, prompt.scope, prompt.root, ids, tokens, hot_tokens, limits)
        with ThreadPoolExecutor(len(self.clients)) as threads:
            found = list(threads.map(lambda client: _asked(client, part), self.clients))
        blocks = min(each.blocks for each in found)
        hot = hot_tokens // BLOCK_TOKENS
        # Blocks that not all have are written again.
        self._forget_saved(prompt.wanted[hot + blocks :])
        tails = [frozenset(each.tails) if each.blocks == blocks else frozenset[bytes]() for each in found]
        common = frozenset.intersection(*tails)
        if not blocks and not common:
            return None
        ids = prompt.ids[: hot + blocks]
        name, root = prompt.request_id, prompt.root
        return _WholePrompt(name, prompt.owner, root, ids, prompt.tokens, prompt.scope, tails=common)

    def find(self, prompt: Prompt, hot_tokens: int) -> FoundKV | None:
        found = super().find(prompt, hot_tokens)
        if found is None or not isinstance(prompt, _WholePrompt):
            return found
        # Tails are common only after the last of the common blocks.
        all_here = hot_tokens // BLOCK_TOKENS + len(found.blocks) == len(prompt.ids)
        tails = [tail for tail in found.tails if all_here and tail.location.tokens in prompt.tails]
        return replace(found, tails=tails)

    def _adopt_slabs(self, engine: Engine, reading: str, restored: Restored) -> None:
        """Has the followers take what is not in the pool, as the leader does."""
        blocks = [kept.value for _, kept in restored.blocks if isinstance(kept.value, Slab)]
        tails = [kept.value for _, kept in restored.tails if isinstance(kept.value, Slab)]
        names = [pack_tokens(tokens) for tokens, _ in restored.tails]
        if blocks or tails:
            engine.called(lambda: engine.executor.adopt_read(reading, [*blocks, *tails], len(blocks), names)).result(
                ADOPT_S
            )


def _asked(client: StageClient, part: ReadPart) -> FoundPart:
    try:
        return client.read(part).wait()
    except SatchelError as error:
        logger.warning("nothing is read back: %s", error.message)
        return FoundPart(0, [])


@dataclass
class _Staged:
    """What a follower has read for the leader: blocks for the pool or outside of it, and tails by their packed
    tokens."""

    records: deque[Records] = field(default_factory=deque)
    blocks: list[Slab] = field(default_factory=list)
    tails: dict[bytes, Slab] = field(default_factory=dict)


class StageIds:
    """A stage's ids of the blocks that the leader names by its own.

    Args:
        model_id: of the stage.
    """

    def __init__(self, model_id: bytes) -> None:
        self._model = model_id
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        # Readers note ids, and the thread that computes.
        self._lock = threading.Lock()

    def of_root(self, theirs: bytes, scope: str) -> bytes:
        """Returns the parent of every first block of a scope."""
        return self._note(theirs, root_id(self._model, scope))

    def of_prompt(self, root: bytes, scope: str, theirs: Sequence[bytes], tokens: Sequence[int]) -> list[bytes]:
        """Returns the ids of a prompt's whole blocks, in order, given the leader's."""
        own = block_ids(self.of_root(root, scope), tokens)
        return [self._note(one, other) for one, other in zip(theirs, own, strict=True)]

    def of_block(self, theirs: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Returns a block's id.

        Args:
            parent: the stage's id of its parent.
        """
        return self._note(theirs, block_id(parent, tokens))

    def get(self, theirs: bytes) -> bytes | None:
        """Returns the id of a block or root that was named before; None if that is too long ago."""
        return self._known.get(theirs)

    def _note(self, theirs: bytes, own: bytes) -> bytes:
        with self._lock:
            self._known[theirs] = own
            self._known.move_to_end(theirs)
            while len(self._known) > IDS_MAX:
                self._known.popitem(last=False)
        return own


class FollowerParts:
    """A follower's part of KV on its node's disk. `read` is for any thread but an event loop's, the other methods are
    for the thread that computes.

    Args:
        model_id: of its stage.
    """

    def __init__(self, disk: DiskTier, batch: Batch, model_id: bytes) -> None:
        self._disk, self._batch, self._ids = disk, batch, StageIds(model_id)
        self._lock = threading.Lock()
        self._staged: dict[str, _Staged] = {}
        self._forgotten: deque[str] = deque(maxlen=FORGOTTEN_MAX)

    def save(
        self,
        owner: str,
        root: bytes,
        scope: str,
        chain: Sequence[bytes],
        items: Sequence[Sequence[Any]],
        limits: Mapping[str, int | None],
    ) -> None:
        """As `Batch.save`. KV only saves work: what this disk is too slow for is computed again."""
        unsaved = []
        if not self._disk.has_room(sum(kept.nbytes for _, _, _, kept in items)):
            logger.warning(
                "%d bytes of KV wait to be written; new KV of %s is dropped", self._disk.waiting_bytes, owner
            )
            return
        self._ids.of_root(root, scope)
        for entry, parent, tokens, kept in items:
            before = self._ids.get(parent)
            if before is None:
                # It was written so long ago that its id is not known any more.
                logger.warning("KV of %s is written in part only", owner)
                break
            own = None if entry is None else self._ids.of_block(entry, before, tokens)
            if own is None or own not in self._disk.saved:
                unsaved.append(Unsaved(own, before, tokens, kept_of(kept)))
        used = [own for entry in chain if (own := self._ids.get(entry)) is not None]
        job = WriteJob(owner, used, copies_of(unsaved, self._batch), limits=limits)
        if self._disk.accepts(job):
            self._disk.write(job)

    def read(self, part: ReadPart) -> FoundPart:
        """As `StageClient.read`."""
        staged = _Staged()

        def stage(records: Records) -> Future[list[PooledBlock]]:
            # The reader uses its buffers again; a GPU has a copy already.
            data = np.copy(records.data) if isinstance(records.data, np.ndarray) else records.data
            staged.records.append(replace(records, data=data))
            done: Future[list[PooledBlock]] = Future()
            # Only their number matters here.
            done.set_result([_placeholder() for _ in records.windows])
            return done

        tokens = unpack_tokens(part.tokens)
        root, ids = self._ids.of_root(part.root, part.scope), part.ids
        own = self._ids.of_prompt(part.root, part.scope, ids, tokens[: len(ids) * BLOCK_TOKENS])
        prompt = Prompt(part.reading, part.owner, root, own, tokens, part.scope, limits=part.limits)
        restored = self._disk.load(prompt, part.hot_tokens, stage)
        if restored is None:
            return FoundPart(0, [])
        staged.blocks = [kept.value for _, kept in restored.blocks if isinstance(kept.value, Slab)]
        tails = [(pack_tokens(tokens), kept.value) for tokens, kept in restored.tails]
        staged.tails = {tokens: slab for tokens, slab in tails if isinstance(slab, Slab)}
        with self._lock:
            if part.reading in self._forgotten:
                return FoundPart(0, [])
            while len(self._staged) >= READINGS_MAX:
                del self._staged[next(iter(self._staged))]
            self._staged[part.reading] = staged
        return FoundPart(len(restored.blocks), list(staged.tails))

    def blocks(self, reading: str, count: int) -> list[Records]:
        """As `Parts.blocks`. The leader's runs may have other lengths than those that were read here."""
        found: list[Records] = []
        records = self._of(reading).records
        while count:
            run = records.popleft()
            taken, rest = _cut(run, count)
            if rest is not None:
                records.appendleft(rest)
            found.append(taken)
            count -= len(taken.windows)
        return found

    def slabs(self, reading: str, blocks: int, tails: Sequence[bytes]) -> list[Slab]:
        """As `Parts.slabs`."""
        staged = self._of(reading)
        return [*staged.blocks[:blocks], *(staged.tails[tokens] for tokens in tails)]

    def forget(self, reading: str) -> None:
        """As `Parts.forget`. It may come while the KV is still being read."""
        with self._lock:
            if self._staged.pop(reading, None) is None:
                self._forgotten.append(reading)

    def _of(self, reading: str) -> _Staged:
        with self._lock:
            return self._staged[reading]


def _placeholder() -> PooledBlock:
    return PooledBlock((), 0)


def _cut(records: Records, count: int) -> tuple[Records, Records | None]:
    """Returns the first `count` blocks, or all, and the rest."""
    if count >= len(records.windows):
        return records, None
    first = replace(records, data=records.data[:count], windows=records.windows[:count], states=records.states[:count])
    rest = replace(records, data=records.data[count:], windows=records.windows[count:], states=records.states[count:])
    return first, rest
