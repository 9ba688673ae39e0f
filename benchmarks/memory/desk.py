"""An engine turned by hand: no thread, no Ray, no HTTP. One desk has one loaded model."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from satchel.actors.protocol.block_ids import block_ids, root_id
from satchel.actors.protocol.replica_messages import GenerateRequest, MediaSpan, Sampling, SequenceUpdate
from satchel.actors.replica.loading import models
from satchel.actors.replica.loop.engine import Engine
from satchel.cluster.config.config import Scheduling
from satchel.cluster.errors import SatchelError

from ..programs import ROOT, program

CONSUMER = "bench"
PREFIX_BYTES_MAX = 4 * 2**30
KV_MEMORY_FRACTION = 0.25
TURNS_S_MAX = 900.0
SPECIAL_TOKENS = 20
"""The last ids of a vocabulary are control tokens, which no prompt here has."""


WARM_UP_ROUNDS = 2
"""Of what is timed, before it, on a GPU."""


def on_gpu() -> bool:
    """Whether MLX computes on a GPU, which prepares itself for every new shape."""
    return mx.default_device().type == mx.DeviceType.gpu


@dataclass
class TimedAnswer:
    """A request's times in seconds by `time.perf_counter`; `cached` tokens of its prompt were not computed."""

    sent: float
    first: float = 0.0
    ended: float = 0.0
    cached: int = 0
    tokens: int = 0


class Desk:
    """Submits requests to an engine and turns it.

    Attributes:
        engine: with an empty prefix cache after `clear`.
    """

    def __init__(self, source: str) -> None:
        # What is timed is warmed up by its like.
        self.loaded = models.load(source, context_tokens_max=None, progress=lambda what, fraction: None, warm=False)
        self.root = root_id(self.loaded.model_id, "tenant:bench")
        self._count = 0
        self._answers: dict[str, TimedAnswer] = {}
        self.clear()

    def clear(self) -> None:
        """Begin with a new engine, which knows no prefix."""
        kv_bytes = int(psutil.virtual_memory().total * KV_MEMORY_FRACTION)
        self.engine = Engine(self.loaded, Scheduling(prefix_bytes_max=PREFIX_BYTES_MAX), kv_bytes, self._take)

    def prompt(self, tokens: int, seed: str) -> list[int]:
        """Random tokens; another seed gives others from the first on."""
        rng, size = random.Random(seed), self.loaded.vocabulary_size - SPECIAL_TOKENS
        return [rng.randrange(size) for _ in range(tokens)]

    def submit(self, prompt: list[int], max_tokens: int, media: Sequence[MediaSpan] = ()) -> str:
        """Queue a greedy request. Returns its name."""
        self._count += 1
        name = f"sequence-{self._count}"
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids = block_ids(self.root, prompt)
        request = GenerateRequest(name, CONSUMER, "bench", "", prompt, ids, self.root, sampling, media=list(media))
        self._answers[name] = TimedAnswer(time.perf_counter())

        def reply(refusal: SatchelError | None) -> None:
            if refusal is not None:
                raise refusal

        self.engine.submit(request, reply)
        return name

    def turn_until(self, done: Callable[[], bool]) -> None:
        """
        Raises:
            TimeoutError: not within a quarter of an hour.
        """
        ends = time.perf_counter() + TURNS_S_MAX
        while not done():
            self.engine.step()
            if time.perf_counter() > ends:
                raise TimeoutError("the engine did not come to an end")

    def finish(self, names: Iterable[str]) -> list[TimedAnswer]:
        """Turn until all have ended."""
        names = list(names)
        self.turn_until(lambda: all(self._answers[name].ended for name in names))
        return [self._answers.pop(name) for name in names]

    def ask(self, prompt: list[int], max_tokens: int = 1, media: Sequence[MediaSpan] = ()) -> TimedAnswer:
        return self.finish([self.submit(prompt, max_tokens, media)])[0]

    def _take(self, updates: dict[str, list[SequenceUpdate]]) -> None:
        now = time.perf_counter()
        for update in updates.get(CONSUMER, []):
            answer = self._answers[update.request_id]
            answer.cached = update.cached_tokens if update.cached_tokens is not None else answer.cached
            answer.tokens += len(update.tokens)
            if update.tokens and not answer.first:
                answer.first = now
            if update.finish is not None:
                if update.finish != "length":
                    raise RuntimeError(f"{update.finish}: {update.error}")
                answer.ended = now


def write_random_model(name: str, folder: Path, context: int) -> None:
    """A model of random weights that serving is measured with, for a longer context."""
    subprocess.run(
        program("serve.folders", folder, name), cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    )
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": context}, indent=1))
