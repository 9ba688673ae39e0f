"""How fast a replica prefills, as measured, and how much of that a step may do. Pure.

A call takes a fixed part, whatever its tokens, and something for each of them. The fixed part is seen in calls for few
tokens, the rest in those for many; both change with the device's load and with how much text lies before the tokens,
so both are smoothed.
"""

from __future__ import annotations

from ...protocol.block_ids import BLOCK_TOKENS

FALL = 0.5
RISE = 0.6
"""The share of a new measure in the smoothed one, where that gets slower or faster by it."""

FALL_MOST = 0.5
"""A measure counts as no slower than this share of the rate: a chunk that compiles kernels is no measure of others."""

FIXED_RISE = 0.2
"""The fixed part rises more slowly than it falls, for the same reason."""

TOKENS_MIN = 64
"""The least that a step may prefill. Fewer are no chunk but at a prompt's end: they cost nearly what these do, and
measure the fixed part."""

FIRST_CHUNK_TOKENS = 256
"""The budget of a step before the rate is known, while nothing decodes."""

IDLE_PAUSE_S = 0.5
"""What a step's prefill may take while nothing decodes: commands are heard between two steps."""


STEP_WEIGHT = 0.1
"""The share of a new measure in the time of a decode step."""


class PrefillPace:
    """One engine's pace.

    Attributes:
        tokens_per_s: the smoothed rate of whole calls, 0 before the first chunk worth measuring.
        fixed_s: the smoothed fixed part of a call, 0 until it was seen.
        step_s: the smoothed time of a decode step, 0 before the first.

    Args:
        chunk_tokens: the most that one step may prefill.
        pause_s: how long decoding rows may wait for it.
    """

    def __init__(self, chunk_tokens: int, pause_s: float) -> None:
        self.tokens_per_s = 0.0
        self.fixed_s = 0.0
        self.step_s = 0.0
        self._usual_tokens = 0.0
        self._chunk_tokens = chunk_tokens
        self._pause_s = pause_s

    def budget(self, decoding: bool) -> int:
        """How many tokens the next step may prefill, beside `decoding` rows or alone.

        It is what takes the pause, but never less than `TOKENS_MIN`, nor less than takes as long as the fixed part:
        where a call's fixed part is over half of the pause, prefill would nearly stop for the sake of a pause that
        comes out only little shorter.
        """
        if self.tokens_per_s == 0:
            return min(TOKENS_MIN if decoding else FIRST_CHUNK_TOKENS, self._chunk_tokens)
        pause_s = self._pause_s if decoding else max(IDLE_PAUSE_S, self._pause_s)
        fixed_s, token_s = self._parts()
        wanted = max(TOKENS_MIN, min(int(max(pause_s - fixed_s, fixed_s) / token_s), self._chunk_tokens))
        # A power of two: devices prepare themselves for every new shape, which takes longer than using it.
        return 1 << (wanted.bit_length() - 1)

    @property
    def usual_s(self) -> float | None:
        """What a step takes that prefills as much as it may and decodes, seconds; None before the first."""
        if not self.step_s:
            return None
        tokens = self.budget(False)
        # A prompt's token takes no longer than one that is decoded.
        return self.step_s + (tokens / self.tokens_per_s if self.tokens_per_s else tokens * self.step_s)

    def note_step(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        self.step_s += (STEP_WEIGHT if self.step_s else 1.0) * (seconds - self.step_s)

    def note(self, tokens: int, seconds: float) -> None:
        """A call for `tokens` took `seconds`."""
        seconds = max(1e-9, seconds)
        if tokens < TOKENS_MIN:
            if self.tokens_per_s:
                self._note_short(tokens, seconds)
            return
        old = self.tokens_per_s
        rate = max(tokens / seconds, FALL_MOST * old)
        # A chunk says little of how slow larger ones are; one of the size that is used beside decoding rows says it.
        fall = FALL * min(1.0, tokens / self.budget(True)) if old else 1.0
        weight = 1.0 if old == 0 else RISE if rate > old else fall
        self.tokens_per_s = old + weight * (rate - old)
        self._usual_tokens += weight * (tokens - self._usual_tokens)
        self.fixed_s = min(self.fixed_s, seconds)

    def _note_short(self, tokens: int, seconds: float) -> None:
        """What the tokens do not account for is the fixed part; the fewer there are, the more a call says of it."""
        fixed_s = max(0.0, seconds - tokens * self._parts()[1])
        weight = RISE if fixed_s < self.fixed_s else FIXED_RISE
        self.fixed_s += weight * (1 - tokens / max(TOKENS_MIN, self._usual_tokens)) * (fixed_s - self.fixed_s)

    def _parts(self) -> tuple[float, float]:
        """The fixed part of a call and the time of each token (seconds), which are what calls take that were noted."""
        if not self._usual_tokens:
            return 0.0, 1.0 / self.tokens_per_s
        call_s = self._usual_tokens / self.tokens_per_s
        # Half of it at least is the tokens': what is not known yet must not make them look free.
        fixed_s = min(self.fixed_s, call_s / 2)
        return fixed_s, (call_s - fixed_s) / self._usual_tokens


def stop_inside(start: int, budget: int, step_budget: int) -> int:
    """Where a chunk ends that begins at `start`, of a prompt that has more than the `budget`.

    Chunks end where those of whole budgets would that began with the prompt. Then they cut no blocks, the text before
    them has few different lengths, and none is small: each of these costs time, which a step that does less does not.
    A first chunk after a reused prefix is shorter for it, but by no more than half.

    Args:
        budget: what is left of the `step_budget`.

    Returns:
        `start` where no chunk is worth it.
    """
    if budget < step_budget:
        stop = (start + budget) // step_budget * step_budget
        return stop if stop - start >= TOKENS_MIN else start
    if budget < TOKENS_MIN:
        return start
    grain = min(BLOCK_TOKENS, 1 << (budget.bit_length() - 1))
    stop = (start + budget) // grain * grain
    return stop if 2 * (stop - start) >= budget else (start + budget) // (grain // 2) * (grain // 2)
