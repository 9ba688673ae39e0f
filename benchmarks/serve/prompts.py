"""Prompts of random words, each of them one token."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS_FILE = "words.json"
"""In a model's folder: `[word, token id]`, of words that are one token after a space."""


class Prompts:
    """The prompts of one model. The same seed gives the same prompt, and another seed one that begins otherwise."""

    def __init__(self, folder: Path) -> None:
        self._words: list[tuple[str, int]] = json.loads((folder / WORDS_FILE).read_text())

    def one(self, tokens: int, seed: str, *, as_ids: bool) -> Any:
        """A prompt of `tokens` words: text for a server, token ids for an engine."""
        chosen = random.Random(seed).choices(self._words, k=tokens)
        return [id for _, id in chosen] if as_ids else " " + " ".join(word for word, _ in chosen)

    def some(self, lengths: Sequence[int], seed: str, *, as_ids: bool) -> list[Any]:
        return [self.one(tokens, f"{seed}/{index}", as_ids=as_ids) for index, tokens in enumerate(lengths)]
