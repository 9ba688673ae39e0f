"""Serves a divided model while its self-test still runs, as soon as that has computed sequences alone.

A model in one process is served in plain mode during its tests, as mlx-lm runs it (`plain_mode.py`). A group has no
such form. But the first part of its self-test shows whether it computes one sequence after the other, without cached
KV. From then on exactly that is served: between two runs of the test, when none of the test's sequences is computed,
one sequence at a time, of which no KV is kept. Whether it may be batched, and KV be used again, is tested meanwhile.

All processes of a group have one batch, which the test's sequences and others use in turn. So it is cleared in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from ..execution.loaded_model import LoadedModel
from ..loop.engine import Engine

logger = logging.getLogger(__name__)

SERVES_S = 5.0
"""For how long sequences are begun between two runs of the test, if so many wait: else the test would never end."""


class ServedAlone:
    """Serves one sequence at a time between the runs of a self-test. Used on the engine's thread.

    Args:
        after_s: for how long a model that was offered is not served yet.
        begin: makes the engine of a model that is served in this way from now on.
        ends: ends the process, because its engine has failed.

    Attributes:
        engine: serves the model; None before that.
    """

    def __init__(self, after_s: float, begin: Callable[[LoadedModel], Engine], ends: Callable[[], object]) -> None:
        self.engine: Engine | None = None
        self._after_s, self._begin, self._ends = after_s, begin, ends
        self._offered: LoadedModel | None = None
        self._from_s = 0.0

    def offer(self, loaded: LoadedModel) -> None:
        """Lets a model be served that computes sequences alone as it should."""
        self._offered = replace(loaded, spec=replace(loaded.spec, kept=False), kv_why="the self-test has not ended")
        self._from_s = time.monotonic() + self._after_s

    def serve(self) -> None:
        """Serves waiting requests. Never raises: the self-test would take an error for a fault of the model."""
        try:
            if self._offered is not None and time.monotonic() >= self._from_s:
                offered, self._offered = self._offered, None
                self.engine = self._begin(offered)
            if self.engine is None:
                return
            # All processes begin alike.
            self.engine.executor.clear_batch()
            until = time.monotonic() + SERVES_S
            self.engine.serve()
            while self.engine.delivery.sequences and time.monotonic() < until:
                self.engine.serve()
            mx.synchronize()
        except BaseException:
            logger.exception("the engine stopped")
            self._ends()
