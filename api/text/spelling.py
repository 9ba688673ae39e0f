"""The bytes of a line's tokens, and the tokens that always split a text: the basis of `continuation`.

Lines are compared with a new text in UTF-8 bytes, not in characters: a token border may lie inside a character, and
different invalid bytes all become the same character (U+FFFD).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from .control_tokens import BREAK
from .detokenizing import REPLACEMENT
from .tokenizer import Tokenizer

SPELLS_OTHERWISE = "tokens spell another text"
NO_TEXT = "bytes that are no text"

_Items = TypeVar("_Items", bytes, str, list[int])

# SentencePiece's form of a space.
_META_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_TOKENS_MAX = 2**32
_LEADS_TRIED = 16
_ENDS_TRIED = 8
# A piece that cannot equal any text, because this byte never occurs in UTF-8.
_NOTHING = b"\xff"


@dataclass(frozen=True)
class StoredBranch:
    """A conversation as an agent's memory holds it.

    Args:
        text: the text of `tokens`: the rendered prompt and the answer, with special tokens spelled out.
        tokens: the exact ids, sampled ones included.
    """

    text: str
    tokens: Sequence[int]


@dataclass(frozen=True)
class IndexedLine(StoredBranch):
    """A line with the byte offsets of its tokens, worth caching. Created by `Spelling.index`, for that model only.

    Args:
        data: `text` in UTF-8.
        ends: `(aligned tokens + 1,) int64`: the first k tokens end at byte `ends[k]` of `data`. Inside a stretch that
            is only aligned as a whole, it is the end of that stretch.
        added: `(added tokens,) int64`: the indexes of added tokens among the aligned ones.
        controls: `(n, 2) int64`: the first byte and the end (exclusive) of each added token among the aligned ones.
        plain: `(n, 2) int64`: the same for each place where ordinary tokens spell a control token's text.
        fault: why the remaining tokens are not aligned; "" if all are.
        fault_at: the byte of `data` where they begin to differ.
    """

    data: bytes = field(repr=False)
    ends: np.ndarray = field(repr=False)
    added: np.ndarray = field(repr=False)
    controls: np.ndarray = field(repr=False)
    plain: np.ndarray = field(repr=False)
    fault: str
    fault_at: int

    def tokens_within(self, limit: int) -> int:
        """Returns how many of the first tokens end within the first `limit` bytes."""
        return int(np.searchsorted(self.ends, limit, side="right")) - 1


class _TokenBytes(dict[int, bytes]):
    """The bytes of tokens, cached; at most the vocabulary."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._spell(token)
        return piece


