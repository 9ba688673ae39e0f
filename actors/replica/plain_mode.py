"""Plain mode: serves a model as mlx-lm runs it, one sequence at a time, while tests find the best way to run it.

Plain mode needs only one check: that the model gives the same logits if a prompt is computed in chunks from its own
caches. A few tokens show it. No KV of such sequences is cached or reused, because it differs from the KV that the final
mode computes. So no sequence and no block ever mixes both.

The tests run in pieces, and share a thread with the sequences: a sequence waits until a piece ends, and the tests wait
until no sequence is computed. So a test may be paused in the middle of a call while sequences are computed above it on
the stack.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...cluster.errors import SatchelError
from ..model_files.source import first_sentence
from .device.device import as_numpy
from .execution.loaded_model import LoadedModel
from .loop.engine import Engine
from .proving.agreement import MODEL_ERRORS
from .proving.pieces import Pieces
from .selftest.forced_sequences import Logits, difference, not_finite, rounding

logger = logging.getLogger(__name__)

KNOWN_S = 2.0
"""If an earlier load has findings, they are read instead of tested, which mostly takes less than this."""

TOKENS = 24
_PARTS = (9, 1, 14)
"""Tokens of a text that the model reads as a whole, and in these chunks."""


class PlainMode:
    """Serves a model in plain mode between the pieces of its tests. Used on the engine's thread.

    Args:
        after_s: for how long a model is not served before plain mode begins. None: 0 s at a first start, and `KNOWN_S`
            if an earlier load has findings.
        begin: makes the engine of a model that is served in plain mode from now on.
        ends: ends the process, because its engine has failed.

    Attributes:
        pieces: the pieces of the tests; sequences are served between them.
        engine: serves the model in plain mode; None if it is not served.
    """

    def __init__(
        self, after_s: float | None, begin: Callable[[LoadedModel], Engine], ends: Callable[[], object]
    ) -> None:
        self.pieces = Pieces(self._serve)
        self.engine: Engine | None = None
        self._after_s, self._begin, self._ends = after_s, begin, ends
        self._plain: LoadedModel | None = None
        self._from_s = 0.0

    def offer(self, plain: LoadedModel, known: bool = False) -> None:
        """Lets a model be served in plain mode; `known` is whether an earlier load has findings."""
        usual_s = KNOWN_S if known else 0.0
        self._plain, self._from_s = plain, time.monotonic() + (usual_s if self._after_s is None else self._after_s)

    def _serve(self) -> None:
        """Serves waiting requests. Never raises: the paused test would take an error for a fault of the model."""
        plain = self._plain
        if plain is not None and time.monotonic() >= self._from_s:
            self._plain = None
            self._start(plain)
        if self.engine is None:
            return
        try:
            self.engine.serve()
            # Errors of the device must be raised here, not in the test that continues.
            mx.synchronize()
        except BaseException:
            logger.exception("the engine stopped")
            self._ends()

    def _start(self, plain: LoadedModel) -> None:
        try:
            if wrong := fault(plain):
                logger.warning("%s is not served before its self-test: %s", plain.folder, wrong)
                return
            self.engine = self._begin(plain)
        except SatchelError as error:
            logger.warning("%s is not served before its self-test: %s", plain.folder, error.message)
        except Exception:
            logger.exception("%s is not served before its self-test", plain.folder)


def fault(plain: LoadedModel) -> str:
    """Returns why a model may not even be served in plain mode, as the end of a sentence; empty if it may."""
    step = max(1, plain.vocabulary_size // (TOKENS + 1))
    tokens = [(1 + at) * step % plain.vocabulary_size for at in range(min(TOKENS, plain.context_tokens))]
    try:
        whole, parts = (_last_logits(plain, tokens, sizes) for sizes in ((TOKENS,), _PARTS))
    except MODEL_ERRORS as error:
        return f"it cannot continue from its own caches ({first_sentence(error)})"
    return not_finite(whole) or difference(whole, parts, rounding(plain))


def _last_logits(plain: LoadedModel, tokens: list[int], sizes: tuple[int, ...]) -> Logits:
    caches, at, logits = make_prompt_cache(plain.model), 0, None
    for size in sizes:
        if part := tokens[at : at + size]:
            logits = plain.model(mx.array([part], mx.uint32), cache=caches)[0, -1]
            mx.eval(logits, [cache.state for cache in caches])
            at += size
    assert logits is not None
    return {(0, 0): as_numpy(logits.astype(mx.float32))}
