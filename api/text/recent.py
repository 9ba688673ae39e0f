"""A cache of recently encoded prompts: if a prompt continues a cached one, only the rest is encoded.

Agents send the whole conversation with every turn. Encoding 30,000 tokens takes 20 ms and more, longer than everything
else that the endpoint does for a turn. The ids are the same as if the whole text was encoded.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np

from .continuation import Match, continue_text
from .control_tokens import unbroken
from .spelling import IndexedLine, Spelling, StoredBranch

_LEAST_CHARACTERS = 8192
"""Shorter texts are not looked up, because encoding them is faster."""

_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, eq=False)
class _Recent:
    scope: str
    line: IndexedLine

    @property
    def nbytes(self) -> int:
        line = self.line
        # Python stores a character in up to four bytes.
        return len(line.data) + 4 * len(line.text) + 12 * len(line.tokens)


class RecentTexts:
    """Encodes prompts, and caches the last ones. Thread-safe.

    Args:
        bytes_max: the size of the cache; the least recently used prompt is evicted first.
    """

    def __init__(self, spelling: Spelling, bytes_max: int = _BYTES_MAX) -> None:
        self._spelling = spelling
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._known: list[_Recent] = []

    def encode(self, text: str, scope: str, *, special_tokens: bool = False) -> list[int]:
        """Returns the ids of `text` as `Tokenizer.encode` does; it may be guarded (have breaks, see `control_tokens`).
        A prompt is reused only within its `scope`, so that the time reveals nothing to other callers.

        Raises:
            InvalidRequest: `text` is not valid Unicode.
        """
        tokenizer = self._spelling.tokenizer
        around = tokenizer.around if special_tokens else ([], [])
        if tokenizer.backend is None or around is None:
            return tokenizer.encode(text, special_tokens=special_tokens)
        begin, end = around
        return [*begin, *self._encode(text, scope), *end]

    def _encode(self, text: str, scope: str) -> list[int]:
        if len(text) < _LEAST_CHARACTERS:
            return self._spelling.tokenizer.encode(text)
        with self._lock:
            known = [one for one in self._known if one.scope == scope]
        found = continue_text(text, [one.line for one in known], self._spelling)
        before = None if found.line is None else known[found.line]
        if before is None:
            line = self._spelling.index(StoredBranch(unbroken(text), found.tokens))
        else:
            line = self._spelling.extended(before.line, found.kept_tokens, unbroken(text), found.tokens)
        line = replace(line, tokens=np.array(found.tokens, np.uint32))
        # The prompt that this one continues, or changes near its end, will not be sent again.
        self._remember(_Recent(scope, line), None if found.match is Match.DIVERGE else before)
        return found.tokens

    def _remember(self, new: _Recent, instead_of: _Recent | None) -> None:
        with self._lock:
            self._known = [new, *(one for one in self._known if one is not instead_of)]
            held = sum(one.nbytes for one in self._known)
            while held > self._bytes_max:
                held -= self._known.pop().nbytes
