"""A replica's side of the disk: what its rows leave is written down behind them, and read back before others begin.

The store of the node says where things are (`StoreCaller`); bytes go past it, straight to the files and from them.
Both ways have limits, and neither is ever waited for by a step: memory only saves work, so whatever fails here is
computed again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ....cluster.errors import DiskFull, SatchelError, StaleEpoch, Unavailable
from ....cluster.timing import USUAL, Timing
from ...kv_store.disk.quotas import Limits
from ...kv_store.disk.segment_reader import EntryReader, Failure
from ...kv_store.disk.segments import grouped, read_key, write_segment
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import TOKEN_BYTES, Entry, Location, pack_tokens, tail_id, unpack_tokens
from ...protocol.messages import GenerateRequest
from ..kv.caches import BlockRun, ModelCacheSpec, Slab
from ..kv.device import on_gpu
from . import slab_codec
from .memory import Found, Restored, Unsaved, kept_of

logger = logging.getLogger(__name__)

STALLED_S = 30.0
"""After so long without anything written the disk is not waited for: what is more than may wait is dropped."""

TRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""How long after each failure a job is tried again, where the store does not answer or the disk is full: it may be
starting anew, and makes room."""

SAVED_MAX = 65_536
"""Block ids that are remembered as written. One too few is only written twice, and the second copy dropped."""

TAILS_MAX = 2
"""How many tails after the last block are read back."""

TAILS_ASKED = 16
"""How many are asked for where recurrent layers can use only those of which the prompt has every token."""

RATE_WEIGHT = 0.3
"""The share of a new measure in the rate of reading back."""


@dataclass(frozen=True)
class Written:
    """Something other than KV that is to be written down: named arrays, found again by `tokens` after `parent`."""

    parent: bytes
    tokens: Sequence[int]
    arrays: dict[str, mx.array]


