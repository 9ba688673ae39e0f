"""What an endpoint measures of its sequences, under vLLM's names, so that dashboards for vLLM show Satchel too.

A sequence is what vLLM calls a request: a request with `n` choices counts `n` times. `engine` is the replica that has
the sequence; after a failover that is another one. Times are those of the endpoint, except the queue and prefill times,
which the replica tells. Buckets are vLLM's.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from ...actors.protocol.replica_messages import SequenceUpdate
from ..requests.backend import Generation

LABELS = ["model_name", "engine"]
"""vLLM's labels: the served model, and the replica."""

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_HISTOGRAMS = {
    "time_to_first_token_seconds": (_FIRST_TOKEN_S, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_TOKEN_S, "Between two outputs of a sequence, mostly of one token each."),
    "request_time_per_output_token_seconds": (_TOKEN_S, "The mean time between two tokens of a sequence."),
    "e2e_request_latency_seconds": (_REQUEST_S, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_REQUEST_S, "From a replica's acceptance to a place in its batch."),
    "request_prefill_time_seconds": (_REQUEST_S, "From the place in the batch to the first token."),
    "request_decode_time_seconds": (_REQUEST_S, "From the first token to the last."),
    "request_inference_time_seconds": (_REQUEST_S, "From the place in the batch to the last token."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a sequence's prompt."),
    "request_generation_tokens": (_TOKENS, "Tokens that a sequence generated."),
}
"""Buckets and meaning by name."""


class _Histograms(NamedTuple):
    """The histograms of one model on one replica, in the order of `_HISTOGRAMS`."""

    first_token: Histogram
    inter_token: Histogram
    per_token: Histogram
    end_to_end: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram


class SequenceMetrics:
    """The metrics of one `Generator`'s sequences, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "vllm:request_success", "Sequences by how they ended.", [*LABELS, "finished_reason"], registry=self.registry
        )
        self._histograms = [
            Histogram(f"vllm:{name}", meaning, LABELS, buckets=buckets, registry=self.registry)
            for name, (buckets, meaning) in _HISTOGRAMS.items()
        ]
        self._of: dict[tuple[str, str], _Histograms] = {}

    def of(self, model: str, replica: str) -> _Histograms:
        """Returns the histograms of a model on a replica."""
        found = self._of.get((model, replica))
        if found is None:
            found = _Histograms(*(each.labels(model, replica) for each in self._histograms))
            self._of[model, replica] = found
        return found

    def count_end(self, model: str, replica: str, reason: str) -> None:
        self._ended.labels(model, replica, reason).inc()


class SequenceTimes:
    """Measures one sequence.

    Args:
        arrived: when its request came, by `time.perf_counter`.
        prompt_tokens: length of its prompt in tokens.
    """

    def __init__(
        self, metrics: SequenceMetrics, model: str, generation: Generation, arrived: float, prompt_tokens: int
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._generation = generation
        self._arrived = arrived
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._first_at: float | None = None
        self._last_at = 0.0
        self._queued_s: float | None = None
        self._prefill_s: float | None = None
        self._ended = False

    def note(self, update: SequenceUpdate) -> None:
        """Measures an update that has just been read."""
        if self._queued_s is None:
            self._queued_s = update.queued_s
        if self._prefill_s is None:
            self._prefill_s = update.prefill_s
        if not update.tokens:
            return
        now, histograms = time.perf_counter(), self._metrics.of(self._model, self._generation.replica)
        if self._first_at is None:
            self._first_at = now
            histograms.first_token.observe(now - self._arrived)
        else:
            histograms.inter_token.observe(now - self._last_at)
        self._last_at = now
        self._tokens += len(update.tokens)

    def end(self, reason: str) -> None:
        """Counts the end of the sequence; further calls do nothing. The times of a sequence that failed or was aborted
        are not measured, because they say nothing of how long answers take.

        Args:
            reason: `stop`, `length`, `abort` or `error`.
        """
        if self._ended:
            return
        self._ended = True
        replica = self._generation.replica
        self._metrics.count_end(self._model, replica, reason)
        if reason not in ("stop", "length"):
            return
        histograms = self._metrics.of(self._model, replica)
        histograms.end_to_end.observe(time.perf_counter() - self._arrived)
        histograms.prompt_tokens.observe(self._prompt_tokens)
        histograms.generation_tokens.observe(self._tokens)
        if self._queued_s is not None:
            histograms.queue.observe(self._queued_s)
        if self._prefill_s is not None:
            histograms.prefill.observe(self._prefill_s)
        if self._first_at is None:
            return
        decode_s = self._last_at - self._first_at
        histograms.decode.observe(decode_s)
        if self._prefill_s is not None:
            histograms.inference.observe(self._prefill_s + decode_s)
        if self._tokens > 1:
            histograms.per_token.observe(decode_s / (self._tokens - 1))
