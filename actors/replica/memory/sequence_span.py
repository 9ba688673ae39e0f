"""The span of a sequence at its replica, with a child for each phase: queue, restore, prefill, decode."""

from __future__ import annotations

from ....cluster.errors import SatchelError
from ....cluster.telemetry.context import NO_SPAN, Span
from ...protocol.replica_messages import GenerateRequest, SequenceUpdate


def sequence_span(request: GenerateRequest, caller: Span) -> SequenceSpan:
    """Begins the span of a sequence, within that of the call that submits it."""
    about = {
        "satchel.sequence.id": request.request_id,
        "satchel.prompt_tokens": len(request.prompt),
        "satchel.generated_before": request.generated or None,
        "gen_ai.request.model": request.model,
    }
    return SequenceSpan(caller.child("sequence", about))


class SequenceSpan:
    """The span of a sequence. Used on the engine's thread."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self._span = span
        self._phase = span.child("queue")
        self._generated = 0

    @property
    def phase(self) -> Span:
        """The span of its present phase."""
        return self._phase

    def restore(self) -> None:
        """Its KV is being read back."""
        self._begin("restore")

    def prefill(self, cached: int, from_disk: int) -> None:
        """Its prompt is computed, without the `cached` first tokens, of which `from_disk` were read back."""
        self._begin("prefill")
        self._phase.set({"satchel.cached_tokens": cached, "satchel.restored_tokens": from_disk})

    def decode(self) -> None:
        """Its answer is drawn."""
        self._begin("decode")

    def note_token(self) -> None:
        """A token was drawn."""
        self._generated += 1
        if self._generated == 1:
            self._span.event("first token")

    def preempt(self) -> None:
        """It has lost its place, and waits for another one."""
        self._span.event("preempted", {"satchel.generated_tokens": self._generated})
        self._begin("queue")

    def refuse(self, why: SatchelError) -> None:
        """It was not accepted."""
        self._end(type(why).__name__)

    def leave(self, last: SequenceUpdate) -> None:
        """It has ended, with its last update."""
        self._span.set({"satchel.generated_tokens": self._generated, "satchel.finish": last.finish})
        self._end(str(last.error["kind"]) if last.error else "")

    def _begin(self, phase: str) -> None:
        self._phase.end()
        self._phase = self._span.child(phase)

    def _end(self, error: str) -> None:
        self._phase.end(error)
        self._span.end(error)
