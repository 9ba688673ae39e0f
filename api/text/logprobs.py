"""Which tokens stand behind the text of an answer, and how likely each was.

The law: the bytes of the tokens that come out concatenate to the UTF-8 of the content that is shown. Tokens without a
part in it (special tokens, reasoning, tool calls, what follows a stop string) do not come out, and of a token that is
partly shown only that part does. A token comes out with the last of its bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ...actors.protocol.messages import TokenLogprobs
from .model import REPLACEMENT, TextModel

LOGPROB_MIN = -9999.0
"""What OpenAI writes for a token that is practically impossible; JSON has no infinity."""

_REPLACEMENT = REPLACEMENT.encode()


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer's content.

    `data` are its bytes as far as they are shown, perhaps a part of a character; `offset` is the character of the
    content in which they begin. `top` are bytes and logarithms of the likeliest tokens there, best first.
    """

    data: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    offset: int


@dataclass(slots=True)
class _Entry:
    """A token on its way: `taken` of its bytes have been shown or skipped."""

    token: int
    logprobs: TokenLogprobs
    data: bytes
    taken: int = 0
    shown: bytes = b""


class TokenLedger:
    """Follows one row's tokens through the pipeline: `add` as they are drawn, then `show` and `skip` in the order of
    the text that they made, then `finish`."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._group: list[_Entry] = []
        self._entries: deque[_Entry] = deque()
        self._ready: list[ShownToken] = []
        self._characters = 0

    def add(self, token: int, piece: str, logprobs: TokenLogprobs) -> None:
        """A token, and the text that the detokenizer gave for it."""
        entry = _Entry(token, logprobs, self._text.token_bytes(token))
        if self._text.byte_level:
            self._entries.append(entry)
        else:
            self._group.append(entry)
            self.settle(piece)

    def settle(self, piece: str) -> None:
        """More text from the detokenizer, without a token."""
        if not piece or not self._group:
            return
        group, self._group = self._group, []
        data = piece.encode()
        if b"".join(entry.data for entry in group) != data:
            # The decoder changed them, as it does with a text's first space; nobody knows which byte is whose.
            for entry in group:
                entry.data = b""
            group[-1].data = data
        self._entries.extend(group)

    def show(self, text: str) -> list[ShownToken]:
        """The next characters go out: the tokens that are complete with them."""
        for index, part in enumerate(text.split(REPLACEMENT)):
            if index:
                self._take(self._replaced_bytes(), _REPLACEMENT)
            data = part.encode()
            self._take(len(data), data)
        ready, self._ready = self._ready, []
        return ready

    def skip(self, text: str) -> None:
        """The next characters do not go out."""
        for index, part in enumerate(text.split(REPLACEMENT)):
            if index:
                self._take(self._replaced_bytes(), b"")
            self._take(len(part.encode()), b"")

    def finish(self) -> list[ShownToken]:
        """No more text goes out: the tokens of which a part has."""
        for entry in self._entries:
            self._end(entry)
        self._entries.clear()
        ready, self._ready = self._ready, []
        return ready

    def _take(self, size: int, shown: bytes) -> None:
        """`size` bytes of the tokens have become `shown`, which is as long, or U+FFFD, or nothing."""
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

    def _end(self, entry: _Entry) -> None:
        if not entry.shown:
            return
        drawn, top = entry.logprobs
        named = [(self._text.token_bytes(token), _finite(value)) for token, value in top]
        inside = _continues(entry.shown[0])
        self._ready.append(ShownToken(entry.shown, _finite(drawn), named, self._characters - inside))
        self._characters += sum(not _continues(byte) for byte in entry.shown)

    def _replaced_bytes(self) -> int:
        """How many of the next bytes one U+FFFD stands for: a maximal part of a character (Unicode 3.9), or itself."""
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


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def _finite(value: float) -> float:
    # Written so that what is no number at all becomes the least one too.
    return value if value > LOGPROB_MIN else LOGPROB_MIN


def chat_logprobs(tokens: list[ShownToken]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice or chunk."""

    def one(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    content = [{**one(t.data, t.logprob), "top_logprobs": [one(*top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: list[ShownToken]) -> dict[str, Any]:
    """The `logprobs` of a text completion's choice or chunk. `top_logprobs` have the drawn token too, as OpenAI's."""
    top: list[dict[str, float]] = []
    for token in tokens:
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
    """A token as text; a part of a character in OpenAI's form, `bytes:\\xe6\\x97`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
