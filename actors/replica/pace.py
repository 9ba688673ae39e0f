"""How fast a replica prefills, as measured, and how much of that a step may do. Pure."""

from __future__ import annotations

SMOOTHING = 0.2
RISE = 0.6
"""Rates rise faster than they fall: a device's first chunk also compiles its kernels."""

TOKENS_MIN = 64
"""Shorter chunks measure the cost of a call, not of a token."""

FULL_CHUNK_TOKENS = 512
FIRST_CHUNK_TOKENS = 256
"""The budget of a step before the rate is known."""

IDLE_PAUSE_S = 0.5
"""What a step's prefill may take while nothing decodes: commands are heard between two steps."""


class PrefillPace:
    """One engine's pace. `tokens_per_s` is the smoothed rate, 0 before the first chunk worth measuring.

    Args:
        chunk_tokens: the most that one step may prefill.
        pause_s: how long decoding rows may wait for it.
    """

    def __init__(self, chunk_tokens: int, pause_s: float) -> None:
        self.tokens_per_s = 0.0
        self._chunk_tokens = chunk_tokens
        self._pause_s = pause_s

    def budget(self, decoding: bool) -> int:
        """How many tokens the next step may prefill, beside `decoding` rows or alone."""
        if self.tokens_per_s == 0:
            return min(FIRST_CHUNK_TOKENS, self._chunk_tokens)
        pause_s = self._pause_s if decoding else max(IDLE_PAUSE_S, self._pause_s)
        wanted = max(TOKENS_MIN, min(int(self.tokens_per_s * pause_s), self._chunk_tokens))
        # A power of two: devices prepare themselves for every new shape, which takes longer than using it.
        return 1 << (wanted.bit_length() - 1)

    def note(self, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` took `seconds`."""
        if tokens < TOKENS_MIN:
            return
        rate, old = tokens / max(1e-9, seconds), self.tokens_per_s
        # A short chunk measures the call more than the tokens: it says little of how slow long ones are.
        fall = SMOOTHING * min(1.0, tokens / FULL_CHUNK_TOKENS)
        weight = 1.0 if old == 0 else RISE if rate > old else fall
        self.tokens_per_s = old + weight * (rate - old)
