"""Token alignment: continues a conversation by its text, and keeps as many remembered token ids as possible.

A new prompt comes as text. Tokenized again, it may give other ids than those in memory for the same text: a model draws
` hel` and `lo`, but the tokenizer gives ` hello`. The KV cache would be lost from the first different id on. So the
text is compared with the text of each remembered line. The line's own ids are kept up to a *seam*, and only the text
after the seam is tokenized.

A seam is a position where the new text has a token border regardless of the text before it, so that the tokens after it
stay the same. There are four kinds. Later ones are tried only if they can keep more tokens:

1. the end of an added token that splits the text there, in the line and in the new text;
2. after it, up to the first id in which the line differs from the tokenizer: the result equals a full tokenization;
3. an end of a word in the new text and in the line; words are what the pre-tokenizer separates (byte-level only);
4. the beginning of an added token in the new text, at a border of the line (other tokenizers).

The rest is tokenized from the beginning of an added token before the seam, or from the beginning of the text, or from
the beginning of a word, if what follows is tokenized as in the line. So the cut has no effect: nothing is added at its
front, and no merge crosses the seam.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from ...cluster.errors import InvalidRequest
from .control_tokens import BREAK, unbroken
from .spelling import IndexedLine, Spelling, StoredBranch, common_length, utf8

__all__ = ["Continuation", "IndexedLine", "Match", "StoredBranch", "continue_text"]

TEXT_CHANGED = "text changed"
NO_SEAM = "no safe seam"
NOTHING_COMMON = "nothing in common"
PICTURES_CHANGED = "pictures changed"

# The least common share of a line's text for a partial match.
_PARTIAL_MIN = 0.8
_WORD_TOKENS = 16
# How far behind the common part words are compared, because the text after a word may decide where it ends.
_AHEAD_BYTES = 4096
# How far before the end of a long common part the comparison of words begins.
_BEHIND_BYTES = 16_384
_WORD_BEGINS = (re.compile(rb"[a-z]\n(?=[A-Za-z])"), re.compile(rb"[a-z](?= [a-z])"))
# If the common part after the last added token has `_LONG_BYTES`, encoding begins at a line or word `_OVERLAP_BYTES`
# before its end, if the ids of the next `_PROVEN_BYTES` are the line's.
_LONG_BYTES = 32_768
_OVERLAP_BYTES = 8192
_PROVEN_BYTES = 4096
_LATE_BEGINS = (re.compile(rb"\n(?=\S)"), _WORD_BEGINS[1])
# How many borders before the end of the common part are tried as the beginning of an added token. This finds one that
# shares its first characters, such as `<|`, with the line.
_BORDERS_TRIED = 8
# How many added tokens are tried if a cut has to be tested by encoding.
_CUTS_TESTED = 4
_CUT_CONTEXT_BYTES = 64


class Match(Enum):
    """How a new text continues a line. It is only reported, and does not limit what is kept."""

    EXACT = "exact"
    EXTEND = "extend"
    PARTIAL = "partial"
    DIVERGE = "diverge"


@dataclass(frozen=True)
class Continuation:
    """The token ids of a new prompt.

    Args:
        tokens: ids of the whole prompt.
        line: the index of the line that they continue; None if no line has a common prefix with the text.
        match: how the text continues that line; None without one.
        common_characters: the length of the common prefix of text and line.
        kept_tokens: how many of the line's own ids `tokens` begins with.
        reason: why no more were kept; "" if all of the line's ids were.
    """

    tokens: list[int]
    line: int | None
    match: Match | None
    common_characters: int
    kept_tokens: int
    reason: str


@dataclass(frozen=True)
class _Seam:
    """`kept` ids of the line, followed by `rest[rest_from:]`."""

    kept: int
    rest: list[int]
    rest_from: int


def continue_text(text: str, lines: Sequence[StoredBranch], spelling: Spelling) -> Continuation:
    """Returns the token ids of `text`, which may be guarded, continuing the line of which the most tokens can be kept.

    Ties go to the longest common text, then to the first line. No special tokens are added around the text. Takes some
    milliseconds plus the encoding of the new text, so it belongs in a worker thread. Lines from `Spelling.index` save
    most of the milliseconds.

    Raises:
        InvalidRequest: `text` is not valid Unicode.
    """
    new = _NewText(text, spelling)
    ranked = []
    for place, line in enumerate(lines):
        if common := new.common(utf8(line)):
            ranked.append((_kept_max(line, common), common, -place, line))
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    best: tuple[tuple[int, int, int], IndexedLine, _Seam] | None = None
    for kept_max, common, place, line in ranked:
        # No later line can keep more tokens, so most lines are never indexed.
        if best is not None and (kept_max, common, place) < best[0]:
            break
        indexed = spelling.index(line)
        common = new.agreed(indexed, common)
        if best is not None and (indexed.tokens_within(common), common, place) < best[0]:
            continue
        seam = new.seam(indexed, common)
        if best is None or (seam.kept, common, place) > best[0]:
            best = ((seam.kept, common, place), indexed, seam)
    if best is None:
        return Continuation(spelling.tokenizer.encode(text), None, None, 0, 0, NOTHING_COMMON)
    (kept, common, place), indexed, seam = best
    characters = len(new.data[:common].decode())
    return Continuation(
        tokens=_ids(indexed.tokens[:kept]) + seam.rest[seam.rest_from :],
        line=-place,
        match=_match(unbroken(text), indexed.text, characters),
        common_characters=characters,
        kept_tokens=kept,
        reason=_reason(indexed, common, kept),
    )


def _kept_max(line: StoredBranch, common: int) -> int:
    """Returns an upper bound of the line's tokens within the first `common` bytes."""
    if isinstance(line, IndexedLine):
        return line.tokens_within(common)
    # A token has at least one byte, except spaces that a tokenizer inserts at the front and after each added token.
    return min(len(line.tokens), 2 * common + 1)


