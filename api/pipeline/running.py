"""The sequences that run for one event loop's requests: listed, and stopped by their ids."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...actors.protocol.replica_messages import GenerateRequest, request_of
from .streams import TextStream


@dataclass(frozen=True)
class RunningSequence:
    """One sequence, from its acceptance by a replica to its end.

    Attributes:
        id: the request's id and a random part.
        agent: the id of the agent whose turn it is, "" for none.
        begun: in Unix time.
    """

    id: str
    tenant: str
    agent: str
    begun: float
    stream: TextStream

    @property
    def request_id(self) -> str:
        return request_of(self.id)


class RunningSequences:
    """The sequences of one `Generator`, in the order in which they began. They are bounded by what replicas accept."""

    def __init__(self) -> None:
        self._running: dict[str, RunningSequence] = {}

    def begin(self, sequence: GenerateRequest, stream: TextStream) -> None:
        """Adds a sequence that a replica has accepted. Its stream's `on_end` must call `end`."""
        agent = sequence.agent.partition("/")[2]
        self._running[sequence.request_id] = RunningSequence(
            sequence.request_id, sequence.tenant, agent, time.time(), stream
        )

    def end(self, sequence_id: str) -> None:
        self._running.pop(sequence_id, None)

    def of(self, tenant: str) -> list[RunningSequence]:
        """Returns a tenant's sequences, those of all tenants for ""."""
        return [each for each in self._running.values() if tenant in ("", each.tenant)]

    def stop(self, id: str, tenant: str) -> int:
        """Stops a sequence by its id, or all those of a request by its id, and returns how many.

        Args:
            tenant: as in `of`.
        """
        found = [each for each in self.of(tenant) if id in (each.id, each.request_id)]
        for each in found:
            each.stream.stop()
        return len(found)
