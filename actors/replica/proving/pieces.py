"""The pieces in which a model is tested while it is already served.

A model is served in plain mode at first. Its self-test runs on the same thread, in pieces, and waiting requests are
served between two pieces. Pieces are short: a chunk of a prompt, for example, is evaluated layer by layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")

BESIDE_S = 0.02
"""How often waiting requests are looked for while work runs on another thread."""


class Pieces:
    """Work in pieces. Used on one thread.

    Args:
        serve: serves waiting requests, and returns once none of them is in computation.
    """

    def __init__(self, serve: Callable[[], object] = lambda: None) -> None:
        self._serve = serve
        self._served_s = 0.0

    def pause(self) -> None:
        """Ends a piece. All launched work must have been evaluated."""
        began = time.monotonic()
        self._serve()
        self._served_s += time.monotonic() - began

    def beside(self, work: Callable[[], T]) -> T:
        """Runs long work, which any thread may run, on another thread while requests are served. Returns or raises as
        `work`."""
        if self is IN_ONE_PIECE:
            return work()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(work)
            while wait([done], timeout=BESIDE_S).not_done:
                self.pause()
            return done.result()

    def now_s(self) -> float:
        """Returns the time by a clock that stops while requests are served."""
        return time.monotonic() - self._served_s

    def evaluate(self, caches: Sequence[Any]) -> None:
        """Evaluates the state of a model's caches (one a layer), with a piece per layer."""
        for cache in caches:
            mx.eval(cache.state)
            self.pause()


IN_ONE_PIECE = Pieces()
"""For tests during which no requests are served."""
