"""A replica's side of the disk: what its rows leave is written down behind them, and read back before others begin.

The store of the node says where things are (`Store`); bytes go past it, straight to the files and from them. Both ways
have limits, and neither is ever waited for by a step: memory only saves work, so whatever fails here is computed again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...cluster.errors import SatchelError
from ..kv_store.blocks import BLOCK_TOKENS
from ..kv_store.codec import Entry, Location, unpack_tokens
from ..kv_store.segment_reader import Failure, StoredEntry, read_entries
from ..kv_store.segments import grouped, read_key, write_segment
from ..messages import GenerateRequest
from . import slab_codec
from .kv_cache import ModelCacheSpec, Slab
from .memory import Restored, Unsaved
from .prefix import Kept

logger = logging.getLogger(__name__)

QUEUE_BYTES_MAX = 512 * 2**20
"""What may wait to be written; more is dropped, and computed again if it is ever wanted."""

SAVED_MAX = 65_536
"""Block ids that are remembered as written. One too few is only written twice, and the second copy dropped."""

TAILS_MAX = 2


class Store(Protocol):
    """The disk tier's methods of the node's store actor, called from any thread; see `kv_store.disk_calls`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """The result.

        Raises:
            SatchelError: what the store raised, or it does not answer in time.
        """
        ...


@dataclass(frozen=True)
class _Session:
    root: Path
    key: bytes
    session: str
    epoch: int


@dataclass
class Turn:
    """What a row left, `nbytes` large: its owner and chain, and what of it is not written yet."""

    owner: str
    chain: list[bytes]
    unsaved: list[Unsaved]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(item.kept.nbytes for item in self.unsaved)


@dataclass
class DiskCounters:
    """Totals since the replica started."""

    written_blocks: int = 0
    written_bytes: int = 0
    unwritten_turns: int = 0
    restored_tokens: int = 0
    corrupt_blocks: int = 0


