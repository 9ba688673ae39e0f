"""Keeps a replica within its memory: limits what sequences may cost, what cached prefixes and image embeddings may
take, and how far the block pool may grow. `memory/budget.py` has the rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ....cluster.config.config import Scheduling
from ..execution.executor import BatchExecutor
from ..execution.loaded_model import LoadedModel
from ..scheduling.limits import Limits
from ..scheduling.scheduler import Scheduler
from .budget import Held, MemoryBudget, Sequences, bearable_bytes
from .embedding_cache import EmbeddingCache
from .sequence_memory import SequenceMemory

IDLE_S = 30.0
"""How long half of the pool's slots must be free before it gives them back."""

STAGES_LEAST = 2
"""A divided model has at least so many stages."""

MUCH_BYTES = 64 * 2**20
"""A pool of fewer bytes keeps its free slots."""


def limits_of(loaded: LoadedModel, scheduling: Scheduling, memory_bytes_max: int) -> Limits:
    """Returns the scheduler's limits for a replica's memory."""
    spec = loaded.spec
    sequences_bytes = min(memory_bytes_max, scheduling.kv_bytes_max or memory_bytes_max)
    chunk = scheduling.prefill_chunk_tokens
    if loaded.piece_tokens is not None and loaded.vision is None:
        # It takes a call with several pieces half of the time, and between two calls the first stage waits for the
        # last. A picture's tokens may be one piece, which needs as much memory as was planned for a chunk.
        chunk *= STAGES_LEAST
    paged = spec.policy is not None
    return Limits(
        sequences_max=scheduling.sequences_max,
        queue_requests_max=scheduling.queue_requests_max,
        prefill_chunk_tokens=min(chunk, spec.snapshot_tokens) if spec.recurrent else chunk,
        prefill_sequences_max=scheduling.prefill_sequences_max,
        kv_tokens_max=sequences_bytes // spec.bytes_per_token,
        sequence_tokens=-(-spec.bytes_per_sequence // spec.bytes_per_token),
        paged=paged,
        # With other layers a sequence may be able to reuse less than another one holds.
        shares=paged and not spec.recurrent and not spec.rule.window,
        stops_at_borders=spec.recurrent,
    )


class Pictures(Protocol):
    """Pictures that wait and those that were encoded.

    Attributes:
        embeddings: the cache of image embeddings.
    """

    embeddings: EmbeddingCache

    @property
    def held_bytes(self) -> int:
        """Bytes of the image embeddings of waiting and running sequences."""
        ...


class MemoryRoom:
    """The memory of an engine. Used on its thread.

    Args:
        bytes_max: what the replica may hold besides its weights and a step's temporary memory.
        unwritten_bytes: returns how many bytes wait to be written to the disk.
        text_bytes: returns how many bytes a long text that is embedded takes.

    Attributes:
        usage: figures of the last step, as `ReplicaStats` has them; for any thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduling: Scheduling,
        bytes_max: int,
        scheduler: Scheduler,
        executor: BatchExecutor,
        memory: SequenceMemory,
        pictures: Pictures,
        unwritten_bytes: Callable[[], int],
        text_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        spec = loaded.spec
        self.budget = MemoryBudget(
            bytes_max,
            spec.bytes_per_token,
            spec.open_sequence_bytes,
            scheduler.limits.sequences_max,
            spec.policy is not None,
        )
        self._loaded, self._scheduling, self._share_bytes = loaded, scheduling, bytes_max
        self._scheduler, self._executor = scheduler, executor
        self._memory, self._pictures = memory, pictures
        self._unwritten_bytes, self._text_bytes = unwritten_bytes, text_bytes
        self.usage: dict[str, int] = {}
        self._much_free_since: float | None = None
        self._fitted: tuple[MemoryBudget, Sequences, Held] | None = None
        memory.room = self._kept_bytes

    def held(self) -> Held:
        """What the replica's memory holds now."""
        pool, prefixes = self._loaded.pool, self._memory.prefixes
        return Held(
            pool=pool.nbytes if pool is not None else 0,
            slots=pool.taken_bytes if pool is not None else 0,
            kept=prefixes.nbytes - prefixes.pool_bytes,
            loose=prefixes.loose_bytes,
            pictures=self._pictures.held_bytes,
            seen=self._pictures.embeddings.nbytes,
            unwritten=self._unwritten_bytes(),
            text=self._text_bytes(),
        )

    def sequences(self) -> Sequences:
        """What the scheduler counts, with the sequences that the next step removes."""
        scheduler = self._scheduler
        return Sequences(scheduler.running + self._executor.leaving, scheduler.cost_tokens, scheduler.held_tokens)

    def _kept_bytes(self) -> int:
        return self.budget.kept_bytes(self.sequences(), self.held())

    def fit(self) -> None:
        """Makes room before a step: evicts cached KV and embeddings for which there is no room beside the sequences,
        and limits what sequences may cost."""
        sequences, held = self.sequences(), self.held()
        asked = self.budget, sequences, held
        if asked == self._fitted:
            # As in most decode steps. All that follows depends on these alone.
            return
        self._fitted = asked
        if self._memory.fit_into(self.budget.kept_bytes(sequences, held)):
            held = self.held()
        most = self._scheduling.vision_bytes_max
        room = self.budget.pictures_bytes(sequences, held)
        self._pictures.embeddings.resize(room if most is None else min(most, room))
        self._scheduler.room_tokens = self.budget.sequences_tokens(sequences, held)
        pool = self._loaded.pool
        if pool is not None:
            pool.limit(self.budget.pool_bytes(sequences, held))
            if self.budget.pool_is_too_large(sequences, held) and held.pool > held.slots:
                self._executor.give_back(self.budget.pool_bytes(sequences, held))
        self.usage = self._usage(sequences, held)

    def _usage(self, sequences: Sequences, held: Held) -> dict[str, int]:
        kept = self._memory.prefixes.loose_slots
        counts = self._loaded.pool.counts() if self._loaded.pool is not None else {"slots": 0, "slots_free": 0}
        return {
            "slots_running": max(0, counts["slots"] - counts["slots_free"] - kept),
            "slots_kept": kept,
            "slots_free": counts["slots_free"],
            "memory_bytes": self.budget.used(sequences, held),
            "memory_bytes_max": self.budget.bytes_max,
            "kv_tokens": sequences.held,
            "kv_tokens_max": int(min(self._scheduler.limits.kv_tokens_max, self._scheduler.room_tokens)),
        }

    def resize(self, share_bytes: int, free_bytes: int, device_bytes: int) -> None:
        """Changes the limit of the memory, and gives back slots that have been free for long. Call it about once a
        second.

        Args:
            share_bytes: the replica's part of the node's memory. It decides which requests are refused. If other
                programs need memory, the replica uses less than its part.
            free_bytes: what is free on the device now, of `device_bytes`.
        """
        if share_bytes != self._share_bytes:
            self._share_bytes = share_bytes
            self._scheduler.limits = limits_of(self._loaded, self._scheduling, share_bytes)
            self._fitted = None
        used = self.budget.used(self.sequences(), self.held())
        self.budget = replace(self.budget, bytes_max=bearable_bytes(share_bytes, used, free_bytes, device_bytes))
        self.fit()
        now, held = time.monotonic(), self.held()
        if held.pool < MUCH_BYTES or 2 * held.slots > held.pool:
            self._much_free_since = None
        elif self._much_free_since is None:
            self._much_free_since = now
        elif now - self._much_free_since >= IDLE_S:
            self._much_free_since = None
            self._executor.give_back(held.slots + held.slots // 4)
