"""mlx-lm's BatchGenerator without any server around it: what the model costs where nothing else runs.

python -m benchmarks.serve.batch_driver FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

from .peak import with_peak
from .protocol import Burst, Mix, StreamedTimes, Trace, answer_commands


class BatchRows:
    """Inserts prompts and notes when each token comes. Greedy, and no token ends a sequence."""

    def __init__(self, folder: str) -> None:
        model, _ = load_model(Path(folder))
        self._generator: Any = BatchGenerator(model)
        self._streams: dict[int, StreamedTimes] = {}

    def _insert(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        now = time.perf_counter()
        names = self._generator.insert(prompts, [max_tokens] * len(prompts))
        for name, prompt in zip(names, prompts, strict=True):
            self._streams[name] = StreamedTimes(sent=now, tokens=0, prompt_tokens=len(prompt))
        return names

    def _step(self, ends: float) -> None:
        _, responses = self._generator.next()
        now = time.perf_counter()
        if now > ends:
            raise TimeoutError("the sequences did not end in time")
        for response in responses:
            stream = self._streams[response.uid]
            stream.times.append(now)
            stream.tokens = (stream.tokens or 0) + 1
            if response.finish_reason is not None:
                stream.ended = now

    def run(self, command: Burst | Mix) -> Trace:
        ends = time.perf_counter() + command.timeout_s
        if isinstance(command, Burst):
            names = self._insert(command.prompts, command.max_tokens)
            while not all(self._streams[name].ended for name in names):
                self._step(ends)
        else:
            running = self._insert(command.running, command.max_tokens)
            while min(len(self._streams[name].times) for name in running) < command.after:
                self._step(ends)
            names = running + self._insert([command.long], command.long_tokens)
            while not self._streams[names[-1]].ended:
                self._step(ends)
            self._generator.remove([name for name in running if not self._streams[name].ended])
        return Trace([self._streams.pop(name) for name in names])


if __name__ == "__main__":
    answer_commands(with_peak(BatchRows(sys.argv[1]).run))