def _match(text: str, old: str, common: int) -> Match:
    if common == len(old):
        return Match.EXACT if common == len(text) else Match.EXTEND
    return Match.PARTIAL if common >= _PARTIAL_MIN * len(old) else Match.DIVERGE


def _reason(line: IndexedLine, common: int, kept: int) -> str:
    if kept == len(line.tokens):
        return ""
    lost = line.tokens_within(common) - kept
    # If the text changed inside a word, the word's earlier tokens are lost too.
    if lost > (_WORD_TOKENS if common < len(line.data) else 0):
        return NO_SEAM
    return line.fault if line.fault and line.fault_at < common else TEXT_CHANGED


class _NewText:
    """The new text, compared with lines to find seams.

    Attributes:
        data: the text in UTF-8, without its breaks.
        breaks: `(breaks,) int64`: the bytes before which the text has breaks (`control_tokens.py`), in order.
    """

    def __init__(self, text: str, spelling: Spelling) -> None:
        pieces = text.split(BREAK)
        try:
            encoded = [piece.encode("utf-8") for piece in pieces]
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text with an unpaired surrogate at character {error.start}") from None
        self.data = b"".join(encoded)
        self.breaks = np.cumsum([len(piece) for piece in encoded[:-1]], dtype=np.int64)
        self._spelling, self._tokenizer = spelling, spelling.tokenizer
        self._encoded: dict[int, list[int]] = {}

    def common(self, data: bytes) -> int:
        """Returns the length in bytes of the common prefix, cut at a character border."""
        return _at_character(self.data, common_length(self.data, data))

    def agreed(self, line: IndexedLine, common: int) -> int:
        """Returns where the first `common` bytes, which are equal, begin to have different tokens: one side has a
        control token and the other only its text. Returns `common` if there is no such place.

        If a model wrote a marker of a call or of reasoning as ordinary text, it stays text, though the template would
        write the token.
        """
        if len(self.breaks):
            # The first control token that ends behind each break.
            at = np.searchsorted(line.controls[:, 1], self.breaks, side="right")
            crossed = at[at < len(line.controls)]
            broken = line.controls[crossed, 0] < self.breaks[: len(crossed)]
            if broken.any():
                common = min(common, int(line.controls[crossed[int(broken.argmax())], 0]))
        plain = line.plain[line.plain[:, 1] <= common]
        if len(plain):
            at = np.searchsorted(self.breaks, plain[:, 0], side="right")
            behind = np.append(self.breaks, len(self.data) + 1)[at]
            own = self._tokenizer.controls.own_marks
            for start, end in plain[behind >= plain[:, 1]].tolist():
                if self.data[start:end] not in own:
                    return min(common, start)
        return common

    def seam(self, line: IndexedLine, common: int) -> _Seam:
        """Returns the last seam within the first `common` bytes."""
        within = line.tokens_within(common)
        place = self._last_added(line, within)
        first = 0 if place is None else place + 1
        start = 0 if place is None else int(line.ends[first]) - len(self._spelling.content(line.tokens[place]))
        skip = int(place is not None)
        if (late := self._late(line, common, start)) is not None:
            first, start, skip = line.tokens_within(late), late, 0
        rest = self._encode(start)
        own = _ids(line.tokens[first:within])
        same = common_length(own, rest[skip : skip + len(own)])
        seam = _Seam(first + same, rest, skip + same)
        if seam.kept == within:
            return seam
        if self._spelling.byte_level:
            # The beginning of an added token is the end of a word.
            return self._at_word(line, common, start, seam)
        return self._before_added(line, within, seam)

    def _late(self, line: IndexedLine, common: int, start: int) -> int | None:
        """Returns a byte after `start` from which the rest of the text gets the same tokens as in the whole text; None
        if there is none, or too little to gain.

        Words do not depend on what is before them, and merges stay inside words. So if two encodings have a long
        stretch of tokens in common, they are the same from there on.
        """
        if not self._spelling.byte_level or common - start < _LONG_BYTES:
            return None
        first, last = common - 2 * _OVERLAP_BYTES, common - _OVERLAP_BYTES
        for pattern in _LATE_BEGINS:
            for match in pattern.finditer(self.data, first, last):
                at = match.end()
                begin = line.tokens_within(at)
                if line.ends[begin] != at:
                    continue
                proven = _ids(line.tokens[begin : line.tokens_within(at + _PROVEN_BYTES)])
                return at if self._encode(at)[: len(proven)] == proven else None
        return None

    def _encode(self, start: int) -> list[int]:
        """Returns the ids of the text from byte `start`, which begins a character."""
        if start not in self._encoded:
            self._encoded[start] = self._tokenizer.encode(_guarded(self.data, self.breaks, start, len(self.data)))
        return self._encoded[start]

    def _last_added(self, line: IndexedLine, within: int) -> int | None:
        """Returns the index of the last added token among the line's first `within` that splits the new text too."""
        tests = 0
        for place in line.added[: int(np.searchsorted(line.added, within))][::-1]:
            token = int(line.tokens[place])
            end = int(line.ends[place + 1])
            start = end - len(self._spelling.content(token))
            # Other added tokens may overlap its text, and a longer one may begin at the same place.
            if self._spelling.added_at(self.data, start, after_space=True) != token:
                continue
            if self._spelling.backend is not None or self._cut_holds(start, end):
                return int(place)
            tests += 1
            if tests == _CUTS_TESTED:
                break
        return None

    def _cut_holds(self, start: int, end: int) -> bool:
        """Returns whether an unknown tokenizer encodes the text before, in and after [start, end) independently."""
        before = self.data[max(0, start - _CUT_CONTEXT_BYTES) : start].decode("utf-8", "ignore")
        added = self.data[start:end].decode()
        after = self.data[end : end + _CUT_CONTEXT_BYTES].decode("utf-8", "ignore")
        encode = self._tokenizer.encode
        (token,) = encode(added)
        behind = encode(added + after)
        return behind[:1] == [token] and encode(before + added + after) == [*encode(before), *behind]

    def _at_word(self, line: IndexedLine, common: int, start: int, seam: _Seam) -> _Seam:
        """Returns the last seam at the end of a word with a token border in the line, if it keeps more than `seam`.

        The words of both texts are compared from a position where both begin a word. While they end at the same
        positions, they are equal, so the line's ids for them have the same text as the tokenizer's.
        """
        sizes = start + self._spelling.sizes(seam.rest)
        since = self._word_before(start, common, sizes)
        later = line.plain[line.plain[:, 0] >= common, 0].tolist()
        broken = np.array([_behind_character(line.data, start) for start in later], np.int64)
        broken = np.concatenate((self.breaks[self.breaks <= common], broken))
        ends = [
            since
            + self._spelling.word_borders(
                _guarded(data, breaks, since, _at_character(data, common + _AHEAD_BYTES), errors="replace")
            )
            for data, breaks in ((self.data, self.breaks), (line.data, broken))
        ]
        count = min(len(ends[0]), len(ends[1]))
        different = np.flatnonzero(ends[0][:count] != ends[1][:count])
        shared = ends[0][: int(different[0]) if len(different) else count]
        for end in shared[shared <= common][::-1].tolist():
            kept = line.tokens_within(end)
            if kept <= seam.kept:
                break
            border = int(np.searchsorted(sizes, end, side="right")) - 1
            if line.ends[kept] == end == sizes[border]:
                # A tokenizer that normalizes text gives ids whose bytes are not those of the text.
                same = self._spelling.join(seam.rest[:border]) == self.data[start:end]
                return _Seam(kept, seam.rest, border) if same else seam
        return seam

    def _before_added(self, line: IndexedLine, within: int, seam: _Seam) -> _Seam:
        """Returns a seam at a border of the line where the new text has an added token, if it keeps more than
        `seam`."""
        for kept in range(within, max(seam.kept, within - _BORDERS_TRIED), -1):
            at = int(line.ends[kept])
            # The line's text goes on here, so its tokens before the border may depend on the following text.
            if at < len(line.data) and not self._spelling.joins_by_merges:
                break
            token = self._spelling.added_at(self.data, at, after_space=False)
            if token is None or self._is_put_in(line, kept):
                continue
            end = at + len(self._spelling.content(token))
            if self._is_broken(at, end):
                continue
            if self._spelling.backend is not None or self._cut_holds(at, end):
                return _Seam(kept, self._encode(at), 0)
        return seam

    def _is_broken(self, start: int, end: int) -> bool:
        """Returns whether there is a break in the text of [start, end)."""
        return bool(np.searchsorted(self.breaks, end) > np.searchsorted(self.breaks, start, side="right"))

    @staticmethod
    def _is_put_in(line: IndexedLine, kept: int) -> bool:
        """Returns whether the line's tokens after its last added token may be only a space that the tokenizer inserts.

        An inserted space belongs to the text after it. It must not stay if the new text has none there.
        """
        before = int(np.searchsorted(line.added, kept))
        first = int(line.added[before - 1]) + 1 if before else 0
        return kept > first and not line.data[int(line.ends[first]) : int(line.ends[kept])].strip()

    def _word_before(self, start: int, common: int, sizes: np.ndarray) -> int:
        """Returns where to begin comparing words: `start`, or a later position where a word surely begins.

        Pre-tokenizers begin a word at a letter after a line break, and at a space between letters. Even for one that
        does not, no seam is wrong, because a seam is always a token border of the new text's own encoding.
        """
        if common - start <= _BEHIND_BYTES:
            return start
        first = common - _BEHIND_BYTES
        for pattern in _WORD_BEGINS:
            for match in pattern.finditer(self.data, first, first + _BEHIND_BYTES // 2):
                border = int(np.searchsorted(sizes, match.end()))
                if sizes[border] == match.end():
                    return match.end()
        return start


def _guarded(data: bytes, breaks: np.ndarray, start: int, end: int, errors: str = "strict") -> str:
    """Returns bytes `start` to `end` of `data` as text with the breaks between them."""
    first, last = int(np.searchsorted(breaks, start, side="right")), int(np.searchsorted(breaks, end))
    edges = [start, *breaks[first:last].tolist(), end]
    return BREAK.join(data[one:other].decode("utf-8", errors) for one, other in pairwise(edges))


def _behind_character(data: bytes, at: int) -> int:
    """Returns where the character that begins at byte `at` ends."""
    at += 1
    while at < len(data) and 0x80 <= data[at] < 0xC0:
        at += 1
    return at


def _at_character(data: bytes, at: int) -> int:
    """Returns `at`, or the beginning of the character that it lies in."""
    while at < len(data) and 0x80 <= data[at] < 0xC0:
        at -= 1
    return at


def _ids(tokens: Sequence[int]) -> list[int]:
    return tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
