"""Turns an answer's tokens into text, one at a time. A few microseconds per token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

# A character has at most four bytes, so if a window this long still ends in U+FFFD, its bytes are invalid.
_HELD_TOKENS_MAX = 8
_CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """Turns tokens into text one at a time. The pieces, `flush` included, concatenate to the whole text."""

    def add(self, token: int) -> str:
        """Returns the text completed by `token`; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Returns the held text at the end of the answer; incomplete bytes become U+FFFD."""
        ...


class ByteDetokenizer:
    """A detokenizer for byte-level BPE. Every token is a fixed byte string, so a UTF-8 decoder is the only state.

    Replaces invalid bytes by maximal subparts, like the one-shot decoder of `tokenizers`.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """A detokenizer for all other decoders: decodes a short window twice per token and emits the difference.

    `tokenizers.decoders.DecodeStream` takes 1.4 µs per token instead of 2.3, but it holds invalid bytes for ever,
    cannot be flushed, and does not work with tokenizers in Python.

    Args:
        decode: token ids to text.
        context: tokens before the first one, so that decoders do not strip its leading space.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._known = len(self._window)

    def add(self, token: int) -> str:
        self._window.append(token)
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        known, text = self._decode(self._window[: self._known]), self._decode(self._window)
        new = text[len(known) :]
        held = len(self._window) - self._known
        if not final and held < _HELD_TOKENS_MAX and (not new or text.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        return new
