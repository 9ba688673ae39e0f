"""What is found out of a model while it is served already, piece by piece.

A model is served plainly at first, and what makes it faster is proven meanwhile, on the thread that computes. Between
two pieces of that whoever waits is served. A piece is short: a chunk of a prompt, for one, is evaluated layer by layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")

BESIDE_S = 0.02
"""How often it is looked whether somebody waits, while work is done on another thread."""


class Pieces:
    """Work in pieces. Used on one thread.

    Args:
        serve: serves whoever waits, and returns once nothing of it is computed any more.
    """

    def __init__(self, serve: Callable[[], object] = lambda: None) -> None:
        self._serve = serve
        self._served_s = 0.0

    def pause(self) -> None:
        """Ends a piece. All that was launched must have been evaluated."""
        began = time.monotonic()
        self._serve()
        self._served_s += time.monotonic() - began

    def beside(self, work: Callable[[], T]) -> T:
        """Does long work that may be done on any thread, while others are served. Returns or raises as `work`."""
        if self is IN_ONE_PIECE:
            return work()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(work)
            while wait([done], timeout=BESIDE_S).not_done:
                self.pause()
            return done.result()

    def now_s(self) -> float:
        """Returns the time by a clock that stands still while somebody is served."""
        return time.monotonic() - self._served_s

    def evaluate(self, caches: Sequence[Any]) -> None:
        """Evaluates the state of a model's caches, one a layer, a piece each."""
        for cache in caches:
            mx.eval(cache.state)
            self.pause()


IN_ONE_PIECE = Pieces()
"""While nobody is served."""
