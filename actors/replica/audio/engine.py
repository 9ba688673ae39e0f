"""The engine of a model of speech: one transcript, or one spoken text, after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....cluster.errors import InvalidRequest, SatchelError
from ...model_files.identity.model_identity import ModelIdentity
from ...protocol.speech_messages import SPEAK, SpeechInfo, SpeechPiece, SpeechRequest, SpeechUpdate, speech_refusal
from ..jobs.engine import GIVEN_BYTES_MAX, JobCounters, JobEngine
from ..jobs.queue import SerialJob
from .listening import ListeningModel
from .speaking import SpeakingModel

UNMEASURED_S = 60.0
"""Families that write down a whole file at once get no longer audio, in seconds, before a file of at least half its
length has been written down."""

FARTHER = 2
"""How many times the longest audio so far a file may have. Twice the length is four times the size, and the memory of
no larger one is predicted (`pace.FARTHEST`)."""


@dataclass
class SpeechCounters(JobCounters):
    """Totals since the engine started; `_s` are seconds of audio."""

    transcripts: int = 0
    transcribed_s: float = 0.0
    speeches: int = 0
    spoken_s: float = 0.0


class SpeechEngine(JobEngine[SpeechRequest]):
    """Writes down speech, or speaks. The arguments but `model` are those of `JobEngine`. A second of audio costs
    `TOKENS_PER_S` tokens, and a character of a text one; its windows or lines share that evenly."""

    takes = SpeechRequest
    jobs, whole, brought = "requests", "answer", "the audio files that wait"
    counters: SpeechCounters

    def __init__(
        self,
        model: ListeningModel | SpeakingModel,
        identity: ModelIdentity,
        waiting_max: int,
        memory_bytes: int,
        send: Callable[[str, SpeechUpdate], None],
        claim: Callable[[int], None] = lambda nbytes: None,
        *,
        given_bytes_max: int = GIVEN_BYTES_MAX,
    ) -> None:
        super().__init__(identity, waiting_max, memory_bytes, send, claim, given_bytes_max=given_bytes_max)
        self.model, self.counters = model, SpeechCounters()
        self._longest_s = 0.0
        self.does = "speaks" if model.info.speaks else "writes down speech"

    @property
    def info(self) -> SpeechInfo:
        return self.model.info

    @property
    def described(self) -> dict[str, Any]:
        return {"speech": self.info, "layers": f"{self.does} ({self.info.family})"}

    @property
    def totals(self) -> dict[str, Any]:
        counters = self.counters
        return {
            "transcripts_total": counters.transcripts,
            "transcribed_s_total": counters.transcribed_s,
            "speeches_total": counters.speeches,
            "spoken_s_total": counters.spoken_s,
        }

    def refusal(self, request: SpeechRequest) -> SatchelError | None:
        refused = speech_refusal(self.info, request) or self._too_long(request)
        return None if refused is None else InvalidRequest(refused[1], param=refused[0])

    def _too_long(self, request: SpeechRequest) -> tuple[str, str] | None:
        """Returns the refusal of a file that is much longer than what this model has written down, for nothing says
        what memory it would take; None if it is not."""
        most = max(UNMEASURED_S, FARTHER * self._longest_s)
        if not isinstance(self.model, ListeningModel) or self.model.in_windows or request.seconds <= most:
            return None
        message = f"file: the audio has {request.seconds:g} s; at most {most:g} s are taken until this model has"
        return "file", f"{message} written down at least half as much here: longer audio may not fit into memory"

    def cost(self, request: SpeechRequest) -> tuple[int, int]:
        steps = self.model.steps(request)
        return max(1, request.tokens // steps), steps

    def size(self, request: SpeechRequest) -> int:
        return self.model.size(request)

    def given_bytes(self, request: SpeechRequest) -> int:
        return len(request.samples)

    def too_large(self, needed: int) -> InvalidRequest:
        what = "input: to speak this text" if self.info.speaks else "file: to write down audio of this length"
        message = f"{what} takes about {needed >> 20} MiB of memory beside the model's weights"
        param = "input" if self.info.speaks else "file"
        return InvalidRequest(f"{message}; {self.memory_bytes >> 20} MiB are left here", param=param)

    def compute(self, request: SpeechRequest) -> SpeechUpdate:
        def told(piece: SpeechPiece) -> None:
            self._send(request.request_id, SpeechUpdate(0, partial=[piece]))

        counters = self.counters
        if isinstance(self.model, SpeakingModel):
            assert request.task == SPEAK
            began = time.perf_counter()
            seconds = self.model.speak(request, self.paused, told)
            self.rest_done()
            self.pace.note_step(request.tokens, time.perf_counter() - began)
            counters.speeches, counters.spoken_s = counters.speeches + 1, counters.spoken_s + seconds
            return SpeechUpdate(0, seconds=seconds, done=True)
        transcript = self.model.transcribe(request, self.paused, told)
        self.rest_done()
        self._longest_s = max(self._longest_s, request.seconds)
        counters.transcripts += 1
        counters.transcribed_s += request.seconds
        return SpeechUpdate(0, transcript=transcript, done=True)

    def note_steps(self, job: SerialJob, new: int, seconds: float) -> None:
        # A text may have other segments than lines, and windows may overlap: a text's pace is noted when it is spoken.
        if not self.info.speaks and (planned := min(new, job.steps)):
            super().note_steps(job, planned, seconds)

    def failed(self, error: SatchelError) -> SpeechUpdate:
        return SpeechUpdate(0, error=error.to_wire())
