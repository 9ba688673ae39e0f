"""What mlx-lm computes of a checkpoint, in float32, and how far others may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from tests.worlds.bench import Logits

ON_CPU = mx.default_device() == mx.cpu

TOLERANCE = 2e-5 if ON_CPU else 1e-3
"""How far logits may be off, of the largest of them, in float32: on a CPU by the order of sums alone, elsewhere also by
how products are rounded, and by sealed numbers that take another code for it."""

TIE = 10
"""So many tolerances between a token and the best one are a tie: either may be said."""

EXEMPT_MAX = 0.02
"""The share of positions at which another token than the best one may be said, because it is a tie."""


@dataclass
class Tally:
    """Counts positions, and those that were exempt, until it is `close`d.

    Attributes:
        exempt: where another token than the best one was taken, and it was a tie.
        worst: how far logits were off, of their scale; None where only tokens are compared.
    """

    positions: int = 0
    exempt: int = 0
    worst: float | None = None
    wrong: list[str] = field(default_factory=list)

    def logits(self, expected: Logits, got: Logits) -> None:
        """Compares logits of forced rows: within the tolerance, and the same likeliest token but for ties."""
        for place, one in expected.items():
            scale, off = np.abs(one).max(), np.abs(got[place] - one).max()
            self.worst = max(self.worst or 0.0, float(off / scale))
            if off > TOLERANCE * scale:
                self.wrong.append(f"row {place[0]}, draw {place[1]}: off by {off / scale:.1e} of its logits")
            self._token(one, int(got[place].argmax()), f"row {place[0]}, draw {place[1]}")

    def words(self, expected: np.ndarray, tokens: Sequence[int], what: str) -> None:
        """Compares greedy tokens with the logits, `(tokens, vocabulary)`, of who was told the same tokens before."""
        for at, token in enumerate(tokens):
            self._token(expected[at], token, f"{what}, token {at}")

    def _token(self, expected: np.ndarray, token: int, where: str) -> None:
        best = expected.max()
        self.positions += 1
        if expected[token] == best:
            return
        self.exempt += 1
        if best - expected[token] > TIE * TOLERANCE * np.abs(expected).max():
            self.wrong.append(f"{where}: {token} instead of {expected.argmax()}, {best - expected[token]:.2f} likelier")

    def close(self, what: str) -> None:
        """Prints what was counted; nothing may have been wrong."""
        off = "" if self.worst is None else f"; off by at most {self.worst:.1e}"
        print(f"{what}: {self.exempt} of {self.positions} positions are exempt{off}")
        assert not self.wrong, f"{what}: {self.wrong[:5]}"
        assert self.exempt <= max(1, EXEMPT_MAX * self.positions), f"{what}: too many positions are exempt"


@dataclass(frozen=True)
class Words:
    """A greedy answer."""

    text: str
    tokens: list[int]


class Reference:
    """mlx-lm's own model and tokenizer of a folder. Its weights are multiplied in float32, as a CPU can."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Any = load_tokenizer(folder)

    @cached_property
    def model(self) -> Any:
        model, _ = load_model(self.folder, lazy=True)
        model.set_dtype(mx.float32)
        model = dequantize_model(model)
        mx.eval(model.parameters())
        return model

    @property
    def chats(self) -> bool:
        return self.tokenizer.has_chat_template

    def prompt(self, said: str | list[dict[str, Any]]) -> list[int]:
        """The tokens that mlx-lm's programs make of a text or a conversation."""
        if isinstance(said, str):
            return list(self.tokenizer.encode(said))
        return list(self.tokenizer.apply_chat_template(said, add_generation_prompt=True))

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> Words:
        """What mlx-lm says."""
        pieces = list(stream_generate(self.model, self.tokenizer, list(prompt), max_tokens))
        return Words("".join(piece.text for piece in pieces), [piece.token for piece in pieces])

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """What it computes before each token of an answer that it is told, `(tokens, vocabulary) float32`."""
        told = mx.array([[*prompt, *answer][:-1]])
        return np.array(self.model(told, cache=make_prompt_cache(self.model))[0, len(prompt) - 1 :])
