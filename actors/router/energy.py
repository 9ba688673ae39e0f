"""Chooses the replica that takes the least energy among those that answer soon enough. Pure; arrays are
`(candidates,) float64`."""

from __future__ import annotations

from math import inf

import numpy as np

from .costs import Floats
from .splitting import ANSWER_TOKENS

EVEN_SHARE = 0.05
"""Energies this close to the least one, as a share of it, count as even."""


def request_j(computed_tokens: Floats, prefill_token_j: Floats, decode_token_j: Floats) -> Floats | None:
    """Returns the joules of a request on each candidate: of the tokens of its prompt that are computed there, and of an
    answer of usual length. None if one of them does not know its joules a token: then they cannot be compared.

    Args:
        prefill_token_j, decode_token_j: 0 if they are unknown.
    """
    if not ((prefill_token_j > 0.0) & (decode_token_j > 0.0)).all():
        return None
    return computed_tokens * prefill_token_j + ANSWER_TOKENS * decode_token_j


def least_energy(joules: Floats, total_s: Floats, last_assigned: Floats, delay_s_max: float) -> int:
    """Returns the position of the candidate with the least joules among those whose cost in seconds is at most
    `delay_s_max` above the lowest; among even ones the one that was given work least recently."""
    allowed = np.where(total_s <= total_s.min() + delay_s_max, joules, inf)
    return int(np.where(allowed <= allowed.min() * (1.0 + EVEN_SHARE), last_assigned, inf).argmin())
