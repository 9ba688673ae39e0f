"""The embedding loop: texts that become vectors, in steps that take turns with prefill.

A step either embeds or prefills, so decoding sequences wait no longer than for prefill alone. Both have the same
budget, and their speed is measured together: both run tokens through the model and compute no logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....cluster.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    SatchelError,
    Unavailable,
)
from ...protocol.replica_messages import PooledTexts, PoolingRequest
from ..device.device import on_gpu
from ..device.device_errors import on_device
from ..execution.hidden_states import HiddenStates
from ..execution.loaded_model import LoadedModel
from ..execution.pooling import LongText, PoolingText, TextPooler
from ..scheduling.prefill_budget import PrefillPace
from ..scheduling.text_queue import Pick, TextJob, TextQueue
from .delivery import Counters

logger = logging.getLogger(__name__)

LONG_TEXT_PART = 4
"""The caches of a long text take at most this part of a replica's memory (a quarter); the rest is for sequences."""

Reply = Callable[[PooledTexts | SatchelError], None]


@dataclass
class _Embedding:
    """A request in progress. It has the vectors that are computed so far, by the indexes of their texts."""

    request: PoolingRequest
    reply: Reply
    vectors: dict[int, np.ndarray]

    def text(self, index: int) -> PoolingText:
        tokens, skipped = self.request.texts[index], self.request.skipped
        # At least one token must count.
        most = len(tokens) - 1
        return PoolingText(
            tokens, min(skipped[index], most) if skipped else 0, tuple(self.request.score), self.request.logprobs
        )

    def answer(self) -> PooledTexts:
        join = np.stack if self.request.logprobs is None else np.concatenate
        vectors = join([self.vectors[index] for index in range(len(self.request.texts))])
        return PooledTexts(vectors.shape[1], vectors.astype("<f4").tobytes())


