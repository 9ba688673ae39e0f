"""A replica's disk tier: writes sequences' KV in the background, and reads it back before other sequences begin.

The node's store knows where entries are. The bytes do not pass through it: they go straight to the files and from them.
Writing and reading have limits, and no step ever waits for them. KV on disk only saves work: whatever fails here is
computed again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ....cluster.config.timing import USUAL, Timing
from ....cluster.errors import DiskFull, SatchelError, StaleEpoch, Unavailable
from ...kv_store.disk.segment_reader import read_entries
from ...kv_store.disk.segments import grouped, read_key, write_segment
from ...model_files.identity.model_identity import adapted_id
from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.entries import (
    TOKEN_BYTES,
    Entry,
    Failure,
    Location,
    SegmentRecord,
    pack_tokens,
    tail_id,
    unpack_tokens,
)
from ...protocol.replica_messages import GenerateRequest
from ...protocol.store_client import StoreClient
from ...protocol.store_messages import FoundKV, Limits, PullKV
from ..kv.caches import ModelCacheSpec, Record, Slab
from . import slab_codec
from .disk_reading import Adopt, ReadRate, is_slow, read_blocks, read_slabs
from .following import follow
from .sequence_memory import Found, Piece, Restored, Unsaved, kept_of

logger = logging.getLogger(__name__)

STALLED_S = 30.0
"""If nothing was written for this long, the disk counts as stalled: KV beyond the limit is dropped, not waited for."""

TRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses after which a job is retried if the store does not answer or the disk is full: a store restarts, and makes
room on its disk."""

SAVED_MAX = 65_536
"""How many written block ids are remembered. A forgotten one is written twice, and the second copy is dropped."""

TAILS_MAX = 2
"""How many tails after the last block are read back."""

TAILS_ASKED = 16
"""How many tails the store is asked for if layers are recurrent: these need tails that the prompt has entirely."""


@dataclass(frozen=True)
class Written:
    """Named arrays other than KV that are to be written. They are found again by `tokens` after `parent`."""

    parent: bytes
    tokens: Sequence[int]
    arrays: dict[str, mx.array]


