"""Maps an answer's text back to its tokens and their logprobs.

Invariant: the bytes of the returned tokens concatenate to the UTF-8 of the shown content. Tokens that are not shown
(special tokens, reasoning, tool calls, text after a stop string) are left out, and a token that is partly shown has
only that part. A token is returned with the last of its bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....actors.protocol.replica_messages import TokenLogprobs
from ..detokenizing import REPLACEMENT
from ..tokenizer import Tokenizer

LOGPROB_MIN = -9999.0
"""OpenAI's value for a practically impossible token; JSON has no infinity."""

_REPLACEMENT = REPLACEMENT.encode()


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer's content.

    `data` are its shown bytes, perhaps a part of a character; `offset` is the index of the content's character in which
    they begin. `top` are (bytes, logprob) of the likeliest tokens there, best first. The first token of a prompt has no
    `logprob`.
    """

    data: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]
    offset: int


@dataclass(slots=True)
class _PendingToken:
    """A pending token: `taken` of its bytes have been shown or skipped."""

    token: int
    logprobs: TokenLogprobs
    data: bytes
    taken: int = 0
    shown: bytes = b""


class TokenLedger:
    """One sequence's tokens on their way through the pipeline: call `add` for each sampled token, `show` and `skip` in
    the order of the text, then `finish`.

    Args:
        characters: how many come before the sequence's text.
    """

    def __init__(self, tokenizer: Tokenizer, characters: int = 0) -> None:
        self._tokenizer = tokenizer
        self._group: list[_PendingToken] = []
        self._entries: deque[_PendingToken] = deque()
        self._ready: list[ShownToken] = []
        self._characters = characters

    def add(self, token: int, piece: str, logprobs: TokenLogprobs) -> None:
        """Adds a token, and the text that the detokenizer returned for it."""
        entry = _PendingToken(token, logprobs, self._tokenizer.token_bytes(token))
        if self._tokenizer.byte_level:
            self._entries.append(entry)
        else:
            self._group.append(entry)
            self.settle(piece)

    def settle(self, piece: str) -> None:
        """Adds text that the detokenizer returned without a new token."""
        if not piece or not self._group:
            return
        group, self._group = self._group, []
        data = piece.encode()
        if b"".join(entry.data for entry in group) != data:
            # The decoder changed the bytes, for example a leading space, so they cannot be assigned to single tokens.
            for entry in group:
                entry.data = b""
            group[-1].data = data
        self._entries.extend(group)

    def show(self, text: str) -> list[ShownToken]:
        """Marks the next characters as shown. Returns the tokens that they complete."""
        for index, part in enumerate(text.split(REPLACEMENT)):
            if index:
                self._take(self._replaced_bytes(), _REPLACEMENT)
            data = part.encode()
            self._take(len(data), data)
        ready, self._ready = self._ready, []
        return ready

    def skip(self, text: str) -> None:
        """Marks the next characters as not shown."""
        for index, part in enumerate(text.split(REPLACEMENT)):
            if index:
                self._take(self._replaced_bytes(), b"")
            self._take(len(part.encode()), b"")

    def finish(self) -> list[ShownToken]:
        """Ends the text. Returns the tokens that are partly shown."""
        for entry in self._entries:
            self._end(entry)
        self._entries.clear()
        ready, self._ready = self._ready, []
        return ready

    def _take(self, size: int, shown: bytes) -> None:
        """Consumes `size` bytes of the tokens, shown as `shown`: equally many bytes, U+FFFD, or none."""
        while self._entries:
            entry = self._entries[0]
            count = min(size, len(entry.data) - entry.taken)
            last = count == size
            entry.taken += count
            entry.shown += shown if last else shown[:count]
            size, shown = size - count, b"" if last else shown[count:]
            if entry.taken < len(entry.data):
                return
            self._end(self._entries.popleft())

    def _end(self, entry: _PendingToken) -> None:
        if not entry.shown:
            return
        self._ready.append(_shown(self._tokenizer, entry.shown, entry.logprobs, self._characters))
        self._characters += _characters_of(entry.shown)

    def hidden(self, token: int, logprobs: TokenLogprobs) -> ShownToken:
        """Returns a token that is no part of the text, at the end of what has been shown."""
        return _shown(self._tokenizer, self._tokenizer.token_bytes(token), logprobs, self._characters)

    def _replaced_bytes(self) -> int:
        """Returns how many of the next bytes one U+FFFD replaces: a maximal subpart (Unicode 3.9), or itself."""
        front = b""
        for entry in self._entries:
            front += entry.data[entry.taken :]
            if len(front) >= 4:
                break
        try:
            front[:4].decode()
        except UnicodeDecodeError as error:
            if error.start == 0:
                return error.end
        return len(_REPLACEMENT)


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[ShownToken]:
    """Returns all tokens of a prompt, also those that are no text.

    Args:
        logprobs: of all tokens but the first.
    """
    shown, characters = list[ShownToken](), 0
    for token, found in zip(tokens, [None, *logprobs], strict=True):
        shown.append(_shown(tokenizer, tokenizer.token_bytes(token), found, characters))
        characters += _characters_of(shown[-1].data)
    return shown


def _shown(tokenizer: Tokenizer, data: bytes, logprobs: TokenLogprobs | None, characters: int) -> ShownToken:
    """Returns a token behind so many characters."""
    offset = characters - (data[:1] != b"" and _continues(data[0]))
    if logprobs is None:
        return ShownToken(data, None, [], offset)
    named = [(tokenizer.token_bytes(token), _finite(value)) for token, value in logprobs[1]]
    return ShownToken(data, _finite(logprobs[0]), named, offset)


def _characters_of(data: bytes) -> int:
    """Returns how many characters begin in bytes of UTF-8."""
    return sum(not _continues(byte) for byte in data)


def _continues(byte: int) -> bool:
    """Returns whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def _finite(value: float) -> float:
    # This comparison also turns NaN into the minimum.
    return value if value > LOGPROB_MIN else LOGPROB_MIN


def chat_logprobs(tokens: list[ShownToken]) -> dict[str, Any]:
    """Returns the `logprobs` of a chat's choice or chunk."""

    def one(data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    content = [{**one(t.data, t.logprob), "top_logprobs": [one(*top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: list[ShownToken]) -> dict[str, Any]:
    """Returns the `logprobs` of a text completion's choice or chunk. As in OpenAI's, `top_logprobs` include the sampled
    token, and a prompt's first token has None."""
    top: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprob is None:
            top.append(None)
            continue
        likeliest: dict[str, float] = {}
        for data, logprob in [*token.top, (token.data, token.logprob)]:
            likeliest.setdefault(_written(data), logprob)
        top.append(likeliest)
    return {
        "tokens": [_written(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": top,
        "text_offset": [token.offset for token in tokens],
    }


def _written(data: bytes) -> str:
    """Returns a token as text; a part of a character in OpenAI's form, `bytes:\\xe6\\x97`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
