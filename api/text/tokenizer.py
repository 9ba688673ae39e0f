"""A model's tokenizer, with its control tokens. Encoding may take milliseconds to seconds and belongs in a worker
thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ...actors.model_files.text.byte_level import mend_decoder
from ...actors.model_files.text.infill import infill_marks
from ...actors.patches import inner_tokenizer
from ...cluster.errors import InvalidRequest
from ..tools.formats import harmony
from .control_tokens import BREAK, ControlTokens, Markers, unbroken
from .detokenizing import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .guarded_encoding import GuardedEncoder, GuardedIds

_LONG_TOKEN_CHARACTERS = 8
"""Texts with more characters per token than this are rare."""
_COUNTED_CHARACTERS = 2**16

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes_by_character() -> dict[str, int]:
    """Returns GPT-2's reversible map of bytes to printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """One model's tokenizer. Thread-safe.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
        name: the model's.
        markers: the texts around the model's reasoning, and around its calls.
        template: the model's chat templates, "" if they are not known.
        in_harmony: whether the model answers in OpenAI's Harmony format.

    Attributes:
        hidden_tokens: special and end-of-sequence tokens, which never become text.
        call_tokens, think_tokens, harmony_tokens: markers of tool calls and reasoning, and of the Harmony format,
            hidden or not.
        infill_marks: the fill-in-the-middle tokens; None if there are none.
        byte_level: whether a token's bytes do not depend on its neighbours.
        backend: the `tokenizers.Tokenizer`; None if the tokenizer is written in Python.
        added_tokens: the `AddedToken` of each added token's id.
    """

    def __init__(
        self,
        wrapper: Any,
        name: str = "",
        markers: Markers | None = None,
        template: str = "",
        *,
        in_harmony: bool = False,
    ) -> None:
        self.name = name
        self.markers = markers or Markers()
        self._template = template
        self._tokenizer = inner_tokenizer(wrapper)
        self.added_tokens: dict[int, Any] = dict(self._tokenizer.added_tokens_decoder)
        self.backend = _rust_tokenizer(self._tokenizer)
        self.byte_level = self.backend is not None and _is_byte_level(self.backend)
        self._pieces: dict[int, bytes] = {}
        self._bytes = _bytes_by_character()
        vocabulary = self._tokenizer.get_vocab()
        # Unicode normalization merges at most a few characters into one.
        self._token_characters_max = 4 * max(map(len, vocabulary), default=1)
        self.infill_marks = infill_marks(vocabulary)
        self.end_tokens = frozenset(wrapper.eos_token_ids)
        special = frozenset(token for token, entry in self.added_tokens.items() if entry.special)
        self.hidden_tokens = self.end_tokens | frozenset(self._tokenizer.all_special_ids) | special
        thinks = (*(wrapper.think_start_tokens or ()), *(wrapper.think_end_tokens or ()))
        self.think_tokens = frozenset(thinks) - self.end_tokens
        calls = (*(wrapper.tool_call_start_tokens or ()), *(wrapper.tool_call_end_tokens or ()))
        self.call_tokens = frozenset(calls) - self.end_tokens
        self.harmony_tokens: frozenset[int] = frozenset()
        if in_harmony:
            self.harmony_tokens = frozenset(vocabulary[marker] for marker in harmony.MARKERS) - self.end_tokens
        elif self.markers.calls:
            # Everything that the template writes around calls may be part of a call's marker.
            written = frozenset(self.encode(self.markers.calls)) & self.hidden_tokens
            self.call_tokens |= written - self.end_tokens - self.think_tokens - frozenset(self.begin_tokens)

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens."""
        own = self.call_tokens | self.think_tokens
        special = self.hidden_tokens | own | self.harmony_tokens
        normalizer = None if self.backend is None else self.backend.normalizer
        return ControlTokens(self.added_tokens, special, own, self.markers, self._template, normalizer)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Returns the token ids of `text`, which may be guarded (have breaks, see `control_tokens`). `special_tokens`
        adds those that the tokenizer puts around a text.

        Raises:
            InvalidRequest: `text` is not valid Unicode.
        """
        guarded = BREAK in text
        try:
            (unbroken(text) if guarded else text).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text with an unpaired surrogate at character {error.start}") from None
        if guarded:
            return self.encode_guarded(text, special_tokens=special_tokens).ids
        if self.backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens))
        # A batch of one, because `Tokenizer.encode` holds the interpreter lock and this does not.
        return self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids

    def encode_guarded(self, text: str, *, special_tokens: bool = False) -> GuardedIds:
        """As `encode`, for a guarded text that is valid Unicode but for its breaks; also returns the words of the
        tokens."""
        if self._guarded_encoder is not None:
            return self._guarded_encoder.encode(text, special_tokens=special_tokens)
        # Nothing is known about a tokenizer written in Python, so the texts between breaks are encoded separately.
        out = GuardedIds()
        begin, end = (self.begin_tokens, self.closing_tokens) if special_tokens else ([], [])
        for ids in (begin, *(self.encode(piece) for piece in text.split(BREAK) if piece), end):
            out.add(ids, [None] * len(ids))
        return out

    @cached_property
    def _guarded_encoder(self) -> GuardedEncoder | None:
        if self.backend is None:
            return None
        return GuardedEncoder(self.backend, self.added_tokens, self.controls.ids)

    @property
    def begin_tokens(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        return self.around[0] if self.around else []

    @cached_property
    def around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens that the tokenizer puts before and after a text; None if it changes the text in another
        way."""
        whole, bare = self.encode("a", special_tokens=True), self.encode("a")
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    @property
    def closing_tokens(self) -> list[int]:
        """The special tokens that the tokenizer puts after a text."""
        return self.around[1] if self.around else []

    def token_of(self, word: str) -> int | None:
        """Returns the token of a word, None if the word has several."""
        tokens = self.encode(word)
        return tokens[0] if len(tokens) == 1 else None

    def word_tokens(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of words, each at the beginning of a text and behind a space."""
        spelled = (self.encode(form) for word in words for form in (word, f" {word.lstrip()}"))
        return [list(tokens) for tokens in dict.fromkeys(map(tuple, spelled)) if tokens]

    def tokens_min(self, text: str, enough: int) -> int:
        """Returns a lower bound of the number of tokens in `text`. A text with far more than `enough` tokens is not
        encoded whole, which would take seconds and much memory."""
        least = len(text) // self._token_characters_max
        if least >= enough or self.backend is None or len(text) <= _LONG_TOKEN_CHARACTERS * enough:
            return least
        tokens = 0
        for start in range(0, len(text), _COUNTED_CHARACTERS):
            piece = text[start : start + _COUNTED_CHARACTERS].encode("utf-8", "replace").decode()
            # A cut adds a few tokens, but never doubles their number.
            tokens += len(self.backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            if tokens >= 2 * enough:
                break
        return max(least, tokens // 2)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`, special tokens included."""
        if self.backend is not None:
            return self.backend.decode(list(tokens), skip_special_tokens=False)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def written(self, tokens: Sequence[int]) -> list[str]:
        """Returns each token's text in the tokenizer's vocabulary, "" for tokens that it does not have."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(list(tokens))]

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Returns a new detokenizer for one sequence. `context` are the tokens that the text continues, if any."""
        if self.byte_level:
            return ByteDetokenizer(self._piece)
        return WindowDetokenizer(self.decode, context)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of `token` in the middle of a text. If not `byte_level`, neighbours may change them."""
        if self.byte_level:
            return self._piece(token)
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes_alone(token)
        return piece

    def _bytes_alone(self, token: int) -> bytes:
        if self.backend is not None and (byte := _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token) or "")):
            return bytes.fromhex(byte[1])
        # Decoders may strip a leading space, but not the space of a second token.
        return self.decode([token, token])[len(self.decode([token])) :].encode()

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            assert self.backend is not None
            # Models may pad their vocabulary with ids that the tokenizer does not have; these have no text.
            written = self.backend.id_to_token(token) or ""
            try:
                piece = bytes([self._bytes[character] for character in written])
            except KeyError:
                piece = written.encode("utf-8")
            self._pieces[token] = piece
        return piece

    def json(self) -> str:
        """Returns the tokenizer as `tokenizers` writes it.

        Raises:
            InvalidRequest: Python code wraps it, so it cannot be described in that form.
        """
        if self.backend is None:
            raise InvalidRequest(
                f"the tokenizer of {self.name!r} is written in Python: constrained decoding is not possible"
            )
        return self.backend.to_str()


def _rust_tokenizer(tokenizer: Any) -> Any | None:
    """Returns the inner `tokenizers.Tokenizer`, or None if Python code wraps its encoding or decoding.

    Using it directly makes encoding thread-safe: transformers' own `encode` sets truncation on shared state.
    """
    from transformers import PreTrainedTokenizerBase

    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer)
    if backend is None or kind.encode is not PreTrainedTokenizerBase.encode:
        return None
    if kind.decode is not PreTrainedTokenizerBase.decode:
        return None
    backend.no_truncation()
    backend.no_padding()
    mend_decoder(backend)
    return backend


def _is_byte_level(backend: Any) -> bool:
    from tokenizers import decoders

    return isinstance(backend.decoder, decoders.ByteLevel)
