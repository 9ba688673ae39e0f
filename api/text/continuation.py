"""Continuing a conversation by its text: the ids of a new prompt, beginning with as many remembered ones as can be.

A new prompt comes as text. Tokenized anew, it may give other ids than those in memory though it says the same: a model
draws ` hel` and `lo` where the tokenizer says ` hello`. From the first other id on the KV cache would be lost. So the
text is compared with the text of each remembered line, and the line's own ids are kept up to a *seam*; only what is
behind the seam is tokenized.

A seam is a place where the new text's own tokenization has a border whatever stands before it, so that nothing changes
for the rest. There are four kinds, the later ones tried only where tokens can be won by them:

1. the end of an added token that splits the text there, in the line and in the new text;
2. behind it, as long as the line has the very ids that the tokenizer gives, the result being that of tokenizing anew;
3. an end of a word in the new text and in the line, words being what the pre-tokenizer separates (byte-level only);
4. the beginning of an added token in the new text, where the line has a border (for the others).

The rest is always tokenized from the beginning of an added token before the seam or from the beginning of the text, so
it cannot know that anything was cut: nothing is added at its front, and no merge reaches over the seam.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ...cluster.errors import InvalidRequest
from .model import TextModel
from .spelling import IndexedLine, Line, Spelling, common_length, spelling_of, utf8

__all__ = ["Continuation", "IndexedLine", "Line", "Match", "continue_text", "index_line"]

TEXT_CHANGED = "text changed"
NO_SEAM = "no safe seam"
NOTHING_COMMON = "nothing in common"
PICTURES_CHANGED = "pictures changed"

# The common part of a line's text from which on it is a partial match.
_PARTIAL_MIN = 0.8
_WORD_TOKENS = 16
# How far behind the common part words are looked at: what follows may decide where a word ends.
_AHEAD_BYTES = 4096
# And how far before its end from on, where the text is longer.
_BEHIND_BYTES = 16_384
_WORD_BEGINS = (re.compile(rb"[a-z]\n(?=[A-Za-z])"), re.compile(rb"[a-z](?= [a-z])"))
# How many borders before the end of the common part may be the beginning of an added token. One that differs from the
# line only past its first characters, such as `<|`, is found by this.
_BORDERS_TRIED = 8
# How many added tokens are tried where cutting there has to be tested.
_CUTS_TESTED = 4
_CUT_CONTEXT_BYTES = 64


class Match(Enum):
    """How a new text continues a line. Only said, never a limit to what is kept."""

    EXACT = "exact"
    EXTEND = "extend"
    PARTIAL = "partial"
    DIVERGE = "diverge"


@dataclass(frozen=True)
class Continuation:
    """The token ids of a new prompt.

    Args:
        tokens: ids of the whole prompt.
        line: which of the lines they continue; None where none has anything in common with the text.
        match: how the text continues that line; None without one.
        common_characters: how many of the first characters of text and line are equal.
        kept_tokens: how many of the line's own ids lead `tokens`.
        reason: why no more were kept; "" where all of the line's are.
    """

    tokens: list[int]
    line: int | None
    match: Match | None
    common_characters: int
    kept_tokens: int
    reason: str


@dataclass(frozen=True)
class _Seam:
    """`kept` ids of the line, then `rest` from `rest_from` on."""

    kept: int
    rest: list[int]
    rest_from: int


def index_line(line: Line, model: TextModel) -> IndexedLine:
    """`line` prepared for `continue_text` with this model, for callers that keep it."""
    return spelling_of(model).index(line)


def continue_text(text: str, lines: Sequence[Line], model: TextModel) -> Continuation:
    """The token ids of `text`, continuing the line of which the most tokens can be kept.

    Of several such lines that with the longest common text, and then the first. Nothing is put around the text (no
    beginning-of-sequence token but one that is spelled out in it). Takes milliseconds and the encoding of what is new,
    so it belongs in a worker thread. Lines that were prepared by `index_line` save most of the milliseconds.

    Raises:
        InvalidRequest: `text` is not valid Unicode.
    """
    spelling = spelling_of(model)
    new = _NewText(text, model, spelling)
    ranked = []
    for place, line in enumerate(lines):
        if common := new.common(utf8(line)):
            ranked.append((_kept_max(line, common), common, -place, line))
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    best: tuple[tuple[int, int, int], IndexedLine, _Seam] | None = None
    for kept_max, common, place, line in ranked:
        # No later line can keep more, so most need not even be prepared.
        if best is not None and (kept_max, common, place) < best[0]:
            break
        indexed = spelling.index(line)
        if best is not None and (indexed.tokens_within(common), common, place) < best[0]:
            continue
        seam = new.seam(indexed, common)
        if best is None or (seam.kept, common, place) > best[0]:
            best = ((seam.kept, common, place), indexed, seam)
    if best is None:
        return Continuation(model.encode(text), None, None, 0, 0, NOTHING_COMMON)
    (kept, common, place), indexed, seam = best
    characters = len(new.data[:common].decode())
    return Continuation(
        tokens=_ids(indexed.tokens[:kept]) + seam.rest[seam.rest_from :],
        line=-place,
        match=_match(text, indexed.text, characters),
        common_characters=characters,
        kept_tokens=kept,
        reason=_reason(indexed, common, kept),
    )


def _kept_max(line: Line, common: int) -> int:
    """A number of tokens that the line surely does not exceed within the first `common` bytes."""
    if isinstance(line, IndexedLine):
        return line.tokens_within(common)
    # A token spells a byte at least, but for a space that a tokenizer puts at the front and behind each added token.
    return min(len(line.tokens), 2 * common + 1)


def _match(text: str, old: str, common: int) -> Match:
    if common == len(old):
        return Match.EXACT if common == len(text) else Match.EXTEND
    return Match.PARTIAL if common >= _PARTIAL_MIN * len(old) else Match.DIVERGE


def _reason(line: IndexedLine, common: int, kept: int) -> str:
    if kept == len(line.tokens):
        return ""
    lost = line.tokens_within(common) - kept
    # Where the text changed in a word, the word's tokens before that are lost with it.
    if lost > (_WORD_TOKENS if common < len(line.data) else 0):
        return NO_SEAM
    return line.fault if line.fault and line.fault_at < common else TEXT_CHANGED


class _NewText:
    """The new text: compares it with lines and finds where they may be continued."""

    def __init__(self, text: str, model: TextModel, spelling: Spelling) -> None:
        try:
            self.data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text with an unpaired surrogate at character {error.start}") from None
        self._model = model
        self._spelling = spelling
        self._encoded: dict[int, list[int]] = {}

    def common(self, data: bytes) -> int:
        """How many of the first bytes are equal, no character being cut."""
        return _at_character(self.data, common_length(self.data, data))

    def seam(self, line: IndexedLine, common: int) -> _Seam:
        """The latest seam within the first `common` bytes."""
        within = line.tokens_within(common)
        place = self._last_added(line, within)
        first = 0 if place is None else place + 1
        start = 0 if place is None else int(line.ends[first]) - len(self._spelling.content(line.tokens[place]))
        rest, skip = self._encode(start), int(place is not None)
        own = _ids(line.tokens[first:within])
        same = common_length(own, rest[skip : skip + len(own)])
        seam = _Seam(first + same, rest, skip + same)
        if seam.kept == within:
            return seam
        if self._spelling.byte_level:
            # The beginning of an added token is the end of a word.
            return self._at_word(line, common, start, seam)
        return self._before_added(line, within, seam)

    def _encode(self, start: int) -> list[int]:
        """The ids of the text from byte `start` on, which is its beginning or that of an added token."""
        if start not in self._encoded:
            self._encoded[start] = self._model.encode(self.data[start:].decode())
        return self._encoded[start]

    def _last_added(self, line: IndexedLine, within: int) -> int | None:
        """The place of the last added token among the line's first `within` that splits the new text too."""
        tests = 0
        for place in line.added[: int(np.searchsorted(line.added, within))][::-1]:
            token = int(line.tokens[place])
            end = int(line.ends[place + 1])
            start = end - len(self._spelling.content(token))
            # Others may reach into its text, and a longer one may begin there too.
            if self._spelling.added_at(self.data, start, after_space=True) != token:
                continue
            if self._spelling.backend is not None or self._cut_holds(start, end):
                return int(place)
            tests += 1
            if tests == _CUTS_TESTED:
                break
        return None

    def _cut_holds(self, start: int, end: int) -> bool:
        """Whether a tokenizer of which nothing is known tokenizes apart what is before, in and behind [start, end)."""
        before = self.data[max(0, start - _CUT_CONTEXT_BYTES) : start].decode("utf-8", "ignore")
        added = self.data[start:end].decode()
        after = self.data[end : end + _CUT_CONTEXT_BYTES].decode("utf-8", "ignore")
        encode = self._model.encode
        (token,) = encode(added)
        behind = encode(added + after)
        return behind[:1] == [token] and encode(before + added + after) == [*encode(before), *behind]

    def _at_word(self, line: IndexedLine, common: int, start: int, seam: _Seam) -> _Seam:
        """The last end of a word that has a border in the line, if it keeps more than `seam`.

        Both texts' words are compared from where both are known to begin one. While they end at the same places, they
        are the same, and whatever ids the line has for them say the same as the tokenizer's.
        """
        sizes = start + self._spelling.sizes(seam.rest)
        since = self._word_before(start, common, sizes)
        windows = [data[since : _at_character(data, common + _AHEAD_BYTES)] for data in (self.data, line.data)]
        ends = [since + self._spelling.word_borders(window) for window in windows]
        count = min(len(ends[0]), len(ends[1]))
        different = np.flatnonzero(ends[0][:count] != ends[1][:count])
        shared = ends[0][: int(different[0]) if len(different) else count]
        for end in shared[shared <= common][::-1].tolist():
            kept = line.tokens_within(end)
            if kept <= seam.kept:
                break
            border = int(np.searchsorted(sizes, end, side="right")) - 1
            if line.ends[kept] == end == sizes[border]:
                # Where the tokenizer changes the text, bytes of ids are not bytes of the text.
                same = self._spelling.join(seam.rest[:border]) == self.data[start:end]
                return _Seam(kept, seam.rest, border) if same else seam
        return seam

    def _before_added(self, line: IndexedLine, within: int, seam: _Seam) -> _Seam:
        """A border of the line at which an added token begins in the new text, if it keeps more than `seam`."""
        for kept in range(within, max(seam.kept, within - _BORDERS_TRIED), -1):
            at = int(line.ends[kept])
            # What the line's tokens were made of reaches further, so they may not be those of what is before.
            if at < len(line.data) and not self._spelling.joins_by_merges:
                break
            token = self._spelling.added_at(self.data, at, after_space=False)
            if token is None or self._is_put_in(line, kept):
                continue
            if self._spelling.backend is not None or self._cut_holds(at, at + len(self._spelling.content(token))):
                return _Seam(kept, self._encode(at), 0)
        return seam

    @staticmethod
    def _is_put_in(line: IndexedLine, kept: int) -> bool:
        """Whether the line's tokens from its last added one on may spell nothing but what the tokenizer puts there.

        A space at the front of a text belongs to that text; where the new one has none there, it must not stay.
        """
        before = int(np.searchsorted(line.added, kept))
        first = int(line.added[before - 1]) + 1 if before else 0
        return kept > first and not line.data[int(line.ends[first]) : int(line.ends[kept])].strip()

    def _word_before(self, start: int, common: int, sizes: np.ndarray) -> int:
        """Where to look at words from: `start`, or a place nearer to `common` where a word surely begins.

        Pre-tokenizers begin one at a letter behind a line's end, and at a space between letters. One that does not
        would still get no wrong seam, as a seam is always a border between two tokens of the text's own.
        """
        if common - start <= _BEHIND_BYTES:
            return start
        first = common - _BEHIND_BYTES
        for pattern in _WORD_BEGINS:
            for found in pattern.finditer(self.data, first, first + _BEHIND_BYTES // 2):
                border = int(np.searchsorted(sizes, found.end()))
                if sizes[border] == found.end():
                    return found.end()
        return start


def _at_character(data: bytes, at: int) -> int:
    """`at`, or the beginning of the character that it lies in."""
    while at < len(data) and 0x80 <= data[at] < 0xC0:
        at -= 1
    return at


def _ids(tokens: Sequence[int]) -> list[int]:
    return tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
