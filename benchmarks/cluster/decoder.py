"""Sequences that decode without an end.

    python -m benchmarks.cluster.decoder ROWS TOKENS

Asked whatever, it answers with the steps so far, the processor seconds of this process, and the milliseconds of the
longest step since it was last asked. See `worker.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from satchel.actors.model_files.source import EMBEDDED
from satchel.actors.replica.loading import models

from ..memory.neighbours import decoding
from .worker import answer


class Decoder:
    """Its own thread decodes: lazy arrays stay with the thread that made them."""

    def __init__(self, rows: int, tokens: int) -> None:
        self._lengths = [tokens] * rows
        self._steps, self._longest_s = 0, 0.0
        self._began = threading.Event()
        threading.Thread(target=self._decode, daemon=True).start()

    def _decode(self) -> None:
        loaded = models.load(str(EMBEDDED / "recall"), context_tokens_max=None, progress=lambda what, fraction: None)
        executor = decoding(loaded, self._lengths)
        while True:
            began = time.perf_counter()
            executor.step()
            self._longest_s = max(self._longest_s, time.perf_counter() - began)
            self._steps += 1
            self._began.set()

    def so_far(self) -> dict[str, Any]:
        self._began.wait()
        longest_s, self._longest_s = self._longest_s, 0.0
        return {"steps": self._steps, "cpu_s": time.process_time(), "longest_ms": 1e3 * longest_s}


def main() -> None:
    decoder = Decoder(int(sys.argv[1]), int(sys.argv[2]))
    answer(lambda question: decoder.so_far())


if __name__ == "__main__":
    main()
