"""mlx-lm's own prompt caches, in this process: what a program would write that keeps agents' KV with mlx-lm alone."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model

PREFILL_TOKENS = 2048
"""Of a piece, as in `generate_step`."""


@dataclass(frozen=True)
class PlainAnswer:
    """Seconds from the begin to the first token, and to the last one."""

    first_s: float
    whole_s: float


class PlainCaches:
    """A model with mlx-lm's `generate_step` and `BatchGenerator`, greedy."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder)[0]

    def cold(self, context: Sequence[int], turn: Sequence[int], tokens: int) -> tuple[PlainAnswer, list[Any]]:
        """Computes a context and answers the turn behind it. Also returns the context's caches, as a program would keep
        them."""
        began, kept = time.perf_counter(), make_prompt_cache(self._model)
        for start in range(0, len(context), PREFILL_TOKENS):
            self._model(mx.array([context[start : start + PREFILL_TOKENS]]), cache=kept)
            mx.eval([cache.state for cache in kept])
        spent = time.perf_counter() - began
        copied = copy.deepcopy(kept)
        began = time.perf_counter()
        answer = self._answer(turn, copied, tokens, began)
        return PlainAnswer(spent + answer.first_s, spent + answer.whole_s), kept

    def hot(self, turn: Sequence[int], kept: list[Any], tokens: int) -> PlainAnswer:
        """Answers a turn behind a context whose caches are in memory."""
        began = time.perf_counter()
        return self._answer(turn, copy.deepcopy(kept), tokens, began)

    def warm(self, turn: Sequence[int], kept: list[Any], tokens: int, path: Path) -> tuple[PlainAnswer, int]:
        """As `hot`, but the caches are in a file, which is dropped from the page cache before where a system can be
        told to. Also returns the file's bytes."""
        save_prompt_cache(str(path), kept)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        began = time.perf_counter()
        read: Any = load_prompt_cache(str(path))
        answer = self._answer(turn, read, tokens, began)
        return answer, path.stat().st_size

    def _answer(self, prompt: Sequence[int], caches: list[Any], tokens: int, began: float) -> PlainAnswer:
        first = 0.0
        for _ in generate_step(mx.array(list(prompt)), self._model, max_tokens=tokens, prompt_cache=caches):
            first = first or time.perf_counter()
        return PlainAnswer(first - began, time.perf_counter() - began)

    def staggered(self, prompts: Sequence[Sequence[int]], tokens: int, delay_s: float) -> list[float]:
        """Two prompts in one batch, the second `delay_s` after the first. Returns when each answer ended, in seconds
        from the begin."""
        generator: Any = BatchGenerator(self._model)
        began = time.perf_counter()
        waiting = [list(prompt) for prompt in prompts]
        names = generator.insert([waiting.pop(0)], [tokens])
        ended: dict[int, float] = {}
        while len(ended) < len(prompts):
            if waiting and (time.perf_counter() - began >= delay_s or len(ended) == len(names)):
                self._sleep_until(began + delay_s)
                names += generator.insert([waiting.pop(0)], [tokens])
            for response in generator.next()[1]:
                if response.finish_reason is not None:
                    ended[response.uid] = time.perf_counter() - began
        return [ended[name] for name in names]

    def one_after_the_other(self, prompts: Sequence[Sequence[int]], tokens: int, delay_s: float) -> list[float]:
        """As `staggered`, but the second prompt waits until the first answer has ended."""
        began, ended = time.perf_counter(), list[float]()
        for number, prompt in enumerate(prompts):
            self._sleep_until(began + number * delay_s)
            self._answer(prompt, make_prompt_cache(self._model), tokens, time.perf_counter())
            ended.append(time.perf_counter() - began)
        return ended

    @staticmethod
    def _sleep_until(moment: float) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))
