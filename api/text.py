"""Text on one side, token ids on the other: tokenizer, chat template, incremental detokenizing, stop strings.

Everything here is computation without I/O, except `load_text_model`. Rendering and encoding may take milliseconds to
seconds and belong in a worker thread; a `Detokenizer` and a `StopMatcher` cost microseconds a token.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..actors.replica.end_tokens import read_end_tokens
from ..cluster.errors import InvalidRequest, ModelLoadError

REPLACEMENT = "\ufffd"

# A character has at most four bytes, so a window this long that still ends in U+FFFD holds bytes that are invalid.
_HELD_TOKENS_MAX = 8
_CONTEXT_TOKENS = 6


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's reversible map of bytes to printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer(Protocol):
    """Turns tokens into text one at a time. The pieces, `flush` included, concatenate to the whole text."""

    def add(self, token: int) -> str:
        """The text that became complete with `token`; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the answer; incomplete bytes become U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level BPE: every token is a fixed string of bytes, so a UTF-8 decoder is all the state there is.

    Replaces invalid bytes by maximal subparts, as the one-shot decoder of `tokenizers` does.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For every other decoder: decodes a short window twice a token and emits the difference.

    Args:
        decode: token ids to text.
        context: tokens before the first one. Decoders that strip a leading space then keep it.
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


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and never lets a part of one out.

    The match that ends first wins, and of those that end together the longest. So the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that can go out, and whether a stop string was found. After a match no more text comes out."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)[1]], True
        cut = len(buffer) - longest_held(buffer, self._stops)
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """What was held back because a stop string might have begun there."""
        held, self._held = self._held, ""
        return held


def longest_held(text: str, markers: Iterable[str]) -> int:
    """How many of the last characters of `text` are a proper prefix of a marker; the longest such suffix."""
    cut = len(text)
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= at < cut:
            if marker.startswith(text[at:]):
                cut = at
            at = text.find(marker[0], at + 1)
    return len(text) - cut


class TextModel:
    """The text side of one served model: its tokenizer, its chat template and its form of tool calls.

    Thread-safe. `hidden_tokens` never become text: special tokens and every end-of-sequence token.
    `tool_call_tokens` are those of them that mark tool calls.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
        sampling: the model's own `temperature`, `top_p` and `top_k`, for requests that are silent about them.
    """

    def __init__(self, wrapper: Any, *, name: str = "", sampling: Mapping[str, float] | None = None) -> None:
        self.name = name
        self.sampling = dict(sampling or {})
        self._wrapper = wrapper
        self._tokenizer = wrapper._tokenizer
        self._backend = _rust_tokenizer(self._tokenizer)
        self._byte_level = self._backend is not None and _is_byte_level(self._backend)
        self._pieces: dict[int, bytes] = {}
        self._bytes = _bytes_by_character()
        # Unicode normalization makes at most a handful of characters into one.
        self._token_characters_max = 4 * max(map(len, self._tokenizer.get_vocab()), default=1)
        self.end_tokens = frozenset(wrapper.eos_token_ids)
        self.hidden_tokens = self.end_tokens | frozenset(self._tokenizer.all_special_ids) | self._special_added()
        self.has_tool_calls = bool(wrapper.has_tool_calling and wrapper.tool_parser)
        self.tool_call_start: str = wrapper.tool_call_start or ""
        self.tool_call_end: str = wrapper.tool_call_end or ""
        self.tool_parser: Callable[[str, Any], Any] | None = wrapper.tool_parser
        markers = (*(wrapper.tool_call_start_tokens or ()), *(wrapper.tool_call_end_tokens or ()))
        self.tool_call_tokens = frozenset(markers) - self.end_tokens

    def _special_added(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token for token, entry in added.items() if entry.special)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt text of a conversation, up to where the assistant begins.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses these messages.
        """
        if not self._wrapper.has_chat_template:
            raise InvalidRequest(f"the model {self.name!r} has no chat template; use /v1/completions", param="model")
        try:
            # A template is a program that comes with the model: it may fail in any way on messages it does not expect.
            return self._wrapper.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused: {reason}", param="messages") from error

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. `special_tokens` adds those that the tokenizer puts around a text by itself.

        Raises:
            InvalidRequest: `text` is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text with an unpaired surrogate at character {error.start}") from None
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens))
        # A batch of one, because `Tokenizer.encode` keeps the interpreter lock and this does not.
        return self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids

    def tokens_min(self, text: str) -> int:
        """A number of tokens that `text` surely has, found without encoding it."""
        return len(text) // self._token_characters_max

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` in one go, special tokens included."""
        if self._backend is not None:
            return self._backend.decode(list(tokens), skip_special_tokens=False)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for one row. `context`: the tokens that the text continues, where it continues some."""
        if self._byte_level:
            return ByteDetokenizer(self._piece)
        return WindowDetokenizer(self.decode, context)

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            assert self._backend is not None
            # Ids past the tokenizer's end exist where a model pads its vocabulary; they have no text.
            written = self._backend.id_to_token(token) or ""
            try:
                piece = bytes([self._bytes[character] for character in written])
            except KeyError:
                piece = written.encode("utf-8")
            self._pieces[token] = piece
        return piece


def _rust_tokenizer(tokenizer: Any) -> Any | None:
    """The `tokenizers.Tokenizer` inside, or None where Python code stands before it that must run too.

    Using it directly is what makes encoding thread-safe: transformers' own `encode` sets truncation on shared state.
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
    return backend


def _is_byte_level(backend: Any) -> bool:
    from tokenizers import decoders

    return isinstance(backend.decoder, decoders.ByteLevel)


def load_text_model(folder: str | Path, *, name: str = "") -> TextModel:
    """The text side of the model in `folder`. Takes up to seconds.

    Raises:
        ModelLoadError: no tokenizer there, or one that does not load.
    """
    # Imported here because mlx_lm brings MLX with it, which only processes that serve text need.
    from mlx_lm import tokenizer_utils

    path = Path(folder)
    try:
        wrapper = tokenizer_utils.load(path, eos_token_ids=sorted(read_end_tokens(path)) or None)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise ModelLoadError(f"the tokenizer of {name or path.name!r} does not load: {error}") from error
    return TextModel(wrapper, name=name or path.name, sampling=_own_sampling(path))


def _own_sampling(path: Path) -> dict[str, float]:
    """What generation_config.json says of sampling; `do_sample: false` is greedy. Values out of range are left out."""
    try:
        config = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    limits = {"temperature": (0.0, 10.0), "top_p": (1e-9, 1.0), "top_k": (0, 2**31 - 1)}
    own = {name: config[name] for name in limits if type(config.get(name)) in (int, float)}
    return {name: value for name, value in own.items() if limits[name][0] <= value <= limits[name][1]}