class EmbedLoop:
    """The requests for vectors, and the embedding part of a step. Used on the engine's thread.

    Args:
        jobs_max: how many requests may wait.
        pace: limits what a step may embed, and measures it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        jobs_max: int,
        pace: PrefillPace,
        counters: Counters,
    ) -> None:
        self._loaded = loaded
        self._pace = pace
        self._counters = counters
        self.queue = TextQueue(jobs_max)
        self._pooler: TextPooler | None = None
        if isinstance(loaded.hidden, HiddenStates):
            self._pooler = TextPooler(loaded.hidden, loaded.sentences.pooling, normalizes=loaded.sentences.normalizes)
        self._asked: dict[str, _Embedding] = {}
        self._long: LongText | None = None
        self._picks: list[Pick] = []
        self._suspects: set[str] = set()
        self._on_gpu = on_gpu()

    @property
    def held_bytes(self) -> int:
        """Bytes that the caches of the long text take once all of it is computed."""
        hidden, long = self._loaded.hidden, self._long
        return hidden.cache_bytes(len(long.text.tokens)) if long and isinstance(hidden, HiddenStates) else 0

    # Requests.

    def accept(self, request: PoolingRequest, reply: Reply, memory_bytes: int) -> None:
        """Queues a request, or replies with its refusal. `memory_bytes` is what the replica may hold now."""
        refusal = self._refusal(request, memory_bytes)
        if refusal is not None:
            reply(refusal)
            return
        self._asked[request.request_id] = _Embedding(request, reply, {})
        self._counters.requests += 1
        self.queue.add(
            TextJob(
                request.request_id,
                [len(tokens) for tokens in request.texts],
                request.priority,
                time.monotonic() + request.deadline_s,
                request.tenant,
                request.flow,
            )
        )

    def _refusal(self, request: PoolingRequest, memory_bytes: int) -> SatchelError | None:
        loaded, hidden = self._loaded, self._loaded.hidden
        if refused := loaded.embedding.refusal:
            does = "embeds no texts" if request.logprobs is None else "has no logprobs of prompts"
            return InvalidRequest(f"the model {does}: {refused}", param="model")
        assert isinstance(hidden, HiddenStates)
        if not hidden.exact and (request.score or request.logprobs is not None):
            does = "scores no texts" if request.score else "has no logprobs of prompts"
            return InvalidRequest(f"the model {does}: it changes its logits after the output layer", param="model")
        if not request.texts or not all(request.texts):
            return InvalidRequest("there are no texts, or one is empty", param="input")
        if request.skipped and (len(request.skipped) != len(request.texts) or min(request.skipped) < 0):
            return InvalidRequest("every text needs a number of skipped tokens", param="input")
        given = [*request.texts, request.score] if request.score else request.texts
        if max(map(max, given)) >= loaded.vocabulary_size or min(map(min, given)) < 0:
            return InvalidRequest("a text has token ids outside the vocabulary", param="input")
        longest = max(map(len, request.texts))
        if longest > loaded.context_tokens:
            return ContextLengthExceeded(
                f"a text has {longest} tokens; the model's context is {loaded.context_tokens} tokens", param="input"
            )
        chunk, most = self._pace.chunk_tokens, memory_bytes // LONG_TEXT_PART
        if longest > chunk and hidden.cache_bytes(longest) > most:
            fit = max(chunk, (most - hidden.cache_bytes(0)) // max(1, hidden.spec.bytes_per_token))
            return ContextLengthExceeded(f"a text has {longest} tokens; memory holds {fit} here", param="input")
        if request.request_id in self._asked:
            return Unavailable(f"request {request.request_id} has not left yet")
        reason = self.queue.refusal(request.tenant, request.flow)
        if reason == "full":
            return QueueFull(f"the queue is full ({self.queue.waiting_max} requests for embeddings wait)")
        if reason == "full_for_it":
            return QueueFull("the queue is full for this caller: the rest of it is reserved for others")
        return None

    def end(self, request_id: str, error: SatchelError) -> None:
        """Ends a request with an error; unknown ones are ignored."""
        embedding = self._asked.pop(request_id, None)
        if embedding is not None:
            self.queue.remove(request_id)
            self._suspects.discard(request_id)
            embedding.reply(error)
        if self.queue.long_text is None:
            self._long = None

    def begin_anew(self) -> None:
        """Computes again what was on the device when it failed. Which request caused the failure is unknown, so the
        requests of that batch are computed one by one. If the device fails again at one of them, that one ends."""
        lost = {pick.job.request_id for pick in self._picks}
        self._picks, self._long = [], None
        self.queue.begin_anew()
        if lost <= self._suspects:
            for request_id in lost:
                self._suspects.discard(request_id)
                self.end(request_id, GenerationFailed("the device failed while it was embedded, twice"))
        else:
            self._suspects |= lost

    # Steps.

    def step(self, *, decoding: bool) -> bool:
        """Computes one batch or chunk. Returns False if there was nothing to do.

        Args:
            decoding: whether there are decoding sequences, which wait for this step.
        """
        for request_id in self.queue.expired(time.monotonic()):
            self.end(request_id, DeadlineExceeded("the request's deadline has passed"))
        if not self.queue:
            return False
        picks = self.queue.next_batch(self._pace.budget(decoding))
        if self._on_gpu:
            # A power of two, so that there are few different shapes: devices compile kernels for every new one.
            picks = picks[: 1 << (len(picks).bit_length() - 1)]
        first = picks[0].job
        if first.request_id in self._suspects:
            picks = [pick for pick in picks if pick.job is first]
        else:
            picks = [pick for pick in picks if pick.job.request_id not in self._suspects]
        self._picks = picks
        self._compute(picks)
        self._picks = []
        self._suspects.discard(first.request_id)
        return True

    def _compute(self, picks: list[Pick]) -> None:
        started = time.perf_counter()
        try:
            with on_device():
                vectors = self._vectors(picks)
        except Exception as error:
            if len(picks) > 1:
                logger.exception("embedding %d texts failed; they are embedded one by one", len(picks))
                for pick in picks:
                    if pick.job.request_id in self._asked:
                        self._compute([pick])
            else:
                self._fail(picks[0].job.request_id, error)
            return
        tokens = sum(pick.stop - pick.start for pick in picks)
        assert self._pooler is not None
        padded = len(picks) * self._pooler.width(max(pick.stop - pick.start for pick in picks))
        self._pace.note(padded, time.perf_counter() - started)
        self._counters.embedded_tokens += tokens
        for pick, vector in zip(picks, vectors, strict=True):
            if vector is not None:
                self._asked[pick.job.request_id].vectors[pick.index] = vector
        for request_id in self.queue.computed(picks):
            embedding = self._asked.pop(request_id)
            embedding.reply(embedding.answer())

    def _vectors(self, picks: list[Pick]) -> list[np.ndarray | None]:
        assert self._pooler is not None
        texts = [self._asked[pick.job.request_id].text(pick.index) for pick in picks]
        first = picks[0]
        if first.ends and not first.start:
            return [*self._pooler.batch(texts)]
        if not first.start:
            self._long = self._pooler.begin(texts[0])
        assert self._long is not None
        vector = self._pooler.advance(self._long, first.stop)
        if first.ends:
            self._long = None
        return [vector]

    def _fail(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, SatchelError):
            logger.exception("request %s failed", request_id)
            error = GenerationFailed(f"embedding failed: {type(error).__name__}")
        self.end(request_id, error)
