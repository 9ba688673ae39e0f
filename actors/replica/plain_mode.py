"""Serves a model plainly while it is found out how it is computed best: as mlx-lm runs it, a sequence at a time.

That needs no proof but one: that the model goes on from its own caches, with a prompt in parts as with a whole one. A
few tokens show it. Nothing is kept of such sequences and nothing is used again, as their KV is not what it will be; so
no sequence and no block ever has KV of both. The work in pieces and the sequences share a thread: a sequence waits for
a piece, and work waits until no sequence is computed. So it may stand in the middle of a call, with sequences computed
above it on the stack.
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
from .execution.agreement import MODEL_ERRORS
from .execution.loaded_model import LoadedModel
from .execution.pieces import Pieces
from .loop.engine import Engine
from .selftest.forced_sequences import Logits, difference, not_finite, rounding

logger = logging.getLogger(__name__)

KNOWN_S = 2.0
"""What was found before is read, which is mostly done by then."""

TOKENS = 24
_PARTS = (9, 1, 14)
"""Of a text that the model reads in parts, and as a whole."""


class PlainMode:
    """Used on the engine's thread.

    Args:
        after_s: how long a model that could be served plainly is not served at all. None: not at all at a first start,
            and `KNOWN_S` where an earlier one has found things out.
        begin: makes the engine of a model that is served plainly from now on.
        ends: ends the process, as its engine has failed.

    Attributes:
        pieces: between which sequences are served.
        engine: serves the model plainly; None if nothing does.
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
        """Lets a model be served plainly; `known` is whether an earlier start has found things out."""
        usual_s = KNOWN_S if known else 0.0
        self._plain, self._from_s = plain, time.monotonic() + (usual_s if self._after_s is None else self._after_s)

    def _serve(self) -> None:
        """Serves whoever waits. Never raises: what was interrupted would take it for a fault of the model."""
        plain = self._plain
        if plain is not None and time.monotonic() >= self._from_s:
            self._plain = None
            self._start(plain)
        if self.engine is None:
            return
        try:
            self.engine.serve()
            # What the device tells is told now, and not to the work that goes on.
            mx.synchronize()
        except BaseException:
            logger.exception("the engine stopped")
            self._ends()

    def _start(self, plain: LoadedModel) -> None:
        try:
            if wrong := fault(plain):
                logger.warning("%s is not served before it is tried: %s", plain.folder, wrong)
                return
            self.engine = self._begin(plain)
        except SatchelError as error:
            logger.warning("%s is not served before it is tried: %s", plain.folder, error.message)
        except Exception:
            logger.exception("%s is not served before it is tried", plain.folder)


def fault(plain: LoadedModel) -> str:
    """Why a model may not be served even plainly, as the end of a sentence; empty if it may."""
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
