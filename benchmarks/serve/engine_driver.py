"""Satchel's engine without Ray and HTTP: the step loop in the main thread, commands from another.

python -m benchmarks.serve.engine_driver FOLDER
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Sequence

import psutil

from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.replica_messages import GenerateRequest, Sampling, SequenceUpdate
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.cluster.config.config import Scheduling
from satchel.cluster.errors import SatchelError

from .peak import with_peak
from .protocol import Burst, Mix, StreamedTimes, Trace, answer_commands

CONSUMER = "bench"
KV_MEMORY_FRACTION = 0.25
"""Of the machine's memory, as a server with one replica has it."""


class EngineSequences:
    """Submits requests and sorts the engine's updates into streams."""

    def __init__(self, folder: str) -> None:
        self._loaded = models.load(folder, context_tokens_max=None, progress=lambda what, fraction: None, kv="fp16")
        kv_bytes = int(psutil.virtual_memory().total * KV_MEMORY_FRACTION)
        self.engine = Engine(self._loaded, Scheduling(), kv_bytes, self._take)
        self._streams: dict[str, StreamedTimes] = {}
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._news_at_pieces = 0
        self._count = 0

    def _take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        now = time.perf_counter()
        for update in updates.get(CONSUMER, []):
            stream = self._streams[update.request_id]
            if update.tokens:
                stream.times.append(now)
                stream.tokens = (stream.tokens or 0) + len(update.tokens)
            if update.finish is not None:
                stream.ended = now
                stream.error = None if update.finish == "length" else f"{update.finish}: {update.error}"
            # Not at every token: the waiting thread would take the interpreter from the engine.
            if stream.ended or len(stream.times) == self._news_at_pieces:
                self._news.put(None)

    def _submit(self, prompt: list[int], max_tokens: int) -> str:
        self._count += 1
        name = f"sequence-{self._count}"
        root = root_id(self._loaded.model_id, "tenant:bench")
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(name, CONSUMER, "bench", "", prompt, block_ids(root, prompt), root, sampling)
        stream = self._streams[name] = StreamedTimes(prompt_tokens=len(prompt), sent=time.perf_counter())

        def reply(refusal: SatchelError | None) -> None:
            if refusal is not None:
                stream.error, stream.ended = str(refusal), time.perf_counter()
                self._news.put(None)

        self.engine.submit(request, reply)
        return name

    def _wait(self, names: Sequence[str], timeout_s: float, pieces: int | None = None) -> None:
        """Until every sequence has given that many pieces, or has ended.

        Raises:
            queue.Empty: not within the time.
        """
        ends = time.perf_counter() + timeout_s
        for name in names:
            stream = self._streams[name]
            while not stream.ended and (pieces is None or len(stream.times) < pieces):
                self._news.get(timeout=max(0.01, ends - time.perf_counter()))

    def run(self, command: Burst | Mix) -> Trace:
        if isinstance(command, Burst):
            names = [self._submit(prompt, command.max_tokens) for prompt in command.prompts]
            self._wait(names, command.timeout_s)
        else:
            self._news_at_pieces = command.after
            running = [self._submit(prompt, command.max_tokens) for prompt in command.running]
            self._wait(running, command.timeout_s, command.after)
            names = [*running, self._submit(command.long, command.long_tokens)]
            self._wait(names[-1:], command.timeout_s)
            # An engine counts an abort as an end of its own kind; for the load it is a good one.
            self.engine.abort(tuple(running))
            self._wait(running, command.timeout_s)
            for name in running:
                self._streams[name].error = None
        return Trace([self._streams.pop(name) for name in names])


def main(folder: str) -> None:
    sequences = EngineSequences(folder)

    def answer() -> None:
        answer_commands(with_peak(sequences.run))
        # The engine's thread is the main one and may be in a long step.
        os._exit(0)

    threading.Thread(target=answer, name="commands", daemon=True).start()
    sequences.engine.run()


if __name__ == "__main__":
    main(sys.argv[1])