class DiskTier:
    """Writes and reads one model's KV. `offer` is for the engine's thread, `load` for any but an event loop's."""

    def __init__(self, spec: ModelCacheSpec, model_id: bytes, store: Store) -> None:
        self.counters = DiskCounters()
        self.saved: OrderedDict[bytes, None] = OrderedDict()
        self._spec = spec
        self._model = model_id
        self._store = store
        self._session: _Session | None = None
        self._queue: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._write_forever, name="disk", daemon=True).start()

    @property
    def waiting_bytes(self) -> int:
        """What is not written yet."""
        return self._waiting

    def offer(self, turn: Turn) -> None:
        """Write this in the background, unless too much waits already. Its arrays are being computed."""
        if self._waiting + turn.nbytes > QUEUE_BYTES_MAX:
            self.counters.unwritten_turns += 1
            logger.warning("%d bytes of KV wait to be written; what %s left is not kept", self._waiting, turn.owner)
            return
        mx.eval([array for item in turn.unsaved for array in item.kept.value.arrays()])
        with self._lock:
            # An empty turn too: its chain has been used.
            self._waiting += turn.nbytes
        self._queue.put(turn)

    def load(self, request: GenerateRequest, hot_tokens: int) -> Restored | None:
        """What the disk has of a prompt beyond its first `hot_tokens` tokens; None where that is nothing, or fails."""
        try:
            return self._load(request, hot_tokens)
        except SatchelError as error:
            logger.warning("request %s: nothing is read back: %s", request.request_id, error.message)
            return None

    def _load(self, request: GenerateRequest, hot_tokens: int) -> Restored | None:
        session = self._opened()
        prompt, ids = request.prompt, request.block_ids
        # The last token is computed in any case: it is the first one to draw from.
        if session is None or hot_tokens >= len(prompt) - 1:
            return None
        hot = hot_tokens // BLOCK_TOKENS
        parent = ids[hot - 1] if hot else request.root_id
        rest = prompt[len(ids) * BLOCK_TOKENS : -1]
        found = self._store.call("disk_find", self._model, ids[hot:], parent, rest, TAILS_MAX)
        if found is None:
            return None
        failures: list[Failure] = []
        blocks: list[tuple[int, Sequence[int], Kept[Slab]]] = []
        tails: list[tuple[Sequence[int], Kept[Slab]]] = []
        try:
            where = [Location.from_wire(location) for location in found["blocks"]]
            self._forget_saved(ids[hot + len(where) :])
            ends = [(Location.from_wire(location), used) for location, used in found["tails"]]
            ends = [(location, used) for location, used in ends if used > hot_tokens - len(ids) * BLOCK_TOKENS]
            for index, entry in enumerate(read_entries(session.root, session.key, where)):
                slab = self._slab(entry, failures)
                start = (hot + index) * BLOCK_TOKENS
                if slab is None or list(slab[0]) != prompt[start : start + BLOCK_TOKENS]:
                    break
                blocks.append((hot + index, *slab))
            if len(blocks) == len(where):
                for entry in read_entries(session.root, session.key, [location for location, _ in ends]):
                    slab = self._slab(entry, failures)
                    if slab is not None:
                        tails.append(slab)
        finally:
            told = [[failure.location.to_wire(), failure.reason, failure.missing] for failure in failures]
            self._store.call("disk_read", found["lease"], ids[: hot + len(blocks)], request.agent, told)
        self.counters.corrupt_blocks += sum(not failure.missing for failure in failures)
        self.counters.restored_tokens += len(blocks) * BLOCK_TOKENS + max(
            (len(tokens) for tokens, _ in tails), default=0
        )
        for index, _, _ in blocks:
            self._note_saved(ids[index])
        return Restored(blocks, tails) if blocks or tails else None

    def _slab(self, entry: StoredEntry | Failure, failures: list[Failure]) -> tuple[Sequence[int], Kept[Slab]] | None:
        if isinstance(entry, Failure):
            failures.append(entry)
            return None
        location, tokens = entry.location, unpack_tokens(entry.location.tokens)
        try:
            slab = slab_codec.from_parts(self._spec, entry.parts, len(tokens), location.window_from)
        except ValueError as error:
            failures.append(Failure(location, str(error), False))
            return None
        mx.eval(slab.arrays())
        return tokens, Kept(slab, slab.nbytes, location.window_from, slab.states is not None)

    # The writer's thread.

    def _write_forever(self) -> None:
        while True:
            turn = self._queue.get()
            try:
                self._write(turn)
            except SatchelError as error:
                self.counters.unwritten_turns += 1
                logger.warning("what %s left is not written: %s", turn.owner, error.message)
                with self._lock:
                    # The store may have begun anew.
                    self._session = None
            except Exception:
                # Whatever it is: this thread must live, or nothing is ever written again.
                self.counters.unwritten_turns += 1
                logger.exception("what %s left is not written", turn.owner)
            finally:
                with self._lock:
                    self._waiting -= turn.nbytes

    def _write(self, turn: Turn) -> None:
        session = self._opened()
        if session is None:
            return
        for entries in grouped(self._entries(turn)):
            record = write_segment(
                session.root,
                session.key,
                self._model,
                entries,
                session=session.session,
                epoch=session.epoch,
                now_s=time.time(),
            )
            for written in self._store.call("disk_commit", record.to_wire()):
                self._note_saved(written)
            self.counters.written_blocks += len(entries)
            self.counters.written_bytes += record.nbytes
        # Once for the whole chain, which may be long; what has gone from the disk is written again after a later turn.
        self._forget_saved(self._store.call("disk_touch", self._model, turn.chain, turn.owner))

    def _entries(self, turn: Turn) -> Iterator[Entry]:
        owners = (turn.owner,)
        for item in turn.unsaved:
            parts: dict[str, np.ndarray] = slab_codec.to_parts(self._spec, item.kept.value)
            more: dict[str, Any] = {"window_from": item.kept.window_from, "snapshot": item.kept.snapshot}
            if item.id is None:
                yield Entry.of_tail(item.parent, item.tokens, parts, owners=owners, **more)
            else:
                yield Entry(item.id, item.parent, item.tokens, parts, owners=owners, **more)

    def _note_saved(self, block: bytes) -> None:
        self.saved[block] = None
        self.saved.move_to_end(block)
        while len(self.saved) > SAVED_MAX:
            self.saved.popitem(last=False)

    def _forget_saved(self, missing: Sequence[bytes]) -> None:
        for block in missing:
            self.saved.pop(block, None)

    def _opened(self) -> _Session | None:
        with self._lock:
            if self._session is None:
                told = self._store.call("disk_session")
                if told is None:
                    return None
                root = Path(told["root"])
                self._session = _Session(root, read_key(root), told["session"], told["epoch"])
            return self._session
