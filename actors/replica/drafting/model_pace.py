"""What drafts of a small model cost and how many of them are right, and what may be spent to find out. Pure.

Such drafts take time before the step that they are for. So that a model that never gains anything costs next to
nothing, whatever was not expected to pay is paid from a credit, a small part of the time that steps have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from .pace import LASTS_STEPS, MEASURED

DEPTHS = (1, 2, 4, 7)
"""How many tokens may be drafted one after the other."""

TRIAL_DEPTH = 2
"""How many are where it is not known whether they pay."""

TRIAL_PART, CREDIT_MOST_S = 0.02, 1.0
"""Which part of the steps' time may be spent to find that out, and how much may be saved up for it."""

TRIED_LEAST = 24
"""After so many tokens it is known how many are right, for `LASTS_STEPS` steps."""

SHARE_FIRST, FIRST_COUNTS = 0.6, 8.0
"""Which part of drafted tokens is taken to be right before any was drafted, and as how many tokens that counts."""

SEEN_LESS = 0.98
"""How much less a drafted token counts with every later one."""


@dataclass
class Share:
    """Which part of drafted tokens is right. `right` of the `tried` ones were, each counted less the older it is."""

    right: float = 0.0
    tried: float = 0.0

    def note(self, right: int, drafted: int) -> None:
        """Notes a draft: how many of its tokens were right. What came after the first wrong one was not tried."""
        for at in range(min(right + 1, drafted)):
            self.right, self.tried = self.right * SEEN_LESS + (at < right), self.tried * SEEN_LESS + 1.0

    def after(self, before: float) -> float:
        """Returns the share, less than 1, if it was taken to be `before` at first."""
        return min(0.99, (self.right + FIRST_COUNTS * before) / (self.tried + FIRST_COUNTS))


class ModelPace:
    """The measured times of a drafting model on one device.

    Args:
        pieces: seconds of a piece of a prompt, by its tokens; at least one.
        token_s: seconds of a drafted token of one sequence.

    Attributes:
        credit_s: what may be spent on what is not expected to pay. A single piece may exceed it.
    """

    def __init__(self, pieces: Mapping[int, float], token_s: float) -> None:
        self.credit_s = 0.0
        self._pieces = {tokens: deque([seconds], MEASURED) for tokens, seconds in pieces.items()}
        self._tokens = {1: deque([token_s], MEASURED)}
        self._share = Share()
        self._steps, self._tried_at = 0, 0
        self._tried = 0

    def note_step(self, seconds: float) -> None:
        """Notes a step of the batch that took so long."""
        self._steps += 1
        self.credit_s = min(CREDIT_MOST_S, self.credit_s + TRIAL_PART * seconds)

    def note_piece(self, tokens: int, seconds: float) -> None:
        """Notes how long a piece of a prompt took."""
        self._pieces.setdefault(tokens, deque(maxlen=MEASURED)).append(seconds)

    def note_drafts(self, sequences: int, depth: int, seconds: float) -> None:
        """Notes how long it took to draft `depth` tokens of each of some sequences."""
        self._tokens.setdefault(sequences, deque(maxlen=MEASURED)).append(seconds / depth)

    def note_right(self, own: Share, right: int, drafted: int) -> None:
        """Notes how many tokens of a sequence's draft were right.

        Args:
            own: the sequence's share, which is told too.
        """
        for share in (own, self._share):
            share.note(right, drafted)
        self._tried = TRIED_LEAST if self.is_known else self._tried
        self._tried, self._tried_at = self._tried + min(right + 1, drafted), self._steps

    @property
    def is_known(self) -> bool:
        """Whether enough was drafted lately to know how many tokens are right."""
        if self._steps - self._tried_at > LASTS_STEPS:
            self._tried = 0
        return self._tried >= TRIED_LEAST

    def share(self, own: Share | None = None) -> float:
        """Returns which part of a sequence's drafted tokens may be expected to be right."""
        usual = self._share.after(SHARE_FIRST)
        return usual if own is None else own.after(usual)

    def drafts_s(self, sequences: int, depth: int) -> float:
        """Returns how long it takes to draft `depth` tokens of each of so many sequences, as far as known."""
        known = [count for count in self._tokens if count <= sequences] or [min(self._tokens)]
        return depth * median(self._tokens[max(known)])

    def prompt_s(self, tokens: int) -> float:
        """Returns how long a piece or several with so many tokens take together, as far as known."""
        known = [size for size in self._pieces if size <= tokens] or [min(self._pieces)]
        return median(self._pieces[max(known)]) * max(1.0, tokens / max(known))
