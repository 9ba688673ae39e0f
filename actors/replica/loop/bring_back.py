"""Reads evicted KV of agents back from disk while the engine has nothing else to do.

While an agent's program runs a tool, other sequences may evict the agent's KV from memory. Once they have ended there
is room again, and the agent's next turn need not wait for the disk. Only spare room is used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, replace

from ...protocol.block_ids import BLOCK_TOKENS
from ...protocol.replica_messages import GenerateRequest
from ..memory.keeping import Keeping
from ..memory.restores import Reading, Restores
from ..memory.sequence_memory import Restored, Sequence, SequenceMemory, is_remembered
from ..scheduling.prefill_budget import PrefillPace

AGENTS_MAX = 16
"""The KV of so many agents is read back, those of the latest turns."""


@dataclass(frozen=True)
class _EndedTurn:
    request: GenerateRequest
    tokens: array[int]
    ids: list[bytes]

    def sequence(self, number: int) -> Sequence:
        """A sequence with the turn's whole blocks. The number tells it from earlier ones, of which something may still
        come."""
        tokens, name = [*self.tokens[: len(self.ids) * BLOCK_TOKENS], 0], f"back {number} {self.request.request_id}"
        request = replace(self.request, request_id=name, remembered_tokens=len(tokens) - 1)
        return Sequence(request, tokens, self.ids, prepares=True)


class BringBack:
    """The agents whose next turn is expected here. Used on the engine's thread.

    Args:
        pace: tells how long computing the KV would take.
    """

    def __init__(self, memory: SequenceMemory, keeping: Keeping, restores: Restores, pace: PrefillPace) -> None:
        self._memory = memory
        self._keeping = keeping
        self._restores = restores
        self._pace = pace
        self._turns: OrderedDict[str, _EndedTurn] = OrderedDict()
        self._begun = 0
        # What is being read, and for which turn.
        self._reading: tuple[Sequence, _EndedTurn] | None = None

    def note_end(self, sequence: Sequence) -> None:
        """Notes an agent's turn that is complete."""
        request = sequence.request
        if is_remembered(request) and not request.media:
            request = replace(request, prompt=[], block_ids=[])
            self._turns.pop(request.agent, None)
            self._turns[request.agent] = _EndedTurn(request, array("I", sequence.tokens), list(sequence.ids))
            if len(self._turns) > AGENTS_MAX:
                self._turns.popitem(last=False)

    def forget(self, agent: str) -> None:
        """Forgets an agent: its KV is not read back."""
        if self._reading is not None and self._reading[1].request.agent == agent:
            self.end()
        self._turns.pop(agent, None)

    def clear(self) -> None:
        """Forgets all agents."""
        self.end()
        self._turns.clear()

    def begin(self) -> bool:
        """Begins to read KV back, of the latest turn that memory lacks a part of, if there is room for it. Returns
        whether something is being read."""
        if self._reading is not None:
            return True
        for agent, turn in reversed(self._turns.items()):
            hot = self._memory.prefixes.leading(turn.ids)
            missing = (len(turn.ids) - hot) * BLOCK_TOKENS
            # Asked again and again while nothing runs, so before a long prompt's tokens are copied.
            if not 0 < missing <= self._memory.spare_tokens(turn.request):
                continue
            self._begun += 1
            sequence, known = turn.sequence(self._begun), hot * BLOCK_TOKENS
            if not self._restores.asks(sequence, known, plain=self._memory.prefixes.is_plain):
                return False
            self._reading = sequence, turn
            self._memory.pin(sequence, known)
            self._restores.begin(sequence, known, self._pace.tokens_per_s)
            # If the disk lacks it, it is not asked again.
            del self._turns[agent]
            return True
        return False

    def take(self, reading: Reading, restored: Restored | None) -> bool:
        """Takes what was read back. Returns False if it was read for a request."""
        if self._reading is None or reading.prompt.request_id != self._reading[0].id:
            return False
        if self._restores.end(reading) and restored is not None:
            self._keeping.put_back(self._reading[0], restored)
        self.end()
        return True

    def pause(self) -> None:
        """Ends the reading that goes on, if one does, until there is nothing else to do again: a request has come, and
        reads its own KV."""
        if self._reading is not None:
            turn = self._reading[1]
            self.end()
            self._turns[turn.request.agent] = turn

    def end(self) -> None:
        """Ends the reading that goes on, if one does, for good."""
        if self._reading is not None:
            sequence, self._reading = self._reading[0], None
            self._restores.leave(sequence.id)
            self._memory.unpin(sequence)