@dataclass(frozen=True)
class Prompt:
    """A prompt whose KV may be read back: `tokens` after `root`, and the `ids` of their whole blocks. `scope` says who
    shares it, as in `block_ids.root_id`; "" if that is not known. `adapter` is its adapter's digest, b"" for none, and
    `limits` what the tenant may have on disk. `tokens_per_s` is how fast it could be computed instead without delaying
    anybody; 0 if it could not."""

    request_id: str
    owner: str
    root: bytes
    ids: Sequence[bytes]
    tokens: Sequence[int]
    scope: str = ""
    adapter: bytes = b""
    limits: Limits = field(default_factory=dict)
    tokens_per_s: float = 0.0

    @property
    def wanted(self) -> Sequence[bytes]:
        """Ids of the blocks to look for. If a block ends with the prompt's last token, it is excluded: a sealed block
        cannot be cut, so a tail is read instead."""
        return self.ids[: (len(self.tokens) - 1) // BLOCK_TOKENS]

    @classmethod
    def of(cls, request: GenerateRequest) -> Prompt:
        """Returns the prompt of a request."""
        name, ids = request.request_id, request.block_ids
        scope, adapter, limits = request.scope, request.adapter, request.disk_limits
        return cls(name, request.agent, request.root_id, ids, request.prompt, scope, adapter, limits)


@dataclass(frozen=True)
class WriterSession:
    """What a writer must know: the folder and key of KV, and the store's session and epoch."""

    root: Path
    key: bytes
    session: str
    epoch: int

    def write(self, model: bytes, entries: Sequence[Entry]) -> SegmentRecord:
        """Writes entries of a model into a file, as `write_segment` does; the store has yet to commit the record."""
        more: dict[str, Any] = {"session": self.session, "epoch": self.epoch, "now_s": time.time()}
        return write_segment(self.root, self.key, model, entries, **more)


@dataclass
class WriteJob:
    """A sequence's KV (and other arrays) that is to be written, of `nbytes` bytes.

    Attributes:
        owner: the agent.
        chain: ids of entries that the sequence used.
        root, scope: the parent of the first block, and who shares it, as in `block_ids.root_id`.
        limits: what the tenant may have on disk.
        adapter: the digest of the adapter that it was computed with, b"" for none.
        done: called on the writer's thread when the job was written or given up.
    """

    owner: str
    chain: list[bytes]
    unsaved: list[Unsaved]
    others: list[Written] = field(default_factory=list)
    root: bytes = b""
    scope: str = ""
    limits: Limits = field(default_factory=dict)
    adapter: bytes = b""
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
    followed_sequences: int = 0
    lost_prefills: int = 0


def _with_tokens(where: Sequence[Location], tokens: Sequence[int]) -> list[Location]:
    """Returns the leading blocks whose tokens match `tokens`."""
    for index, location in enumerate(where):
        start = index * BLOCK_TOKENS
        if list(unpack_tokens(location.tokens)) != list(tokens[start : start + BLOCK_TOKENS]):
            return list(where[:index])
    return list(where)


class Brings(Protocol):
    """Finds KV elsewhere before a prompt's KV is read."""

    def bring(self, prompt: Prompt, session: WriterSession) -> int:
        """Has what it finds on the node's disk; as `OtherParts.bring`."""
        ...


class DiskTier:
    """Writes and reads the KV of one model and of its adapters. `accepts`, `withdraw` and `write` are for the engine's
    thread; `load`, `look`, `pull` and `read` block, and are for any thread but an event loop's. If nobody has the tier
    any more, what still waits is not written.

    Attributes:
        others: makes KV of the model out of KV of others; None for nothing.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        model_id: bytes,
        store: StoreClient,
        unwritten_bytes_max: int = 512 * 2**20,
        timing: Timing = USUAL,
    ) -> None:
        self.counters = DiskCounters()
        self.others: Brings | None = None
        # Of all reads, and of those for sequences that were alone: beside others the pool takes blocks between steps.
        self._rate, self._rate_alone = ReadRate(), ReadRate()
        self.saved: OrderedDict[bytes, None] = OrderedDict()
        self._spec = spec
        self._model = model_id
        self._store = store
        self._pull_s = timing.pull_s
        self._session: WriterSession | None = None
        self._queue: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._waiting = 0
        self._waiting_max = unwritten_bytes_max
        # When a job was last written, or accepted while none waited.
        self._moved_at = time.monotonic()
        self._given_up = False
        # Guards the counts; only held briefly.
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        arguments = self._queue, weakref.WeakMethod(self._open_early), weakref.WeakMethod(self._write_or_say)
        threading.Thread(target=_write_forever, args=arguments, name="disk", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def restore_bytes_per_s(self) -> float:
        """How fast KV was read back lately; 0 before the first time."""
        return self._rate.bytes_per_s

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were handed over and wait to be written."""
        return self._waiting

    @property
    def stalled(self) -> bool:
        """Whether the disk makes no progress."""
        return self._waiting > 0 and time.monotonic() - self._moved_at > STALLED_S

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more may wait, or nothing waits."""
        return not self._waiting or self._waiting + nbytes <= self._waiting_max

    def accepts(self, job: WriteJob) -> bool:
        """Accepts a job, or returns False. If it is accepted, `write` or `withdraw` must follow. Jobs are accepted even
        beyond the limit, because the sequence frees its own caches, but not if the disk has stalled."""
        if self.stalled and not self.has_room(job.nbytes):
            self.counters.unwritten_turns += 1
            logger.warning("%d bytes of KV wait to be written; new KV of %s is dropped", self._waiting, job.owner)
            return False
        # Empty jobs are accepted too: they mark their chain as used.
        return True

    def withdraw(self) -> None:
        """Notes that an accepted job is not written."""
        self.counters.unwritten_turns += 1

    def write(self, job: WriteJob) -> None:
        """Writes an accepted job in the background, after waiting for its arrays."""
        mx.eval([array for item in job.unsaved for array in item.kept.value.arrays()])
        with self._lock:
            if not self._waiting:
                self._moved_at = time.monotonic()
            self._waiting += job.nbytes
        self._queue.put(job)

    def load(self, prompt: Prompt, hot_tokens: int, adopt: Adopt) -> Restored | None:
        """Reads a prompt's KV beyond its first `hot_tokens` tokens; None if there is nothing, reading fails, or takes
        longer than to compute it.

        Args:
            adopt: as for `read_blocks`.

        Raises:
            Unavailable: the store does not answer.
        """
        # The last token is always computed: it is the first decode step's input.
        if hot_tokens >= len(prompt.tokens) - 1:
            return None
        self._bring(prompt)
        try:
            return self.read_found(prompt, hot_tokens, adopt)
        except Unavailable:
            raise
        except SatchelError as error:
            logger.warning("request %s: reading KV back failed: %s", prompt.request_id, error.message)
            return None

    def _bring(self, prompt: Prompt) -> None:
        """Makes KV of others the model's own. If that fails, what is its own already is read all the same."""
        try:
            # What other parts of the model left was computed without an adapter.
            if self.others is not None and not prompt.adapter and (session := self._opened()) is not None:
                self.others.bring(prompt, session)
        except SatchelError as error:
            self._open_again()
            logger.warning("request %s: no KV is made of other parts': %s", prompt.request_id, error.message)

    def look(self, prompt: Prompt, hot_tokens: int) -> int:
        """Returns how many of a prompt's first tokens `load` would reach, according to the index."""
        try:
            found = self.find(prompt, hot_tokens) if hot_tokens < len(prompt.tokens) - 1 else None
            if found is None:
                return hot_tokens
            self._store.disk_read(found.lease, [], prompt.owner).wait()
        except SatchelError as error:
            logger.warning("request %s: looking KV up on disk failed: %s", prompt.request_id, error.message)
            return hot_tokens
        whole = (hot_tokens // BLOCK_TOKENS + len(found.blocks)) * BLOCK_TOKENS
        return max(hot_tokens, whole + max((tail.tokens for tail in found.tails), default=0))

    def pull(self, request: GenerateRequest) -> None:
        """Pulls KV from another node to this node's disk. KV that does not arrive is computed."""
        whole = request.pull_tokens // BLOCK_TOKENS
        rest = request.prompt[whole * BLOCK_TOKENS : (whole + 1) * BLOCK_TOKENS]
        try:
            self._store.pull(self._wanted(request, rest)).wait()
        except SatchelError as error:
            logger.warning("request %s: pulling KV failed: %s", request.request_id, error.message)

    async def follow(self, request: GenerateRequest, wait_s: float, waits: Callable[[], bool]) -> bool:
        """Pulls KV from a node while that node computes it.

        Args:
            wait_s: how long at most.
            waits: whether the sequence still waits for the KV.

        Returns:
            Whether all of it arrived; the rest is computed.
        """
        whole = request.pull_tokens // BLOCK_TOKENS
        wanted = self._wanted(request, request.prompt[whole * BLOCK_TOKENS : request.pull_tokens])
        came = await follow(self._store.pull, wanted, wait_s, waits)
        self.counters.followed_sequences += 1
        return came

    def _wanted(self, request: GenerateRequest, rest: list[int]) -> PullKV:
        return PullKV(
            request.pull_from,
            adapted_id(self._model, request.adapter),
            request.root_id,
            request.block_ids[: request.pull_tokens // BLOCK_TOKENS],
            rest,
            request.agent,
            self._pull_s,
            request.disk_limits,
        )

    def find(self, prompt: Prompt, hot_tokens: int) -> FoundKV | None:
        """Returns what the store finds, with the tails that can be used."""
        hot = hot_tokens // BLOCK_TOKENS
        parent = prompt.ids[hot - 1] if hot else prompt.root
        # All tokens after the hot blocks, because the blocks on disk may end before the prompt's last block.
        rest = pack_tokens(prompt.tokens[hot * BLOCK_TOKENS : -1])
        most = TAILS_ASKED if self._spec.recurrent else TAILS_MAX
        model = adapted_id(self._model, prompt.adapter)
        found = self._store.disk_find(model, prompt.wanted[hot:], parent, rest, most).wait()
        if found is None:
            return None
        tails = found.tails
        if self._spec.recurrent:
            tails = [tail for tail in tails if tail.tokens * TOKEN_BYTES == len(tail.location.tokens)]
        return replace(found, tails=tails[:TAILS_MAX])

    def read_found(self, prompt: Prompt, hot_tokens: int, adopt: Adopt) -> Restored | None:
        """As `load`. Raises `SatchelError` if reading fails."""
        session = self._opened()
        found = self.find(prompt, hot_tokens) if session is not None else None
        if session is None or found is None:
            return None
        hot, ids = hot_tokens // BLOCK_TOKENS, prompt.wanted
        failures: list[Failure] = []
        blocks: list[Found] = []
        tails: list[Found] = []
        used = 0
        try:
            where = found.blocks
            self._forget_saved(ids[hot + len(where) :])
            same = _with_tokens(where, prompt.tokens[hot * BLOCK_TOKENS :])
            read_s = self._rate_alone.seconds(sum(each.nbytes for each in same))
            if is_slow(read_s, len(same), prompt.tokens_per_s):
                used = len(same)
                logger.info("request %s is computed: reading its KV would take %.2f s", prompt.request_id, read_s)
                return None
            started = time.perf_counter()
            blocks = self._read_blocks(session, same, failures, adopt)
            used = len(blocks)
            took_s = time.perf_counter() - started
            self._rate.note(sum(kept.nbytes for _, kept in blocks), took_s)
            if prompt.tokens_per_s:
                if not self._rate_alone.lasts:
                    self._rate_alone = ReadRate()
                self._rate_alone.note(sum(each.nbytes for each in same[:used]), took_s)
            if len(blocks) == len(where):
                more = hot_tokens - (hot + len(blocks)) * BLOCK_TOKENS
                ends = [tail.location for tail in found.tails if tail.tokens > more]
                tails = self._found(ends, self._read(session, ends, failures))
        finally:
            self._store.disk_read(found.lease, ids[: hot + used], prompt.owner, failures).wait()
            for known in ids[hot : hot + used]:
                self._note_saved(known)
        self.counters.corrupt_blocks += sum(not failure.missing for failure in failures)
        self.counters.restored_tokens += len(blocks) * BLOCK_TOKENS + max(
            (len(tokens) for tokens, _ in tails), default=0
        )
        parent = ids[hot + len(blocks) - 1] if hot + len(blocks) else prompt.root
        for tokens, _ in tails:
            self._note_saved(tail_id(parent, tokens))
        return Restored(hot, blocks, tails) if blocks or tails else None

    def read(self, parent: bytes, tokens: Sequence[int], owner: str) -> dict[str, mx.array] | None:
        """Returns the evaluated arrays of something `Written`, by name, in the shapes and dtypes in which they were
        written; None if they are not there or cannot be read."""
        try:
            session = self._opened()
            if session is None:
                return None
            found = self._store.disk_find(self._model, [], parent, pack_tokens(tokens), 1).wait()
            if found is None:
                return None
            where = [tail.location for tail in found.tails if tail.tokens == len(tokens)]
            arrays: dict[str, mx.array] = {}
            failures: list[Failure] = []
            try:
                for stored in read_entries(session.root, session.key, where):
                    if isinstance(stored, Failure):
                        failures.append(stored)
                    else:
                        arrays |= {name: slab_codec.to_mlx(array) for name, array in stored.parts.items()}
                # No other thread could evaluate what this one leaves lazy.
                mx.eval(list(arrays.values()))
            finally:
                used = [location.id for location in where] if arrays else []
                self._store.disk_read(found.lease, used, owner, failures).wait()
        except SatchelError as error:
            logger.warning("reading arrays of %s back failed: %s", owner or "nobody", error.message)
            return None
        self.counters.corrupt_blocks += sum(not failure.missing for failure in failures)
        return arrays if arrays and not failures else None

    def _read(self, session: WriterSession, where: Sequence[Location], failures: list[Failure]) -> list[Slab | None]:
        return read_slabs(self._spec, session.root, session.key, where, failures)

    def _read_blocks(
        self, session: WriterSession, where: Sequence[Location], failures: list[Failure], adopt: Adopt
    ) -> list[Found]:
        if self._spec.policy is None:
            slabs = self._read(session, where, failures)
            return self._found(where, slabs[: slabs.index(None)] if None in slabs else slabs)
        blocks = read_blocks(self._spec, session.root, session.key, where, failures, adopt)
        return self._found(where[: len(blocks)], blocks)

    def _found(self, where: Sequence[Location], pieces: Sequence[Piece | None]) -> list[Found]:
        return [
            (unpack_tokens(location.tokens), kept_of(piece))
            for location, piece in zip(where, pieces, strict=False)
            if piece is not None
        ]

    # The writer's thread.

    def _open_early(self) -> None:
        """The first call to a store imports much, which no prompt should wait for."""
        try:
            self._opened()
        except Exception as error:
            logger.info("the store is asked again for the first write: %s", error)

    def _write_or_say(self, job: WriteJob) -> None:
        try:
            self._write_patiently(job)
        except SatchelError as error:
            self.counters.unwritten_turns += 1
            logger.warning("writing KV of %s failed: %s", job.owner, error.message)
        except Exception:
            # The thread must survive any error, or nothing is ever written again.
            self.counters.unwritten_turns += 1
            logger.exception("writing KV of %s failed", job.owner)
        finally:
            job.done()
            with self._lock:
                self._waiting -= job.nbytes

    def _write_patiently(self, job: WriteJob) -> None:
        """Writes a job. Retries if the store is unavailable, unless an earlier job has failed all its retries and
        nothing was written since."""
        for pause_s in () if self._given_up else TRIES_S:
            try:
                return self._write(job)
            except (Unavailable, StaleEpoch, DiskFull) as error:
                logger.info("writing KV of %s again in %g s: %s", job.owner, pause_s, error.message)
                time.sleep(pause_s)
        self._given_up = True
        self._write(job)

    def _write(self, job: WriteJob) -> None:
        try:
            self._write_once(job)
        except SatchelError:
            self._open_again()
            raise
        self._given_up = False
        self._moved_at = time.monotonic()

    def _write_once(self, job: WriteJob) -> None:
        session, model = self._opened(), adapted_id(self._model, job.adapter)
        if session is None:
            return
        for entries in grouped(self._entries(job)):
            record = session.write(model, entries)
            there = self._store.disk_commit(record, job.limits).wait() or []
            for written in there:
                self._note_saved(written)
            self.counters.written_blocks += len(entries)
            self.counters.written_bytes += record.nbytes
            self._moved_at = time.monotonic()
            if len(there) < len(entries) and any(most is not None for most in job.limits.values()):
                # The tenant's limit is reached, and later blocks would never be found.
                break
        # One call for the whole chain, which may be long. Blocks that the disk has lost are written again after a later
        # turn.
        self._forget_saved(self._store.disk_touch(model, job.chain, job.owner).wait() or [])

    def _entries(self, job: WriteJob) -> Iterator[Entry]:
        owners = (job.owner,)
        # After a failed attempt some blocks may be on disk already.
        for item in [item for item in job.unsaved if item.id is None or item.id not in self.saved]:
            kept = item.kept.value
            assert isinstance(kept, Slab | Record), "blocks in the pool must be copied before they are handed over"
            parts = slab_codec.to_parts(self._spec, kept)
            more: dict[str, Any] = {"window_from": item.kept.window_from, "snapshot": item.kept.snapshot}
            more["data"] = slab_codec.whole(kept)
            if item.id is None:
                yield Entry.of_tail(item.parent, item.tokens, parts, owners=owners, **more)
            else:
                yield Entry(item.id, item.parent, item.tokens, parts, owners=owners, **more)
        for other in job.others:
            arrays = {name: slab_codec.to_numpy(array) for name, array in other.arrays.items()}
            yield Entry.of_tail(other.parent, other.tokens, arrays, owners=owners)

    def _note_saved(self, block: bytes) -> None:
        # A plain OrderedDict, because other threads remove ids, and a library's cache is not atomic.
        self.saved.pop(block, None)
        self.saved[block] = None
        while len(self.saved) > SAVED_MAX:
            self.saved.popitem(last=False)

    def _forget_saved(self, missing: Sequence[bytes]) -> None:
        for block in missing:
            self.saved.pop(block, None)

    def _opened(self) -> WriterSession | None:
        with self._opening:
            if self._session is None:
                told = self._store.disk_session().wait()
                if told is None:
                    return None
                root = Path(told.root)
                self._session = WriterSession(root, read_key(root), told.session, told.epoch)
            return self._session

    def _open_again(self) -> None:
        """Asks the store next time: it may have restarted."""
        with self._opening:
            self._session = None


def _write_forever(
    jobs: queue.SimpleQueue[WriteJob | None],
    begin: weakref.WeakMethod[Callable[[], None]],
    write: weakref.WeakMethod[Callable[[WriteJob], None]],
) -> None:
    """Runs until nobody has the tier any more: then None comes."""
    if (now := begin()) is not None:
        now()
    del now
    while (job := jobs.get()) is not None and (then := write()) is not None:
        then(job)
        # Otherwise they would stay alive until the next one.
        del job, then
