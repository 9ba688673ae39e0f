"""Prefills prompts that agents will probably send next, while the engine has nothing else to do.

A prompt is *prepared* block by block, in chunks as short as those beside running sequences. Between two chunks commands
are handled: if a request has come, the prompt leaves the device at once, and goes on from its last whole block when
there is nothing to do again. Prepared KV is no sequence's, so neither the scheduler nor the router counts it. It never
takes the place of other KV: without spare room nothing is prepared, and it is evicted first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from cachetools import LRUCache

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import GenerateRequest
from ..execution.executor import BatchExecutor
from ..execution.loaded_model import LoadedModel
from ..kv.caches import PooledBlock
from ..memory.sequence_memory import Sequence, SequenceMemory
from ..scheduling.prefill_budget import PrefillPace, stop_inside

logger = logging.getLogger(__name__)

PROMPTS_MAX = 64
"""How many prompts wait; the oldest ones are dropped."""

AGENTS_MAX = 1024
"""Of how many agents it is known what was prepared for them last."""


class PrepareLoop:
    """The prompts to prepare, at most one of each agent. Used on the engine's thread."""

    def __init__(self, loaded: LoadedModel, executor: BatchExecutor, memory: SequenceMemory, pace: PrefillPace) -> None:
        self._loaded = loaded
        self._executor = executor
        self._memory = memory
        self._pace = pace
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._block_ids: LRUCache[str, list[bytes]] = LRUCache(AGENTS_MAX)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerateRequest) -> None:
        """Adds a prompt instead of the agent's former one, and drops what was prepared of only that. Prompts that this
        model cannot prefill are left out."""
        self.drop(request.agent)
        tokens, loaded = request.prompt, self._loaded
        fits = 0 < len(tokens) < loaded.context_tokens and 0 <= min(tokens) <= max(tokens) < loaded.vocabulary_size
        if not fits or request.media or not request.reusable or not loaded.computes(request):
            return
        self._memory.limit(request)
        stay = set(request.block_ids)
        former = self._block_ids.get(request.agent, [])
        self._memory.prefixes.drop_prepared([block for block in former if block not in stay])
        self._block_ids[request.agent] = list(request.block_ids)
        self._waiting[request.agent] = Sequence(request, list(tokens), list(request.block_ids), prepares=True)
        if len(self._waiting) > PROMPTS_MAX:
            self.drop(next(iter(self._waiting)))

    def drop(self, agent: str) -> None:
        """Drops the agent's prompt, if it has one; what is prepared of it stays."""
        if (sequence := self._waiting.pop(agent, None)) is not None:
            self._leave(sequence)

    def forget(self, agent: str) -> int:
        """Drops the agent's prompt and what was prepared for the agent, unless a sequence has used it. Returns the
        freed bytes."""
        self.drop(agent)
        return self._memory.prefixes.drop_prepared(self._block_ids.pop(agent, []))

    def clear(self) -> None:
        """Drops all prompts."""
        for agent in list(self._waiting):
            self.drop(agent)

    def pause(self) -> None:
        """Takes the prompt that is being prepared off the device."""
        for sequence in self._waiting.values():
            if self._executor.holds(sequence.id):
                self._leave(sequence)

    def step(self) -> bool:
        """Prefills one chunk. Returns False if there was nothing to do."""
        while self._waiting:
            agent, sequence = next(iter(self._waiting.items()))
            try:
                if self._prefill(sequence):
                    return True
            except Exception:
                # It only saves time.
                logger.exception("a prompt of agent %s could not be prepared", agent)
            self.drop(agent)
        return False

    def _prefill(self, sequence: Sequence) -> bool:
        """Prefills a chunk. Returns False, and does nothing, if nothing is left or there is no room."""
        end = len(sequence.ids) * BLOCK_TOKENS
        # With a block more, because the chunk may begin within one. Without a pool what is cached are copies.
        own = BLOCK_TOKENS if self._loaded.pool is not None else BLOCK_TOKENS + end
        room = self._memory.spare_tokens(sequence.request) - own
        if not self._executor.holds(sequence.id):
            self._executor.leave([sequence.id])
            hit = self._memory.find(sequence, end)
            if hit.tokens >= end or room <= 0:
                return False
            assert not isinstance(hit.tail, PooledBlock), "a tail is not a whole block"
            adapter = sequence.request.adapter
            self._executor.open(sequence.id, hit.blocks, hit.tail, hit.tail_tokens, adapter=adapter)
        done = self._executor.length(sequence.id)
        budget = self._pace.short_budget()
        stop = end if end - done <= budget else stop_inside(done, budget, budget)
        if stop <= done or stop - done > room:
            return False
        # Not measured: the rate of short chunks says nothing about that of requests.
        self._executor.prefill([(sequence.id, sequence.given(done, stop))])
        self._memory.keep_blocks(sequence, stop)
        if stop == end:
            self.drop(sequence.request.agent)
        return True

    def _leave(self, sequence: Sequence) -> None:
        self._memory.leave(sequence)
        self._executor.leave([sequence.id])
