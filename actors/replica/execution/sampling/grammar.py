"""Constrained decoding: where each sequence is in its grammar, and the masks of the tokens that may come next.

A mask for the next token needs the token before it. The model needs only that token too, so a step launches the model
first and makes the masks in parallel; only sampling waits for them. Sequences without a grammar are not affected.

If a grammar allows only one token several times in a row, these tokens are computed in one step: a sequence that is
alone is given them, and where a step may have drafts, they are its draft.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....model_files.text.grammar_compiler import GrammarCompiler, load_compiler
from ..loaded_model import LoadedModel

PARALLEL_SEQUENCES_MIN = 8
"""With at least this many sequences, their masks are made on several threads. A mask takes about 0.1 ms, but waking
threads takes 2 ms on two busy cores."""

_TOO_COMPLEX = "the grammar has become too complex to follow"


class SequenceGrammar:
    """One sequence's place in its grammar. `Grammars` makes it; then the engine's thread uses it.

    Args:
        matcher: llguidance's `LLMatcher`, at the beginning.
        tokens: how many tokens a mask has bits for.

    Attributes:
        error: why the grammar cannot be followed any further, or "". If set, the next token is not constrained.
        failure: the `error` at the time when the last followed token was drawn. If set, that token is meaningless.
    """

    def __init__(self, matcher: Any, tokens: int) -> None:
        self.matcher = matcher
        self.words = (tokens + 31) // 32
        self.error = ""
        self.failure = ""
        self._followed: list[int] = []

    def resume(self, generated: Sequence[int]) -> None:
        """Goes to the state after all tokens generated so far. Called when the sequence joins a batch: for the first
        time, again after a preemption, or on another replica."""
        known = len(self._followed)
        if self._followed != list(generated[:known]):
            self.matcher.reset()
            self._followed, self.error, known = [], "", 0
        for token in generated[known:]:
            self._follow(token)
        self.failure = ""

    def follow(self, token: int) -> None:
        """Advances by the token that was drawn last."""
        self.failure = self.error
        self._follow(token)

    def _follow(self, token: int) -> None:
        self._followed.append(token)
        # After the end of the text a matcher accepts only end tokens, and the sequence ends.
        if not self.error and not self.matcher.consume_token(token) and self.matcher.is_error():
            self.error = _TOO_COMPLEX

    def ahead(self, tokens: Sequence[int]) -> list[SequenceGrammar]:
        """Returns where the sequence will be after each of these tokens, if they come."""
        places, place = [], self
        for token in tokens:
            place = SequenceGrammar(place.matcher.deep_copy(), 32 * self.words)
            place.follow(token)
            places.append(place)
        return places

    def forced(self, mask: np.ndarray, most: int) -> list[int]:
        """Returns the next tokens for as long as the grammar allows only one each time, at most `most`. `mask`,
        `(words,)`, is the mask of the first."""
        matcher, words, found = None, mask, list[int]()
        while len(found) < most and (token := _only(words)) is not None:
            if matcher is None:
                matcher, words = self.matcher.deep_copy(), np.empty_like(mask)
            if not matcher.consume_token(token):
                break
            found.append(token)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return found

    def check(self, mask: np.ndarray) -> None:
        """Notes an error that was met while the sequence's `mask`, `(words,) int32`, was made; then the sequence is no
        longer constrained."""
        if self.matcher.is_error():
            self.error = _TOO_COMPLEX
        elif not mask.any():
            self.error = "the model has no token that continues the grammar"
        if self.error:
            mask.fill(-1)


def _only(mask: np.ndarray) -> int | None:
    """Returns the only token of a mask; None if there are several."""
    places = np.flatnonzero(mask)
    if len(places) != 1:
        return None
    word = int(mask[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(places[0]) + word.bit_length() - 1


@dataclass(frozen=True)
class SequenceMasks:
    """Which tokens some sequences of a batch may draw.

    Attributes:
        sequences: ascending indexes in the batch.
        words: `(sequences, words) uint32`, a bit for every token, the lowest bit first.
    """

    sequences: list[int]
    words: np.ndarray


class MaskMaker:
    """Makes the masks of a batch, of many sequences on llguidance's own threads."""

    def __init__(self) -> None:
        self._threads: Any = None

    def __call__(self, sequences: Iterable[tuple[int, SequenceGrammar]]) -> SequenceMasks | None:
        """Returns the masks of sequences, each given as (index in the batch, its grammar); None if no sequence is
        constrained. Releases Python's lock, so that other threads run."""
        constrained = [(index, grammar) for index, grammar in sequences if not grammar.error]
        if not constrained:
            return None
        masks = np.zeros((len(constrained), constrained[0][1].words), dtype=np.int32)
        if len(constrained) < PARALLEL_SEQUENCES_MIN:
            for mask, (_, grammar) in zip(masks, constrained, strict=True):
                grammar.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        else:
            if self._threads is None:
                from llguidance import LLExecutor

                self._threads = LLExecutor()
            matchers = [(grammar.matcher, place) for place, (_, grammar) in enumerate(constrained)]
            self._threads.unsafe_compute_mask_ptr(
                matchers, masks.ctypes.data, masks.nbytes // len(constrained), len(constrained)
            )
        for mask, (_, grammar) in zip(masks, constrained, strict=True):
            grammar.check(mask)
        return SequenceMasks([index for index, _ in constrained], masks.view(np.uint32))


class Grammars:
    """Compiles the grammars of a replica's requests. Thread-safe; the tokenizer is read with the first one.

    Args:
        trusted: whether code in the model's folder may run.
    """

    def __init__(self, loaded: LoadedModel, *, trusted: bool = False) -> None:
        self._loaded = loaded
        self._trusted = trusted
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def sequence(self, grammar: str, generated: Sequence[int]) -> SequenceGrammar:
        """Returns a sequence's place in a grammar after the tokens `generated` so far. Takes up to seconds.

        Raises:
            InvalidRequest: it does not compile, or the model's tokenizer cannot follow grammars.
            ModelLoadError: the tokenizer does not load.
        """
        loaded = self._loaded
        with self._lock:
            if self._compiler is None:
                self._compiler = load_compiler(
                    loaded.folder,
                    loaded.folder.name,
                    loaded.eos_token_ids,
                    loaded.vocabulary_size,
                    trusted=self._trusted,
                )
        place = SequenceGrammar(self._compiler.matcher(grammar), self._compiler.tokens)
        place.resume(generated)
        return place
