"""What drafts of a small model cost and how many of them are right, and what may be spent to find out. Pure.

Such drafts take time before the step that they are for. So that a model that never gains anything costs next to
nothing, whatever was not expected to pay is paid from a credit, a small part of the time that steps have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from .pace import LASTS_STEPS, MEASURED, MEASURED_LEAST

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

SHARE_MOST = 0.9
"""Nothing is tried that would not pay with this part of drafted tokens right."""

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


Times = dict[int, deque[tuple[int, float]]]
"""By size: the steps at which something was timed, and how long it took in seconds."""


class ModelPace:
    """The measured times of a drafting model on one device.

    Args:
        pieces: seconds of a piece of a prompt, by its tokens; at least one.
        token_s: seconds of a drafted token of one sequence.

    Attributes:
        credit_s: what may be spent on what is not expected to pay.
    """

    def __init__(self, pieces: Mapping[int, float], token_s: float) -> None:
        self.credit_s = 0.0
        self._first_pieces, self._first_token_s = dict(pieces), token_s
        self._pieces: Times = {}
        self._tokens: Times = {}
        self._share = Share()
        self._steps = self._tried = self._tried_at = 0

    def note_step(self, seconds: float) -> None:
        """Notes a step of the batch that took so long."""
        self._steps += 1
        self.credit_s = min(CREDIT_MOST_S, self.credit_s + TRIAL_PART * seconds)

    def note_piece(self, tokens: int, seconds: float) -> None:
        """Notes how long a piece of a prompt took."""
        self._pieces.setdefault(tokens, deque(maxlen=MEASURED)).append((self._steps, seconds))

    def note_drafts(self, sequences: int, depth: int, seconds: float) -> None:
        """Notes how long it took to draft `depth` tokens of each of some sequences."""
        self._tokens.setdefault(sequences, deque(maxlen=MEASURED)).append((self._steps, seconds / depth))

    def note_right(self, own: Share, right: int, drafted: int) -> None:
        """Notes how many tokens of a sequence's draft were right.

        Args:
            own: the sequence's share, which is told too.
        """
        for share in (own, self._share):
            share.note(right, drafted)
        self._tried = self._tried_lately + min(right + 1, drafted)
        self._tried_at = self._steps

    @property
    def is_known(self) -> bool:
        """Whether enough was drafted lately to know how many tokens are right."""
        return self._tried_lately >= TRIED_LEAST

    @property
    def _tried_lately(self) -> int:
        return self._tried if self._steps - self._tried_at <= LASTS_STEPS else 0

    def share(self, own: Share | None = None) -> float:
        """Returns which part of a sequence's drafted tokens may be expected to be right."""
        usual = self._share.after(SHARE_FIRST)
        return usual if own is None else own.after(usual)

    def drafts_s(self, sequences: int, depth: int) -> float:
        """Returns how long it takes to draft `depth` tokens of each of so many sequences, as far as known."""
        return depth * (self._known(self._tokens, sequences) or (1, self._first_token_s))[1]

    def prompt_s(self, tokens: int) -> float:
        """Returns how long a piece or several with so many tokens take together, as far as known."""
        first = max((size for size in self._first_pieces if size <= tokens), default=min(self._first_pieces))
        size, seconds = self._known(self._pieces, tokens) or (first, self._first_pieces[first])
        return seconds * max(1.0, tokens / size)

    def _known(self, times: Times, size: int) -> tuple[int, float] | None:
        """Returns the largest size up to this one of which times are believed, and how long it takes; None for none.
        The first time of a shape may compile it."""
        for known in sorted((known for known in times if known <= size), reverse=True):
            lately = [seconds for step, seconds in times[known] if self._steps - step <= LASTS_STEPS]
            if len(lately) >= MEASURED_LEAST:
                return known, median_low(lately)
        return None
