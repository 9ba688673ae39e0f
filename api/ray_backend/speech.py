"""Requests to models of speech: a replica queues one, and is asked for its pieces until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...actors.protocol.clients import ReplicaClient
from ...actors.protocol.speech_messages import SpeechPiece, SpeechRequest, SpeechUpdate
from ...cluster.errors import from_wire
from ..requests.backend import SpeechAnswer
from .resending import Resending, next_update
from .routing import Routing


class RaySpeech(Resending[SpeechRequest, SpeechUpdate]):
    """One request. Another replica begins it again with the same seed; what was told before is not told again.

    Args:
        told: called with each piece.
    """

    def __init__(self, routing: Routing, request: SpeechRequest, told: Callable[[SpeechPiece], None]) -> None:
        super().__init__(routing, request)
        self._told = told
        self._characters = self._bytes = 0
        """How much was told."""

    async def _ask_replica(self, client: ReplicaClient, left_s: float) -> SpeechUpdate:
        request, number = replace(self._request, deadline_s=left_s), 0
        characters, nbytes = self._characters, self._bytes
        await client.do_speech(request)
        while True:
            update = await next_update(request.request_id, number, client.next_speech)
            number = update.number
            for piece in update.partial:
                rest = SpeechPiece(piece.text[characters:], piece.audio[nbytes:])
                characters, nbytes = max(0, characters - len(piece.text)), max(0, nbytes - len(piece.audio))
                if rest.text or rest.audio:
                    self._characters += len(rest.text)
                    self._bytes += len(rest.audio)
                    self._told(rest)
            if update.error is not None:
                raise from_wire(update.error)
            if update.done:
                return update

    async def run(self) -> SpeechAnswer:
        """Raises as `Backend.do_speech`."""
        update, decision = await self.answered()
        return SpeechAnswer(update, decision.replica, decision.node, decision.why)
