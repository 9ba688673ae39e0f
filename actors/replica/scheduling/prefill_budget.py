"""Measures how fast a replica prefills, and limits how many tokens a step may prefill. Pure.

A call costs a fixed part plus a part per token. Calls with few tokens measure the fixed part, calls with many the rest.
Both change with the device's load and with the length of the text before the tokens, so both are smoothed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.block_ids import BLOCK_TOKENS

FALL = 0.5
RISE = 0.6
"""Weights of a new measurement in the smoothed rate, for a slower and a faster one."""

FALL_MOST = 0.5
"""A measurement counts as at least this share of the smoothed rate: a chunk for which kernels were compiled says
nothing about others."""

FIXED_RISE = 0.2
"""The fixed part rises more slowly than it falls, for the same reason."""

TOKENS_MIN = 64
"""The least that a step may prefill. Smaller chunks occur only at a prompt's end. They cost nearly as much, and are
used to measure the fixed part."""

FIRST_CHUNK_TOKENS = 256
"""The budget of a step before the rate is known, while nothing decodes."""

CPU_CHUNK_TOKENS = 256
"""The most that a step may prefill on a CPU. There a call's products are as fast for this many tokens as for more, but
its attention computes the scores of all of them, masked ones too, and they leave the caches: on two cores 2,048 tokens
of four small models, or 12,000, take 3 to 33% longer in chunks of 512, and 14 to 64% in chunks of 1,024."""

IDLE_PAUSE_S = 0.5
"""Time of a step's prefill while nothing decodes. It is limited because commands are handled only between steps."""


SHORT_PAUSE_S = 0.05
"""Time of a chunk that no request needs yet: so long a request may wait that comes meanwhile."""

STEP_WEIGHT = 0.1
"""Weight of a new measurement in the smoothed time of a decode step."""


class PrefillPace:
    """The measured prefill rate of one engine.

    Attributes:
        tokens_per_s: smoothed rate of whole calls, 0 before the first chunk that is large enough to measure.
        fixed_s: smoothed fixed part of a call, 0 until it was measured.
        step_s: smoothed time of a decode step, 0 before the first.
        chunk_tokens: the most that one step may prefill.

    Args:
        chunk_tokens: as the attribute.
        pause_s: how long decoding sequences may wait for prefill.
    """

    def __init__(self, chunk_tokens: int, pause_s: float) -> None:
        self.tokens_per_s = 0.0
        self.fixed_s = 0.0
        self.step_s = 0.0
        self._usual_tokens = 0.0
        self.chunk_tokens = chunk_tokens
        self._pause_s = pause_s

    def budget(self, decoding: bool) -> int:
        """Returns how many tokens the next step may prefill; `decoding` says whether there are decoding sequences.

        These are the tokens that fill the pause, but at least `TOKENS_MIN`, and at least as many as take as long as the
        fixed part. Without the latter, if the fixed part is over half of the pause, prefill would nearly stop, and the
        pause would be only a little shorter.
        """
        if self.tokens_per_s == 0:
            return min(TOKENS_MIN if decoding else FIRST_CHUNK_TOKENS, self.chunk_tokens)
        return self._tokens_in(self._pause_s if decoding else max(IDLE_PAUSE_S, self._pause_s))

    def short_budget(self) -> int:
        """Returns how many tokens a chunk has that no request needs yet, as `budget` does."""
        if self.tokens_per_s == 0:
            return min(TOKENS_MIN, self.chunk_tokens)
        return self._tokens_in(min(SHORT_PAUSE_S, self._pause_s))

    def _tokens_in(self, pause_s: float) -> int:
        fixed_s, token_s = self._parts()
        wanted = max(TOKENS_MIN, min(int(max(pause_s - fixed_s, fixed_s) / token_s), self.chunk_tokens))
        # A power of two, so that there are few different shapes: devices compile kernels for every new one.
        return 1 << (wanted.bit_length() - 1)

    @property
    def usual_s(self) -> float | None:
        """Seconds that a step with a full prefill budget and a decode step takes; None before the first."""
        if not self.step_s:
            return None
        tokens = self.budget(False)
        # Before the rate is known: a prompt token takes at most as long as a decode step.
        return self.step_s + (tokens / self.tokens_per_s if self.tokens_per_s else tokens * self.step_s)

    def note_step(self, seconds: float) -> None:
        """Records the time of a decode step."""
        self.step_s += (STEP_WEIGHT if self.step_s else 1.0) * (seconds - self.step_s)

    def note(self, tokens: int, seconds: float) -> None:
        """Records the time of a prefill call."""
        seconds = max(1e-9, seconds)
        if tokens < TOKENS_MIN:
            if self.tokens_per_s:
                self._note_short(tokens, seconds)
            return
        old = self.tokens_per_s
        rate = max(tokens / seconds, FALL_MOST * old)
        # A small chunk says little about how slow larger ones are; a chunk of the budget used while sequences decode
        # counts fully.
        fall = FALL * min(1.0, tokens / self.budget(True)) if old else 1.0
        weight = 1.0 if old == 0 else RISE if rate > old else fall
        self.tokens_per_s = old + weight * (rate - old)
        self._usual_tokens += weight * (tokens - self._usual_tokens)
        self.fixed_s = min(self.fixed_s, seconds)

    def _note_short(self, tokens: int, seconds: float) -> None:
        """Updates the fixed part: the time that the tokens do not explain. The fewer tokens, the more weight."""
        fixed_s = max(0.0, seconds - tokens * self._parts()[1])
        weight = RISE if fixed_s < self.fixed_s else FIXED_RISE
        self.fixed_s += weight * (1 - tokens / max(TOKENS_MIN, self._usual_tokens)) * (fixed_s - self.fixed_s)

    def _parts(self) -> tuple[float, float]:
        """Returns the fixed part of a call and the time per token, seconds, that explain the measured calls."""
        if not self._usual_tokens:
            return 0.0, 1.0 / self.tokens_per_s
        call_s = self._usual_tokens / self.tokens_per_s
        # At least half of a call is due to its tokens: a wrong fixed part must not make tokens look free.
        fixed_s = min(self.fixed_s, call_s / 2)
        return fixed_s, (call_s - fixed_s) / self._usual_tokens


def stop_beside(start: int, stop: int, runs: Sequence[tuple[int, int]]) -> int:
    """Returns the end of a chunk `[start, stop)`, moved so that it cuts no run of tokens: to the run's first token, or
    to its end if the chunk starts with it.

    Args:
        runs: [first, end) of each run.
    """
    for first, end in runs:
        if first < stop < end:
            return first if first > start else end
    return stop


def stop_inside(start: int, budget: int, step_budget: int) -> int:
    """Returns the end of a chunk that begins at `start`, of a prompt with more than `budget` tokens left.

    Chunks end at multiples of the budget, counted from the prompt's begin. So no block is cut, the text before a chunk
    has few different lengths, and no chunk is small. Each of these would cost more time than a shorter step saves. The
    first chunk after a reused prefix gets shorter by this rule, but at most by half.

    Args:
        budget: what is left of the `step_budget`.

    Returns:
        The end; `start` if no chunk is worth it.
    """
    if budget < step_budget:
        stop = (start + budget) // step_budget * step_budget
        return stop if stop - start >= TOKENS_MIN else start
    if budget < TOKENS_MIN:
        return start
    grain = min(BLOCK_TOKENS, 1 << (budget.bit_length() - 1))
    stop = (start + budget) // grain * grain
    return stop if 2 * (stop - start) >= budget else (start + budget) // (grain // 2) * (grain // 2)