class Spelling:
    """The bytes of one model's tokens. Thread-safe.

    Attributes:
        tokenizer: the model's.
        backend: the `tokenizers.Tokenizer`, or None.
        byte_level: whether token borders follow from counting bytes, because the tokenizer inserts nothing.
        joins_by_merges: whether the tokens before a token border depend only on the text before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.backend, self._added = tokenizer.backend, tokenizer.added_tokens
        self._concatenates = self.backend is not None and (tokenizer.byte_level or _is_sentencepiece(self.backend))
        self._pieces = _TokenBytes(self._spell)
        self._added_tokens = np.array(sorted(self._added), np.int64)
        self._by_content = {entry.content.encode(): token for token, entry in self._added.items() if entry.content}
        self._lengths = sorted({len(content) for content in self._by_content}, reverse=True)
        self._alone: dict[int, bool] = {}
        self._space_first = self._concatenates and self._puts_space("")
        # All added tokens behave alike here, so one that always splits a text is enough to test.
        few = islice(self._added, _LEADS_TRIED)
        lead = next((self._added[token].content for token in few if self.stands_alone(token)), "")
        self._space_later = bool(lead) and self._concatenates and self._puts_space(lead)
        self.byte_level = tokenizer.byte_level and not self._space_first
        self.joins_by_merges = self._joins_by_merges()

    def index(self, line: StoredBranch) -> IndexedLine:
        """Returns `line` with offsets. Takes milliseconds for 100,000 tokens, more if the tokenizer normalizes text."""
        if isinstance(line, IndexedLine):
            return line
        data = utf8(line)
        tokens = np.fromiter(line.tokens, np.int64, len(line.tokens))
        added = np.flatnonzero(np.isin(tokens, self._added_tokens))
        spelled, ends = b"", np.zeros(len(tokens) + 1, np.int64)
        if self._concatenates:
            pieces = list(map(self._pieces.__getitem__, line.tokens))
            spelled = b"".join(pieces)
            np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=ends[1:])
        if self._concatenates and spelled == data:
            count, fault_at = len(tokens), len(data)
        else:
            count, fault_at = self._align(line, data, spelled, ends, added)
        fault = ""
        if count < len(tokens):
            fault = NO_TEXT if data.startswith(REPLACEMENT.encode(), fault_at) else SPELLS_OTHERWISE
        added, ends = added[: int(np.searchsorted(added, count))], ends[: count + 1]
        controls = self._spans(tokens, ends, added)
        plain = self._spelled_plain(data, controls, 0)
        return IndexedLine(line.text, line.tokens, data, ends, added, controls, plain, fault, fault_at)

    def extended(self, line: IndexedLine, kept: int, text: str, tokens: list[int]) -> IndexedLine:
        """Returns the line of `text` and `tokens` with offsets. Its first `kept` tokens are those of `line`."""
        data, at = text.encode(), int(line.ends[kept])
        rest = tokens[kept:]
        pieces = list(map(self._pieces.__getitem__, rest)) if self._concatenates else []
        if not pieces or b"".join(pieces) != data[at:]:
            return self.index(StoredBranch(text, tokens))
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces))) + at
        added = np.flatnonzero(np.isin(np.array(rest, np.int64), self._added_tokens)) + kept
        known = line.added[: int(np.searchsorted(line.added, kept))]
        ends, added = np.concatenate((line.ends[: kept + 1], ends)), np.concatenate((known, added))
        controls = np.concatenate((line.controls[: len(known)], self._spans(tokens, ends, added[len(known) :])))
        # Text that spells a marker may have begun before.
        plain = line.plain[line.plain[:, 1] <= at]
        since = max(0, at - max(self._lengths, default=0), int(plain[-1, 1]) if len(plain) else 0)
        plain = np.concatenate((plain, self._spelled_plain(data, controls, since)))
        return IndexedLine(text, tokens, data, ends, added, controls, plain, "", len(data))

    def _spans(self, tokens: Sequence[int] | np.ndarray, ends: np.ndarray, added: np.ndarray) -> np.ndarray:
        """Returns `(n, 2) int64`: the bytes of the added tokens at the indexes `added`."""
        kinds, which = np.unique(np.asarray(tokens, np.int64)[added], return_inverse=True)
        lengths = np.array([len(self.content(token)) for token in kinds.tolist()], np.int64)
        before, behind = ends[added], ends[added + 1]
        begins = behind - lengths[which]
        # The text may have less than the token's content, such as spaces for `▁`.
        begins = np.where(before < behind, np.maximum(begins, before), begins)
        return np.stack((begins, behind), 1)

    def _spelled_plain(self, data: bytes, controls: np.ndarray, since: int) -> np.ndarray:
        """Returns `(n, 2) int64`: the places from byte `since` on that spell a control token but are ordinary text."""
        spans = np.array(list(self.tokenizer.controls.spelled(data, since)), np.int64).reshape(-1, 2)
        # For each place, the first added token that ends behind its beginning.
        at = np.searchsorted(controls[:, 1], spans[:, 0], side="right")
        begins = np.append(controls[:, 0], len(data) + 1)[at]
        # If that token begins within the place, they only overlap at its end.
        return spans[begins > spans[:, 0]]

    def sizes(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns `(len(tokens) + 1,) int64`: the bytes of the first k tokens, for every k. Byte-level only."""
        ends = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, map(self._pieces.__getitem__, tokens)), np.int64, len(tokens)), out=ends[1:])
        return ends

    def join(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of `tokens`. Byte-level only."""
        return b"".join(map(self._pieces.__getitem__, tokens))

    def word_borders(self, text: str) -> np.ndarray:
        """Returns `(words,) int64`: the bytes at which the pre-tokenizer's words end in a text, which may be guarded
        (have breaks). Byte-level only."""
        assert self.backend is not None
        if BREAK in text:
            encoding = self.tokenizer.encode_guarded(text)
            ids, of = encoding.ids, encoding.words
        else:
            whole = self.backend.encode_batch([text], add_special_tokens=False)[0]
            ids, of = whole.ids, [-1 if word is None else word for word in whole.word_ids]
        words = np.array(of, np.int64)
        return self.sizes(ids)[1:][np.append(words[1:] != words[:-1], True)[: len(words)]]

    def content(self, token: int) -> bytes:
        """Returns the text of an added token in UTF-8."""
        return self._added[token].content.encode()

    def added_at(self, data: bytes, at: int, *, after_space: bool) -> int | None:
        """Returns the added token that always splits a text at byte `at`, if there is one.

        Args:
            after_space: whether a token may be returned that would also include white space before `at`.
        """
        for length in self._lengths:
            token = self._by_content.get(data[at : at + length])
            if token is None:
                continue
            takes_in = self._added[token].lstrip and data[max(0, at - 4) : at].decode("utf-8", "ignore")[-1:].isspace()
            return token if self.stands_alone(token) and (after_space or not takes_in) else None
        return None

    def stands_alone(self, token: int) -> bool:
        """Returns whether an added token is always found in a text, unless a longer one begins there too.

        Such a token splits the text: the parts before and after it are tokenized independently.
        """
        alone = self._alone.get(token)
        if alone is None:
            alone = self._alone[token] = self._is_alone(token)
        return alone

    def _is_alone(self, token: int) -> bool:
        entry, content = self._added[token], self._added[token].content
        if not content or content[0].isspace() or entry.single_word:
            return False
        if self.backend is not None:
            if entry.normalized and self.backend.normalizer is not None:
                return False
            if entry.special and self.backend.encode_special_tokens:
                return False
        if self._concatenates and self._pieces[token] != content.encode():
            return False
        if self.tokenizer.encode(content) != [token]:
            return False
        others = (other.content for other in self._added.values() if other.content)
        return not any(_begins_inside(content, other) or _begins_inside(other, content) for other in others)

    def _spell(self, token: int) -> bytes:
        if not 0 <= token < _TOKENS_MAX:
            return _NOTHING
        if self.tokenizer.byte_level:
            return self.tokenizer.token_bytes(token)
        assert self.backend is not None
        written = self.backend.id_to_token(token) or ""
        if byte := _BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(byte[1])
        return written.replace(_META_SPACE, " ").encode()

    def _puts_space(self, lead: str) -> bool:
        """Returns whether the tokenizer inserts a space at the beginning of a text after `lead`."""
        return self.join(self.tokenizer.encode(lead + "a")[bool(lead) :]) == b" a"

    def _joins_by_merges(self) -> bool:
        from tokenizers import models

        model = self.backend.model if self.backend is not None else None
        if not isinstance(model, models.BPE) or model.ignore_merges or model.dropout:
            return False
        splits = _state(self.backend.pre_tokenizer) if self.backend is not None else None
        # Other patterns may look ahead, so that later text moves the end of a word. These look ahead only at spaces.
        return splits is None or splits["type"] == "Metaspace" or "String" in splits.get("pattern", ())

    def _align(
        self, line: StoredBranch, data: bytes, spelled: bytes, ends: np.ndarray, added: np.ndarray
    ) -> tuple[int, int]:
        """Aligns tokens with a text that differs from their bytes, from added token to added token.

        Changes `ends`, `(tokens + 1,) int64`, in place from offsets in `spelled` to offsets in `data`. `added`,
        `(added tokens,) int64`, are the indexes of added tokens.

        Returns:
            How many of the first tokens are aligned, and the first byte that is not.
        """
        sizes, first, at = ends.copy(), 0, 0
        for place in [*added.tolist(), len(line.tokens)]:
            own = sizes[first : place + 1] - sizes[first]
            segment = spelled[int(sizes[first]) : int(sizes[place])]
            skip, stop = self._skip(segment, data, at, later=first > 0), None
            if skip is not None:
                ends[first + 1 : place + 1] = np.maximum(own[1:] - skip, 0) + at
                stop = self._past(line, place, data, at + len(segment) - skip)
                ends[place + 1 : place + 2] = stop or 0
            if stop is None:
                stop = self._past_whole(line, first, place, data, at)
                ends[first + 1 : place + 2] = stop or 0
            if stop is None:
                skip = int(self._has_space(first > 0) and segment[:1] == b" " and data[at : at + 1] != b" ")
                same = common_length(segment[skip:], data[at : at + len(segment)])
                count = int(np.searchsorted(own, same + skip, side="right")) - 1 if self._concatenates else 0
                ends[first + 1 : first + count + 1] = np.maximum(own[1 : count + 1] - skip, 0) + at
                return first + count, at + same
            first, at = place + 1, self._past_spaces(line, place, data, stop)
        return len(line.tokens), at

    def _has_space(self, later: bool) -> bool:
        return self._space_later if later else self._space_first

    def _skip(self, segment: bytes, data: bytes, at: int, *, later: bool) -> int | None:
        """Returns how many bytes of `segment` to skip so that the text at `at` begins with the rest; None if neither
        0 nor 1."""
        if not self._concatenates:
            return None
        if data.startswith(segment, at):
            return 0
        spaced = self._has_space(later) and segment[:1] == b" " and data.startswith(segment[1:], at)
        return 1 if spaced else None

    def _past(self, line: StoredBranch, place: int, data: bytes, at: int) -> int | None:
        """Returns where the text of the added token at index `place` ends, None if it does not begin at byte `at`."""
        if place == len(line.tokens):
            return at
        token = line.tokens[place]
        if self._added[token].lstrip:
            at = _behind_spaces(data, at)
        piece = self._pieces[token]
        return at + len(piece) if data.startswith(piece, at) else None

    def _past_whole(self, line: StoredBranch, first: int, place: int, data: bytes, at: int) -> int | None:
        """Returns where a stretch ends, its added token included, if the tokenizer gives such tokens for its text.

        For tokens whose text differs from the encoded one: normalized, lower-cased, unknown characters. The added token
        before the stretch is decoded with it, because decoders treat the beginning of a text differently.
        """
        before = self._added[line.tokens[first - 1]].content if first else ""
        stretch = line.tokens[max(first - 1, 0) : place + 1]
        if not all(0 <= token < _TOKENS_MAX for token in stretch):
            return None
        decoded = self.tokenizer.decode(stretch)
        # Different invalid bytes decode to the same character.
        if REPLACEMENT in decoded:
            return None
        stops = [len(data)]
        if place < len(line.tokens):
            # The text may also have the token's own text there.
            stops = list(islice(_ends_of(self.content(line.tokens[place]), data, at), _ENDS_TRIED))
        for stop in stops:
            text = before + data[at:stop].decode("utf-8", "replace")
            if decoded == text or decoded == self.tokenizer.decode(self.tokenizer.encode(text)):
                return stop
        return None

    def _past_spaces(self, line: StoredBranch, place: int, data: bytes, at: int) -> int:
        """Returns `at`, or the end of the white space that the added token at index `place` includes."""
        if place < len(line.tokens) and self._added[line.tokens[place]].rstrip:
            return _behind_spaces(data, at)
        return at


def utf8(line: StoredBranch) -> bytes:
    """Returns the text of `line` in UTF-8. Lone surrogates become bytes that no valid text has."""
    return line.data if isinstance(line, IndexedLine) else line.text.encode("utf-8", "surrogatepass")


def common_length(one: _Items, other: _Items) -> int:
    """Returns the length of the common prefix. Compares slices instead of looping over items."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    # The first difference lies in [low, high).
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low, step = low + step, 2 * step
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _state(part: Any | None) -> dict[str, Any] | None:
    """Returns a part of a Rust tokenizer as in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _is_sentencepiece(backend: Any) -> bool:
    """Returns whether pieces use `▁` for a space, and a text is their concatenation except for a leading space."""
    state = _state(backend.decoder)
    if state is None:
        return False
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    spaces = [step for step in steps if step["type"] == "Metaspace" or step["type"] == "Replace"]
    if [step.get("replacement") or step.get("pattern") for step in spaces] not in (
        [_META_SPACE],
        [{"String": _META_SPACE}],
    ):
        return False
    others = [step for step in steps if step not in spaces]
    return all(
        step["type"] in ("ByteFallback", "Fuse")
        or (step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0))
        for step in others
    )


def _begins_inside(inner: str, outer: str) -> bool:
    """Returns whether `inner` or a prefix of it at the end of `outer` begins inside `outer`."""
    at = outer.find(inner[0], 1)
    while at > 0:
        if outer.startswith(inner, at) or inner.startswith(outer[at:]):
            return True
        at = outer.find(inner[0], at + 1)
    return False


def _ends_of(content: bytes, data: bytes, at: int) -> Iterator[int]:
    """Yields the end of each occurrence of `content` in `data` from byte `at` on."""
    while (at := data.find(content, at)) >= 0:
        at += len(content)
        yield at


def _behind_spaces(data: bytes, at: int, width: int = 256) -> int:
    """Returns the first byte from `at` on that is not white space."""
    while at < len(data):
        piece = data[at : at + width].decode("utf-8", "ignore")
        spaces = len(piece) - len(piece.lstrip())
        at += len(piece[:spaces].encode())
        if spaces < len(piece) or not piece:
            break
    return at