class StoreCaller(Protocol):
    """The disk tier's methods of the node's store actor, called from any thread; see `kv_store.disk_calls`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """The result.

        Raises:
            SatchelError: what the store raised, or it does not answer in time.
        """
        ...


@dataclass(frozen=True)
class Prompt:
    """What may be read back for a request: `tokens`, of whose blocks `ids` are the ids, the first after `root`."""

    request_id: str
    owner: str
    root: bytes
    ids: Sequence[bytes]
    tokens: Sequence[int]

    @property
    def wanted(self) -> Sequence[bytes]:
        """The blocks to look for. Of one that the last token ends a tail is wanted, as a sealed block cannot be cut."""
        return self.ids[: (len(self.tokens) - 1) // BLOCK_TOKENS]

    @classmethod
    def of(cls, request: GenerateRequest) -> Prompt:
        return cls(request.request_id, request.agent, request.root_id, request.block_ids, request.prompt)


@dataclass(frozen=True)
class _Session:
    root: Path
    key: bytes
    session: str
    epoch: int


@dataclass
class WriteJob:
    """What a row left, or has so far, `nbytes` large: its owner, the ids that it used, and what of it and besides is
    not written. `limits` say what its tenant may have on the disk. `done` is called on the writer's thread when it is
    written, or never will be."""

    owner: str
    chain: list[bytes]
    unsaved: list[Unsaved]
    others: list[Written] = field(default_factory=list)
    limits: Limits = field(default_factory=dict)
    done: Callable[[], None] = lambda: None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(item.kept.nbytes for item in self.unsaved)
        self.nbytes += sum(array.nbytes for item in self.others for array in item.arrays.values())


@dataclass
class DiskCounters:
    """Totals since the replica started."""

    written_blocks: int = 0
    written_bytes: int = 0
    unwritten_turns: int = 0
    restored_tokens: int = 0
    corrupt_blocks: int = 0


def read_slabs(
    spec: ModelCacheSpec, root: Path, key: bytes, where: Sequence[Location], *, joins: bool = False
) -> tuple[list[Slab | Failure], BlockRun | None]:
    """Read entries back, each part into arrays before the next is read: while its bytes are in the processor's caches.

    Args:
        root: the folder of KV.
        key: `read_key`.
        where: the entries, pinned.
        joins: whether they are blocks one after the other. Then what follows one that failed may not be read.

    Returns:
        For every location its slab or why there is none; and if it `joins` and none failed, all as one, or None where
        nothing would be gained.

    Raises:
        InvalidRecord: a location that no store gives.
        DiskError: nothing can be read now.
    """
    slabs = slab_codec.SlabReader(spec, len(where), joins=joins, stacked=on_gpu())
    found: list[Slab | Failure] = []
    with EntryReader(root, key, where) as reader:
        for read in reader.parts():
            if joins and 0 in reader.failures:
                break
            slabs.take(read.name, read.indexes, read.array)
        for index, location in enumerate(where):
            failure = reader.failures.get(index)
            if failure is not None:
                found.append(failure)
                if joins:
                    found += [Failure(later, "an earlier one failed", True) for later in where[index + 1 :]]
                    break
                continue
            try:
                found.append(slabs.slab(index, len(location.tokens) // 4, location.window_from))
            except ValueError as error:
                found.append(Failure(location, str(error), False))
    good = [slab for slab in found if not isinstance(slab, Failure)]
    return found, slabs.joined(good) if joins and len(good) == len(where) else None


def _with_tokens(where: Sequence[Location], tokens: Sequence[int]) -> list[Location]:
    """The blocks up to the first whose tokens are not those."""
    for index, location in enumerate(where):
        start = index * BLOCK_TOKENS
        if list(unpack_tokens(location.tokens)) != list(tokens[start : start + BLOCK_TOKENS]):
            return list(where[:index])
    return list(where)


class DiskTier:
    """Writes and reads one model's KV. `accepts` and `write` are for the engine's thread, `load` for any but an event
    loop's."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        model_id: bytes,
        store: StoreCaller,
        unwritten_bytes_max: int = 512 * 2**20,
        timing: Timing = USUAL,
    ) -> None:
        self.counters = DiskCounters()
        self.restore_bytes_per_s = 0.0
        self.saved: OrderedDict[bytes, None] = OrderedDict()
        self._spec = spec
        self._model = model_id
        self._store = store
        self._pull_s = timing.pull_s
        self._session: _Session | None = None
        self._queue: queue.SimpleQueue[WriteJob] = queue.SimpleQueue()
        self._waiting = 0
        self._waiting_max = unwritten_bytes_max
        # When something was written last, or came while nothing waited.
        self._moved_at = time.monotonic()
        self._given_up = False
        # For what is counted; nobody holds it for long.
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        threading.Thread(target=self._write_forever, name="disk", daemon=True).start()

    @property
    def waiting_bytes(self) -> int:
        """What is not written yet."""
        return self._waiting

    @property
    def behind(self) -> bool:
        """Whether more waits than may, and goes on being written."""
        return self._waiting > self._waiting_max and not self._stalled

    @property
    def _stalled(self) -> bool:
        return self._waiting > 0 and time.monotonic() - self._moved_at > STALLED_S

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more may wait."""
        return self._waiting + nbytes <= self._waiting_max

    def accepts(self, job: WriteJob) -> bool:
        """Take a job on; `write` must follow. What a row leaves is taken however much waits, as the row's own caches
        go for it; only where nothing has been written for long it is not."""
        with self._lock:
            if self._stalled and not self.has_room(job.nbytes):
                self.counters.unwritten_turns += 1
                logger.warning("%d bytes of KV wait to be written; what %s left is not kept", self._waiting, job.owner)
                return False
            if not self._waiting:
                self._moved_at = time.monotonic()
            # An empty job too: its chain has been used.
            self._waiting += job.nbytes
            return True

    def write(self, job: WriteJob) -> None:
        """Write what was accepted, in the background. Its arrays are being computed."""
        mx.eval([array for item in job.unsaved for array in item.kept.value.arrays()])
        self._queue.put(job)

    def load(self, prompt: Prompt, hot_tokens: int) -> Restored | None:
        """What the disk has of a prompt beyond its first `hot_tokens` tokens; None where that is nothing, or fails.

        Raises:
            Unavailable: the store does not answer.
        """
        # The last token is computed in any case: it is the first one to draw from.
        if hot_tokens >= len(prompt.tokens) - 1:
            return None
        try:
            return self._load(prompt, hot_tokens)
        except Unavailable:
            raise
        except SatchelError as error:
            logger.warning("request %s: nothing is read back: %s", prompt.request_id, error.message)
            return None

    def look(self, prompt: Prompt, hot_tokens: int) -> int:
        """How many of a prompt's first tokens `load` would reach now, as far as the index tells."""
        try:
            found = self._find(prompt, hot_tokens) if hot_tokens < len(prompt.tokens) - 1 else None
            if found is None:
                return hot_tokens
            self._store.call("disk_read", found["lease"], [], prompt.owner, [])
        except SatchelError as error:
            logger.warning("request %s: nothing is known of the disk: %s", prompt.request_id, error.message)
            return hot_tokens
        whole = (hot_tokens // BLOCK_TOKENS + len(found["blocks"])) * BLOCK_TOKENS
        return max(hot_tokens, whole + max((used for _, used in found["tails"]), default=0))

    def pull(self, request: GenerateRequest) -> None:
        """Have KV fetched from another node onto this one's disk; what does not come is computed."""
        whole = request.pull_tokens // BLOCK_TOKENS
        rest = request.prompt[whole * BLOCK_TOKENS : (whole + 1) * BLOCK_TOKENS]
        wanted = [self._model, request.root_id, request.block_ids[:whole], rest]
        try:
            self._store.call("pull", request.pull_from, wanted, request.agent, self._pull_s, request.disk_limits)
        except SatchelError as error:
            logger.warning("request %s: nothing is pulled: %s", request.request_id, error.message)

    def _find(self, prompt: Prompt, hot_tokens: int) -> dict[str, Any] | None:
        """What the store answers to `disk_find`, with the tails that are of use."""
        hot = hot_tokens // BLOCK_TOKENS
        parent = prompt.ids[hot - 1] if hot else prompt.root
        # The tail may follow any of them: what was known before need not reach the prompt's last block.
        rest = pack_tokens(prompt.tokens[hot * BLOCK_TOKENS : -1])
        most = TAILS_ASKED if self._spec.recurrent else TAILS_MAX
        found = self._store.call("disk_find", self._model, prompt.wanted[hot:], parent, rest, most)
        if found is None:
            return None
        tails = [(Location.from_wire(location), used) for location, used in found["tails"]]
        if self._spec.recurrent:
            tails = [(location, used) for location, used in tails if used * TOKEN_BYTES == len(location.tokens)]
        return {**found, "tails": tails[:TAILS_MAX]}

    def _load(self, prompt: Prompt, hot_tokens: int) -> Restored | None:
        session = self._opened()
        found = self._find(prompt, hot_tokens) if session is not None else None
        if session is None or found is None:
            return None
        hot, ids = hot_tokens // BLOCK_TOKENS, prompt.wanted
        failures: list[Failure] = []
        blocks: list[Found] = []
        tails: list[Found] = []
        run: BlockRun | None = None
        try:
            where = [Location.from_wire(location) for location in found["blocks"]]
            self._forget_saved(ids[hot + len(where) :])
            same = _with_tokens(where, prompt.tokens[hot * BLOCK_TOKENS :])
            started = time.perf_counter()
            blocks, run = self._read(session, same, failures, joins=True)
            self._note_rate(sum(kept.nbytes for _, kept in blocks), time.perf_counter() - started)
            if len(blocks) == len(where):
                more = hot_tokens - (hot + len(blocks)) * BLOCK_TOKENS
                ends = [location for location, used in found["tails"] if used > more]
                tails, _ = self._read(session, ends, failures)
        finally:
            told = [[failure.location.to_wire(), failure.reason, failure.missing] for failure in failures]
            self._store.call("disk_read", found["lease"], ids[: hot + len(blocks)], prompt.owner, told)
        self.counters.corrupt_blocks += sum(not failure.missing for failure in failures)
        self.counters.restored_tokens += len(blocks) * BLOCK_TOKENS + max(
            (len(tokens) for tokens, _ in tails), default=0
        )
        parent = ids[hot + len(blocks) - 1] if hot + len(blocks) else prompt.root
        for known in (*ids[hot : hot + len(blocks)], *(tail_id(parent, tokens) for tokens, _ in tails)):
            self._note_saved(known)
        return Restored(hot, blocks, tails, run) if blocks or tails else None

    def read(self, parent: bytes, tokens: Sequence[int], owner: str) -> dict[str, mx.array] | None:
        """The arrays of something that was `Written`; None where it is not there, or cannot be read."""
        try:
            session = self._opened()
            if session is None:
                return None
            found = self._store.call("disk_find", self._model, [], parent, pack_tokens(tokens), 1)
            if found is None:
                return None
            where = [Location.from_wire(location) for location, used in found["tails"] if used == len(tokens)]
            arrays: dict[str, mx.array] = {}
            failures: list[Failure] = []
            try:
                with EntryReader(session.root, session.key, where) as reader:
                    arrays = {part.name: slab_codec.to_mlx(part.array[0]) for part in reader.parts()}
                    # What this thread leaves undone no other one can do.
                    mx.eval(list(arrays.values()))
                    failures = list(reader.failures.values())
            finally:
                told = [[failure.location.to_wire(), failure.reason, failure.missing] for failure in failures]
                used = [location.id for location in where] if arrays else []
                self._store.call("disk_read", found["lease"], used, owner, told)
        except SatchelError as error:
            logger.warning("what %s left is not read back: %s", owner or "nobody", error.message)
            return None
        self.counters.corrupt_blocks += sum(not failure.missing for failure in failures)
        return arrays if arrays and not failures else None

    def _note_rate(self, nbytes: int, seconds: float) -> None:
        if nbytes:
            rate = nbytes / max(seconds, 1e-6)
            self.restore_bytes_per_s += (RATE_WEIGHT if self.restore_bytes_per_s else 1.0) * (
                rate - self.restore_bytes_per_s
            )

    def _read(
        self, session: _Session, where: Sequence[Location], failures: list[Failure], *, joins: bool = False
    ) -> tuple[list[Found], BlockRun | None]:
        """What can be used of some tails, or of blocks up to the first that cannot, and all of those as one."""
        found: list[Found] = []
        slabs, run = read_slabs(self._spec, session.root, session.key, where, joins=joins)
        for location, slab in zip(where, slabs, strict=True):
            if not isinstance(slab, Failure):
                found.append((unpack_tokens(location.tokens), kept_of(slab)))
                continue
            failures.append(slab)
            if joins:
                break
        return found, run

    # The writer's thread.

    def _write_forever(self) -> None:
        while True:
            job = self._queue.get()
            try:
                self._write_patiently(job)
            except SatchelError as error:
                self.counters.unwritten_turns += 1
                logger.warning("what %s left is not written: %s", job.owner, error.message)
            except Exception:
                # Whatever it is: this thread must live, or nothing is ever written again.
                self.counters.unwritten_turns += 1
                logger.exception("what %s left is not written", job.owner)
            finally:
                job.done()
                with self._lock:
                    self._waiting -= job.nbytes
                # Else it would be held until the next one comes.
                del job

    def _write_patiently(self, job: WriteJob) -> None:
        """Write a job; where the store cannot be used, again a few times, but not for each of many jobs."""
        for pause_s in () if self._given_up else TRIES_S:
            try:
                return self._write(job)
            except (Unavailable, StaleEpoch, DiskFull) as error:
                logger.info("what %s left is written in %g s: %s", job.owner, pause_s, error.message)
                time.sleep(pause_s)
        self._given_up = True
        self._write(job)

    def _write(self, job: WriteJob) -> None:
        try:
            self._write_once(job)
        except SatchelError:
            with self._opening:
                # The store may have begun anew.
                self._session = None
            raise
        self._given_up = False
        self._moved_at = time.monotonic()

    def _write_once(self, job: WriteJob) -> None:
        session = self._opened()
        if session is None:
            return
        for entries in grouped(self._entries(job)):
            record = write_segment(
                session.root,
                session.key,
                self._model,
                entries,
                session=session.session,
                epoch=session.epoch,
                now_s=time.time(),
            )
            there = self._store.call("disk_commit", record.to_wire(), dict(job.limits))
            for written in there:
                self._note_saved(written)
            self.counters.written_blocks += len(entries)
            self.counters.written_bytes += record.nbytes
            self._moved_at = time.monotonic()
            if len(there) < len(entries) and any(most is not None for most in job.limits.values()):
                # Its tenant may have no more, and nobody finds what follows.
                break
        # Once for the whole chain, which may be long; what has gone from the disk is written again after a later turn.
        self._forget_saved(self._store.call("disk_touch", self._model, job.chain, job.owner))

    def _entries(self, job: WriteJob) -> Iterator[Entry]:
        owners = (job.owner,)
        # After a failure some of it may be there.
        for item in [item for item in job.unsaved if item.id is None or item.id not in self.saved]:
            parts: dict[str, np.ndarray] = slab_codec.to_parts(self._spec, item.kept.value)
            more: dict[str, Any] = {"window_from": item.kept.window_from, "snapshot": item.kept.snapshot}
            if item.id is None:
                yield Entry.of_tail(item.parent, item.tokens, parts, owners=owners, **more)
            else:
                yield Entry(item.id, item.parent, item.tokens, parts, owners=owners, **more)
        for other in job.others:
            arrays = {name: slab_codec.to_numpy(array) for name, array in other.arrays.items()}
            yield Entry.of_tail(other.parent, other.tokens, arrays, owners=owners)

    def _note_saved(self, block: bytes) -> None:
        # Others may forget it at any moment, so no cache of a library's, which takes several steps for one.
        self.saved.pop(block, None)
        self.saved[block] = None
        while len(self.saved) > SAVED_MAX:
            self.saved.popitem(last=False)

    def _forget_saved(self, missing: Sequence[bytes]) -> None:
        for block in missing:
            self.saved.pop(block, None)

    def _opened(self) -> _Session | None:
        with self._opening:
            if self._session is None:
                told = self._store.call("disk_session")
                if told is None:
                    return None
                root = Path(told["root"])
                self._session = _Session(root, read_key(root), told["session"], told["epoch"])
            return self._session
