"""Prompts for what comes between two texts, for models that were trained with tokens for it (Bavarian et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The families' control tokens before the prefix, before the suffix, and before the answer.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


@dataclass(frozen=True)
class InfillMarks:
    """The token ids before the parts of a prompt."""

    before: int
    after: int
    answer: int

    def prompt(self, before: list[int], after: list[int]) -> list[int]:
        """Returns the prompt for what comes between two texts in tokens."""
        return [self.before, *before, self.after, *after, self.answer]


def infill_marks(vocabulary: Mapping[str, int]) -> InfillMarks | None:
    """Returns a tokenizer's marks; None if it has none that are known.

    Args:
        vocabulary: token ids by text.
    """
    for names in _NAMES:
        if all(name in vocabulary for name in names):
            return InfillMarks(*(vocabulary[name] for name in names))
    return None
