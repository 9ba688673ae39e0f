"""What mlx-lm computes of a checkpoint, and how far others may be off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer, save_model

from tests.worlds.replica.bench import Logits

from .served import own_source

ON_CPU = mx.default_device() == mx.cpu

TOLERANCE = 2e-5 if ON_CPU else 1e-3
"""How far logits may be off, of the largest of them, in float32: on a CPU by the order of sums alone, elsewhere also by
how products of quantized weights are rounded, and by sealed numbers that take another code for it."""

TIE = 10
"""So many tolerances between a token and the best one are a tie: either may be said."""

EXEMPT_MAX = 0.02
"""The share of positions at which another token than the best one may be said, because it is a tie."""

ROUNDINGS, TIE_ROUNDINGS, EXEMPT_TIMES = 2.0, 4.0, 4.0
"""In 16 bits: how far logits may be off, how far apart those of a tie, and at how many positions another token may be
said for one, as multiples of what mlx-lm's own do if it reads a text token by token."""


SEALED_OFF = TOLERANCE if ON_CPU else 1e-2
"""The same where KV is sealed: on a GPU the last bit of a number may give it another code, and so a step of a fifteenth
of its group. Seen on an H200: up to 6e-3 in company, 3e-4 from memory, and 3e-6 where nothing is sealed."""

ROUNDED, ROUNDED_TOKENS = (own_source("string")[:2000], own_source("heapq")[:1000], own_source("bisect")[:300]), 64
"""By which that is measured: texts to go on with, and how far."""


@dataclass(frozen=True)
class Allowed:
    """How far logits may be off.

    Attributes:
        off: of the largest of them.
        tie: between a token and the best one, of the largest, so that either may be said.
        exempt: the share of positions at which another one may be said for it.
        exempt_least: so many positions always may.
    """

    off: float = TOLERANCE
    tie: float = TIE * TOLERANCE
    exempt: float = EXEMPT_MAX
    exempt_least: int = 1

    @property
    def tie_nats(self) -> float:
        """Of two tokens' logprobs, of logits up to about 30."""
        return 30 * self.tie


@dataclass
class Tally:
    """Counts positions, and those that were exempt, until it is `close`d.

    Attributes:
        allowed: how far logits may be off.
        exempt: where another token than the best one was taken, and it was a tie.
        worst: how far logits were off, of their scale; None where only tokens are compared.
    """

    allowed: Allowed = Allowed()
    positions: int = 0
    exempt: int = 0
    worst: float | None = None
    wrong: list[str] = field(default_factory=list)

    def logits(self, expected: Logits, got: Logits) -> None:
        """Compares logits of forced sequences: within the tolerance, and the same likeliest token but for ties."""
        for place, one in expected.items():
            scale, off = np.abs(one).max(), np.abs(got[place] - one).max()
            self.worst = max(self.worst or 0.0, float(off / scale))
            if off > self.allowed.off * scale:
                self.wrong.append(f"sequence {place[0]}, draw {place[1]}: off by {off / scale:.1e} of its logits")
            self._token(one, int(got[place].argmax()), f"sequence {place[0]}, draw {place[1]}")

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
        if best - expected[token] > self.allowed.tie * np.abs(expected).max():
            self.wrong.append(f"{where}: {token} instead of {expected.argmax()}, {best - expected[token]:.2f} likelier")

    def close(self, what: str) -> None:
        """Prints what was counted; nothing may have been wrong."""
        off = "" if self.worst is None else f"; off by at most {self.worst:.1e}"
        print(f"{what}: {self.exempt} of {self.positions} positions are exempt{off}")
        assert not self.wrong, f"{what}: {self.wrong[:5]}"
        assert self.exempt <= max(self.allowed.exempt_least, self.allowed.exempt * self.positions), (
            f"{what}: too many positions are exempt"
        )


@dataclass(frozen=True)
class Words:
    """A greedy answer."""

    text: str
    tokens: list[int]


class Reference:
    """mlx-lm's own model and tokenizer of a folder.

    Args:
        dtype: `float32`, in which its weights are multiplied too, as a CPU can; or `auto`: as mlx-lm serves it.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder = folder
        self.dtype = dtype
        self.tokenizer: Any = load_tokenizer(folder)

    @cached_property
    def model(self) -> Any:
        model, _ = load_model(self.folder, lazy=True)
        if self.dtype == "float32":
            model.set_dtype(mx.float32)
            model = dequantize_model(model)
        mx.eval(model.parameters())
        return model

    @cached_property
    def allowed(self) -> Allowed:
        """Of logits in its dtype."""
        if self.dtype == "float32":
            return Allowed()
        off, parted, positions = 0.0, 0, 0
        for text in ROUNDED:
            prompt = self.prompt(text)
            answer = self.greedy(prompt, ROUNDED_TOKENS).tokens
            whole, steps = self.logits(prompt, answer), self._stepped(prompt, answer)
            off = max(off, float((np.abs(whole - steps).max(axis=1) / np.abs(whole).max(axis=1)).max()))
            parted += int((whole.argmax(axis=1) != steps.argmax(axis=1)).sum())
            positions += len(answer)
        print(f"mlx-lm's own logits are off by {off:.1e}, and its tokens at {parted} of {positions} positions")
        share = max(EXEMPT_MAX, EXEMPT_TIMES * parted / positions)
        return Allowed(ROUNDINGS * off, TIE_ROUNDINGS * off, share, exempt_least=3)

    def unpack(self, folder: Path) -> None:
        """Writes the model with weights in float32, whose products keep that precision on a GPU too."""
        save_model(folder, self.model)
        config = json.loads((self.folder / "config.json").read_text())
        plain = {name: value for name, value in config.items() if not name.startswith("quantization")}
        (folder / "config.json").write_text(json.dumps({**plain, "dtype": "float32", "torch_dtype": "float32"}))
        for file in self.folder.iterdir():
            if file.name != "config.json" and not file.name.startswith("model"):
                shutil.copy(file, folder)

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
        logits = self.model(told, cache=make_prompt_cache(self.model))[0, len(prompt) - 1 :]
        return np.array(logits.astype(mx.float32))

    def _stepped(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """As `logits`, each token of the answer read by itself."""
        caches, found = make_prompt_cache(self.model), []
        for told in ([*prompt], *([token] for token in answer[:-1])):
            found.append(self.model(mx.array([told]), cache=caches)[0, -1].astype(mx.float32))
            mx.eval(found[-1])
        return np.array(mx.stack(found))
