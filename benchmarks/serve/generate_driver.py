"""mlx-lm's `stream_generate` without any server around it, one prompt after the other.

python -m benchmarks.serve.generate_driver FOLDER
"""

from __future__ import annotations

import sys
import time
from typing import Any

from mlx_lm.generate import stream_generate
from mlx_lm.utils import load

from .peak import with_peak
from .protocol import Burst, Mix, StreamedTimes, Trace, answer_commands


class OneAtATime:
    """Generates answers and notes when each token comes. Greedy."""

    def __init__(self, folder: str) -> None:
        loaded: Any = load(folder)
        self._model, self._tokenizer = loaded[:2]

    def run(self, command: Burst | Mix) -> Trace:
        if not isinstance(command, Burst):
            raise RuntimeError("it computes one prompt at a time")
        ends = time.perf_counter() + command.timeout_s
        return Trace([self._answer(prompt, command.max_tokens, ends) for prompt in command.prompts])

    def _answer(self, prompt: list[int], max_tokens: int, ends: float) -> StreamedTimes:
        stream = StreamedTimes(sent=time.perf_counter(), tokens=0, prompt_tokens=len(prompt))
        for _ in stream_generate(self._model, self._tokenizer, prompt, max_tokens):
            stream.times.append(time.perf_counter())
            stream.tokens = len(stream.times)
            if stream.times[-1] > ends:
                raise TimeoutError("the answers did not end in time")
        stream.ended = time.perf_counter()
        return stream


if __name__ == "__main__":
    answer_commands(with_peak(OneAtATime(sys.argv[1]).run))
